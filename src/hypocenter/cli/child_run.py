"""A command that a verb runs as a child: its environment, its output passed on, how it ended.

`watch/child.py` runs it; the verbs `doctor` and `guard` share what stands here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import FrameType

from hypocenter.base.wording import signal_name
from hypocenter.cli.output import say
from hypocenter.coredump.rocm import ArmedVariable, variables_at_fault
from hypocenter.settings.environment import Environment
from hypocenter.watch.child import Ended, environment_for
from hypocenter.watch.fault_text import signal_below


def environment_of(
    runs: Path,
    *,
    suspect: bool = False,
    is_own: bool = True,
    is_guarded: bool = False,
    is_nan: bool = False,
) -> dict[str, str]:
    """The child's: it records into `runs`, and writes its stacks when it is aborted.

    `suspect`: its engines trace what they compute. A program that is not `is_own` is recorded by
    what each Python below it runs first, unless HYPO_RECORD is 0. `is_guarded`: its Triton launches
    run guarded. `is_nan`: its numbers are looked at, and torch.compile runs its programs as they
    are.
    """
    environment = environment_for(runs)
    is_recorded = Environment.read().record
    if not is_own and is_recorded:
        first = str(resources.files("hypocenter") / "foreign" / "startup")
        others = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (first, others)))
    if not is_own and not is_recorded:
        environment["HYPO_RECORD"] = "0"
    environment |= {"HYPO_TRACE": "1"} if suspect else {}
    environment |= {"HYPO_NAN": "1", "TORCHDYNAMO_DISABLE": "1"} if is_nan else {}
    return environment | ({"HYPO_GUARD": "1"} if is_guarded else {})


def say_armed(environment: Mapping[str, str], armed: Sequence[ArmedVariable] = ()) -> None:
    """Tell what is set for a command beside our own variables, `armed` and what `watch` adds: it
    changes how the command runs."""
    purposes: dict[str, list[str]] = {}
    for variable in (*armed, *variables_at_fault(environment)):
        purposes.setdefault(variable.purpose, []).append(f"{variable.name}={variable.value}")
    for purpose, settings in purposes.items():
        verb = "is" if len(settings) == 1 else "are"
        say(f"{' '.join(settings)} {verb} set for the command, so that {purpose}")


def how(ended: Ended) -> str:
    """How a command ended, in a few words."""
    if ended.enough:
        return f"{ended.enough}, so the command was ended"
    if ended.hung_seconds is not None:
        seconds = f"{ended.hung_seconds:.0f} seconds"
        if ended.is_idle:
            return f"no step or launch was begun for {seconds}, so the command was ended"
        return f"a step or launch ran for {seconds}, so the command was ended"
    if ended.signal is not None:
        return f"the command was ended by {signal_name(ended.signal)}"
    if (below := signal_below(ended.exit_code)) is not None:
        name = signal_name(below)
        return f"the command ended with exit code {ended.exit_code}: {name} ended what it ran"
    return f"the command ended with exit code {ended.exit_code}"


def exit_code(ended: Ended) -> int:
    """The exit code as a shell gives it."""
    return 128 + (ended.signal or 0) if ended.exit_code is None else ended.exit_code


def pass_on(data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(2, data)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise: no child outlives us, and no file is left half written."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # not the main thread
            if signal.getsignal(number) == signal.SIG_DFL:
                before.append((number, signal.signal(number, leave)))
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
