"""What a launch gave on its device, beside what its replay on the CPU gives."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES, Array, bf16_to_f32
from hypocenter.base.errors import NotReplayed
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.contents import LaunchOutcome
from hypocenter.record.events import OUTSIDE_PLANS, Place, SourceRecord, TensorRecord, Values
from hypocenter.replay.admission import RecordedTensor
from hypocenter.replay.arguments import Argument
from hypocenter.replay.corrections import element_bytes, elements_of
from hypocenter.replay.findings import Coverage, ReplayReport
from hypocenter.replay.rebuild import Rebuilt
from hypocenter.replay.recorded import replay_place
from hypocenter.replay.source import kernel_of
from hypocenter.replay.terms import KernelText, ReadOperands, Schedule, SeenReplay

#: How far a result may be off, as a share of the largest one of its tensor: sums in another order,
#: functions that are not exact to the last bit, and matrix units that shorten their inputs.
_TOLERANCE = {"F64": 1e-3, "F32": 1e-3, "F16": 1e-2, "BF16": 3e-2}
_OF_MATRIX_UNITS = 3e-2
#: The largest numbers of types, and the share of them from which on a result may be infinite.
_ENDS, _NEAR_END = {"F64": 1.797e308, "F32": 3.402e38, "F16": 65504.0, "BF16": 3.389e38}, 0.99
_DOT = re.compile(r"\bdot(_scaled)?\(")


class Differing(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of which a device has other numbers than the replay: the one that is furthest off.

    `element` is counted row by row; `num_elements` of `num_in_all` are off by more than rounding.
    """

    argument: str
    element: int
    on_device: float
    in_replay: float
    num_elements: int
    num_in_all: int


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What a replay left in a tensor: bytes row by row, and which of them it wrote."""

    dtype: str
    rows: Array
    is_written: Array


@dataclass
class ReplayedOutcome:
    """A launch of an outcome as the replay makes it: `results` by parameter, row by row.

    Of those only tensors that the replay or the device changed. Bytes of what a kernel chooses by
    floats, such as indices, are not among them: they may differ by right.
    """

    place: Place
    report: ReplayReport
    #: The largest number that the launch was given: what is summed may cancel.
    largest: float = 0.0
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    results: dict[str, Array] = field(default_factory=dict)
    #: Of the kernel and of all that it calls.
    texts: tuple[str, ...] = ()

    def differing(self, on_device: Mapping[str, bytes]) -> list[Differing]:
        """Where results of a device differ, given row by row; those not given are as before."""
        has_dot = any(map(_DOT.search, self.texts))
        found = (
            _compare(name, self.tensors[name].dtype, on_device[name], result, self.largest, has_dot)
            for name, result in self.results.items()
            if name in on_device
        )
        return [difference for difference in found if difference is not None]

    def row_by_row(self, contents: Mapping[str, bytes]) -> dict[str, bytes]:
        """Bytes from the first element of tensors to the last, as `differing` takes them."""
        found = {
            name: _rows_of(np.frombuffer(contents[name], np.uint8), self.tensors[name])
            for name in self.results
            if name in contents
        }
        return {name: rows.tobytes() if rows is not None else b"" for name, rows in found.items()}


def replay_outcome(
    index: BundleIndex,
    outcome: LaunchOutcome,
    *,
    allow_source: bool,
    budget_seconds: float,
    operands: ReadOperands | None = None,
) -> ReplayedOutcome:
    """Replay a launch; `operands` as in Schedule.

    Raises as `replay_place` does, and NotReplayed where it would be given something else than the
    launch was: what follows from a comparison would be of that.
    """
    place = Place(outcome.step, OUTSIDE_PLANS, outcome.launch)
    launch = index.launch(place)
    texts = tuple(source.text for source in _sources(index, launch.source, {}))
    made = ReplayedOutcome(place, ReplayReport((), (), Coverage(0, 0, 0, 0.0)), texts=texts)
    made.largest = max(map(_largest_in, outcome.given), default=0.0)
    changed = {values.tensor for values in outcome.gave}
    has_floats = any(values.dtype in _TOLERANCE for values in outcome.given)

    kernel_of(index, launch, allow_source=allow_source)
    rebuilt = Rebuilt(index, place, launch, {})
    held = {values.tensor: values.data for values in outcome.given}
    for name, tensor in rebuilt.tensors.items():
        own = rebuilt.arguments[name]
        if not isinstance(own, RecordedTensor) or own.data is None:
            raise NotReplayed(launch.kernel, f"has no room for {name}")
        rows = _rows_of(own.data[own.start :], tensor)
        if rows is None or rows.tobytes() != held.get(tensor.id):
            raise NotReplayed(launch.kernel, f"cannot be given what {name} held")

    def keep(rebuilt: Rebuilt, done: Sequence[Argument]) -> None:
        for argument in done:
            tensor, data = rebuilt.tensors.get(argument.name), argument.region.data
            if tensor is None or data is None:
                continue
            if not (argument.was_written or tensor.id in changed):
                continue
            is_plain = tensor.dtype in NUMPY_DTYPES and not has_floats
            if tensor.dtype in _TOLERANCE or is_plain:
                rows = _rows_of(data[argument.start :], tensor)
                if rows is not None:
                    made.tensors[argument.name], made.results[argument.name] = tensor, rows

    made.report = replay_place(
        index,
        place,
        text=KernelText(allow_source),
        schedule=Schedule(budget_seconds=budget_seconds, operands=operands),
        seen=SeenReplay(keep),
    )
    return made


def left_behind(rebuilt: Rebuilt, done: Sequence[Argument]) -> dict[str, LeftBehind]:
    """What a replay left, by parameter: of tensors whose elements are all there."""
    found: dict[str, LeftBehind] = {}
    for argument in done:
        tensor, region = rebuilt.tensors.get(argument.name), argument.region
        if tensor is None or region.data is None:
            continue
        written = np.repeat(region.writer != 0, region.granule).view(np.uint8)
        rows = _rows_of(region.data[argument.start :], tensor)
        marks = _rows_of(written[argument.start : region.data.size], tensor)
        if rows is not None and marks is not None:
            found[argument.name] = LeftBehind(tensor.dtype, rows.copy(), marks.astype(bool))
    return found


@dataclass(frozen=True, slots=True)
class KnownResults:
    """What a launch was given and what it left, by parameter: bytes row by row."""

    before: Mapping[str, bytes]
    after: Mapping[str, bytes]
    largest: float
    has_dot: bool

    def other_than(self, left: Mapping[str, LeftBehind]) -> Differing | None:
        """Where a replay left other numbers: of elements that one of both has written.

        Whole numbers that a kernel chooses by floats may differ by right.
        """
        has_floats = any(tensor.dtype in _TOLERANCE for tensor in left.values())
        for name, tensor in left.items():
            is_plain = tensor.dtype in NUMPY_DTYPES and not has_floats
            if name not in self.after or not (tensor.dtype in _TOLERANCE or is_plain):
                continue
            after = np.frombuffer(self.after[name], np.uint8)
            before = np.frombuffer(self.before.get(name, b""), np.uint8)
            if not after.size == before.size == tensor.rows.size:
                continue
            width = element_bytes(tensor.dtype) or 1
            counts = (tensor.is_written | (after != before)).reshape(-1, width).any(axis=1)
            mine, theirs = (
                data.reshape(-1, width)[counts].reshape(-1) for data in (tensor.rows, after)
            )
            other = _compare(name, tensor.dtype, theirs.tobytes(), mine, self.largest, self.has_dot)
            if other is not None:
                return other
        return None


def known_results(index: BundleIndex, outcome: LaunchOutcome) -> KnownResults:
    """What was recorded of a launch; raises UsageError for one that the bundle does not have."""
    launch = index.launch(Place(outcome.step, OUTSIDE_PLANS, outcome.launch))
    before = {values.tensor: values.data for values in outcome.given}
    after = before | {values.tensor: values.data for values in outcome.gave}
    named = [(a.name, a.tensor) for a in launch.arguments if a.tensor is not None]
    return KnownResults(
        {name: before[tensor] for name, tensor in named if tensor in before},
        {name: after[tensor] for name, tensor in named if tensor in after},
        max(map(_largest_in, outcome.given), default=0.0),
        any(_DOT.search(source.text) for source in _sources(index, launch.source, {})),
    )


def _sources(index: BundleIndex, key: str, seen: dict[str, None]) -> list[SourceRecord]:
    if key in seen or key not in index.sources:
        return []
    seen[key] = None
    own = index.sources[key]
    return [own, *(s for callee in own.callees for s in _sources(index, callee, seen))]


def _rows_of(data: Array, tensor: TensorRecord) -> Array | None:
    """The bytes of a tensor's elements, row by row; None where they are not all in `data`."""
    view = elements_of(data, tensor, element_bytes(tensor.dtype) or 1)
    return None if view is None else np.ascontiguousarray(view).reshape(-1)


def _compare(
    name: str, dtype: str, on_device: bytes, replayed: Array, largest: float, has_dot: bool
) -> Differing | None:
    given, right = _numbers(np.frombuffer(on_device, np.uint8), dtype), _numbers(replayed, dtype)
    if given.size != right.size:
        size = int(right.size)
        return Differing(
            argument=name,
            element=0,
            on_device=math.nan,
            in_replay=math.nan,
            num_elements=size,
            num_in_all=size,
        )
    if not given.size:
        return None
    finite = np.isfinite(right)
    limit = 0.0
    if dtype in _TOLERANCE:
        share = max(_TOLERANCE[dtype], _OF_MATRIX_UNITS if has_dot else 0.0)
        limit = share * max(largest, float(np.abs(right[finite]).max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        off = np.abs(given - right)
    end = _NEAR_END * _ENDS.get(dtype, np.inf)  # beyond it one rounds to infinity, and one does not
    are_large = (np.abs(given) >= end) & (np.abs(right) >= end) & (given * right > 0)
    off = np.where(are_large | (given == right) | (np.isnan(given) & np.isnan(right)), 0.0, off)
    off = np.where(np.isnan(off), np.inf, off)
    wrong = off > limit
    if not wrong.any():
        return None
    at = int(off.argmax())
    return Differing(
        argument=name,
        element=at,
        on_device=float(given[at]),
        in_replay=float(right[at]),
        num_elements=int(wrong.sum()),
        num_in_all=int(given.size),
    )


def _largest_in(values: Values) -> float:
    if values.dtype not in _TOLERANCE:
        return 0.0
    numbers = np.abs(_numbers(np.frombuffer(values.data, np.uint8), values.dtype))
    return float(numbers[np.isfinite(numbers)].max(initial=0.0))


def _numbers(data: Array, dtype: str) -> Array:
    if dtype == "BF16":
        return bf16_to_f32(data.view(np.uint16)).astype(np.float64)
    kind = np.dtype(np.float16) if dtype == "F16" else NUMPY_DTYPES[dtype]
    numbers: Array = data.view(kind).astype(np.float64)
    return numbers
