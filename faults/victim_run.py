"""Runs a victim, or its twin, in a process of its own, and keeps the bundle that it leaves.

Knows the declared symptom only to choose how to run it, as whoever met it would; it diagnoses
nothing.
"""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from faults.report import environment_of, module_command
from faults.victim import Planted
from hypocenter.base.errors import ErrorKind
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.watch.child import Deadlines, Ended, watch
from hypocenter.watch.collect import collect

#: Seconds that a step may take, which takes half a second on an idle machine; as machine code,
#: where the first ones have kernels and emulator compiled; and, for runs that are known to hang,
#: what they are given before they are ended.
STEP_SECONDS, EMULATED_SECONDS, HANG_SECONDS = 60.0, 240.0, 8.0
#: Symptoms that end a run by themselves; the others are looked for with everything traced.
FAULTS = ("crash", "error", "hang")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and its bundle; `report` is what it wrote about itself."""

    ended: Ended
    bundle: Bundle | None
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[list[int]] | None:
        return self.report.get("token_ids")

    def symptom(self, healthy: Outcome | None = None) -> str:
        """One of SYMPTOMS; `healthy` is the twin's outcome, for the text to be compared with."""
        if self.ended.hung_seconds is not None or self.report.get("kind") == ErrorKind.ENDLESS:
            return "hang"
        if self.ended.signal == signal.SIGABRT or self.report.get("is_asynchronous"):
            return "crash"
        if self.report.get("error") == "BadLogits":
            return "nonfinite"
        if self.token_ids is None:
            return "error"
        return "none" if healthy is None or self.token_ids == healthy.token_ids else "differs"

    def last_words(self) -> str:
        """What was said of its fault, else the last line of stderr."""
        if self.bundle is not None and self.bundle.fault.message:
            return self.bundle.fault.message
        lines = self.ended.stderr.strip().splitlines()
        return lines[-1] if lines else ""


def run_child(victim: Planted, folder: Path, *, twin: bool, device: str = "") -> Outcome:
    """Run what is planted, or its twin; record, outcome and bundle are below `folder`."""
    runs, outcome = folder / "runs", folder / "outcome.json"
    runs.mkdir(mode=0o700, parents=True)
    is_suspect = twin or victim.symptom not in FAULTS
    is_traced = victim.symptom not in FAULTS and not victim.hides
    environment = {**environment_of(), "HYPO_RUN_DIR": str(runs), "PYTHONFAULTHANDLER": "1"}
    environment["HYPO_TRACE"] = "1" if is_traced else "0"
    step_seconds = EMULATED_SECONDS if device.startswith("emu:") else STEP_SECONDS
    seconds = HANG_SECONDS if victim.symptom == "hang" and not twin else step_seconds
    ended = watch(
        command(victim, twin=twin, device=device, outcome=outcome),
        environment,
        runs,
        _ignore,
        Deadlines(seconds, seconds),
        subprocess.DEVNULL,
    )
    made = collect(runs, ended, suspect=is_suspect)
    if made is not None:
        # The doctor is not told by the victim's name, and what does not survive the folder does
        # not count.
        made = msgspec.structs.replace(made, command=("hypo", "run"))
        bundles.save(made, folder / "bundle")
        made = bundles.load(folder / "bundle")
    report = json.loads(outcome.read_text("utf-8")) if outcome.is_file() else {}
    return Outcome(ended, made, report)


def command(
    victim: Planted, *, twin: bool = False, device: str = "", outcome: Path | None = None
) -> list[str]:
    """The command line of a run."""
    return [
        *module_command("faults.child"),
        victim.name,
        *(["--twin"] if twin else []),
        *(["--device", device] if device else []),
        *(["--outcome", str(outcome)] if outcome else []),
    ]


def _ignore(data: bytes) -> None:
    """The child's stderr is kept, not shown."""
