"""An assertion of a kernel of Inductor's: which parameter has the index, and which element it is.

The element is read where the run was looked at closely, so that what the index tensor held is on
record: the program that the assertion names is replayed, and its loads of that line are compared
with the range.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.base.refusals import DeviceAssert
from hypocenter.doctor.case import Case
from hypocenter.doctor.compiled.asserted import AssertedIndex, asserted_index
from hypocenter.doctor.compiled.words import user_name_of
from hypocenter.doctor.diagnosis import SolvedEntry
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import LaunchRecord, Place

#: Launches of the kernel that are replayed, the last one first, and seconds of each.
MAX_LAUNCHES, REPLAY_SECONDS = 4, 3.0


@dataclass(frozen=True, slots=True)
class CompiledAssertion:
    """What follows from the kernel's text: `argument` has the index, `entry` is the one at fault.

    `place` is its launch, where that is sure, and `told` goes on with the sentence.
    """

    argument: str
    fix: str
    told: str = ""
    place: Place | None = None
    entry: SolvedEntry | None = None


def compiled_assertion(
    case: Case, use: LaunchMade, refusal: DeviceAssert
) -> CompiledAssertion | None:
    """Of an assertion of an index in the kernel of `use`; None for any other assertion."""
    source = case.sources.get(use.launch.source)
    asserted = asserted_index(source, refusal.condition) if source is not None else None
    if asserted is None:
        return None
    uses = [made for made in case.launches if made.launch.source == use.launch.source]
    for made in uses[: -MAX_LAUNCHES - 1 : -1]:
        bound = _bound(made.launch, asserted)
        entry = _entry(case, made, refusal, asserted, bound)
        if entry is not None:
            name = user_name_of(case, made.launch, asserted.parameter)
            element = f"{name}[{', '.join(map(str, entry.index))}]"
            fix = f"Keep {name} inside 0 to {bound - 1}"
            told = f": {element} is {entry.value}, and {bound} is the limit"
            return CompiledAssertion(asserted.parameter, fix, told, made.place, entry)
    bound, name = _bound(use.launch, asserted), user_name_of(case, use.launch, asserted.parameter)
    of = name if asserted.line else f"what is made of {name}"
    limit = f"{bound - 1}" if bound else f"less than {asserted.bound}"
    is_one = len({made.launch.site for made in uses}) == 1
    place = use.place if is_one else None
    return CompiledAssertion(asserted.parameter, f"Keep {of} inside 0 to {limit}", place=place)


def _bound(launch: LaunchRecord, asserted: AssertedIndex) -> int:
    """The first number that is outside; 0 where a launch does not say it."""
    if asserted.bound.isdigit():
        return int(asserted.bound)
    value = next((arg.value for arg in launch.arguments if arg.name == asserted.bound), None)
    return value if isinstance(value, int) else 0


def _entry(
    case: Case, use: LaunchMade, refusal: DeviceAssert, asserted: AssertedIndex, bound: int
) -> SolvedEntry | None:
    """The first element outside that the program of the assertion loads; None without one."""
    tensor = case.tensor_of(use.launch, asserted.parameter)
    if not asserted.line or not bound or refusal.block is None or use.place is None:
        return None
    if tensor is None or not tensor.shape:
        return None
    try:
        from hypocenter.replay.trace import trace_program

        x, y, z = refusal.block
        size = (*use.launch.grid, 1, 1, 1)[:3]
        number = x + size[0] * (y + size[1] * z)
        trace = trace_program(
            case.index, use.place, number, allow_source=case.allow_source, seconds=REPLAY_SECONDS
        )
    except (HypoError, MissingPackage, ImportError):
        return None
    low = -bound if asserted.wraps else 0
    for access in trace.accesses:
        base = trace.argument_of(access)
        is_it = access.operation == "load" and base is not None and base.name == asserted.parameter
        if not is_it or base is None or all(site.line != asserted.line for site in access.sites):
            continue
        for pointer, value in zip(access.pointers, access.values, strict=True):
            if not low <= int(value) < bound:
                at = (int(pointer) - base.address) // access.width_bytes
                index = _index_of(at, tensor.shape, tensor.strides)
                if index is not None:
                    return SolvedEntry(argument=asserted.parameter, index=index, value=int(value))
    return None


def _index_of(at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The index of the element that lies `at` elements behind the first; None if there is none."""
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    index = [0] * len(shape)
    for axis in order:
        if strides[axis] > 0:
            index[axis] = min(at // strides[axis], shape[axis] - 1)
            at -= index[axis] * strides[axis]
    return tuple(index) if not at else None
