"""What test files cost in processor seconds: told at the end of a long run, red far beyond limits.

Seconds of the processor, children included, and not of the clock: other work on the machine changes
them little. `benchmarks/seconds_of_tests.py` has a note of each test written to a diary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from outside.forked import seconds_of_forks

#: What the fast tier may cost on two cores, in processor seconds: all of it, and a file of it.
#: Above what is there (1,000, and 28 of a file; 60 where it alone compiles): processors differ.
MOST_SECONDS = 1400.0
MOST_SECONDS_OF_A_FILE = 80.0
#: A run that cost less is none of a whole tier, and not told of.
TOLD_SECONDS = 200.0
#: So many of the most expensive files are told.
NUM_TOLD = 6
#: The folder that diaries are written to, where somebody wants them.
DIARIES = "SECONDS_OF_TESTS_DIARIES"
#: Stands in a diary for what a process did before its first test: it read all files.
SET_UP = "reading all files, in each process"


def processor_seconds() -> float:
    """What this process took so far, its children that have ended and those that fork."""
    return sum(os.times()[:4]) + seconds_of_forks()


def beyond_limits(costs: Mapping[str, float]) -> list[str]:
    """What costs too much, of files and their processor seconds."""
    found = [
        f"{file} took {seconds:.0f} processor seconds; a file of the fast tier may take "
        f"{MOST_SECONDS_OF_A_FILE:.0f}: make it cheaper, or move cases to a slower tier"
        for file, seconds in costs.items()
        if seconds > MOST_SECONDS_OF_A_FILE and file != SET_UP
    ]
    if (whole := sum(costs.values())) > MOST_SECONDS:
        found.append(
            f"the fast tier took {whole:.0f} processor seconds, and may take {MOST_SECONDS:.0f}"
        )
    return found


class Costs:
    """A pytest plugin: adds up what the files of a run cost, those of its workers with them."""

    def __init__(self, *, is_limited: bool) -> None:
        self.of_files: dict[str, float] = {}
        self._is_limited = is_limited

    def _note(self, what: str, seconds: float) -> None:
        file = what.split("::")[0]
        self.of_files[file] = self.of_files.get(file, 0.0) + seconds
        if folder := os.environ.get(DIARIES):
            with (Path(folder) / str(os.getpid())).open("a") as diary:
                diary.write(json.dumps([what, seconds]) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Note what reading the files has cost; every process of pytest-xdist reads them all."""
        self._note(SET_UP, processor_seconds())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note what a test costs, with the fixtures that it is the first or the last to need."""
        before = processor_seconds()
        try:
            return (yield)
        finally:
            self._note(item.nodeid, processor_seconds() - before)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker of pytest-xdist has told at its end."""
        for file, seconds in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self.of_files[file] = self.of_files.get(file, 0.0) + seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["costs"] = self.of_files
        elif self._is_limited and beyond_limits(self.of_files) and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        whole = sum(self.of_files.values())
        if whole >= TOLD_SECONDS:
            costs = sorted(self.of_files.items(), key=lambda cost: -cost[1])
            most = ", ".join(f"{file} {seconds:.0f}" for file, seconds in costs[:NUM_TOLD])
            terminalreporter.write_line(f"{whole:.0f} processor seconds; most in {most}")
        if self._is_limited:
            for problem in beyond_limits(self.of_files):
                terminalreporter.write_line(f"too expensive: {problem}", red=True)
