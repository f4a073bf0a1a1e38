"""Rung: what was refused or reported outright, and who made an error that another call reported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hypocenter.base.errors import ErrorKind
from hypocenter.base.refusals import EntryOutOfRange, FieldOutOfRange
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.rungs.refusal_readings import NO_CODE, reading_of
from hypocenter.doctor.rungs.runtime_refusals import (
    has_told_no_code,
    is_of_runtime,
    runtime_refusals,
)
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import Called, Rejected

NAME = "refusals"
#: What tensors are called that hold the tokens which a step has chosen.
_CHOSEN = ("token_ids", "outcomes")


def refusals(case: Case) -> list[Claim]:
    """Root causes that a refusal names by itself, and errors blamed on the call that made them."""
    told = {claim.seq for claim in case.claims if claim.root is not None}
    claims = [
        claim
        for event in case.index.events_of(Rejected)
        if event.seq not in told
        and not is_of_runtime(event.refusal)
        and (claim := _claim_of(case, event))
    ]
    claims += runtime_refusals(case)
    claims += _of_calls(case)
    return claims


# -- refusals -------------------------------------------------------------------------------------


def _claim_of(case: Case, event: Rejected) -> Claim | None:
    if isinstance(event.refusal, FieldOutOfRange):
        return _claim_of_field(event.refusal)
    if isinstance(event.refusal, EntryOutOfRange) and not (event.kernel or event.tensor):
        return _claim_of_token(case, event, event.refusal)
    reading = reading_of(event.refusal, event.tensor)
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


def _claim_of_token(case: Case, event: Rejected, refusal: EntryOutOfRange) -> Claim:
    """A token that was chosen and is none of the vocabulary: the launch that chose it."""
    use = next(
        (
            use
            for use in reversed(case.launches)
            if use.step <= event.step
            and (name := _choice_of(case, use))
            and name in case.written_by(use.launch)
        ),
        None,
    )
    value, last = refusal.value, refusal.bound - 1
    kernel, argument = ("", refusal.argument)
    if use is not None:
        kernel, argument = use.launch.kernel, _choice_of(case, use)
    text = f"chose token {value}, but {refusal.of} has {refusal.bound} entries"
    access = case.access(use.launch, argument, "store") if use is not None else None
    root = RootCause(
        cause=Cause.TOKEN_RANGE,
        blames=Blame.KERNEL,
        sentence=f"{kernel or 'the sampler'} {text}",
        fix=f"Let {kernel or 'the sampler'} choose from 0 to {last} only, as it was asked to",
        kernel=kernel or None,
        argument=argument,
        tensor=refusal.argument,
        place=use.place if use is not None else None,
        proof=Proof(
            f"step {event.step} gave token {value}, and the tokenizer refused it",
            f"a token from 0 to {last}",
            f"the same check, 0 <= token < {refusal.bound}, holds for {min(max(value, 0), last)} "
            f"and not for {value}",
        ),
    ).at(access)
    seq = use.seq if use is not None else event.seq
    return proven(root, NAME, (), "the tokenizer taking what was chosen", seq)


def _choice_of(case: Case, use: LaunchMade) -> str:
    """The argument of a launch that holds chosen tokens; empty where none does."""
    tensors = case.tensors_of(use.launch).items()
    return next((name for name, tensor in tensors if tensor.name in _CHOSEN), "")


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
        cause=NO_CODE.cause,
        sentence=f"{kernel}: {event.outcome}",
        fix=NO_CODE.fix,
        kernel=kernel,
        proof=Proof(f"{kernel} was refused: {event.outcome}", NO_CODE.corrected, NO_CODE.green),
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
