"""Rung: where a GPU stood by its own dump, joined with the record, and that very program replayed.

The dump says which program it was, at which line, and mostly which address; the record says whose
the parameters are; the replay of that one program says what leads there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import msgspec

from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause, index_cause
from hypocenter.doctor.compiled.words import user_name_of
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, SolvedEntry, Verdict, proven, row
from hypocenter.doctor.gpu_sight import (
    address_text,
    grid_of,
    launch_of,
    lowest_address,
    own_frame,
    sight_of,
    sight_text,
    thread_number,
)
from hypocenter.doctor.rungs.driver.wrapped_index import claims_of_wrapped
from hypocenter.doctor.rungs.replays import claims_of_programs
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import StreamEvent, TensorRecord
from hypocenter.record.gap import Gap
from hypocenter.record.gpu_stop import GpuFrame, GpuGrid, GpuStop, GpuWarp
from hypocenter.replay.terms import KernelText, Schedule

NAME = "core dump"
#: Of all replays of the rung.
RUNG_SECONDS = 15.0


class _Stop(msgspec.Struct, frozen=True):
    """A warp that stopped at fault, and the recorded launch that it belongs to."""

    warp: GpuWarp
    grid: GpuGrid
    use: LaunchMade
    frame: GpuFrame | None
    told: str

    @property
    def program(self) -> int:
        """The linear number of its program, x fastest."""
        x, y, z = self.warp.block or (0, 0, 0)
        size = (*self.use.launch.grid, 1, 1, 1)[:3]
        return x + size[0] * (y + size[1] * z)


def gpu_stops(case: Case) -> list[Claim]:
    """Tells where every GPU stood, and proves what led there where a recorded launch stopped."""
    case.sights += filter(None, (sight_of(case, stop) for stop in case.bundle.gpu_stops))
    if any(claim.root is not None for claim in case.claims):
        return []
    stopped = next(_stops_at_fault(case), None)
    if stopped is None or stopped.use.place is None:
        return []
    if (freed := _claim_of_freed(case, stopped)) is not None:
        return [freed]
    try:
        return _claims_of_replay(case, stopped)
    except (MissingPackage, ImportError) as error:
        reason = f"needs the replay of launches: {error}"
    except HypoError as error:
        reason = str(error)
    case.leave_unseen(Gap.not_examined("the program at which the GPU stopped", reason))
    return []


def _stops_at_fault(case: Case) -> Iterator[_Stop]:
    for stop in case.bundle.gpu_stops:
        warp = stop.faulting
        grid = grid_of(stop, warp) if warp is not None else None
        if warp is None or grid is None or warp.block is None or not _is_of_memory(stop, warp):
            continue
        use = launch_of(case, grid)
        sight = sight_of(case, stop)
        if use is not None and sight is not None:
            yield _Stop(warp, grid, use, own_frame(case, warp, use), sight_text(sight))


def _is_of_memory(stop: GpuStop, warp: GpuWarp) -> bool:
    """Whether it is an access that went wrong, and not an assert or a wait."""
    return bool(stop.exception or warp.exception) and warp.access is not None


# -- memory that had gone -------------------------------------------------------------------------


def _claim_of_freed(case: Case, stopped: _Stop) -> Claim | None:
    """The tensor of the launch that had been freed by the time, if the address lies in it."""
    warp, launch = stopped.warp, stopped.use.launch
    address = lowest_address(warp)
    if address is None or warp.access is None or warp.access.known_bits != (1 << 64) - 1:
        return None
    for arg in launch.arguments:
        tensor = case.tensors.get(arg.tensor) if arg.tensor is not None else None
        allocation = case.allocations.get(tensor.allocation) if tensor else None
        freed = case.freed.get(allocation.id) if allocation else None
        if tensor is None or allocation is None or freed is None:
            continue
        if allocation.address <= address < allocation.address + allocation.num_bytes:
            return _use_of_freed(case, stopped, arg.name, tensor, address)
    return None


def _use_of_freed(
    case: Case, stopped: _Stop, name: str, tensor: TensorRecord, address: int
) -> Claim | None:
    use, freed = stopped.use, case.freed[tensor.allocation]
    waited = any(
        event.action == "synchronise" and use.seq < event.seq < freed.seq
        for event in case.index.events_of(StreamEvent)
    )
    # That launch had ended; what ran later was made from it, without being recorded.
    cause = Cause.CAPTURED_POINTER if waited else Cause.USE_AFTER_FREE
    alive = _clean_while_alive(case, stopped)
    if alive is None:
        return None
    green, expression = alive
    again = "a later run of the launch, as a graph makes it," if waited else "the launch"
    root = RootCause(
        cause=cause,
        sentence=f"{use.launch.kernel}: {name} ({tensor.name}) was given back ({freed.site}), and "
        f"{again} went on to use it",
        fix=f"Keep {tensor.name} until the last graph and launch that use it have ended"
        if waited
        else f"Wait for the launches with {tensor.name} before it is given back",
        proof=Proof(
            f"{stopped.told}; {address_text(address, (1 << 64) - 1)} lies in {tensor.name}, which "
            "was gone by then",
            f"{tensor.name} not freed",
            green,
        ),
        kernel=use.launch.kernel,
        argument=case.fact_of(use.launch, name),
        tensor=tensor.name,
        file=stopped.frame.file if stopped.frame else None,
        line=stopped.frame.line if stopped.frame else None,
        expression=expression or None,
        place=use.place,
    )
    refutes = "memory of another tensor at that address by then"
    return proven(root, NAME, (), refutes, use.seq, (tensor.id,))


def _clean_while_alive(case: Case, stopped: _Stop) -> tuple[str, str] | None:
    """What the replay of the program says, with its tensors as they were at the launch, and the
    text of the access; None where another tensor explains the address."""
    untested = "the address belongs to no other tensor of the launch", ""
    try:
        from hypocenter.replay.solve import matching, reaches
        from hypocenter.replay.trace import trace_program
    except (MissingPackage, ImportError):
        return untested
    assert stopped.use.place is not None
    try:
        trace = trace_program(
            case.index, stopped.use.place, stopped.program, allow_source=case.allow_source
        )
    except HypoError:
        return untested
    asked = _request_of(stopped)
    found = [access for access in matching(trace, asked) if reaches(trace, access, asked)]
    if not found or any(trace.findings_at(access) for access in found):
        return None
    return (
        f"the replay of program {stopped.warp.block} with it alive reads the same addresses, and "
        "finds nothing wrong"
    ), found[0].sites[0].expression


# -- what led there -------------------------------------------------------------------------------


def _claims_of_replay(case: Case, stopped: _Stop) -> list[Claim]:
    """What the replay of that program finds at that line; else the entry that explains it."""
    from hypocenter.replay.solve import matching, reaches, solve
    from hypocenter.replay.trace import trace_program

    use, place = stopped.use, stopped.use.place
    assert place is not None
    asked = _request_of(stopped)
    if not asked.places:  # any access may be the one
        return []
    trace = trace_program(case.index, place, stopped.program, allow_source=case.allow_source)
    at_fault = matching(trace, asked)
    same = [access for access in at_fault if reaches(trace, access, asked)]
    if any(trace.findings_at(access) for access in same):
        if (claim := _wrong_stride(case, stopped, trace.findings_at(same[0])[0])) is not None:
            return [claim]
        claims = claims_of_programs(case, use, (stopped.program,), RUNG_SECONDS)
        return [_with_dump(claim, stopped) for claim in claims]
    solution = solve(case.index, place, stopped.program, asked, allow_source=case.allow_source)
    if solution is None:
        return [_claim_of_nothing(stopped)]
    wrapped = None
    if solution.wrapped:
        shown = _name_of(case, use, solution)
        wrapped = claims_of_wrapped(case, use, stopped.warp, stopped.told, solution, shown)
    return wrapped or [_by_entry(case, stopped, solution)]


def _request_of(stopped: _Stop) -> Any:
    from hypocenter.replay.solve import GpuRequest

    warp, access = stopped.warp, stopped.warp.access
    assert access is not None
    threads = {
        lane.lane: thread_number(lane.thread, stopped.grid.block)
        for lane in warp.lanes
        if lane.thread is not None
    }
    return GpuRequest(
        operation=access.operation,
        places=tuple((frame.file, frame.line) for frame in warp.frames),
        addresses={
            threads[lane]: address & access.known_bits
            for lane, address in access.addresses.items()
            if lane in threads
        },
        known=access.known_bits or (1 << 64) - 1,
    )


def _with_dump(claim: Claim, stopped: _Stop) -> Claim:
    """A claim of the replay, which the dump bears out: it is the same access."""
    said = f"{stopped.told}; that is this access"
    hypothesis = msgspec.structs.replace(
        claim.hypothesis, diagnostic=NAME, evidence=(*claim.hypothesis.evidence, said)
    )
    root = claim.root
    if root is not None:
        proof = msgspec.structs.replace(root.proof, red=f"{stopped.told}; {root.proof.red}")
        root = msgspec.structs.replace(root, proof=proof)
    return Claim(hypothesis, root, claim.seq, claim.tensors)


def _claim_of_nothing(stopped: _Stop) -> Claim:
    return row(
        Cause.INDEX_RANGE,
        Verdict.INCONCLUSIVE,
        NAME,
        stopped.told,
        "the replay of that program finds nothing wrong there, and no entry that it loads explains "
        "the address",
        would_refute="an entry that does",
        kernel=stopped.use.launch.kernel,
    )


def _wrong_stride(case: Case, stopped: _Stop, finding: Any) -> Claim | None:
    """A number of the launch that is larger than the stride or the size it should be, if one is.

    Only numbers that the tensor itself has are tried: a smaller one always stays inside. Where the
    product left 32 bits, only a factor of it that is no stride nor size of the tensor may be wrong,
    and a stride right: else it is the product that is.
    """
    use, tensor = stopped.use, case.tensor_of(stopped.use.launch, finding.argument or "")
    if tensor is None:
        return None
    own = {*tensor.strides, *tensor.shape}
    factors = _factors_of(finding) if finding.is_overflow else None
    for arg in use.launch.arguments:
        if arg.tensor is not None or isinstance(arg.value, bool) or not isinstance(arg.value, int):
            continue
        if factors is not None and (arg.name not in factors or arg.value in own):
            continue
        rights = own if factors is None else {*tensor.strides}
        for right in sorted(rights - {1}, reverse=True):
            if 0 < right < arg.value and _is_clean_with(case, stopped, {arg.name: right}):
                return _by_number(case, stopped, finding, tensor, (arg.name, arg.value, right))
    return None


def _factors_of(finding: Any) -> set[str]:
    """The names in the product that left 32 bits."""
    if finding.origin is None:
        return set()
    try:
        tree = ast.parse(finding.origin.expression, mode="eval")
    except (SyntaxError, ValueError):
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _is_clean_with(case: Case, stopped: _Stop, corrections: dict[str, Any]) -> bool:
    """Whether the program that stopped and the last one go well with these corrections."""
    from hypocenter.replay.recorded import replay_place

    assert stopped.use.place is not None
    last = 1
    for size in stopped.use.launch.grid:
        last *= size
    try:
        report = replay_place(
            case.index,
            stopped.use.place,
            corrections=corrections,
            text=KernelText(case.allow_source),
            schedule=Schedule((stopped.program, last - 1)),
        )
    except HypoError:
        return False
    return bool(report.coverage.num_run) and not report.findings


def _by_number(
    case: Case, stopped: _Stop, finding: Any, tensor: TensorRecord, number: tuple[str, int, int]
) -> Claim:
    name, given, right = number
    use, target = stopped.use, case.fact_of(stopped.use.launch, finding.argument)
    is_stride = right in tensor.strides
    what = "a stride" if is_stride else "a size"
    root = RootCause(
        cause=Cause.WRONG_STRIDE if is_stride else Cause.BAD_SCALAR,
        sentence=f"{use.launch.kernel}: {name} is {given}, but {target} ({tensor.name}) has shape "
        f"{tensor.shape} and strides {tensor.strides}",
        fix=f"Pass {right} for {name}: {what} of {tensor.name}",
        proof=Proof(
            f"{stopped.told}; the replay of that program with {name} = {given}: {finding.kind}: "
            f"{target} {finding.detail}",
            f"{name} = {right}",
            "the same replay and that of the last program: nothing wrong",
        ),
        kernel=use.launch.kernel,
        argument=name,
        file=finding.file,
        line=finding.line,
        expression=finding.sites[0].expression,
        place=use.place,
        finding=finding,
    )
    evidence = _values(finding)
    return proven(root, NAME, evidence, "another number with which it fails", use.seq, (tensor.id,))


def _by_entry(case: Case, stopped: _Stop, solution: Any) -> Claim:
    """The claim that an entry of a tensor led to where the GPU stopped."""
    entry, finding, use = solution.entry, solution.finding, stopped.use
    tensor = case.tensor_of(use.launch, entry.argument)
    shown = _name_of(case, use, solution)
    hold = "hold" if entry.is_cast and not solution.others else "holds"
    holds = f"{shown} {hold} {_value(solution)}"
    cause, sentence, fix, at = _meaning(case, stopped, solution, shown)
    red = (
        f"{stopped.told}; {address_text(solution.address, stopped.warp.access.known_bits)}"  # type: ignore[union-attr]
        f" is what the replay of that program asks for when {holds}: {finding.kind}: "
        f"{' '.join(filter(None, (finding.argument, finding.detail)))}"
    )
    is_open = solution.largest is None
    corrected, green = _green(case, use, solution, shown)
    kernel, argument = use.launch.kernel, case.fact_of(use.launch, entry.argument)
    evidence = (*_values(finding), *_others(solution))
    if is_open:
        return row(
            cause,
            Verdict.INCONCLUSIVE,
            NAME,
            red,
            *evidence,
            "no entry was found with which the replay is clean",
            would_refute="another entry that gives the address",
            kernel=kernel,
            argument=argument,
        )
    root = RootCause(
        cause=cause,
        sentence=f"{kernel}: {sentence}",
        fix=fix,
        proof=Proof(red, corrected, green),
        kernel=kernel,
        argument=argument,
        tensor=tensor.name if tensor else None,
        file=at.file,
        line=at.line,
        expression=at.expression,
        place=use.place,
        finding=finding,
        entries=tuple(
            SolvedEntry(argument=entry.argument, index=index, value=value)
            for index, value in entry.elements(solution.value).items()
        ),
    )
    refutes = "another entry that gives the address"
    return proven(root, NAME, evidence, refutes, use.seq, (tensor.id,) if tensor else ())


def _meaning(case: Case, stopped: _Stop, solution: Any, shown: str) -> tuple[Cause, str, str, Any]:
    """Class, what is wrong, what to do, and the line, of an entry that led astray."""
    entry, use = solution.entry, stopped.use
    here = solution.finding.sites[0]
    if entry.is_cast:
        return (
            Cause.DTYPE_WIDTH,
            f"{entry.argument} has elements of {entry.item_bytes} bytes, but {entry.width_bytes} "
            f"are read at a time: {shown} together are {_value(solution)}",
            f"Read {entry.argument} with the width of its elements ({entry.item_bytes} bytes): "
            "take the cast of the pointer away",
            solution.loaded_at,
        )
    if solution.target is None:
        gone = _freed_memory(case, solution.value)
        return (
            Cause.USE_AFTER_FREE if gone else Cause.WILD_POINTER,
            f"{shown} is the address {solution.value:#x}, "
            + (f"in {gone}" if gone else "where no memory is known at the end"),
            f"Keep the memory behind {shown} until the launch has ended, or put a live address "
            "there",
            here,
        )
    target = case.tensor_of(use.launch, solution.target)
    rows = target.shape[0] if target is not None and target.shape else 0
    name = user_name_of(case, use.launch, solution.target)
    bound = f"{name} ends at {solution.largest}" if solution.largest is not None else ""
    has = f"{name} has {rows} rows" if solution.largest == rows - 1 else bound
    last = solution.largest if solution.largest is not None else rows - 1
    # What indices of the engine's own kernels are for is known by their names.
    names = () if case.is_foreign else (entry.argument, solution.target)
    return (
        index_cause(solution.value, *names),
        f"{shown} is {_value(solution)}, but {has}",
        f"Keep {user_name_of(case, use.launch, entry.argument)} inside 0 to {last}",
        here,
    )


def _freed_memory(case: Case, address: int) -> str:
    """The freed memory that an address lies in, in words."""
    for number in case.freed:
        record = case.allocations.get(number)
        if record is not None and record.address <= address < record.address + record.num_bytes:
            return f"{record.name}, which was freed"
    return ""


def _green(case: Case, use: LaunchMade, solution: Any, shown: str) -> tuple[str, str]:
    largest = solution.largest
    if largest is None:
        return "", ""
    told = f"{shown} = {largest}"
    if solution.target is None:
        told = f"{shown} = the address of a tensor of the launch"
    elif solution.is_alone:
        first = solution.entry.indices[0]
        told = f"{_element(case, use, solution.entry, first)} read by itself: {largest}"
    return told, f"the same replay with {told}: nothing wrong at that line"


def _name_of(case: Case, use: LaunchMade, solution: Any) -> str:
    """`ids_ptr[77]`, or the entries of which it is one."""
    entry = solution.entry
    if not solution.others:
        return " and ".join(_element(case, use, entry, index) for index in entry.indices)
    every = sorted((entry, *solution.others), key=lambda other: other.offset)
    ends = every[0].indices[0], every[-1].indices[-1]
    first, last = (_element(case, use, entry, index) for index in ends)
    return f"one of {first} to {last}"


def _element(case: Case, use: LaunchMade, entry: Any, index: tuple[int, ...]) -> str:
    return f"{user_name_of(case, use.launch, entry.argument)}[{', '.join(map(str, index))}]"


def _value(solution: Any) -> str:
    if solution.target is None:
        return f"{solution.value:#x}"
    if not solution.modulus:
        return str(solution.value)
    return f"{solution.value} (or a multiple of {solution.modulus} more or less)"


def _others(solution: Any) -> Iterator[str]:
    if solution.modulus:
        yield (
            "the upper half of the address was overwritten before the GPU stopped, so the entry is "
            f"known up to multiples of {solution.modulus}"
        )


def _values(finding: Any) -> tuple[str, ...]:
    if not finding.values:
        return ()
    return (f"at that lane {', '.join(f'{k} = {v}' for k, v in finding.values.items())}",)
