"""`hypo lab`: lists the victims, runs one of them, scores the doctor on all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hypocenter.base.errors import EXIT_GATE, EXIT_OK, UsageError
from hypocenter.cli.output import say, show, show_json
from hypocenter.lab.harmless import find, harmless
from hypocenter.lab.run import command, run_child
from hypocenter.lab.score import (
    HarmlessScore,
    Score,
    Total,
    score_all,
    score_harmless,
    totals,
)
from hypocenter.lab.victim import Harmless, Victim, victims, victims_without

MAX_JOBS = 64
#: Shares that a score must reach: all found, and what is told of nearly all of them is right.
DETECTED, NAMED = 1.0, 0.95
MEDIAN_SECONDS, MOST_SECONDS = 10.0, 60.0


class VictimRecord(msgspec.Struct, frozen=True):
    """A victim as `hypo lab list --json` tells it."""

    name: str
    title: str
    cause: str
    symptom: str
    kernel: str | None
    argument: str | None
    device: str
    source: str


def list_victims(*, as_json: bool) -> None:
    """Print name, symptom, cause and title of every victim, and of what does no harm."""
    without: list[str] = []
    found = [_facts(victim) for victim in victims_without(without.append)]
    if as_json:
        show_json(found)
        return
    for score in found:
        show(f"{score.name:28} {score.symptom:9}  {score.title}")
    for name in without:
        show(f"{name:28} {'-':9}  needs Triton, which is not installed")
    changes = harmless()
    for change in changes:
        show(f"{change.name:28} {'harmless':9}  {change.title}")
    say(f"{len(found) + len(without)} victims, {len(changes)} harmless changes")


def run(name: str, *, twin: bool, device: str, out: str | None) -> None:
    """Run one victim or harmless change; leaves with its exit code.

    With `out` its bundle is saved there.

    Raises UsageError for an unknown name, and for an `out` that is there already.
    """
    victim = find([name])[0]
    if out is None:
        sys.exit(_exit_code(subprocess.run(command(victim, twin=twin, device=device)).returncode))
    folder = Path(out)
    if folder.exists():
        raise UsageError(f"--out {out} is there already; name another folder")
    outcome = run_child(victim, folder, twin=twin, device=device)
    say(f"{victim.name}: {outcome.symptom()}; {outcome.last_words() or 'nothing was said'}")
    if outcome.bundle is not None:
        say(f"the bundle is in {folder / 'bundle'}; see hypo doctor {folder / 'bundle'}")
    ended = outcome.ended
    sys.exit(_exit_code(-ended.signal if ended.signal else ended.exit_code or EXIT_OK))


def score(names: Sequence[str], *, device: str, num_jobs: int, as_json: bool) -> None:
    """Score the doctor; leaves with EXIT_GATE when it falls short of what it must reach."""
    if not 1 <= num_jobs <= MAX_JOBS:
        raise UsageError(f"--jobs is {num_jobs}, but must be from 1 to {MAX_JOBS}")
    chosen = find(names) if names else [*victims(), *harmless()]
    planted = [victim for victim in chosen if isinstance(victim, Victim)]
    changes = [change for change in chosen if isinstance(change, Harmless)]
    if not as_json and planted:
        show(_HEAD)
    scores = score_all(
        planted, device=device, num_jobs=num_jobs, tell=lambda _: None if as_json else _show(_)
    )
    if not as_json and changes:
        show(f"{'harmless change':28} {'seen':9} {'answers':9} {'s':>6}  findings")
    alarms = score_harmless(
        changes,
        device=device,
        num_jobs=num_jobs,
        tell=lambda _: None if as_json else _show_harmless(_),
    )
    sums = totals(scores)
    problems = [*(shortfalls(sums[-1]) if planted else ()), *false_alarms(alarms)]
    if as_json:
        told = {"victims": scores, "totals": sums, "harmless": alarms, "problems": problems}
        show_json(told)
    elif planted:
        show("")
        show(_TOTAL_HEAD)
        for line in sums:
            show(_shown_total(line))
    for problem in problems:
        say(problem)
    if problems:
        sys.exit(EXIT_GATE)


def shortfalls(whole: Total) -> list[str]:
    """What keeps a score from being good enough, in sentences; empty for none."""
    found = []
    for what, count, share in (
        ("show the symptom that they declare", whole.as_declared, DETECTED),
        ("are detected", whole.detected, DETECTED),
        ("have their kernel named", whole.kernel_named, NAMED),
        ("have their argument named", whole.argument_named, NAMED),
        ("have their class told right", whole.class_right, NAMED),
    ):
        if count < share * whole.num:
            found.append(f"{count} of {whole.num} victims {what}, but {share:.0%} must")
    if whole.false_findings:
        found.append(f"{whole.false_findings} healthy twins have findings, but none may")
    for what, seconds, limit in (
        ("the median is", whole.median_seconds, MEDIAN_SECONDS),
        ("the slowest takes", whole.most_seconds, MOST_SECONDS),
    ):
        if seconds > limit:
            found.append(f"{what} {seconds:.1f} s, but at most {limit:.0f} s are allowed")
    return found


def false_alarms(scores: Sequence[HarmlessScore]) -> list[str]:
    """What is wrong with the scores of harmless changes, in sentences; empty for nothing."""
    alarms = sum(bool(score.found) for score in scores)
    harmful = sum(score.observed != "none" for score in scores)
    return [
        *([f"{alarms} of {len(scores)} harmless changes have findings"] if alarms else []),
        *([f"{harmful} of {len(scores)} harmless changes do harm"] if harmful else []),
    ]


_HEAD = (
    f"{'victim':28} {'symptom':9} {'seen':9} det krn arg line cls prf {'s':>6}  root cause; twin"
)
_TOTAL_HEAD = (
    f"{'symptom':9} {'victims':>7} {'as said':>7} {'detected':>8} {'kernel':>6} {'argument':>8} "
    f"{'line':>7} {'class':>5} {'proof':>5} {'false':>5} {'median s':>8} {'most s':>6}"
)


def _show(score: Score) -> None:
    flags = (
        score.detected,
        score.kernel_named,
        score.argument_named,
        score.line_named,
        score.class_right,
    )
    marks = ["." if flag is None else "yes" if flag else "NO" for flag in (*flags, score.proof)]
    twin = f"; TWIN {score.twin.observed}: {', '.join(score.twin.found)}" if _is_odd(score) else ""
    columns = " ".join(f"{m:{w}}" for m, w in zip(marks, (3, 3, 3, 4, 3, 3), strict=True))
    show(
        f"{score.victim:28} {score.symptom:9} {score.observed:9} {columns} {score.seconds:6.2f}  "
        f"{score.found or '(none)'}{twin}"
    )


def _show_harmless(score: HarmlessScore) -> None:
    found = ", ".join(score.found) or "(none)"
    show(f"{score.name:28} {score.observed:9} {score.answers:9} {score.seconds:6.2f}  {found}")


def _is_odd(score: Score) -> bool:
    return bool(score.twin.found) or score.twin.observed != "none"


def _shown_total(total: Total) -> str:
    lines = f"{total.line_named}/{total.num_with_line}"
    return (
        f"{total.symptom:9} {total.num:7} {total.as_declared:7} {total.detected:8} "
        f"{total.kernel_named:6} {total.argument_named:8} {lines:>7} {total.class_right:5} "
        f"{total.proof:5} {total.false_findings:5} {total.median_seconds:8.2f} "
        f"{total.most_seconds:6.2f}"
    )


def _facts(victim: Victim) -> VictimRecord:
    return VictimRecord(
        victim.name,
        victim.title,
        victim.cause.value,
        victim.symptom,
        victim.kernel,
        victim.argument,
        victim.device,
        victim.source,
    )


def _exit_code(returned: int) -> int:
    """The exit code as a shell reports the signal that ended a process."""
    return 128 - returned if returned < 0 else returned
