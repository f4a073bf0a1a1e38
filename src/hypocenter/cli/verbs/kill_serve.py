"""`hypo kill-serve`: kills workers under load and prints what clients saw of it."""

from __future__ import annotations

import signal as signals
import sys
from collections.abc import Iterator, Sequence

import msgspec

from hypocenter.base.errors import EXIT_GATE
from hypocenter.cli.output import show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.server.kills import KillFigures, KillPlan, RestartFigures, run_kills

#: Restarts that a table shows.
_MAX_SHOWN = 40


def kill_serve(plan: KillPlan, *, as_json: bool, quiet: bool) -> None:
    """Run it; leaves with EXIT_GATE when a client saw more than a pause."""
    with ProgressDisplay(quiet=quiet) as progress:
        figures = run_kills(plan, progress)
    tell(figures, signals.Signals(plan.signal).name, as_json=as_json)


def tell(figures: KillFigures, cause: str, *, as_json: bool) -> None:
    """Print what clients saw; leaves as `kill_serve` does."""
    if as_json:
        show_json({"cause": cause, **msgspec.to_builtins(figures)})
    else:
        show(table(figures, cause))
    if not figures.is_clean:
        sys.exit(EXIT_GATE)


def _restart_lines(restarts: Sequence[RestartFigures]) -> Iterator[str]:
    """Each restart beside the pauses that hold it: the longest, where there are many."""
    longest = sorted(enumerate(restarts, 1), key=lambda numbered: -numbered[1].max_pause_seconds)
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
