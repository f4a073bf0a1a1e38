"""`hypo lab serve`: kills workers under load and prints what clients saw of it."""

from __future__ import annotations

import signal as signals
import sys
from collections.abc import Iterator, Sequence

import msgspec

from hypocenter.base.errors import EXIT_GATE, UsageError
from hypocenter.cli.output import show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.lab.serve import KillFigures, KillPlan, RestartFigures, run_kills
from hypocenter.lab.serve_planted import PlantedFigures, PlantedServers
from hypocenter.lab.victim import victims

_MAX_KILLS, _MAX_STREAMS, _MAX_TOKENS = 100_000, 1024, 100_000
_MAX_EVERY = 3600.0
#: Restarts that a table shows.
_MAX_SHOWN = 40


def plan_of(
    path: str,
    num_kills: int,
    num_streams: int,
    num_tokens: int,
    signal: str,
    seed: int,
    device: str,
    by_illegal_access: bool,
    every: float,
) -> KillPlan:
    """What was asked for; raises UsageError for a number out of its range."""
    limits = {
        "--kills": (num_kills, _MAX_KILLS),
        "--streams": (num_streams, _MAX_STREAMS),
        "--tokens": (num_tokens, _MAX_TOKENS),
    }
    for name, (value, high) in limits.items():
        if not 1 <= value <= high:
            raise UsageError(f"{name} is {value}, but must be from 1 to {high}")
    if not 0 <= every <= _MAX_EVERY:
        raise UsageError(f"--every is {every:g}, but must be from 0 to {_MAX_EVERY:g} seconds")
    return KillPlan(
        model=path,
        num_kills=num_kills,
        num_streams=num_streams,
        num_tokens=num_tokens,
        signal=signals.Signals[f"SIG{signal}"],
        seed=seed,
        device=device,
        by_illegal_access=by_illegal_access,
        max_seconds=every,
    )


def serve(plan: KillPlan, *, as_json: bool, quiet: bool) -> None:
    """Run it; leaves with EXIT_GATE when a client saw more than a pause."""
    with ProgressDisplay(quiet=quiet) as progress:
        figures = run_kills(plan, progress)
    cause = signals.Signals(plan.signal).name
    if plan.by_illegal_access:
        cause = "illegal access"
    if as_json:
        show_json({"cause": cause, **msgspec.to_builtins(figures)})
    else:
        show(table(figures, cause))
    if not figures.is_clean:
        sys.exit(EXIT_GATE)


def serve_planted(names: str, *, device: str, as_json: bool, quiet: bool) -> None:
    """Serve with one victim after the other in a worker; leaves with EXIT_GATE as `serve` does."""
    found = victims([] if names == "all" else names.split(","))
    servers, figures = PlantedServers(), list[PlantedFigures]()
    with ProgressDisplay(quiet=quiet) as progress:
        for number, victim in enumerate(found):
            progress(f"serving with {victim.name}", number / len(found))
            figures.append(servers.run(victim, device))
    if as_json:
        show_json({"victims": msgspec.to_builtins(figures)})
    else:
        show(planted_table(figures))
    if not all(result.is_clean for result in figures):
        sys.exit(EXIT_GATE)


def planted_table(figures: Sequence[PlantedFigures]) -> str:
    """A line for each victim, those last whose defect no server can see; then sums of the rest."""
    lines = [f"{'victim':<30} {'symptom':<10} {'workers':>7} {'errors':>6} {'changed':>7}"]
    for result in sorted(figures, key=lambda result: (not result.is_seen, result.victim)):
        lines.append(
            f"{result.victim:<30} {result.symptom:<10} {result.num_faults:>7} "
            f"{result.num_errors:>6} {result.num_changed:>7}"
        )
    seen = [result for result in figures if result.is_seen]
    lines += [
        "",
        f"{len(seen)} defects that show: {sum(result.num_answers for result in seen)} answers, "
        f"{sum(result.num_errors for result in seen)} errors, "
        f"{sum(result.num_changed for result in seen)} changed",
    ]
    if silent := [result for result in figures if not result.is_seen]:
        lines.append(
            f"{len(silent)} defects that show in no number by itself: "
            f"{sum(result.num_changed for result in silent)} answers changed"
        )
    bad = [result for result in figures if not result.is_clean]
    return "\n".join([*lines, *(f"{result.victim}: {result.first_problem}" for result in bad)])


def _restart_lines(restarts: Sequence[RestartFigures]) -> Iterator[str]:
    """Each restart beside the pauses that hold it: the longest, where there are many."""
    longest = sorted(enumerate(restarts, 1), key=lambda one: -one[1].max_pause_seconds)
    yield f"{'kill':>6} {'ready after':>12} {'pauses':>7} {'median':>8} {'longest':>8}"
    for number, restart in sorted(longest[:_MAX_SHOWN]):
        yield (
            f"{number:>6} {restart.restart_seconds:>10.2f} s {restart.num_pauses:>7} "
            f"{restart.median_pause_seconds:>6.2f} s {restart.max_pause_seconds:>6.2f} s"
        )
    if len(restarts) > _MAX_SHOWN:
        yield f"and {len(restarts) - _MAX_SHOWN} kills with shorter pauses; --json has all"


def table(figures: KillFigures, cause: str) -> str:
    """The figures as lines."""
    rows = [
        (f"workers killed by {cause}", f"{figures.num_kills}"),
        ("streams", f"{figures.num_streams}"),
        ("answers", f"{figures.num_answers} of {figures.num_tokens} tokens"),
        ("errors that clients saw", f"{figures.num_errors}"),
        ("answers with a changed text", f"{figures.num_changed}"),
        ("pauses", f"{figures.num_pauses}"),
        ("pause, median", f"{figures.median_pause_seconds:.2f} s"),
        ("pause, p99", f"{figures.p99_pause_seconds:.2f} s"),
        ("pause, longest", f"{figures.max_pause_seconds:.2f} s"),
        ("until a worker was ready, median", f"{figures.restart_seconds:.2f} s"),
        ("in all", f"{figures.seconds:.0f} s"),
    ]
    lines = [f"{name:<34} {value}" for name, value in rows]
    if figures.restarts:
        lines += ["", *_restart_lines(figures.restarts)]
    if figures.first_problem:
        lines += ["", f"first problem: {figures.first_problem}"]
    return "\n".join(lines)
