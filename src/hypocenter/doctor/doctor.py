"""The doctor: one bundle in, hypotheses with verdicts and proven root causes out.

A ladder of rungs, each a function of the case alone. Runs no code of the bundle unless allowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import CAUSES, Cause, TestedBy, explains, plausible
from hypocenter.doctor.culprit import with_culprit
from hypocenter.doctor.diagnosis import (
    Claim,
    Diagnosis,
    Hypothesis,
    RootCause,
    RungRecord,
    Verdict,
    row,
)
from hypocenter.doctor.difference import RunDiff
from hypocenter.doctor.run_environment import run_environment_of
from hypocenter.doctor.rungs.address import addresses
from hypocenter.doctor.rungs.captured import captured_pointers
from hypocenter.doctor.rungs.compiled_code import compiled_code
from hypocenter.doctor.rungs.contracts import contracts
from hypocenter.doctor.rungs.driver.launches import driver_launches
from hypocenter.doctor.rungs.engine.adopted_blocks import adopted_blocks
from hypocenter.doctor.rungs.engine.draws import draws
from hypocenter.doctor.rungs.engine.kept_blocks import kept_blocks
from hypocenter.doctor.rungs.engine.lost_rank import lost_rank
from hypocenter.doctor.rungs.engine.own_checks import own_checks
from hypocenter.doctor.rungs.engine.ownership import ownership
from hypocenter.doctor.rungs.engine.states import states
from hypocenter.doctor.rungs.engine.step_inputs import step_inputs
from hypocenter.doctor.rungs.good_run import good_arguments, good_results
from hypocenter.doctor.rungs.gpu_stop import gpu_stops
from hypocenter.doctor.rungs.hang import hang
from hypocenter.doctor.rungs.hints import hints
from hypocenter.doctor.rungs.limits import limits
from hypocenter.doctor.rungs.numbers import numbers
from hypocenter.doctor.rungs.refusals import refusals
from hypocenter.doctor.rungs.replays import replays
from hypocenter.doctor.rungs.streams import order
from hypocenter.doctor.rungs.values import values
from hypocenter.doctor.rungs.watched_access import guarded_run, sanitizer
from hypocenter.doctor.surfaced import describe_surface, symptom
from hypocenter.record.bundle import Bundle
from hypocenter.record.gap import Gap

Rung = Callable[[Case], list[Claim]]

#: What to look for, in this order. A rung that needs what the ones before it found takes that too.
LADDER: dict[str, Rung] = {
    "captured pointers": captured_pointers,
    "limits": limits,
    "arguments": contracts,
    "numbers": numbers,
    "refusals": refusals,
    "address": addresses,
    "core dump": gpu_stops,
    "driver": driver_launches,
    "guarded run": guarded_run,
    "sanitizer": sanitizer,
    "ownership": ownership,
    "kept blocks": kept_blocks,
    "adopted blocks": adopted_blocks,
    "own checks": own_checks,
    "lost rank": lost_rank,
    "states": states,
    "order": order,
    "step inputs": step_inputs,
    "draws": draws,
    "hints": hints,
    "good arguments": good_arguments,
    "hang": hang,
    "replay": replays,
    "values": values,
    "compiled code": compiled_code,
    "good results": good_results,
}

_RANK = (Verdict.CONFIRMED, Verdict.INCONCLUSIVE, Verdict.REFUTED, Verdict.NOT_TESTED)


@dataclass(frozen=True, slots=True)
class _Sorted:
    roots: tuple[RootCause, ...]
    consequences: tuple[str, ...]


def diagnose(
    bundle: Bundle,
    good: Bundle | None = None,
    *,
    allow_source: bool = False,
    without: Collection[str] = (),
) -> Diagnosis:
    """Climb the ladder. `good` is a bundle of a run without the fault.

    With `allow_source` a kernel whose installed source differs from the bundle's is replayed from
    the bundle's text, which runs that text. `without` names rungs of LADDER to leave out.
    """
    started = time.perf_counter()
    case = Case(bundle, good, allow_source=allow_source)
    rungs: list[RungRecord] = []
    for name, rung in LADDER.items():
        if name in without:
            rungs.append(RungRecord(name=name, seconds=0.0, left_out="left out on request"))
            continue
        begun = time.perf_counter()
        failed = ""
        try:
            case.claims += rung(case)
        except Exception as error:
            # A damaged bundle must not cost the report what the other rungs have to say.
            failed = f"failed: {type(error).__name__}: {error}"
            case.leave_unseen(
                Gap.not_examined(f"what the check {name!r} looks for", f"it {failed}")
            )
        seconds = time.perf_counter() - begun
        rungs.append(RungRecord(name=name, seconds=seconds, left_out=failed))
    ordered = _sorted_roots(case)
    return Diagnosis(
        kind=bundle.kind,
        fault_kind=bundle.fault.kind,
        symptom=symptom(case),
        surfaced=describe_surface(case, ordered.roots),
        environment=run_environment_of(bundle),
        hypotheses=_table(case),
        roots=ordered.roots,
        unseen=tuple(case.unseen),
        consequences=ordered.consequences,
        sights=tuple(case.sights),
        rungs=tuple(rungs),
        seconds=time.perf_counter() - started,
        answers=case.good_diff.answers if case.good_diff else None,
        is_unexplained=bool(ordered.roots) and not _explain(case, ordered.roots[0]),
        not_compared=_why_not_compared(case.good_diff),
    )


def _why_not_compared(found: RunDiff | None) -> str:
    """Why a good run tells nothing of the other; empty where it does, or where there is none."""
    if found is None:
        return ""
    if found.first is not None:
        return "the two runs were asked for different things" * found.first.is_of_prompts
    return "" if any(msgspec.structs.astuple(found.compared)) else "neither run recorded a step"


def _explain(case: Case, root: RootCause) -> bool:
    return any(explains(root.cause, kind) for kind in case.symptoms)


def _sorted_roots(case: Case) -> _Sorted:
    """Proven causes, and what is only another sight of one before it.

    Those that explain the symptom come first, and of them the earliest. A number outside its range
    says less than that it is not the step's.
    """

    def order(claim: Claim) -> tuple[bool, int, bool]:
        assert claim.root is not None
        is_range = claim.root.cause is Cause.BAD_SCALAR
        return not _explain(case, claim.root), claim.seq, is_range

    with_root = sorted((claim for claim in case.claims if claim.root), key=order)
    roots: list[RootCause] = []
    seen: set[int] = set()
    consequences = []
    for claim in with_root:
        assert claim.root is not None
        if seen.intersection(claim.tensors):
            consequences.append(claim.root.sentence)
            continue
        seen.update(claim.tensors)
        roots.append(with_culprit(case, claim))
    return _Sorted(tuple(roots), tuple(consequences))


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
            reason = _why_untested(case, cause)
            merged.append(row(cause, Verdict.NOT_TESTED, "", reason).hypothesis)
    return tuple(sorted(merged, key=lambda hypothesis: _RANK.index(hypothesis.verdict)))


def _why_untested(case: Case, cause: Cause) -> str:
    """Why a cause has no verdict, and what would give it one."""
    is_tested = CAUSES[cause].tested_by is TestedBy.REPLAY or cause is Cause.WRONG_ANSWER
    if case.is_foreign and not is_tested:
        return "what this program's kernels expect of their arguments is not known"
    if not case.launches:
        return "no launch of this run was recorded"
    return CAUSES[cause].untested


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
    )
