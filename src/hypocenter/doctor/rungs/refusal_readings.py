"""What a refusal blames by itself: cause, argument, and the fact put right; makes no claims."""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.base.refusals import (
    AnyRefusal,
    BatchSize,
    BlockThreads,
    EntryOutOfRange,
    EntryRepeated,
    FreedTensor,
    GridAxisTooLong,
    GridEmpty,
    GridProduct,
    GridThreads,
    HostArgument,
    MemoryElsewhere,
    Misaligned,
    NotCompiled,
    Null,
    OnOtherDevice,
    OutsideTensor,
    RuntimeRefused,
    SharedMemory,
    StateElsewhere,
    StateInUse,
    StateOfAnother,
    StateOfOtherTokens,
    StillWritten,
    TableTooShort,
    TooShort,
    WrongAxes,
    WrongScalar,
    WrongStrides,
    WrongType,
)
from hypocenter.doctor.causes import Cause, index_cause


@dataclass(frozen=True, slots=True)
class Reading:
    """What a refusal blames, the fact put right with which it would not have been, and the fix."""

    cause: Cause
    argument: str | None
    corrected: str
    green: str
    fix: str


def reading_of(refusal: AnyRefusal, copied: str) -> Reading | None:
    """What a refusal blames; `copied` is the tensor of a refused copy. None for what it does not
    tell by itself."""
    name = refusal.argument or copied
    for reading in (_of_index(refusal), _of_grid(refusal), _of_tensor(refusal, name)):
        if reading is not None:
            return reading
    match refusal:
        case WrongScalar(value=value, limit=limit):
            return Reading(
                Cause.BAD_SCALAR,
                name,
                f"a {name} that holds: {limit}",
                f"the same check holds for it, and not for {value}",
                f"Pass a {name} for which this holds: {limit}",
            )
        case RuntimeRefused(is_no_code=True):
            return NO_CODE
        case NotCompiled(reasons=reasons):
            return next(filter(None, (reading_of(reason, copied) for reason in reasons)), None)
    return None


NO_CODE = Reading(
    Cause.NO_CODE_OBJECT,
    None,
    "code for this architecture",
    "a kernel with code for the architecture is loaded: others of this run were",
    "Build the kernel for the architecture of this GPU too",
)


def _of_index(refusal: AnyRefusal) -> Reading | None:
    match refusal:
        case EntryRepeated(argument="slots" | "state_slots" | "checkpoint_slots" as name):
            whose = "token" if name == "slots" else "sequence"
            return Reading(
                Cause.STALE_SLOT,
                name,
                "a slot of its own for each",
                "the same check holds when no two slots are equal",
                f"Give every {whose} of a step its slot",
            )
        case StateOfAnother(argument="state_sources" as name, row=row):
            return Reading(
                Cause.STALE_SLOT,
                name,
                f"{name}[{row}] = the sequence's own slot, or a checkpoint with a state",
                "the same check holds for a slot in which a state was left",
                "Give out a checkpoint only once the step that leaves it is made",
            )
        case StateOfOtherTokens(argument=name, row=row, wanted=wanted):
            return Reading(
                Cause.FOREIGN_STATE,
                name,
                f"{name}[{row}] = a checkpoint behind the first tokens of request {wanted}",
                "the same check holds for a state that was left behind just these tokens",
                "Find checkpoints by the digest of all tokens before them, once their step settled",
            )
        case StateInUse(argument=name, row=row):
            return Reading(
                Cause.STALE_SLOT,
                name,
                f"{name}[{row}] = a slot that no sequence of the step has or reads",
                "the same check holds for a slot that is free in this step",
                "Give a slot of states to one sequence at a time, and keep those of checkpoints "
                "for checkpoints",
            )
        case StateOfAnother(argument=name, row=row, wanted=wanted):
            return Reading(
                Cause.STALE_SLOT,
                name,
                f"{name}[{row}] = the slot that was left with the state of request {wanted}",
                "the same check holds where the state in the slot is the request's own",
                f"Pass {name} in the order of the requests, and give a slot to one at a time",
            )
        case StateElsewhere(argument=name, row=row, num_tokens=number, position=position):
            return Reading(
                Cause.STALE_SLOT,
                name,
                f"a state of {position} tokens in {name}[{row}]",
                f"the same check holds for a state of {position} tokens, and not of {number}",
                "Run every token of a request once and in order, or begin it anew at position 0",
            )
        case TableTooShort(argument=name, num_entries=number, num_needed=needed):
            return Reading(
                Cause.BUFFER_TOO_SMALL,
                name,
                f"{needed} entries a row",
                f"the same check holds for {needed} entries, and not for {number}",
                f"Give a sequence room in {name} for each of its blocks",
            )
        case EntryOutOfRange(argument=name, entry=entry, value=value, of=of, bound=bound):
            at = f"{name}[{', '.join(map(str, entry))}]"
            better = min(max(value, 0), bound - 1)
            return Reading(
                index_cause(value, name),
                name,
                f"{at} = {better}",
                f"the same check, 0 <= {at} < {bound}, holds for {better} and not for {value}",
                f"Keep {name} inside 0 to {bound - 1}: {of} has {bound} entries",
            )
    return None


def _of_grid(refusal: AnyRefusal) -> Reading | None:
    def of_limit(cause: Cause, name: str | None, value: int, limit: int, fix: str) -> Reading:
        return Reading(
            cause,
            name,
            f"{limit} instead of {value}",
            f"the same check holds for {limit} and not for {value}",
            fix,
        )

    match refusal:
        case GridEmpty(size=size):
            fix = "Do not launch for an empty batch"
            return of_limit(Cause.EMPTY_LAUNCH, "grid", size, 1, fix)
        case BatchSize(num_tokens=0):
            fix = "Do not run a step for an empty batch"
            return of_limit(Cause.EMPTY_LAUNCH, "grid", 0, 1, fix)
        case GridAxisTooLong(size=size, limit=limit):
            fix = f"Keep the grid at or below {limit} along that axis"
            return of_limit(Cause.GRID_LIMIT, "grid", size, limit, fix)
        case GridProduct(num_programs=number, limit=limit):
            fix = f"Split the launch into parts of at most {limit} programs"
            return of_limit(Cause.GRID_PRODUCT, "grid", number, limit, fix)
        case GridThreads(num_threads=number, limit=limit):
            fix = "Use a second grid axis, or fewer warps"
            return of_limit(Cause.GRID_LIMIT, "grid", number, limit, fix)
        case BlockThreads(num_threads=number, limit=limit) if number > limit:
            fix = f"Launch with fewer warps: {limit} threads fit a block, {number} were asked for"
            return of_limit(Cause.THREAD_LIMIT, "num_warps", number, limit, fix)
        case SharedMemory(num_bytes=number, limit=limit):
            fix = f"Use smaller tiles or fewer stages, so that {limit} bytes are enough"
            return of_limit(Cause.SHARED_MEMORY, None, number, limit, fix)
    return None


def _of_tensor(refusal: AnyRefusal, name: str) -> Reading | None:
    def elsewhere(cause: Cause, where: str, was: str, fix: str) -> Reading:
        not_was = f", and not {was}" if was else ""
        return Reading(
            cause,
            name,
            f"{name} {where}",
            f"the same check holds with {name} {where}{not_was}",
            fix,
        )

    def remade(cause: Cause, what: str, fix: str, was: str = "") -> Reading:
        not_was = f", and not as {was}" if was else ""
        return Reading(
            cause,
            name,
            f"{name} as {what}",
            f"the same check holds for {name} as {what}{not_was}",
            fix,
        )

    match refusal:
        case Null():
            return Reading(
                Cause.NULL_POINTER,
                name,
                f"a tensor for {name}",
                "the same check holds for any tensor there",
                f"Pass a tensor for {name}, or do not launch",
            )
        case WrongType(dtype=dtype, read_as=(wanted, *_)):
            return remade(Cause.DTYPE_WIDTH, wanted, f"Make {name} with dtype {wanted}", dtype)
        case FreedTensor(site=site):
            return Reading(
                Cause.USE_AFTER_FREE,
                name,
                f"{name} not freed",
                f"the same check holds for {name} while it is not freed",
                f"Keep {name} until its last use has ended (it was freed at {site})",
            )
        case HostArgument():
            return Reading(
                Cause.HOST_POINTER,
                name,
                f"{name} on the device",
                "the same check holds for an address of the device",
                f"Copy {name} to the device and pass that",
            )
        case OnOtherDevice(device=device, others=others):
            is_host = device == "cpu"
            return elsewhere(
                Cause.HOST_POINTER if is_host else Cause.WRONG_DEVICE,
                f"on {others}",
                "" if is_host else f"on {device}",
                f"Copy {name} to {others} and pass the copy",
            )
        case MemoryElsewhere(device=device, address=address):
            return Reading(
                Cause.WRONG_DEVICE,
                name,
                f"{name} in memory of {device}",
                f"the same check holds for an address of {device}",
                f"Copy {name} by the device that it was allocated on: {address:#x} is not "
                f"{device}'s",
            )
        case StillWritten(writer=writer):
            return Reading(
                Cause.MISSING_WAIT,
                name,
                f"a wait for {writer}",
                f"the same check holds when {writer} has been waited for",
                f"Record an event behind {writer} and wait for it before {name} is copied",
            )
        case OutsideTensor(what="rows", num_asked=asked, num_there=there):
            return Reading(
                Cause.BUFFER_TOO_SMALL,
                name,
                f"{there} instead of {asked}",
                f"the same check holds for {there} and not for {asked}",
                f"Copy at most {there} rows of {name}",
            )
        case TooShort(end_bytes=end, num_bytes=there):
            return Reading(
                Cause.BUFFER_TOO_SMALL,
                name,
                f"{end} instead of {there}",
                f"the same check holds for {end} and not for {there}",
                f"Allocate {end} bytes for {name}, not {there}",
            )
        case Misaligned(alignment_bytes=alignment):
            where = f"at a multiple of {alignment} bytes"
            return Reading(
                Cause.MISALIGNMENT,
                name,
                f"{name} {where}",
                f"the same check holds {where}",
                f"Begin {name} {where}",
            )
        case WrongStrides(limit=limit):
            return remade(Cause.WRONG_STRIDE, limit, f"Pass {name} so that it holds: {limit}")
        case WrongAxes(axes=axes):
            return remade(Cause.WRONG_STRIDE, f"[{axes}]", f"Pass {name} as [{axes}]")
    return None
