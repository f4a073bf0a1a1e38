"""Planted faults on a real GPU, as a section of `scripts/gpu`: those victims that it can have.

`python -m faults --platform card` has the programs as well, and takes longer.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from faults.row import Platform, Row
from faults.table import counts_of, line_of, table
from faults.victim import victims
from faults.victim_case import VictimCase

NUM_JOBS, FEWEST = 10, 10
# Where runs are recorded by themselves; a GPU cannot write to a file on a disk.
_SHARED = "/dev/shm" if Path("/dev/shm").is_dir() else None


def run(device: str) -> dict[str, Any]:
    """All of them, several at a time; wants every fault named rightly, and no finding on a twin."""
    cases = [VictimCase(victim) for victim in victims() if victim.on_card]
    with (
        tempfile.TemporaryDirectory(prefix="faults-", dir=_SHARED) as folder,
        ThreadPoolExecutor(NUM_JOBS) as pool,
    ):
        runs = pool.map(lambda case: case.run(Platform.CARD, Path(folder)), cases)
        return summary([row for rows in runs for row in rows])


def summary(rows: list[Row]) -> dict[str, Any]:
    """Counts, rows and table; `ok` when enough ran and all is as wanted."""
    counts = counts_of(rows)
    return {
        "ok": counts["faults"] >= FEWEST and all(row.is_as_wanted for row in rows),
        "counts": dict(counts),
        "rows": msgspec.to_builtins(rows),
        "table": [*map(line_of, rows), *table(rows)],
    }
