"""Rung: what was refused or reported outright, and who made an error that another call reported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause, index_cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.rungs.runtime_refusals import (
    has_told_no_code,
    is_of_runtime,
    runtime_refusals,
)
from hypocenter.errors import ErrorKind
from hypocenter.record.events import Called, Rejected
from hypocenter.refusals import (
    AnyRefusal,
    BatchSize,
    BlockThreads,
    EntryOutOfRange,
    EntryRepeated,
    FieldOutOfRange,
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
    StateOfAnother,
    StillWritten,
    TableTooShort,
    TooShort,
    WrongAxes,
    WrongScalar,
    WrongStrides,
    WrongType,
)

NAME = "refusals"


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a refusal blames, the fact put right with which it would not have been, and the fix."""

    cause: Cause
    argument: str | None
    corrected: str
    green: str
    fix: str


def refusals(case: Case) -> list[Claim]:
    """Root causes that a refusal names by itself, and errors blamed on the call that made them."""
    told = {claim.seq for claim in case.claims if claim.root is not None}
    claims = [
        claim
        for event in case.index.events_of(Rejected)
        if event.seq not in told
        and not is_of_runtime(event.refusal)
        and (claim := _claim_of(event))
    ]
    claims += runtime_refusals(case)
    claims += _of_calls(case)
    return claims


# -- refusals -------------------------------------------------------------------------------------


def _claim_of(event: Rejected) -> Claim | None:
    if isinstance(event.refusal, FieldOutOfRange):
        return _claim_of_field(event.refusal)
    reading = _reading(event.refusal, event.tensor)
    if reading is None:
        return None
    root = RootCause(
        cause=reading.cause,
        sentence=f"{event.what}: {event.refusal}",
        fix=reading.fix,
        kernel=event.kernel or "copy",
        argument=reading.argument,
        proof=Proof(f"{event.what} was refused: {event.refusal}", reading.corrected, reading.green),
    )
    return proven(root, NAME, (), "the check accepting what was passed", event.seq)


def _claim_of_field(refusal: FieldOutOfRange) -> Claim:
    """A refused number of the model file's metadata; its name says which kernel wants it."""
    field, high = refusal.field, refusal.high
    root = RootCause(
        cause=Cause.BAD_SCALAR,
        sentence=f"the model file: {refusal}",
        fix=f"Mend {field} in the model file ({refusal.file}), or convert the model anew",
        kernel="rope" if "rope" in field.split(".") else None,
        argument=field,
        proof=Proof(
            f"the reader refused it: {refusal}",
            f"{field} = {high}",
            f"the same test, {field} {refusal.range}, holds for {high}",
        ),
    )
    return proven(root, NAME, (), "a value inside the range")


def _reading(refusal: AnyRefusal, copied: str) -> _Reading | None:
    """What a refusal blames; `copied` is the tensor of a refused copy. None for what it does not
    tell by itself."""
    name = refusal.argument or copied
    for reading in (_of_index(refusal), _of_grid(refusal), _of_tensor(refusal, name)):
        if reading is not None:
            return reading
    match refusal:
        case WrongScalar(value=value, limit=limit):
            return _Reading(
                Cause.BAD_SCALAR,
                name,
                f"a {name} that holds: {limit}",
                f"the same check holds for it, and not for {value}",
                f"Pass a {name} for which this holds: {limit}",
            )
        case RuntimeRefused(is_no_code=True):
            return _NO_CODE
        case NotCompiled(reasons=reasons):
            return next(filter(None, (_reading(reason, copied) for reason in reasons)), None)
    return None


_NO_CODE = _Reading(
    Cause.NO_CODE_OBJECT,
    None,
    "code for this architecture",
    "a kernel with code for the architecture is loaded: others of this run were",
    "Build the kernel for the architecture of this GPU too",
)


def _of_index(refusal: AnyRefusal) -> _Reading | None:
    match refusal:
        case EntryRepeated(argument="slots" | "state_slots" as name):
            whose = "token" if name == "slots" else "sequence"
            return _Reading(
                Cause.STALE_SLOT,
                name,
                "a slot of its own for each",
                "the same check holds when no two slots are equal",
                f"Give every {whose} of a step its slot",
            )
        case StateOfAnother(argument=name, row=row, wanted=wanted):
            return _Reading(
                Cause.STALE_SLOT,
                name,
                f"{name}[{row}] = the slot that was left with the state of request {wanted}",
                "the same check holds where the state in the slot is the request's own",
                f"Pass {name} in the order of the requests, and give a slot to one at a time",
            )
        case StateElsewhere(argument=name, row=row, num_tokens=number, position=position):
            return _Reading(
                Cause.STALE_SLOT,
                name,
                f"a state of {position} tokens in {name}[{row}]",
                f"the same check holds for a state of {position} tokens, and not of {number}",
                "Run every token of a request once and in order, or begin it anew at position 0",
            )
        case TableTooShort(argument=name, num_entries=number, num_needed=needed):
            return _Reading(
                Cause.BUFFER_TOO_SMALL,
                name,
                f"{needed} entries a row",
                f"the same check holds for {needed} entries, and not for {number}",
                f"Give a sequence room in {name} for each of its blocks",
            )
        case EntryOutOfRange(argument=name, entry=entry, value=value, of=of, bound=bound):
            at = f"{name}[{', '.join(map(str, entry))}]"
            better = min(max(value, 0), bound - 1)
            return _Reading(
                index_cause(value, name),
                name,
                f"{at} = {better}",
                f"the same check, 0 <= {at} < {bound}, holds for {better} and not for {value}",
                f"Keep {name} inside 0 to {bound - 1}: {of} has {bound} entries",
            )
    return None


def _of_grid(refusal: AnyRefusal) -> _Reading | None:
    def of_limit(cause: Cause, name: str | None, value: int, limit: int, fix: str) -> _Reading:
        return _Reading(
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


def _of_tensor(refusal: AnyRefusal, name: str) -> _Reading | None:
    def elsewhere(cause: Cause, where: str, was: str, fix: str) -> _Reading:
        not_was = f", and not {was}" if was else ""
        return _Reading(
            cause,
            name,
            f"{name} {where}",
            f"the same check holds with {name} {where}{not_was}",
            fix,
        )

    def remade(cause: Cause, what: str, fix: str, was: str = "") -> _Reading:
        not_was = f", and not as {was}" if was else ""
        return _Reading(
            cause,
            name,
            f"{name} as {what}",
            f"the same check holds for {name} as {what}{not_was}",
            fix,
        )

    match refusal:
        case Null():
            return _Reading(
                Cause.NULL_POINTER,
                name,
                f"a tensor for {name}",
                "the same check holds for any tensor there",
                f"Pass a tensor for {name}, or do not launch",
            )
        case WrongType(dtype=dtype, read_as=(wanted, *_)):
            return remade(Cause.DTYPE_WIDTH, wanted, f"Make {name} with dtype {wanted}", dtype)
        case FreedTensor(site=site):
            return _Reading(
                Cause.USE_AFTER_FREE,
                name,
                f"{name} not freed",
                f"the same check holds for {name} while it is not freed",
                f"Keep {name} until its last use has ended (it was freed at {site})",
            )
        case HostArgument():
            return _Reading(
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
            return _Reading(
                Cause.WRONG_DEVICE,
                name,
                f"{name} in memory of {device}",
                f"the same check holds for an address of {device}",
                f"Copy {name} by the device that it was allocated on: {address:#x} is not "
                f"{device}'s",
            )
        case StillWritten(writer=writer):
            return _Reading(
                Cause.MISSING_WAIT,
                name,
                f"a wait for {writer}",
                f"the same check holds when {writer} has been waited for",
                f"Record an event behind {writer} and wait for it before {name} is copied",
            )
        case OutsideTensor(what="rows", num_asked=asked, num_there=there):
            return _Reading(
                Cause.BUFFER_TOO_SMALL,
                name,
                f"{there} instead of {asked}",
                f"the same check holds for {there} and not for {asked}",
                f"Copy at most {there} rows of {name}",
            )
        case TooShort(end_bytes=end, num_bytes=there):
            return _Reading(
                Cause.BUFFER_TOO_SMALL,
                name,
                f"{end} instead of {there}",
                f"the same check holds for {end} and not for {there}",
                f"Allocate {end} bytes for {name}, not {there}",
            )
        case Misaligned(alignment_bytes=alignment):
            where = f"at a multiple of {alignment} bytes"
            return _Reading(
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


# -- calls ----------------------------------------------------------------------------------------


def _of_calls(case: Case) -> Iterator[Claim]:
    """Errors whose maker is not who reported them."""
    fault = case.bundle.fault
    for event in case.index.events_of(Called):
        if not has_told_no_code(case) and (claim := _of_outcome(event)):
            yield claim
    first = next(iter(case.index.events_of(Called)), None)
    if first is None:
        if not case.bundle.events:
            yield row(
                Cause.PENDING_ERROR,
                Verdict.NOT_TESTED,
                NAME,
                "refusals: no event of this run was recorded",
            )
        elif fault.kind in ("error", "crash"):
            is_polled = any(check.armed for check in case.bundle.checks)
            text = (
                "no call before the one that reported it had returned an error: every call was "
                "polled"
            )
            yield row(
                Cause.PENDING_ERROR,
                Verdict.REFUTED,
                NAME,
                text if is_polled else "no earlier call is on record with an error",
                would_refute="an earlier call with the same error",
            )
        return
    if fault.kind == "none":
        yield row(
            Cause.PENDING_ERROR,
            Verdict.INCONCLUSIVE,
            NAME,
            f"step {first.step}: {first.call or 'a call'} reported {first.outcome}, and the run "
            "went on: no request was left that could end by it",
            would_refute="a run without that error",
        )
        return
    is_memory = first.kind is ErrorKind.OUT_OF_MEMORY
    reporter = _reporter(case, first)
    if is_memory and reporter is None and fault.kind == "crash":
        reporter = _Reporter("a fault of the device")
    if reporter is None or not reporter.call or reporter.is_same_call(first):
        return
    call = first.call or ("an allocation" if is_memory else "an unnamed call")
    cause = Cause.LATE_OUT_OF_MEMORY if is_memory else Cause.PENDING_ERROR
    red = (
        f"{call} returned {first.outcome} (event {first.seq}, {first.site or 'no site'}); "
        f"{reporter.call} reported it later"
    )
    null = (
        next(
            (
                claim
                for claim in case.claims
                if claim.hypothesis.cause is Cause.NULL_POINTER and claim.root is not None
            ),
            None,
        )
        if is_memory
        else None
    )
    used = null.root if null is not None else None
    root = RootCause(
        cause=cause,
        sentence=f"{call} made the error, {reporter.call} only reported it: {first.outcome}",
        fix=f"Look at {call}{f' ({first.site})' if first.site else ''}, check what it "
        "returns there, and leave the call that reported it alone",
        kernel=used.kernel if used else _bare_name(first.kernel) or None,
        argument=used.argument if used else None,
        tensor=used.tensor if used else None,
        file=used.file if used else None,
        line=used.line if used else None,
        expression=used.expression if used else None,
        proof=Proof(
            red,
            f"{call} without its error",
            f"without the error of {call} no call before {reporter.call} has one, and "
            f"{reporter.call} has none of its own",
        ),
    )
    yield proven(
        root,
        NAME,
        (),
        "an error of the reporting call's own",
        first.seq,
        null.tensors if null is not None else (),
    )


def _of_outcome(event: Called) -> Claim | None:
    """An error that says what is wrong: there is no code for this GPU."""
    if event.kind is not ErrorKind.NO_CODE:
        return None
    kernel = _bare_name(event.kernel) or event.call
    root = RootCause(
        cause=_NO_CODE.cause,
        sentence=f"{kernel}: {event.outcome}",
        fix=_NO_CODE.fix,
        kernel=kernel,
        proof=Proof(f"{kernel} was refused: {event.outcome}", _NO_CODE.corrected, _NO_CODE.green),
    )
    return proven(root, NAME, (), "the check accepting what was passed", event.seq)


def _bare_name(kernel: str) -> str:
    """As contracts name it."""
    return kernel.removesuffix("_kernel")


@dataclass(frozen=True, slots=True)
class _Reporter:
    """A call that told of an error which another one had made."""

    call: str
    kernel: str = ""

    def is_same_call(self, maker: Called) -> bool:
        """Whether both are one call; of launches the kernel counts, and not the grid."""
        if self.kernel and maker.kernel:
            return self.kernel == maker.kernel
        return self.call == maker.call


def _reporter(case: Case, first: Called) -> _Reporter | None:
    """Who told of an error that `first` had made: the next call with the same outcome, the fault's
    own call."""
    for event in case.index.events_of(Called):
        if event.seq > first.seq and _is_same_error(event.outcome, first.outcome):
            return _Reporter(event.call, event.kernel)
    fault = case.bundle.fault
    is_memory = first.kind is ErrorKind.OUT_OF_MEMORY
    if fault.call and (is_memory or _is_same_error(fault.error, first.outcome)):
        return _Reporter(fault.call, fault.kernel)
    return None


def _is_same_error(error: str, other: str) -> bool:
    """Whether a runtime said the same twice; it may say more the second time."""
    words = [re.sub(r"\W+", " ", text).strip().lower() for text in (error, other)]
    return bool(words[1]) and (words[1] in words[0] or words[0] in words[1])
