"""What tests and files cost in processor seconds, by tier: renews results/seconds-of-tests.md.

    .venv/bin/python benchmarks/seconds_of_tests.py                 the fast tier
    .venv/bin/python benchmarks/seconds_of_tests.py fast sim tools  more of them
    .venv/bin/python benchmarks/seconds_of_tests.py --of FOLDER     the fast tier, of a run that was
                                                                    told to leave its diaries there

Such a run is that of CI: SECONDS_OF_TESTS_DIARIES=FOLDER .ci/run

`tests/support/costs.py` writes the diaries. Kernels are compiled anew, as in a fresh clone.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "benchmarks/results/seconds-of-tests.md"
#: Files that cost less than this are summed in one row.
SMALL_SECONDS = 2.0
#: So many of the slowest tests are listed one by one.
NUM_SLOWEST = 20
_DIARIES = "SECONDS_OF_TESTS_DIARIES"


def measure(tier: str, folder: Path) -> Path:
    """Run a tier with an empty cache of kernels; where the diaries are."""
    diaries = folder / tier
    diaries.mkdir()
    environ = {
        **os.environ,
        _DIARIES: str(diaries),
        "HYPO_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    command += [f"--tier={tier}", "-o", "norecursedirs=.* peer"]
    subprocess.run(command, cwd=ROOT, env=environ, check=True)
    return diaries


def table(tier: str, diaries: Path) -> str:
    """A section of the document."""
    noted: list[tuple[str, float]] = [
        tuple(json.loads(line))
        for diary in diaries.iterdir()
        for line in diary.read_text().splitlines()
    ]
    costs: dict[str, list[float]] = defaultdict(list)
    for test, seconds in noted:
        costs[test.split("::")[0]].append(seconds)
    rows = sorted(((sum(c), len(c), file) for file, c in costs.items()), reverse=True)
    large = [row for row in rows if row[0] >= SMALL_SECONDS]
    small = rows[len(large) :]
    large += [(sum(r[0] for r in small), sum(r[1] for r in small), f"{len(small)} more files")]
    large += [(sum(r[0] for r in rows), sum(r[1] for r in rows), "all")]
    lines = [f"## {tier}", "", "| file | tests | processor s |", "|---|---:|---:|"]
    lines += [f"| {file} | {number} | {s:.1f} |" for s, number, file in large]
    lines += ["", "| slowest tests | processor s |", "|---|---:|"]
    slowest = sorted((one for one in noted if "::" in one[0]), key=lambda one: -one[1])
    lines += [f"| `{test}` | {s:.1f} |" for test, s in slowest[:NUM_SLOWEST]]
    return "\n".join(lines)


def main(words: list[str]) -> None:
    if words[:1] == ["--of"]:
        parts = [table("fast", Path(words[1]))]
    else:
        with tempfile.TemporaryDirectory() as folder:
            parts = [table(tier, measure(tier, Path(folder))) for tier in words or ["fast"]]
    day = datetime.date.today().isoformat()
    head = (
        "# What the tests cost\n\n"
        f"On {day}, {os.cpu_count()} cores, with no kernel compiled before; made by "
        "`benchmarks/seconds_of_tests.py`."
    )
    OUTPUT.write_text("\n\n".join([head, *parts]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
