"""Whether a launch's results have NaN or infinity of elements that have no weight in them.

`0 * NaN` is NaN. So the launch runs as it was, then with numbers in the place of what is not finite
in one of its tensors: 0, 1, and a large one with either sign. What is written then is finite each
time, and the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError, NotReplayed
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Place
from hypocenter.replay.admission import RecordedTensor
from hypocenter.replay.arguments import Argument
from hypocenter.replay.findings import Site
from hypocenter.replay.rebuild import Rebuilt, recorded_site
from hypocenter.replay.replay import replay
from hypocenter.replay.sites import kernel_frames, site_of
from hypocenter.replay.source import kernel_of
from hypocenter.replay.terms import KernelText, Observers, Schedule

#: By torch's name of a type of floats: its bits as an integer, those of its exponent, and the bits
#: of 0, 1, and numbers of which few more are as large, one of each sign.
_FORMS: Mapping[str, tuple[Any, int, tuple[int, ...]]] = {
    "float16": (np.uint16, 0x7C00, (0, 0x3C00, 0x7700, 0xF700)),
    "bfloat16": (np.uint16, 0x7F80, (0, 0x3F80, 0x7140, 0xF140)),
    "float32": (np.uint32, 0x7F800000, (0, 0x3F800000, 0x71400000, 0xF1400000)),
    "float64": (np.uint64, 0x7FF << 52, (0, 0x3FF << 52, 0x694 << 52, 0xE94 << 52)),
}
_NUM_TRIALS = 4
#: Loads of what is not finite that are kept of a replay.
_MAX_LOADS = 4096
_MISFITS = (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Weightless:
    """`num_elements` of `parameter` are not finite and have no weight; the first is `element`.

    `site` is the one access that reads such elements, None where there are several. With 0 in
    their place `num_spoilt` results are finite that were not, and none is another.
    """

    parameter: str
    element: tuple[int, ...]
    num_elements: int
    num_spoilt: int
    site: Site | None
    #: What was written, by parameter, with 0 in their place.
    results: Mapping[str, Array]


@dataclass(slots=True)
class _Ran:
    """What one replay left: bits by parameter that it wrote, and the lanes of its loads."""

    written: dict[str, Array] = field(default_factory=dict)
    #: By parameter of floats the bits of an exponent.
    exponents: dict[str, int] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)
    loads: list[tuple[Array, Site]] = field(default_factory=list)

    def keep_load(
        self, operation: str, pointers: Array, mask: Array, values: Array, width: int
    ) -> None:
        if operation == "load" and len(self.loads) < _MAX_LOADS:
            active = np.broadcast_to(mask, pointers.shape).reshape(-1)
            site = recorded_site(site_of(next(iter(kernel_frames()))))
            self.loads.append((pointers.reshape(-1)[active], site))

    def spoilt(self, name: str) -> Array:
        """Which of the elements that a parameter's memory holds are not finite."""
        exponent = self.exponents[name]
        bad: Array = (self.written[name] & exponent) == exponent
        return bad


class _Launch:
    """A recorded launch that is replayed with other numbers in one of its tensors."""

    def __init__(self, index: BundleIndex, place: Place, text: KernelText, seconds: float) -> None:
        self._index, self._place, self._seconds = index, place, seconds
        self._launch = index.launch(place)
        self._kernel = kernel_of(index, self._launch, allow_source=text.may_run, edited=text.edited)

    def run(self, parameter: str = "", trial: int = 0) -> _Ran | None:
        """With the number of a trial in the place of what is not finite in `parameter`.

        None where not all of it was replayed, or an access was wrong.
        """
        rebuilt = Rebuilt(self._index, self._place, self._launch, {})
        given = {n: v for n, v in rebuilt.arguments.items() if isinstance(v, RecordedTensor)}
        if parameter:
            view, exponent = _bits_of(given[parameter])
            view[(view & exponent) == exponent] = _FORMS[given[parameter].dtype][2][trial]
        ran = _Ran()
        report = replay(
            self._kernel,
            rebuilt.grid,
            rebuilt.arguments,
            schedule=Schedule(budget_seconds=self._seconds, program_seconds=self._seconds),
            observers=Observers(ran.arguments.extend, on_lanes=ran.keep_load),
        )
        if report.findings or not report.coverage.is_complete:
            return None
        for argument in ran.arguments:
            if argument.was_written and argument.region.data is not None:
                kind, exponent, _ = _FORMS.get(given[argument.name].dtype, (np.uint8, 0, ()))
                held = argument.region.data[argument.start :][: argument.num_bytes]
                ran.written[argument.name] = held.view(kind).copy()
                if exponent:
                    ran.exponents[argument.name] = exponent
        return ran

    def tensors_that_are_not_finite(self) -> dict[str, Array]:
        """By parameter of floats where its elements are not; of those that have some."""
        rebuilt = Rebuilt(self._index, self._place, self._launch, {})
        found = {}
        for name, value in rebuilt.arguments.items():
            is_known = isinstance(value, RecordedTensor) and value.data is not None
            if is_known and value.dtype in _FORMS and rebuilt.tensors[name].id in self._recorded:
                view, exponent = _bits_of(value)
                bad = (view & exponent) == exponent
                if bad.any():
                    found[name] = bad
        return found

    @property
    def _recorded(self) -> set[int]:
        return set(self._index.values(self._place))


def weightless_numbers(
    index: BundleIndex, place: Place, *, text: KernelText, seconds: float = 4.0
) -> Weightless | None:
    """The one tensor of a launch whose NaN or infinities have no weight and reach what it writes.

    None where there is none, or where more than one would have to be changed. Raises as
    `replay_place` does.
    """
    launch = _Launch(index, place, text, seconds)
    try:
        bad = launch.tensors_that_are_not_finite()
        before = launch.run() if bad else None
        if before is None or not any(before.spoilt(name).any() for name in before.exponents):
            return None
        found = [
            made
            for name, mask in bad.items()
            if name not in before.written and (made := _weightless(launch, before, name, mask))
        ]
    except HypoError:
        raise
    except _MISFITS as error:
        told = f"has a record that makes no sense ({type(error).__name__}: {error})"
        raise NotReplayed(index.launch(place).kernel, told) from error
    return found[0] if len(found) == 1 else None


def results_of(
    index: BundleIndex, place: Place, *, text: KernelText, seconds: float = 4.0
) -> Mapping[str, Array] | None:
    """What the launch writes with that text, as `Weightless.results`; None for a part of it."""
    ran = _Launch(index, place, text, seconds).run()
    return ran.written if ran is not None else None


def are_same(one: Mapping[str, Array] | None, other: Mapping[str, Array]) -> bool:
    """Whether two replays have written the same to the bit."""
    if one is None or one.keys() != other.keys():
        return False
    return all(np.array_equal(one[name], other[name]) for name in one)


def _weightless(launch: _Launch, before: _Ran, name: str, bad: Array) -> Weightless | None:
    zero = launch.run(name)
    if zero is None or zero.written.keys() != before.written.keys():
        return None
    num_spoilt = 0
    for own, held in zero.written.items():
        spoilt = before.spoilt(own) if own in before.exponents else np.zeros(held.shape, bool)
        if (held != before.written[own])[~spoilt].any():
            return None
        if own in zero.exponents and zero.spoilt(own).any():
            return None
        num_spoilt += int(spoilt.sum())
    for trial in range(1, _NUM_TRIALS):
        other = launch.run(name, trial)
        if other is None or not are_same(other.written, zero.written):
            return None  # they have weight
    element = tuple(int(at) for at in np.argwhere(bad)[0])
    site = _site(before, name, bad)
    return Weightless(name, element, int(bad.sum()), num_spoilt, site, zero.written)


def _site(ran: _Ran, name: str, bad: Array) -> Site | None:
    argument = next(a for a in ran.arguments if a.name == name)
    offsets = np.argwhere(bad) @ np.array(argument.strides, np.int64) * argument.item_bytes
    addresses = np.uint64(argument.address) + offsets.astype(np.uint64)
    sites = {site for pointers, site in ran.loads if np.isin(pointers, addresses).any()}
    return sites.pop() if len(sites) == 1 else None


def _bits_of(tensor: RecordedTensor) -> tuple[Array, int]:
    """The elements of a tensor of floats as integers, to be changed, and an exponent's bits."""
    assert tensor.data is not None
    kind, exponent, _ = _FORMS[tensor.dtype]
    held = tensor.data[tensor.start :]
    flat = held[: held.size // tensor.item_bytes * tensor.item_bytes].view(kind)
    strides = tuple(stride * tensor.item_bytes for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides), exponent
