"""Rung: suspect launches, replayed with what was recorded, and again with one fact put right.

Needs Triton and torch; without them every cause that only this rung can see stays untested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from hypocenter.base.errors import HypoError, MissingPackage, NotReplayed, SourceNotAllowed
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause, TestedBy, refutable
from hypocenter.doctor.diagnosis import (
    Claim,
    Hypothesis,
    Proof,
    RootCause,
    SolvedEntry,
    Verdict,
    proven,
    row,
)
from hypocenter.doctor.examining.time_limit import OutOfTime
from hypocenter.doctor.examining.untested import why_history_untested
from hypocenter.doctor.installed_text import changes, installed_texts
from hypocenter.doctor.rungs.dead_rows import uses_of_dead_rows
from hypocenter.doctor.rungs.replaying.fixes import beside_text, with_fix
from hypocenter.doctor.rungs.replaying.good_outcome import GoodOutcome, good_outcome
from hypocenter.doctor.rungs.replaying.joining import join_fixes
from hypocenter.doctor.rungs.replaying.replay_cause import ReplayCause, source_of
from hypocenter.doctor.rungs.replaying.replay_causes import classify, weight
from hypocenter.doctor.rungs.replaying.trials import Bench, Fitting, Seen, fitting
from hypocenter.doctor.rungs.replaying.zeros import (
    doubts,
    replayed_as_zeros,
    zeros_behind,
    zeros_gap,
)
from hypocenter.doctor.rungs.values import first_spoilt
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import Place, SourceRecord
from hypocenter.record.gap import Gap, GapKind
from hypocenter.replay.findings import Finding, FindingKind, ReplayReport
from hypocenter.replay.terms import KernelText, Schedule, SeenReplay
from hypocenter.replay.text import extent_text, place_text

NAME = "replay"
#: Seconds of one replay, and of all of them together.
REPLAY_SECONDS = 4.0
RUNG_SECONDS = 25.0
#: Once one is proven, so long for what other kernels of a program do.
MORE_SECONDS = 6.0

#: Of a program's own launches nobody knows what was written before them.
_OF_HISTORY = (Cause.UNINITIALISED_READ, Cause.OUTPUT_NOT_WRITTEN)
#: What the use of something dead may look like.
_LATE = (Cause.PROGRAM_RACE, Cause.OUTPUT_NOT_WRITTEN)

Replay = Callable[..., ReplayReport]


@dataclass
class _Rung:
    """One climb: what was replayed, what could not be."""

    case: Case
    replay: Replay
    make_correction: Any
    make_census: Any
    deadline: float
    #: Those that are replayed, by their linear numbers; None for as many as there is time for.
    programs: tuple[int, ...] | None = None
    #: The corrected text of the kernel with which a cause was proven.
    proven_text: SourceRecord | None = None
    clean: int = 0
    partly: int = 0
    #: Launches replayed in full, of which that says less than it might, and why.
    vague: dict[str, None] = field(default_factory=dict)
    failed: dict[Gap, None] = field(default_factory=dict)
    #: What the good run's launch gave, by this run's event and launch.
    good: dict[tuple[int, Place | None], GoodOutcome | None] = field(default_factory=dict)

    def run(
        self,
        use: LaunchMade,
        corrections: Mapping[str, Any] | None = None,
        *,
        use_installed: bool = False,
        edited: SourceRecord | None = None,
    ) -> Seen | None:
        """What was seen, None when the launch cannot be replayed or the time is over.

        `use_installed`: with this installation's kernel in place of the recorded one. `edited` as
        for `replay_place`.
        """
        left = self.deadline - time.monotonic()
        if use.place is None or left <= 0.2:
            return None
        # Another grid has other programs.
        programs = None if "grid" in (corrections or {}) else self.programs
        census = self.make_census()
        is_corrected = bool(corrections) or edited is not None
        good = self.good_outcome(use) if is_corrected else None
        kept: dict[str, Any] = {}
        try:
            report = self.replay(
                self.case.index,
                use.place,
                corrections=dict(corrections or {}),
                text=KernelText(self.case.allow_source, use_installed, edited),
                schedule=Schedule(programs, budget_seconds=min(REPLAY_SECONDS, left)),
                seen=SeenReplay(_keep_in(kept) if good is not None else None, census),
            )
            if good is None:
                return Seen(report, census)
            return Seen(report, census, good.judge(report, census, kept))
        except HypoError as error:
            if not use_installed and not is_corrected:
                self.failed[_not_replayed(use, error)] = None
            return None

    def good_outcome(self, use: LaunchMade) -> GoodOutcome | None:
        """What the good run's launch gave, where a correction can be held against it."""
        key = use.seq, use.place
        if key not in self.good:
            self.good[key] = good_outcome(self.case, use)
        return self.good[key]

    def report(self, use: LaunchMade, corrections: Mapping[str, Any]) -> ReplayReport | None:
        """What was found with these corrections."""
        seen = self.run(use, corrections)
        return seen.report if seen is not None else None


def _keep_in(kept: dict[str, Any]) -> Callable[[Any, Any], None]:
    """Keeps what a replay left, by parameter."""
    from hypocenter.replay.compare import left_behind

    return lambda rebuilt, done: kept.update(left_behind(rebuilt, done))


def replays(case: Case) -> list[Claim]:
    """Replay what earlier rungs blame, else what was under way; else one of each kind of launch."""
    if any(claim.root is not None for claim in case.claims):
        return _after_good_run(case)
    try:
        rung = _rung(case, RUNG_SECONDS)
    except (MissingPackage, ImportError) as error:
        return list(_leave_untested(f"needs the replay of launches: {error}"))
    claims: list[Claim] = []
    proven_of: set[str] = set()
    for use in _suspects(case):
        if use.launch.source in proven_of:
            continue
        try:
            found = _climb(rung, use)
        except OutOfTime:  # what the launches before it said is told
            found, rung.deadline = [], 0.0
        if any(claim.root is not None for claim in found):
            claims += _first_alike(rung, use, found)
            if not case.is_foreign:
                break
            # Kernels of a program have defects of their own: what one does need not be all.
            proven_of.add(use.launch.source)
            rung.deadline = min(rung.deadline, time.monotonic() + MORE_SECONDS)
            continue
        claims += found
        if time.monotonic() > rung.deadline:
            case.leave_unseen(Gap.not_examined("launches that there was no time to replay"))
            rung.vague["there was no time to replay others"] = None
            break
    case.unseen |= rung.failed
    return [*claims, *_refute(rung, claims)]


def claims_of_programs(
    case: Case, use: LaunchMade, programs: tuple[int, ...], seconds: float
) -> list[Claim]:
    """What the replay of these programs alone says, for whoever knows that they went wrong.

    Nothing where they cannot be replayed; raises ImportError without Triton.
    """
    rung = _rung(case, seconds, programs)
    seen = rung.run(use)
    return _first_proven(rung, use, seen) if seen is not None else []


def _rung(case: Case, seconds: float, programs: tuple[int, ...] | None = None) -> _Rung:
    """Raises MissingPackage and ImportError without Triton."""
    from hypocenter.replay.census import Census
    from hypocenter.replay.corrections import TensorCorrection
    from hypocenter.replay.recorded import replay_place

    end = case.limit.until(seconds)
    return _Rung(case, replay_place, TensorCorrection, Census, end, programs)


def _not_replayed(use: LaunchMade, error: HypoError) -> Gap:
    is_foreign = isinstance(error, SourceNotAllowed) and not error.differing
    kind = GapKind.SOURCE_NOT_RUN if is_foreign else GapKind.NOT_REPLAYED
    reason = f"it {error.reason}" if isinstance(error, NotReplayed) else str(error)
    return Gap(kind, use.launch.kernel, reason)


def _climb(rung: _Rung, use: LaunchMade) -> list[Claim]:
    """What the replay of one launch says; counts it."""
    seen = rung.run(use)
    if seen is None:
        return []
    for name in replayed_as_zeros(rung.case, use):
        rung.case.leave_unseen(zeros_gap(rung.case, use, name))
    found = _first_proven(rung, use, seen)
    if not any(claim.root and claim.root.cause not in _LATE for claim in found):
        # Two programs that meet in a dead row are a sight of the use of dead rows.
        found = list(uses_of_dead_rows(rung.case, use, rung.report, rung.make_correction)) or found
    if seen.report.coverage.is_complete and not found:
        rung.clean += 1
        rung.vague |= dict.fromkeys(doubts(rung.case, use))
    elif not found:
        rung.partly += 1
    return found


def _first_alike(rung: _Rung, use: LaunchMade, found: list[Claim]) -> list[Claim]:
    """The same finding at the first launch with that kernel and these shapes, if it has it too.

    A crash lies near its end; what only spoils values does so from the first such launch on.
    """
    case = rung.case
    if case.kind in ("crash", "hang"):
        return found
    cause, argument = next((c.root.cause, c.root.argument) for c in found if c.root)
    first = next(
        (
            made
            for made in case.launches
            if made.place is not None and _key(case, made) == _key(case, use)
        ),
        use,
    )
    # What came of unwritten memory may look unwritten still, so the first to read it is told.
    is_first_told = cause is Cause.UNINITIALISED_READ and case.is_foreign
    if first is use or (cause in _OF_HISTORY and not is_first_told):
        return found
    again = [claim for claim in _climb(rung, first) if claim.root]
    roots = [claim.root for claim in again if claim.root and claim.root.cause is cause]
    is_it = any(not is_first_told or root.argument == argument for root in roots)
    return again if is_it else found


def _after_good_run(case: Case) -> list[Claim]:
    """A difference from the good run is what a race of that very launch looks like."""
    reason = (
        "a cause is proven without a replay; `hypo replay BUNDLE` replays the launches"
        if case.launches
        else "no launch of this run was recorded"
    )
    untested = list(_leave_untested(reason))
    proofs = [claim for claim in case.claims if claim.root is not None]
    root = proofs[0].root
    if len(proofs) > 1 or root is None or root.cause is not Cause.WRONG_ANSWER:
        return untested
    use = next((made for made in case.launches if made.place == root.place), None)
    try:
        rung = _rung(case, 2 * REPLAY_SECONDS)
    except (MissingPackage, ImportError):
        return untested
    if use is None:
        return untested
    seen = rung.run(use)
    found = _first_proven(rung, use, seen) if seen is not None else []
    races = [claim for claim in found if claim.root and claim.root.cause is Cause.PROGRAM_RACE]
    if not races:
        return untested
    return [
        *races,
        *(claim for claim in untested if claim.hypothesis.cause is not Cause.PROGRAM_RACE),
    ]


def _suspects(case: Case) -> Iterator[LaunchMade]:
    """The launch that spoilt something first; then of launches that are alike the last one."""
    if (spoilt := first_spoilt(case)) is not None:
        yield spoilt.use
    yield from (use for use in case.launches if use.seq in case.index.unwritten_reads)
    under_way = {id(use) for use in case.index.under_way}
    alike: dict[Any, LaunchMade] = {}
    for use in case.launches:
        launch = use.launch
        if use.place is not None and launch.source:
            key = _key(case, use)
            if key not in alike or id(use) in under_way:
                alike[key] = use
    yield from sorted(alike.values(), key=lambda use: (-use.step, _number(use.place)))


def _key(case: Case, use: LaunchMade) -> object:
    """Equal for launches that are alike."""
    launch = use.launch
    shapes = tuple((t.shape, t.strides, t.dtype) for t in case.tensors_of(launch).values())
    return launch.source, launch.grid, tuple(launch.constants.items()), shapes


def _number(place: Place | None) -> int:
    return place.launch if place is not None else 0


def _first_proven(rung: _Rung, use: LaunchMade, seen: Seen) -> list[Claim]:
    """Of a launch's findings the first that has a proof; else what there is without one."""
    ordered = sorted(seen.report.findings, key=weight)
    claims = []
    rung.proven_text = None
    for finding in ordered:
        claim = _claim(rung, use, finding, seen)
        if claim is None:
            continue
        if claim.root is not None:
            races = _races_beside(rung, use)
            return [_told_apart(claim, races), *races]
        claims.append(claim)
    return claims


def _told_apart(claim: Claim, races: Sequence[Claim]) -> Claim:
    """The claim without what is told beside it with a proof of its own."""
    assert claim.root is not None
    told = {beside_text(race.root.finding) for race in races if race.root and race.root.finding}
    left = tuple(text for text in claim.root.beside if text not in told)
    return replace(claim, root=msgspec.structs.replace(claim.root, beside=left))


def _races_beside(rung: _Rung, use: LaunchMade) -> list[Claim]:
    """A race that is there still with the mask put right is a defect of its own."""
    seen = rung.run(use, edited=rung.proven_text) if rung.proven_text is not None else None
    found = seen.report.findings if seen else ()
    races = [finding for finding in found if finding.kind is FindingKind.RACE]
    claims = (_claim(rung, use, race, seen) for race in races if seen is not None)
    return [replace(claim, tensors=()) for claim in claims if claim and claim.root][:1]


# -- claims ---------------------------------------------------------------------------------------


def _claim(rung: _Rung, use: LaunchMade, finding: Finding, seen: Seen) -> Claim | None:
    case, launch = rung.case, use.launch
    classified = classify(case, use, finding, seen.report.findings)
    if classified is None:
        return None
    zeros = zeros_behind(case, use, finding)
    is_made_up = finding.kind is FindingKind.RACE and bool(zeros)
    found = _fitting(rung, use, finding, seen)
    found = join_fixes(
        _bench(rung, use, finding, seen),
        finding,
        found,
        lambda other: _fitting(rung, use, other, seen),
    )
    argument = case.fact_of(launch, finding.argument) if finding.argument else None
    tensor = case.tensor_of(launch, finding.argument or "")
    where = f" in program {finding.program}" if finding.program else ""
    red = f"the replay of {use.where}{where}: {finding.kind}: {place_text(finding)}"
    judged = found[0].cause if found else classified
    evidence = (
        f"{extent_text(finding)}{seen.report.coverage.num_run} of "
        f"{seen.report.coverage.num_launched} programs replayed",
        *(
            [f"at that lane {', '.join(f'{k} = {v}' for k, v in finding.values.items())}"]
            if finding.values
            else []
        ),
        *judged.evidence,
        *judged.support,
    )
    if not found:
        return row(
            judged.cause,
            Verdict.INCONCLUSIVE,
            NAME,
            red,
            *evidence,
            f"{zeros} was replayed as zeros, and all of them lead to one place" * is_made_up
            or "no single fact was found with which the replay is clean and loses nothing"
            + ", and gives what the good run gave" * (rung.good_outcome(use) is not None),
            would_refute="a clean replay",
            kernel=launch.kernel,
            argument=argument,
        )
    rung.proven_text = judged.edit.source if judged.edit is not None else None
    root = RootCause(
        cause=judged.cause,
        sentence=f"{launch.kernel}: {finding.kind} at {argument or finding.operation}: "
        f"{place_text(finding, is_named=True)}",
        fix=judged.fix,
        proof=Proof(red, found[0].green.corrected, found[0].green.passes),
        kernel=launch.kernel,
        argument=judged.argument or argument,
        tensor=_blamed_tensor(case, use, finding, judged),
        file=judged.file,
        line=judged.line,
        expression=judged.expression,
        place=use.place,
        finding=finding,
        zeros=zeros,
        entry=SolvedEntry(argument=judged.argument, index=judged.entry[0], value=judged.entry[1])
        if judged.entry is not None and judged.argument
        else None,
    )
    root = with_fix(root, found, finding, seen.report.findings)
    ids = (tensor.id,) if tensor else ()
    return proven(root, NAME, evidence, "a clean replay of the same launch", use.seq, ids)


def _fitting(rung: _Rung, use: LaunchMade, finding: Finding, seen: Seen) -> list[Fitting]:
    """What fits a finding; nothing for programs that meet by what stood as zeros."""
    cause = classify(rung.case, use, finding, seen.report.findings)
    is_race = finding.kind is FindingKind.RACE
    if cause is None or (is_race and zeros_behind(rung.case, use, finding)):
        return []
    return fitting(_bench(rung, use, finding, seen), finding, (*cause.sooner, cause))


def _blamed_tensor(
    case: Case, use: LaunchMade, finding: Finding, judged: ReplayCause
) -> str | None:
    tensor = case.tensor_of(use.launch, judged.argument or finding.argument or "")
    return tensor.name if tensor is not None else None


def _bench(rung: _Rung, use: LaunchMade, finding: Finding, seen: Seen) -> Bench:
    """What corrections of that finding are tried with."""
    launch = use.launch
    changed = changes(launch, rung.case.sources, installed_texts())
    site = finding.sites[0] if finding.sites else None
    given = {a.name: a.value for a in launch.arguments if a.tensor is None}
    return Bench(
        seen,
        lambda facts, text, installed: rung.run(use, facts, edited=text, use_installed=installed),
        rung.make_correction,
        {**given, **launch.constants},
        (changed[0].line, changed[0].was) if changed else None,
        launch.site,
        source_of(rung.case, use, site),
    )


# -- what is not found ----------------------------------------------------------------------------


def _refute(rung: _Rung, claims: list[Claim]) -> Iterator[Claim]:
    told = {claim.hypothesis.cause for claim in claims}
    if any(claim.root is not None for claim in claims):
        yield from _leave_untested("the replay stopped at the first cause that it proved", told)
        return
    if not rung.clean and not rung.partly:
        reason = next(iter(rung.failed), "no launch of the bundle can be replayed")
        yield from _leave_untested(f"nothing was replayed in full: {reason}", told)
        return
    for cause, text in refutable(TestedBy.REPLAY).items():
        if cause in told:
            continue
        if rung.case.is_foreign and cause in _OF_HISTORY:
            reason = why_history_untested(rung.case)
            yield Claim(
                Hypothesis(
                    cause=cause,
                    verdict=Verdict.NOT_TESTED,
                    diagnostic=NAME,
                    evidence=(reason,),
                    is_unrecorded=True,
                )
            )
        elif rung.clean and not rung.partly and not rung.failed and not rung.vague:
            yield row(
                cause,
                Verdict.REFUTED,
                NAME,
                f"{text}: {_launches(rung.clean)} replayed in full",
                would_refute="a program of them that does",
            )
        else:
            yield row(
                cause,
                Verdict.INCONCLUSIVE,
                NAME,
                *_partial(rung, text),
                would_refute="a full replay of every launch"
                if rung.partly or rung.failed or not rung.clean
                else "a replay with all that the launch was given",
            )


def _partial(rung: _Rung, text: str) -> Iterator[str]:
    left = [
        *([f"{_launches(rung.partly)} replayed in part"] if rung.partly else []),
        *([f"{_launches(len(rung.failed))} not at all"] if rung.failed else []),
    ]
    yield "; ".join((f"{text}: {_launches(rung.clean)} replayed in full", *left))
    yield from rung.vague


def _launches(number: int) -> str:
    return count_text(number, "launch", "launches")


def _leave_untested(reason: str, told: Collection[Cause] = ()) -> Iterator[Claim]:
    for cause in refutable(TestedBy.REPLAY):
        if cause not in told:
            yield row(cause, Verdict.NOT_TESTED, NAME, reason)
