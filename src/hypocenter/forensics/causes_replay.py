"""Rung: suspect launches, replayed with what was recorded, and again with one fact put right.

Needs Triton and torch; without them every cause that only this rung can see stays untested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypocenter.diagnosis import Cause, Proof, RootCause, Verdict
from hypocenter.errors import HypoError, MissingPackage
from hypocenter.forensics.case import Case, Use
from hypocenter.forensics.causes_values import first_spoilt
from hypocenter.forensics.claims import Claim, proven, row
from hypocenter.forensics.installed_text import changes, installed
from hypocenter.forensics.replay_dead import dead
from hypocenter.forensics.replay_kinds import Judged, classify, weight
from hypocenter.recording import Place
from hypocenter.records import Finding, ReplayReport

NAME = "replay"
#: Seconds of one replay, and of all of them together.
REPLAY_SECONDS = 4.0
RUNG_SECONDS = 25.0

#: What a clean replay of every program of a launch refutes for it.
SEEN = {
    Cause.MISSING_MASK: "no access leaves its tensor",
    Cause.OFF_BY_ONE: "no access leaves its tensor or reads an entry that is not live",
    Cause.OFFSET_OVERFLOW: "every offset is the same in 32 and in 64 bits",
    Cause.PROGRAM_RACE: "no two programs touch the same element, one writing",
    Cause.OUTPUT_NOT_WRITTEN: "every live row is written whole",
    Cause.UNINITIALISED_READ: "nothing is read that nobody wrote",
}

#: What the use of something dead may look like.
_LATE = (Cause.PROGRAM_RACE, Cause.OUTPUT_NOT_WRITTEN)

Replay = Callable[..., ReplayReport]


@dataclass
class _Rung:
    """One climb: what was replayed, what could not be."""

    case: Case
    replay: Replay
    fact: Any
    deadline: float
    clean: int = 0
    partly: int = 0
    failed: dict[str, None] = field(default_factory=dict)

    def run(
        self, use: Use, corrections: Mapping[str, Any] | None = None, *, installed: bool = False
    ) -> ReplayReport | None:
        """The report, None when the launch cannot be replayed or the time is over.

        `installed`: with this installation's kernel in place of the recorded one.
        """
        left = self.deadline - time.monotonic()
        if use.place is None or left <= 0.2:
            return None
        try:
            return self.replay(
                self.case.bundle, use.place, corrections=dict(corrections or {}),
                budget_seconds=min(REPLAY_SECONDS, left), allow_source=self.case.allow_source,
                use_installed=installed,
            )  # fmt: skip
        except HypoError as error:
            if not installed and not corrections:
                self.failed[f"{use.launch.kernel}: {error}"] = None
            return None


def replays(case: Case) -> list[Claim]:
    """Replay what earlier rungs blame, else what was under way; else one of each kind of launch."""
    if any(claim.root is not None for claim in case.claims):
        return list(_untested("a cause is proven without a replay; `hypo replay` runs one launch"))
    try:
        from hypocenter.forensics.replay_bundle import TensorFact, replay_place
    except (MissingPackage, ImportError) as error:
        return list(_untested(f"needs the replay of launches: {error}"))
    rung = _Rung(case, replay_place, TensorFact, time.monotonic() + RUNG_SECONDS)
    claims: list[Claim] = []
    for use in _suspects(case):
        report = rung.run(use)
        if report is None:
            continue
        found = _found(rung, use, report)
        if not any(claim.root and claim.root.cause not in _LATE for claim in found):
            # Two programs that meet in a dead row are a sight of the use of dead rows.
            found = list(dead(case, use, rung.run, rung.fact)) or found
        claims += found
        if any(claim.root is not None for claim in found):
            break
        if report.coverage.is_complete and not found:
            rung.clean += 1
        elif not found:
            rung.partly += 1
        if time.monotonic() > rung.deadline:
            case.unseen["launches that there was no time to replay"] = None
            break
    case.unseen |= dict.fromkeys(f"not replayed: {text}" for text in rung.failed)
    return [*claims, *_refuted(rung, claims)]


def _suspects(case: Case) -> Iterator[Use]:
    """The launch that spoilt something first; then of launches that are alike the last one."""
    spoilt = first_spoilt(case)
    if spoilt is not None:
        yield spoilt.use
    under_way = {id(use) for use in case.suspects}
    alike: dict[Any, Use] = {}
    for use in case.uses:
        launch = use.launch
        if use.place is not None and launch.source:
            shapes = tuple((t.shape, t.strides, t.dtype) for t in case.tensors_of(launch).values())
            key = (launch.source, launch.grid, tuple(launch.constants.items()), shapes)
            if key not in alike or id(use) in under_way:
                alike[key] = use
    yield from sorted(alike.values(), key=lambda use: (-use.step, _number(use.place)))


def _number(place: Place | None) -> int:
    return place.launch if place is not None else 0


def _found(rung: _Rung, use: Use, report: ReplayReport) -> list[Claim]:
    """Of a launch's findings the first that has a proof; else what there is without one."""
    ordered = sorted(report.findings, key=weight)
    claims = []
    for finding in ordered:
        claim = _claim(rung, use, finding, report)
        if claim is None:
            continue
        if claim.root is not None:
            return [claim]
        claims.append(claim)
    return claims


# -- claims ---------------------------------------------------------------------------------------


def _claim(rung: _Rung, use: Use, finding: Finding, report: ReplayReport) -> Claim | None:
    case, launch = rung.case, use.launch
    judged = classify(case, use, finding, report.findings)
    if judged is None:
        return None
    green = _green(rung, use, finding, judged)
    argument = case.fact_of(launch, finding.argument) if finding.argument else None
    tensor = case.tensor_of(launch, finding.argument or "")
    blamed = case.tensor_of(launch, judged.argument) if judged.argument else tensor
    where = f" in program {finding.program}" if finding.program else ""
    red = f"the replay of {use.where}{where}: {finding.kind}: {_what(finding)}"
    evidence = (
        f"{finding.num_lanes} accesses in {finding.num_programs} programs; "
        f"{report.coverage.num_run} of {report.coverage.num_launched} programs replayed",
        *([f"at that lane {', '.join(f'{k} = {v}' for k, v in finding.values.items())}"]
          if finding.values else []),
        *judged.evidence,
    )  # fmt: skip
    if green is None:
        return row(
            judged.cause, Verdict.INCONCLUSIVE, NAME, red, *evidence,
            "no single fact was found with which the replay is clean",
            would_refute="a clean replay", kernel=launch.kernel, argument=argument,
        )  # fmt: skip
    corrected, text = green
    root = RootCause(
        cause=judged.cause,
        sentence=f"{launch.kernel}: {finding.kind} at {argument or finding.operation}: "
        f"{_what(finding)}",
        fix=judged.fix,
        proof=Proof(red, corrected, text),
        kernel=launch.kernel,
        argument=judged.argument or argument,
        tensor=blamed.name if blamed else None,
        file=judged.file,
        line=judged.line,
        expression=judged.expression,
        place=use.place,
    )
    number = use.place.launch if use.place is not None else 0
    return proven(
        root, NAME, evidence, "a clean replay of the same launch", use.seq * 1000 + number,
        (tensor.id,) if tensor else (),
    )  # fmt: skip


def _what(finding: Finding) -> str:
    name = finding.argument or ""
    place = ", ".join(map(str, finding.element)) if finding.element is not None else ""
    return f"{name}[{place}] {finding.detail}" if place else f"{name} {finding.detail}".strip()


def _green(rung: _Rung, use: Use, finding: Finding, judged: Judged) -> tuple[str, str] | None:
    """The correction with which the finding is gone, and what the replay says then."""
    if judged.settled is not None:
        return judged.settled
    changed = changes(use.launch, rung.case.sources, installed())
    tries: list[tuple[str, Mapping[str, Any], bool]] = []
    if changed and judged.in_kernel:
        one = changed[0]
        tries.append((f"the kernel as it is installed (line {one.line}: `{one.was}`)", {}, True))
    tries += [(text, facts, False) for text, facts in judged.corrections(rung.fact)]
    for corrected, corrections, use_installed in tries:
        report = rung.run(use, corrections, installed=use_installed)
        if report is None:
            continue
        left = [one for one in report.findings if one.kind == finding.kind
                and one.argument == finding.argument
                and (use_installed or one.line == finding.line)]  # fmt: skip
        if not left:
            return corrected, (
                f"the same replay with {corrected}: no such finding "
                f"({report.coverage.num_run} of {report.coverage.num_launched} programs)"
            )
    return None


# -- what is not found ----------------------------------------------------------------------------


def _refuted(rung: _Rung, claims: list[Claim]) -> Iterator[Claim]:
    told = {claim.hypothesis.cause for claim in claims}
    for cause, text in SEEN.items():
        if cause in told:
            continue
        if rung.clean and not rung.partly and not rung.failed:
            yield row(
                cause, Verdict.REFUTED, NAME, f"{text}: {rung.clean} launches replayed in full",
                would_refute="a program of them that does",
            )  # fmt: skip
        elif rung.clean or rung.partly:
            yield row(
                cause, Verdict.INCONCLUSIVE, NAME,
                f"{text} in {rung.clean} launches that were replayed in full; {rung.partly} were "
                f"replayed in part and {len(rung.failed)} not at all",
                would_refute="a full replay of every launch",
            )  # fmt: skip
    if not rung.clean and not rung.partly and not claims:
        reason = next(iter(rung.failed), "no launch of the bundle can be replayed")
        yield from _untested(f"nothing was replayed: {reason}")


def _untested(reason: str) -> Iterator[Claim]:
    for cause in SEEN:
        yield row(cause, Verdict.NOT_TESTED, NAME, reason)
