"""`hypo replay` and `hypo diff`: recorded launches run again with every access checked; two runs.

Reads bundles; what is found, `replay/recorded.py` and `doctor/diff.py` find.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from hypocenter.base.errors import EXIT_ERROR, EXIT_GATE, HypoError, UsageError
from hypocenter.cli.bundles import bundle_at
from hypocenter.cli.launch_choice import choose_places, is_outside_steps, number_of
from hypocenter.cli.output import one_line, show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import OUTSIDE_PLANS, LaunchRecord, Place
from hypocenter.replay.findings import Finding, ReplayReport
from hypocenter.replay.terms import KernelText, Schedule

MAX_BUDGET_SECONDS = 1e6


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One launch: what its replay found, or why there was none."""

    place: Place
    launch: LaunchRecord
    report: ReplayReport | None = None
    problem: str = ""


def replay(
    folder: str,
    step: int | None,
    launch: int | None,
    budget_seconds: float,
    *,
    allow_source: bool,
    as_json: bool,
    quiet: bool = False,
) -> None:
    """Replay and print; leaves with EXIT_GATE when something was found.

    With EXIT_ERROR when not one launch could be replayed. Raises UsageError for a step or launch
    that is not there, BadBundle for a bundle that cannot be read.
    """
    if not 0 < budget_seconds <= MAX_BUDGET_SECONDS:
        raise UsageError(
            f"--budget is {budget_seconds}, but must be above 0 and at most {MAX_BUDGET_SECONDS:g}"
        )
    index = BundleIndex(bundle_at(folder))
    places = choose_places(index, step, launch)
    with ProgressDisplay(quiet=quiet) as progress:
        done = list(_replay_all(index, places, budget_seconds, progress, allow_source=allow_source))
    if as_json:
        shown = [
            {
                "place": replayed.place,
                "kernel": replayed.launch.kernel,
                "grid": replayed.launch.grid,
                "report": replayed.report,
                "problem": replayed.problem,
            }
            for replayed in done
        ]
        show_json(shown)
    else:
        show(replay_text(index, done, allow_source=allow_source))
    if any(replayed.report is not None and replayed.report.findings for replayed in done):
        sys.exit(EXIT_GATE)
    if not any(replayed.report is not None for replayed in done):
        sys.exit(EXIT_ERROR)


def diff(good: str, bad: str, *, as_json: bool) -> None:
    """Compare two runs and print; leaves with EXIT_GATE when they differ."""
    from hypocenter.doctor.diff import rundiff

    found = rundiff(bundle_at(good), bundle_at(bad))
    if as_json:
        show_json(found)
    else:
        show(diff_text(found))
    if found.differences:
        sys.exit(EXIT_GATE)


def _replay_all(
    index: BundleIndex,
    places: Sequence[Place],
    budget_seconds: float,
    progress: Callable[[str, float], None],
    *,
    allow_source: bool,
) -> Iterator[Replayed]:
    from hypocenter.replay.recorded import BUDGET_SECONDS, replay_place
    from hypocenter.replay.replay import ProgramTooSlow

    deadline = time.thread_time() + budget_seconds
    for number, place in enumerate(places):
        launch = index.launch(place)
        what = f"replaying launch {number + 1} of {len(places)} ({launch.kernel})"
        progress(what, number / len(places))
        left = deadline - time.thread_time()
        if left <= 0:
            yield Replayed(
                place=place,
                launch=launch,
                problem="the budget was spent; --budget SECONDS has more",
            )
            continue
        seconds = min(BUDGET_SECONDS, left) if len(places) > 1 else left
        try:
            report = replay_place(
                index,
                place,
                text=KernelText(allow_source),
                schedule=Schedule(budget_seconds=seconds),
                headroom=True,
            )
        except ProgramTooSlow as error:
            problem = f"{error}; --budget SECONDS gives it more"
            yield Replayed(place=place, launch=launch, problem=problem)
        except HypoError as error:
            yield Replayed(place=place, launch=launch, problem=str(error))
        else:
            yield Replayed(place=place, launch=launch, report=report)


# -- as text --------------------------------------------------------------------------------------


def replay_text(index: BundleIndex, done: Sequence[Replayed], *, allow_source: bool = False) -> str:
    """The launches with what became of each, then every finding once."""
    from hypocenter.replay.recorded import index_thresholds
    from hypocenter.replay.text import finding_text

    launches = f"{len(done)} launch{'' if len(done) == 1 else 'es'}"
    lines = [one_line(f"{index.bundle.kind} on {index.bundle.device}: {launches}")]
    lines += [one_line(f"  {_name(index, replayed)}: {_verdict(replayed)}") for replayed in done]
    groups: dict[Any, tuple[Finding, list[Replayed]]] = {}
    for replayed in done:
        for finding in replayed.report.findings if replayed.report else ():
            site = finding.sites[0] if finding.sites else None
            key = (finding.kind, finding.kernel, finding.operation, finding.argument, site)
            groups.setdefault(key, (finding, []))[1].append(replayed)
    for finding, same in groups.values():
        lines += ["", finding_text(finding)]
        if finding.is_overflow:
            lines += [
                f"    {text}"
                for text in index_thresholds(
                    index, same[0].place, finding, allow_source=allow_source
                )
            ]
        lines.append(one_line(f"    in {_name(index, same[0])}{_others(index, same)}"))
    num = len(groups)
    num_replayed = sum(replayed.report is not None for replayed in done)
    counted = launches if num_replayed == len(done) else f"{num_replayed} of {launches} replayed"
    lines += ["", f"{num} finding{'' if num == 1 else 's'} in {counted}"]
    return "\n".join(lines)


def diff_text(found: Any) -> str:
    """A RunDiff in words: the first difference first, what was compared last."""
    lines = [one_line(difference.text) for difference in found.differences]
    if len(lines) > 1:
        lines[1:] = [f"  also {line}" for line in lines[1:]]
    if not lines:
        lines.append("no difference")
    c = found.compared
    lines.append(
        f"compared: {c.num_steps} whole steps, {c.num_launches} launches with {c.num_arguments} "
        f"arguments, {c.num_inputs} inputs, {c.num_statistics} tensors after their launch"
    )
    lines += [f"not compared: {one_line(str(gap))}" for gap in found.unseen]
    lines += [f"around the launches: {one_line(text)}" for text in found.around]
    return "\n".join(lines)


def _name(index: BundleIndex, replayed: Replayed) -> str:
    place, launch = replayed.place, replayed.launch
    name = f"{launch.kernel} ({', '.join(map(str, launch.grid))})"
    if is_outside_steps(index, place):
        return f"launch {place.step}: {name}"
    what = "event" if place.plan == OUTSIDE_PLANS else "launch"
    return f"step {place.step}, {what} {place.launch}: {name}"


def _verdict(replayed: Replayed) -> str:
    if replayed.report is None:
        return f"not replayed: {replayed.problem}"
    coverage = replayed.report.coverage
    num = len(replayed.report.findings)
    what = f"{num} finding{'' if num == 1 else 's'}" if num else "clean"
    if not coverage.is_complete:
        what += f" in {coverage.num_run} of {coverage.num_launched} programs"
    return what


def _others(index: BundleIndex, same: Sequence[Replayed]) -> str:
    if len(same) == 1:
        return ""
    numbers = ", ".join(str(number_of(index, replayed.place)) for replayed in same[1:9])
    return f"; the same in launch {numbers}{', ...' if len(same) > 9 else ''}"
