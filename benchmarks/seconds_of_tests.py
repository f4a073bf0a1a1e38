"""What each test file costs in processor seconds, by tier: renews results/seconds-of-tests.md.

    .venv/bin/python benchmarks/seconds_of_tests.py                 the fast tier
    .venv/bin/python benchmarks/seconds_of_tests.py fast sim tools  more of them

Seconds of the processor, children included, and not of the clock, so that other work on the machine
changes little. Kernels are compiled anew, as in a fresh clone. pytest loads this file as a plugin.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "benchmarks/results/seconds-of-tests.md"
#: Files that cost less than this are summed in one row.
SMALL_SECONDS = 2.0
_DIARIES = "SECONDS_OF_TESTS_DIARIES"


def _seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note what a test costs, with the fixtures that it is the first or the last to need."""
    before = _seconds()
    try:
        return (yield)
    finally:
        with (Path(os.environ[_DIARIES]) / str(os.getpid())).open("a") as diary:
            diary.write(json.dumps([item.nodeid.split("::")[0], _seconds() - before]) + "\n")


def measure(tier: str, folder: Path) -> tuple[dict[str, tuple[float, int]], float, float]:
    """Of each test file (seconds, tests); of the whole run seconds and seconds of the clock."""
    diaries = folder / tier
    diaries.mkdir()
    environ = {
        **os.environ,
        _DIARIES: str(diaries),
        "HYPO_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(ROOT / "benchmarks"),
    }
    before = os.times()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    command += ["-p", "seconds_of_tests", "--tier", tier, "-o", "norecursedirs=.* peer"]
    subprocess.run(command, cwd=ROOT, env=environ, check=True)
    after = os.times()
    costs: dict[str, list[float]] = defaultdict(list)
    for diary in diaries.iterdir():
        for line in diary.read_text().splitlines():
            file, seconds = json.loads(line)
            costs[file].append(seconds)
    whole = after.children_user + after.children_system
    whole -= before.children_user + before.children_system
    sums = {file: (sum(seconds), len(seconds)) for file, seconds in costs.items()}
    return sums, whole, after.elapsed - before.elapsed


def table(tier: str, files: dict[str, tuple[float, int]], whole: float, clock: float) -> str:
    """A section of the document."""
    rows = sorted(files.items(), key=lambda row: -row[1][0])
    large = [row for row in rows if row[1][0] >= SMALL_SECONDS]
    small = [row[1] for row in rows[len(large) :]]
    large.append((f"{len(small)} more files", (sum(s for s, _ in small), sum(n for _, n in small))))
    lines = [f"## {tier}", "", "| file | tests | processor s |", "|---|---:|---:|"]
    lines += [f"| {file} | {number} | {seconds:.1f} |" for file, (seconds, number) in large]
    number = sum(number for _, number in files.values())
    lines += [
        f"| all, with start, collection and workers | {number} | {whole:.0f} |",
        "",
        f"{clock:.0f} s by the clock, which other work on the machine lengthens.",
    ]
    return "\n".join(lines)


def main(tiers: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parts = [table(tier, *measure(tier, Path(folder))) for tier in tiers or ["fast"]]
    day = datetime.date.today().isoformat()
    head = (
        "# What the tests cost\n\n"
        f"On {day}, {os.cpu_count()} cores, with no kernel compiled before; made by "
        "`benchmarks/seconds_of_tests.py`."
    )
    OUTPUT.write_text("\n\n".join([head, *parts]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
