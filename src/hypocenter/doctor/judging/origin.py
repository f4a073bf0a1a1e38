"""Which launch wrote an element that led a kernel astray: followed back through a pipeline.

From what tensors held before each launch, and the replay of those launches that may have written
it. A launch that only passed the element on is asked where it had it from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES
from hypocenter.base.errors import HypoError
from hypocenter.doctor.case import Case, array_of
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Culprit, RootCause
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import HostWrote, TensorRecord, Values
from hypocenter.record.gap import Gap
from hypocenter.replay.terms import KernelText, Schedule, SeenReplay

#: Seconds for all replays, launches that are looked back at, and kernels of one pipeline.
_SECONDS, _MAX_LAUNCHES, _MAX_STAGES = 6.0, 4096, 6
#: Elements of an input that are put to the test, at most.
_MAX_TRIED = 8
#: What an element may have to do with where it was read.
_OF_ENTRIES = (Cause.INDEX_RANGE, Cause.TOKEN_RANGE, Cause.POSITION_RANGE, Cause.BLOCK_TABLE_RANGE)


@dataclass(frozen=True, slots=True)
class _Element:
    """An element of a tensor, as a launch found it: `at` is its index, `value` what it held."""

    use: LaunchMade
    parameter: str
    tensor: TensorRecord
    at: tuple[int, ...]
    value: int

    @property
    def text(self) -> str:
        return f"{self.parameter}[{', '.join(map(str, self.at))}] = {self.value}"

    @property
    def address(self) -> int:
        width = self.width
        steps = zip(self.at, self.tensor.strides, strict=True)
        return self.tensor.address + width * sum(i * stride for i, stride in steps)

    @property
    def width(self) -> int:
        return NUMPY_DTYPES[self.tensor.dtype].itemsize


@dataclass(frozen=True, slots=True)
class _Written:
    """A launch that stored the element, which its replay shows, and as what."""

    use: LaunchMade
    element: _Element


def with_origin(case: Case, root: RootCause) -> RootCause:
    """The cause at the launch that first made a bad entry.

    Where no launch is proven to have written it, the cause stays where it was found, and the report
    says that this is not known.
    """
    start = _element_of(case, root)
    if start is None:
        return root
    written, given = _follow(case, start, case.limit.until(_SECONDS))
    if not written:
        return root
    made = written[-1].use
    # Where it was handed on as it had been given, no line of that kernel is to blame.
    bad = given or written[-1].element
    access = case.access(made.launch, bad.parameter, "load" if given else "store")
    does = "is given" if given else "writes"
    chain = "; ".join(f"{by.use.where} ({by.use.launch.kernel}) wrote it" for by in written)
    named = msgspec.structs.replace(
        root,
        sentence=f"{made.launch.kernel} {does} {bad.text}, with which {root.kernel} then goes "
        f"astray: {root.sentence}",
        fix=f"Look at who fills {bad.parameter} of {made.launch.kernel}: {root.fix}"
        if given
        else f"Look at what {made.launch.kernel} stores into {bad.parameter}: {root.fix}",
        proof=msgspec.structs.replace(root.proof, red=f"{root.proof.red}; {chain}"),
        kernel=made.launch.kernel,
        argument=bad.parameter,
        tensor=bad.tensor.name,
        place=made.place,
        blames=Blame.UNKNOWN if given else Blame.KERNEL,
        culprit=Culprit(f"{access.file}:{access.line}", access.expression)
        if access and not given
        else None,
        launched_at=made.launch.site,
        finding=None,
        entry=None,
    )
    return named.at(access)


def last_writer(case: Case, use: LaunchMade, tensor: TensorRecord | None) -> LaunchMade | None:
    """Of the launches before the last one that may write to the memory of a tensor."""
    before = [made for made in case.launches if _is_before(made, use)]
    return next(iter(writers_of(case, before, tensor.allocation) if tensor else ()), None)


def writers_of(case: Case, launches: Sequence[LaunchMade], allocation: int) -> list[LaunchMade]:
    """Of these launches those that may write to some memory, the last one first."""
    return [made for made in reversed(launches) if _may_write(case, made, allocation)]


def _element_of(case: Case, root: RootCause) -> _Element | None:
    """The bad entry of a cause; None where it has none, or -1, which may well be meant."""
    entry, cause = root.entry, root.cause
    use = next((use for use in case.launches if use.place == root.place), None)
    if entry is None or use is None or cause not in _OF_ENTRIES:
        return None
    tensor = case.tensor_of(use.launch, entry.argument)
    if tensor is None or tensor.dtype not in NUMPY_DTYPES or len(entry.index) != len(tensor.shape):
        return None
    return _Element(use, entry.argument, tensor, entry.index, entry.value)


# -- the way back ---------------------------------------------------------------------------------


def _follow(
    case: Case, element: _Element, deadline: float
) -> tuple[list[_Written], _Element | None]:
    """The launches that wrote it, the last one first, and with what the first of them was given
    it, if it made nothing of it."""
    found: list[_Written] = []
    source: _Element | None = None
    while len(found) < _MAX_STAGES:
        written = _writer(case, source or element, deadline)
        if written is None:
            break
        found.append(written)
        source = _passed_on(case, written, deadline)
        if source is None:
            break
    return found, source


def _writer(case: Case, element: _Element, deadline: float) -> _Written | None:
    """The launch that stored the element; where none is known, the report says so."""
    candidates: list[LaunchMade] = []
    since: LaunchMade | None = None
    before = [use for use in case.launches if _is_before(use, element.use)]
    for made in reversed(before[-_MAX_LAUNCHES:]):
        if _may_write(case, made, element.tensor.allocation):
            candidates.append(made)
        held = _value_before(case, made, element)
        if held is not None and held != element.value:
            since = made
            break
        if held is not None:
            candidates.clear()  # it was there before this launch
    for made in candidates:
        if (written := _writes(case, made, element, deadline)) is not None:
            return written
    if candidates:
        names = ", ".join(dict.fromkeys(made.launch.kernel for made in candidates))
        why = f"{names} may have; no replay of them with what was recorded shows it"
    elif since is not None:
        host = _host_write(case, since, element)
        why = f"none: {host} after {since.where} ({since.launch.kernel})"
    else:
        return None
    case.leave_unseen(Gap.not_recorded(f"which launch wrote {element.text}", why))
    return None


def _is_before(use: LaunchMade, other: LaunchMade) -> bool:
    """Whether a launch was made before another one."""
    if use.seq != other.seq or use.place is None or other.place is None:
        return use.seq < other.seq
    return use.place.launch < other.place.launch


def _host_write(case: Case, since: LaunchMade, element: _Element) -> str:
    """What is recorded of the host that may have."""
    for event in case.index.events_of(HostWrote):
        if since.seq < event.seq < element.use.seq and event.site:
            return f"the host wrote at {event.site}"
    return "an operation of torch or the host did"


def _may_write(case: Case, made: LaunchMade, allocation: int) -> bool:
    """Whether a launch has that memory among what its kernel stores to."""
    written = case.written_by(made.launch)
    return any(
        name in written and other.allocation == allocation
        for name, other in case.tensors_of(made.launch).items()
    )


def _value_before(case: Case, made: LaunchMade, element: _Element) -> int | None:
    """What lay at the element's address right before a launch; None where nobody noted it."""
    if made.place is None:
        return None
    for number, values in case.index.values(made.place).items():
        tensor = case.tensors.get(number)
        if tensor is None or tensor.allocation != element.tensor.allocation:
            continue
        if tensor.dtype == element.tensor.dtype and (at := _index_in(tensor, element)) is not None:
            return _value(values, tensor, at)
    return None


def _index_in(tensor: TensorRecord, element: _Element) -> tuple[int, ...] | None:
    """The index of the element's address in another view of its memory."""
    rest = element.address - tensor.address
    if rest < 0 or rest % element.width or not all(s > 0 for s in tensor.strides):
        return None
    rest //= element.width
    index = [0] * len(tensor.shape)
    for axis in sorted(range(len(tensor.shape)), key=lambda a: -tensor.strides[a]):
        index[axis] = min(rest // tensor.strides[axis], tensor.shape[axis] - 1)
        rest -= index[axis] * tensor.strides[axis]
    return tuple(index) if rest == 0 else None


def _value(values: Values, tensor: TensorRecord, at: tuple[int, ...]) -> int | None:
    if values.shape != tensor.shape or values.dtype.upper() != tensor.dtype:
        return None
    array = array_of(values)
    return int(array[at]) if np.issubdtype(array.dtype, np.integer) else None


# -- replays of the launches before ---------------------------------------------------------------


def _writes(case: Case, made: LaunchMade, element: _Element, deadline: float) -> _Written | None:
    """The launch, where its replay stores that value into that element."""
    for parameter, tensor in _tensors(case, made):
        if tensor.allocation != element.tensor.allocation or tensor.dtype != element.tensor.dtype:
            continue
        at = _index_in(tensor, element)
        if at is None:
            continue
        own = _Element(made, parameter, tensor, at, element.value)
        if _value_after(case, own, {}, deadline) == element.value:
            return _Written(made, own)
    return None


def _tensors(case: Case, made: LaunchMade) -> Iterator[tuple[str, TensorRecord]]:
    """The tensors of a launch by the kernel's own parameters."""
    for argument in made.launch.arguments:
        if argument.tensor is not None and argument.tensor in case.tensors:
            yield argument.name, case.tensors[argument.tensor]


def _passed_on(case: Case, written: _Written, deadline: float) -> _Element | None:
    """The element of an input whose value the launch handed on as it was.

    That it is equal says nothing. With another number there the launch must store that other one.
    """
    made, own = written.use, written.element
    for parameter, tensor in _tensors(case, made):
        recorded = case.index.values(made.place).get(tensor.id) if made.place else None
        if recorded is None or parameter == own.parameter or recorded.shape != tensor.shape:
            continue
        array = array_of(recorded)
        if not np.issubdtype(array.dtype, np.integer):
            continue
        alike = np.argwhere(array == own.value)[:_MAX_TRIED]
        for at in (tuple(map(int, index)) for index in alike):
            other = own.value - 1
            if _value_after(case, own, {parameter: (at, other)}, deadline) == other:
                return _Element(made, parameter, tensor, at, own.value)
    return None


def _value_after(
    case: Case,
    own: _Element,
    changed: dict[str, tuple[tuple[int, ...], int]],
    deadline: float,
) -> int | None:
    """What the replay of a launch stores into an element, with some of its inputs changed.

    None where it stores nothing there, or cannot be replayed to its end.
    """
    left = deadline - time.monotonic()
    if own.use.place is None or left <= 0.1:
        return None
    try:
        from hypocenter.replay.corrections import TensorCorrection
        from hypocenter.replay.recorded import replay_place

        done: list[int] = []

        def keep(rebuilt: object, arguments: object) -> None:
            found = stored_at(arguments, own.parameter, own.at, own.width)
            done.extend([] if found is None else [found])

        report = replay_place(
            case.index,
            own.use.place,
            corrections={
                name: TensorCorrection(elements={at: value})
                for name, (at, value) in changed.items()
            },
            text=KernelText(case.allow_source),
            schedule=Schedule(budget_seconds=min(left, 2.0)),
            seen=SeenReplay(keep),
        )
    except (HypoError, ImportError):
        return None
    return done[0] if done and report.coverage.is_complete else None


def stored_at(arguments: object, parameter: str, at: tuple[int, ...], width: int) -> int | None:
    """The integer that a replayed launch left in an element that it wrote itself."""
    from hypocenter.replay.arguments import Argument

    assert isinstance(arguments, list | tuple)
    for argument in arguments:
        assert isinstance(argument, Argument)
        region = argument.region
        if argument.name != parameter or region.data is None or len(at) != len(argument.strides):
            continue
        steps = zip(at, argument.strides, strict=True)
        start = argument.start + width * sum(i * stride for i, stride in steps)
        if not region.writer[start // region.granule]:
            return None
        data = bytes(region.data[start : start + width])
        return int.from_bytes(data, "little", signed=True)
    return None
