"""What a guarded run refused, access by access: facts of the GPU, and what the replay adds.

The guard tells program, byte and line. The program is then replayed alone with the integers that
were kept of its tensors: where it makes that access again, lane and index values are known too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import msgspec

from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.record.bundle_index import BundleIndex, LaunchMade
from hypocenter.record.events import OUTSIDE_PLANS, LaunchRecord, MaskedOff, Place, TensorRecord
from hypocenter.record.guard_faults import SourceLine
from hypocenter.replay.findings import OVERFLOWS, Finding, ReplayReport
from hypocenter.replay.terms import KernelText, Schedule

#: Of the replay of one program.
REPLAY_SECONDS = 4.0
#: By the kind of a finding the type that an offset left.
OVERFLOWN = {kind: name for name, kind in OVERFLOWS.items()}
#: Sites that are replayed; of further ones only the guard's own facts are told.
MAX_REPLAYED = 16


class GuardFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The first access of a site that left its tensor, in a launch that was guarded.

    `byte_offset` counts from the tensor's first element, and `is_far` says that it may be any
    beyond; `element` is the number of the element there. The tensor has `extent_bytes` from its
    first to the end of its last element, in an allocation of `storage_bytes`; 0 where neither is
    known any more. `is_inside_storage`: a view was passed, and what it is a view of has that byte.
    `is_between`: it lies between the rows of that view.
    `first_program` is the first at fault in a replay: of the launch, where that ends in time, else
    of that program alone. `lane` and `values` are of its first lane at fault, `lane_element` is its
    element; where no replay makes the access again `unreplayed` says why. `overflow` is the type
    that its offset left in that replay, and `overflows_at` the line and the text of what did.
    """

    kernel: str
    operation: str
    argument: str
    file: str
    line: int
    function: str
    expression: str
    called_from: tuple[SourceLine, ...]
    program: tuple[int, int, int] | None
    byte_offset: int
    is_far: bool
    is_null: bool
    element: int
    tensor: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    extent_bytes: int = 0
    storage_bytes: int = 0
    is_between: bool = False
    is_inside_storage: bool = False
    first_program: tuple[int, int, int] | None = None
    lane: tuple[int, ...] | None = None
    lane_element: int | None = None
    values: dict[str, bool | int | float | str] = {}
    unreplayed: str = ""
    overflow: str = ""
    overflows_at: tuple[str, str] | None = None
    launch: int = 0
    launched_at: str = ""
    pid: int | None = None


def guard_findings(index: BundleIndex, *, allow_source: bool) -> Iterator[GuardFinding]:
    """Those of one process, in the order in which they were made.

    With `allow_source` the program's own text of a kernel is run for the replay.
    """
    for number, event in enumerate(index.events_of(MaskedOff)):
        finding = finding_of(index, event)
        if number >= MAX_REPLAYED:
            reason = f"only {MAX_REPLAYED} accesses of a process are replayed"
            yield msgspec.structs.replace(finding, unreplayed=reason)
            continue
        yield _with_replay(index, event, finding, allow_source)


def launch_of(event: MaskedOff) -> LaunchMade:
    """The launch whose access was refused."""
    place = Place(event.step, OUTSIDE_PLANS, event.launched)
    return LaunchMade(event.launch, event.step, event.launched, place)


def program_number(event: MaskedOff) -> int | None:
    """The linear number of the program, x fastest; None where the grid was too large to tell."""
    if event.fault.program is None:
        return None
    x, y, z = event.fault.program
    size = (*event.launch.grid, 1, 1)[:3]
    return x + size[0] * (y + size[1] * z)


def access_text(finding: GuardFinding) -> str:
    """`load of table_ptr at byte 428 in program (1, 0, 0)`, for evidence and proofs."""
    further = " or further" if finding.is_far else ""
    where = f" in program {finding.program}" if finding.program is not None else ""
    return (
        f"{finding.operation} of {finding.argument} at byte {finding.byte_offset}{further}{where}"
    )


def finding_of(index: BundleIndex, event: MaskedOff) -> GuardFinding:
    """What the guard itself tells of an access, and the record of its tensor."""
    fault, site = event.fault, event.fault.site
    here = site.calls[0]
    tensor = _tensor_of(index, event.launch, fault.parameter)
    allocation = index.allocations.get(tensor.allocation) if tensor is not None else None
    width = _width(tensor)
    finding = GuardFinding(
        kernel=fault.kernel,
        operation=site.operation,
        argument=fault.parameter,
        file=here.file,
        line=here.line,
        function=here.function,
        expression=site.expression,
        called_from=site.calls[1:],
        program=fault.program,
        byte_offset=fault.byte_offset,
        is_far=fault.is_far,
        is_null=fault.null,
        element=fault.byte_offset // width,
        launch=event.step,
        launched_at=event.launch.site,
    )
    if tensor is None:
        return finding
    room = allocation.num_bytes if allocation is not None else 0
    at = tensor.address - allocation.address + fault.byte_offset if allocation is not None else -1
    return msgspec.structs.replace(
        finding,
        tensor=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        strides=tensor.strides,
        extent_bytes=tensor.extent_bytes,
        storage_bytes=room,
        is_between=0 <= fault.byte_offset <= tensor.extent_bytes - width and not fault.null,
        is_inside_storage=not fault.is_far and 0 <= at <= room - width,
    )


def _width(tensor: TensorRecord | None) -> int:
    """Bytes of an element; of an empty tensor, which has no extent to tell it by, 1."""
    if tensor is None or 0 in tensor.shape:
        return 1
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
    return max(tensor.extent_bytes // (reach + 1), 1)


def _tensor_of(index: BundleIndex, launch: LaunchRecord, name: str) -> TensorRecord | None:
    numbers = (arg.tensor for arg in launch.arguments if arg.name == name)
    number = next(numbers, None)
    return index.tensors.get(number) if number is not None else None


def _with_replay(
    index: BundleIndex, event: MaskedOff, finding: GuardFinding, allow_source: bool
) -> GuardFinding:
    """The finding with lane and values, if the replay of its program makes the same access."""
    program, place = program_number(event), launch_of(event).place
    if program is None or place is None:
        reason = "the grid is too large for the record to tell the program"
        return msgspec.structs.replace(finding, unreplayed=reason)
    try:
        report = _replay_programs(index, place, [program], allow_source)
    except (HypoError, MissingPackage, ImportError) as error:
        return msgspec.structs.replace(finding, unreplayed=str(error))
    same = [again for again in report.findings if is_that_access(again, finding)]
    if not same:
        reason = "the replay does not make it: what decides it was not kept, or has changed since"
        return msgspec.structs.replace(finding, unreplayed=reason)
    first = same[0]
    # A site's word is the last program's that wrote it: those before it are looked for here.
    if program and report.coverage.seconds * program < REPLAY_SECONDS:
        with contextlib.suppress(HypoError):
            report = _replay_programs(index, place, range(program), allow_source)
            before = [again for again in report.findings if is_that_access(again, finding)]
            first = next(iter(before), first)
    element = first.number if first.argument == finding.argument else None
    wrapped = next((again for again in report.findings if _is_overflow_at(again, finding)), None)
    origin = wrapped.origin if wrapped is not None else None
    return msgspec.structs.replace(
        finding,
        overflow=OVERFLOWN[wrapped.kind] if wrapped is not None else "",
        overflows_at=(f"{origin.file}:{origin.line}", origin.expression) if origin else None,
        first_program=first.program,
        lane=first.lane,
        lane_element=element,
        values=first.values,
    )


def _replay_programs(
    index: BundleIndex, place: Place, programs: Collection[int], allow_source: bool
) -> ReplayReport:
    from hypocenter.replay.recorded import replay_place

    return replay_place(
        index,
        place,
        text=KernelText(allow_source),
        schedule=Schedule(programs, budget_seconds=REPLAY_SECONDS),
    )


def _is_overflow_at(again: Finding, finding: GuardFinding) -> bool:
    """Whether an offset wrapped in the very access that the guard refused."""
    return again.is_overflow and is_that_access(again, finding)


def is_that_access(again: Finding, finding: GuardFinding) -> bool:
    """Whether a replay found the access that the guard refused: same line, operation, argument.

    What is far off may lie in the address space that a replay gives to another argument.
    """
    same_argument = finding.is_far or again.argument == finding.argument
    operations = {text.partition("_")[0] for text in (again.operation, finding.operation)}
    return again.line == finding.line and len(operations) == 1 and same_argument
