"""What a worker left when it died of a fault: a bundle, and the doctor's report of it.

Runs in the thread that watched the worker; the next worker starts meanwhile.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hypocenter import package
from hypocenter.errors import HypoError
from hypocenter.record import bundle as bundles
from hypocenter.record.ring import run_folders as runs_below
from hypocenter.server.worker_life import is_fault
from hypocenter.watch.child import Ended
from hypocenter.watch.collect import collect
from hypocenter.wording import signal_name

#: Bundles that are kept; the oldest goes first.
MAX_BUNDLES = 8
_REPORT_SECONDS = 300.0


class FaultKeeper:
    """Saves bundles below `folder`; None: nothing is saved. `say` tells a person of each."""

    def __init__(
        self, folder: Path | None, say: Callable[[str], None], on_saved: Callable[[], None]
    ) -> None:
        self._folder, self._say, self._on_saved = folder, say, on_saved

    def keep(self, runs: Path, ended: Ended) -> None:
        """Save what a worker left below `runs`, if it died of a fault."""
        if not runs_below(runs):  # it ended before it had anything to run
            return
        self._say(f"the worker {how(ended)}")
        if self._folder is None or not is_fault(ended):
            return
        try:
            bundle = collect(runs, ended)
            if bundle is None:
                return
            name = time.strftime("fault-%Y%m%d-%H%M%S")
            folder = self._free_name(self._folder, name)
            bundles.save(bundle, folder)
        except (OSError, HypoError) as error:
            self._say(f"its bundle could not be saved: {error}")
            return
        self._on_saved()
        self._say(f"its bundle is {folder}; `hypo doctor {folder}` explains it")
        self._write_report(folder)
        self._remove_oldest(self._folder)

    def _free_name(self, base: Path, name: str) -> Path:
        number, folder = 1, base / name
        while folder.exists():
            number += 1
            folder = base / f"{name}-{number}"
        return folder

    def _write_report(self, folder: Path) -> None:
        command = ["nice", "-n", "19", *package.module_command(package.NAME)]
        try:
            with open(folder / "report.md", "wb") as file:
                subprocess.run(
                    [*command, "doctor", str(folder), "--markdown"],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.DEVNULL,
                    timeout=_REPORT_SECONDS,
                    check=False,  # it exits with 3 for a fault
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._say(f"{folder}: no report was written: {error}")

    def _remove_oldest(self, base: Path) -> None:
        found = sorted(base.glob("fault-*"), key=lambda path: path.stat().st_mtime)
        for folder in found[:-MAX_BUNDLES]:
            shutil.rmtree(folder, ignore_errors=True)


def how(ended: Ended) -> str:
    """How it ended, in a few words."""
    if ended.hung_seconds is not None:
        return f"was ended, since a step ran for {ended.hung_seconds:.0f} seconds"
    if ended.signal is not None:
        return f"was ended by {signal_name(ended.signal)}"
    return f"ended with exit code {ended.exit_code}"
