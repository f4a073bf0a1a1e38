"""The doctor: one bundle in, hypotheses with verdicts and proven root causes out.

A ladder of rungs, each a function of the case alone. Runs no code of the bundle unless allowed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

import msgspec

from hypocenter.base.errors import UsageError
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import CAUSES, plausible
from hypocenter.doctor.compiled.words import in_users_words
from hypocenter.doctor.diagnosis import (
    Diagnosis,
    Hypothesis,
    RungRecord,
    Verdict,
    row,
)
from hypocenter.doctor.difference import RunDiff
from hypocenter.doctor.examining.time_limit import EXAMINE_SECONDS, OutOfTime, TimeLimit
from hypocenter.doctor.examining.untested import why_untested
from hypocenter.doctor.judging.judge import Judged, Rung, by_place, explain, judge
from hypocenter.doctor.run_environment import run_environment_of
from hypocenter.doctor.rungs.address import addresses
from hypocenter.doctor.rungs.captured import captured_pointers
from hypocenter.doctor.rungs.compiled_code import compiled_code
from hypocenter.doctor.rungs.compiled_index import compiled_index
from hypocenter.doctor.rungs.contracts import contracts
from hypocenter.doctor.rungs.driver.launches import driver_launches
from hypocenter.doctor.rungs.driver.logged_launch import logged_launch
from hypocenter.doctor.rungs.engine.adopted_blocks import adopted_blocks
from hypocenter.doctor.rungs.engine.draws import draws
from hypocenter.doctor.rungs.engine.kept_blocks import kept_blocks
from hypocenter.doctor.rungs.engine.lost_rank import lost_rank
from hypocenter.doctor.rungs.engine.other_ranks import other_ranks
from hypocenter.doctor.rungs.engine.own_checks import own_checks
from hypocenter.doctor.rungs.engine.ownership import ownership
from hypocenter.doctor.rungs.engine.states import states
from hypocenter.doctor.rungs.engine.step_inputs import step_inputs
from hypocenter.doctor.rungs.engine.waiting import waiting
from hypocenter.doctor.rungs.good_run import good_arguments, good_results
from hypocenter.doctor.rungs.gpu_stop import gpu_stops
from hypocenter.doctor.rungs.hang import hang
from hypocenter.doctor.rungs.hints import hints
from hypocenter.doctor.rungs.limits import limits
from hypocenter.doctor.rungs.nonfinite.first import nonfinite
from hypocenter.doctor.rungs.numbers import numbers
from hypocenter.doctor.rungs.order.streams import order
from hypocenter.doctor.rungs.refusals import refusals
from hypocenter.doctor.rungs.replays import replays
from hypocenter.doctor.rungs.seen.card_hardware import card_hardware
from hypocenter.doctor.rungs.seen.failed_comparison import failed_comparison
from hypocenter.doctor.rungs.seen.halved_elements import halved_elements
from hypocenter.doctor.rungs.seen.short_operands import short_operands
from hypocenter.doctor.rungs.seen.stale_addresses import stale_addresses
from hypocenter.doctor.rungs.seen.tuned_in_place import tuned_in_place
from hypocenter.doctor.rungs.seen.unwritten_reads import unwritten_reads
from hypocenter.doctor.rungs.values import values
from hypocenter.doctor.rungs.watched_access import guarded_run, sanitizer
from hypocenter.doctor.surfaced import describe_surface, symptom
from hypocenter.record.bundle import Bundle
from hypocenter.record.gap import Gap

#: What to look for, in this order. A rung that needs what the ones before it found takes that too.
LADDER: dict[str, Rung] = {
    "captured pointers": captured_pointers,
    "limits": limits,
    "arguments": contracts,
    "numbers": numbers,
    "card hardware": card_hardware,
    "refusals": refusals,
    "compiled index": compiled_index,
    "address": addresses,
    "stale addresses": stale_addresses,
    "core dump": gpu_stops,
    "driver": driver_launches,
    "launch log": logged_launch,
    "guarded run": guarded_run,
    "sanitizer": sanitizer,
    "ownership": ownership,
    "kept blocks": kept_blocks,
    "adopted blocks": adopted_blocks,
    "own checks": own_checks,
    "lost rank": lost_rank,
    "states": states,
    "waiting": waiting,
    "order": order,
    "step inputs": step_inputs,
    "draws": draws,
    "hints": hints,
    "good arguments": good_arguments,
    "other ranks": other_ranks,
    "hang": hang,
    "replay": replays,
    "tuned in place": tuned_in_place,
    "halved elements": halved_elements,
    "unwritten reads": unwritten_reads,
    "failed comparison": failed_comparison,
    "short operands": short_operands,
    "values": values,
    "first of the numbers": nonfinite,
    "compiled code": compiled_code,
    "good results": good_results,
}

#: Seconds in which causes are compared with each other and with the good run.
JUDGE_SECONDS = 20.0
#: What is told of the time beyond its end.
_NATIVE_SECONDS = 5.0
#: Why a rung was left out or stopped.
_NO_TIME = "the time of the examination was over"
#: A replay patches Triton's language for the whole process: beside another it proves nothing.
_TURN = threading.Lock()
_RANK = (Verdict.CONFIRMED, Verdict.INCONCLUSIVE, Verdict.REFUTED, Verdict.NOT_TESTED)


def diagnose(
    bundle: Bundle,
    good: Bundle | None = None,
    *,
    allow_source: bool = False,
    without: Collection[str] = (),
    seconds: float = EXAMINE_SECONDS,
) -> Diagnosis:
    """Climb the ladder. `good` is a bundle of a run without the fault.

    One at a time in a process: other threads wait, and their time begins when their turn comes.
    With `allow_source` a kernel whose installed source differs from the bundle's is replayed from
    the bundle's text, which runs that text. `without` names rungs of LADDER to leave out. After
    `seconds` what is known is told, and `unseen` has what was left out. Raises UsageError where not
    even the bundle's index was made by then.
    """
    with _TURN:
        return _climb(bundle, good, allow_source, without, seconds)


def _climb(
    bundle: Bundle,
    good: Bundle | None,
    allow_source: bool,
    without: Collection[str],
    seconds: float,
) -> Diagnosis:
    started = time.perf_counter()
    case = _case(bundle, good, allow_source=allow_source, limit=TimeLimit(seconds))
    rungs: list[RungRecord] = []
    for name, rung in LADDER.items():
        if name in without:
            rungs.append(RungRecord(name=name, seconds=0.0, left_out="left out on request"))
            continue
        if not case.limit.left:
            rungs.append(RungRecord(name=name, seconds=0.0, left_out=_NO_TIME))
            continue
        begun = time.perf_counter()
        failed = ""
        try:
            with case.limit.enforce():
                case.claims += rung(case)
        except OutOfTime:
            failed = _NO_TIME
            _tell_of_native_call(case, name)
        except Exception as error:
            # A damaged bundle must not cost the report what the other rungs have to say.
            failed = f"failed: {type(error).__name__}: {error}"
            case.leave_unseen(
                Gap.not_examined(f"what the check {name!r} looks for", f"it {failed}")
            )
        seconds = time.perf_counter() - begun
        rungs.append(RungRecord(name=name, seconds=seconds, left_out=failed))
    _tell_of_time(case, [rung.name for rung in rungs if rung.left_out == _NO_TIME])
    ordered = _judge(case)
    roots = tuple(in_users_words(case, root) for root in ordered.roots)
    return Diagnosis(
        kind=bundle.kind,
        fault_kind=bundle.fault.kind,
        symptom=symptom(case),
        surfaced=describe_surface(case, roots),
        environment=run_environment_of(bundle),
        hypotheses=_table(case),
        roots=roots,
        unseen=tuple(case.unseen),
        consequences=ordered.consequences,
        sights=tuple(case.sights),
        compared=case.compared,
        rungs=tuple(rungs),
        seconds=time.perf_counter() - started,
        answers=case.good_diff.answers if case.good_diff else None,
        is_unexplained=bool(roots) and not explain(case, roots[0]),
        not_compared=_why_not_compared(case.good_diff),
    )


def _case(bundle: Bundle, good: Bundle | None, *, allow_source: bool, limit: TimeLimit) -> Case:
    try:
        with limit.enforce():
            return Case(bundle, good, allow_source=allow_source, limit=limit)
    except OutOfTime:
        raise UsageError(
            f"the bundle's {len(bundle.events):,} events were not read within {limit.seconds:g} "
            "seconds; --examine-for SECONDS gives it more"
        ) from None


def _judge(case: Case) -> Judged:
    """What was proven, in order; by place alone where the comparison of causes takes too long."""
    try:
        with TimeLimit(JUDGE_SECONDS).enforce():
            return judge(case, LADDER)
    except OutOfTime:
        why = f"after {JUDGE_SECONDS:g} seconds they were put in the order of their launches"
        case.leave_unseen(Gap.not_examined("which of the causes follow from others", why))
        return by_place(case)


def _tell_of_native_call(case: Case, name: str) -> None:
    """A check that went on after its time, where that is more than a busy machine makes of it."""
    if (over := case.limit.seconds_over) > _NATIVE_SECONDS:
        why = f"it was in a call of native code, which ended {over:.0f} seconds after the time"
        case.leave_unseen(Gap.not_examined(f"what the check {name!r} looks for", why))


def _tell_of_time(case: Case, stopped: Sequence[str]) -> None:
    """What there was no time for."""
    if stopped:
        case.leave_unseen(
            Gap.not_examined(
                f"what these checks look for: {', '.join(stopped)}",
                f"after {case.limit.seconds:g} seconds the examination ended; --examine-for "
                "SECONDS gives it more",
            )
        )


def _why_not_compared(found: RunDiff | None) -> str:
    """Why a good run tells nothing of the other; empty where it does, or where there is none."""
    if found is None:
        return ""
    if found.first is not None:
        is_other = found.first.is_of_prompts and not found.was_asked_alike
        return "the two runs were asked for different things" * is_other
    return "" if any(msgspec.structs.astuple(found.compared)) else "neither run recorded a step"


def _table(case: Case) -> tuple[Hypothesis, ...]:
    """One row per cause and place: confirmed ones all, of the others the weightiest."""
    rows: dict[object, list[Hypothesis]] = {}
    for claim in case.claims:
        hypothesis = claim.hypothesis
        own = hypothesis.verdict is Verdict.CONFIRMED or hypothesis.kernel is not None
        key = (
            (hypothesis.cause, hypothesis.kernel, hypothesis.argument) if own else hypothesis.cause
        )
        rows.setdefault(key, []).append(hypothesis)
    told = {
        hypothesis.cause
        for same in rows.values()
        for hypothesis in same
        if hypothesis.kernel != "copy"
    }
    merged = [_merge(same) for same in rows.values()]
    confirmed = {
        hypothesis.cause for hypothesis in merged if hypothesis.verdict is Verdict.CONFIRMED
    }
    merged = [
        hypothesis
        for hypothesis in merged
        if hypothesis.verdict is Verdict.CONFIRMED
        or hypothesis.cause not in confirmed
        or hypothesis.kernel == "copy"
    ]
    for cause in plausible(case.kind):
        if cause not in told and not (case.is_foreign and CAUSES[cause].is_of_engine):
            reason = why_untested(case, cause)
            merged.append(row(cause, Verdict.NOT_TESTED, "", reason).hypothesis)
    return tuple(sorted(merged, key=lambda hypothesis: _RANK.index(hypothesis.verdict)))


def _merge(same: list[Hypothesis]) -> Hypothesis:
    best = min(same, key=lambda hypothesis: _RANK.index(hypothesis.verdict))
    evidence = [
        text
        for hypothesis in same
        if hypothesis.verdict is best.verdict
        for text in hypothesis.evidence
    ]
    rungs = dict.fromkeys(
        hypothesis.diagnostic for hypothesis in same if hypothesis.verdict is best.verdict
    )
    return Hypothesis(
        cause=best.cause,
        verdict=best.verdict,
        diagnostic=", ".join(filter(None, rungs)),
        evidence=tuple(dict.fromkeys(evidence)),
        would_refute=best.would_refute,
        kernel=best.kernel,
        argument=best.argument,
        is_unrecorded=best.is_unrecorded,
        is_observed=best.is_observed,
        at=best.at,
    )
