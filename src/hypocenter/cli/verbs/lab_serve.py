"""`hypo lab serve`: kills workers under load and prints what clients saw of it."""

from __future__ import annotations

import signal as signals
import sys

import msgspec

from hypocenter.cli.output import show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.errors import EXIT_GATE, UsageError
from hypocenter.lab.serve import KillFigures, KillPlan, run_kills

_MAX_KILLS, _MAX_STREAMS, _MAX_TOKENS = 100_000, 1024, 100_000


def plan_of(
    path: str,
    num_kills: int,
    num_streams: int,
    num_tokens: int,
    signal: str,
    seed: int,
    device: str,
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
    return KillPlan(
        model=path,
        num_kills=num_kills,
        num_streams=num_streams,
        num_tokens=num_tokens,
        signal=signals.Signals[f"SIG{signal}"],
        seed=seed,
        options=("--device", device, "--bundles", ""),
    )


def serve(plan: KillPlan, *, as_json: bool, quiet: bool) -> None:
    """Run it; leaves with EXIT_GATE when a client saw more than a pause."""
    with ProgressDisplay(quiet=quiet) as progress:
        figures = run_kills(plan, progress)
    signal = signals.Signals(plan.signal).name
    if as_json:
        show_json({"signal": signal, **msgspec.to_builtins(figures)})
    else:
        show(table(figures, signal))
    if not figures.is_clean:
        sys.exit(EXIT_GATE)


def table(figures: KillFigures, signal: str) -> str:
    """The figures as lines."""
    rows = [
        (f"workers killed by {signal}", f"{figures.num_kills}"),
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
    if figures.first_problem:
        lines += ["", f"first problem: {figures.first_problem}"]
    return "\n".join(lines)
