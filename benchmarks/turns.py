"""Work of many items in as many turns as it takes: a turn goes on where the last one ended.

Each item makes a row of a file of JSON lines. Knows nothing of what is done.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]

#: What the processes of a pool inherit: the items, what is done with each, and until when.
_ITEMS: dict[str, Any] = {}
_WORK: list[Callable[[Any], Row]] = []
_UNTIL = [0.0]


def parser_of_turns(text: str) -> argparse.ArgumentParser:
    """The options of a turn."""
    parser = argparse.ArgumentParser(description=text.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "turns")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=150.0, help="no new item after so many")
    parser.add_argument("--only", default="", help="groups, between commas")
    return parser


def rows_of_turns(
    file: Path, items: Mapping[str, Any], work: Callable[[Any], Row], jobs: int, until: float
) -> list[Row]:
    """The rows of this turn and of those before it; `until` is a time of `time.monotonic`."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rows = [row for row in rows if row["key"] in items]
    done = {row["key"] for row in rows}
    with file.open("a") as out:
        left = {key: item for key, item in items.items() if key not in done}
        for row in _in_parallel(work, left, jobs, until):
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
    return rows


def _in_parallel(
    work: Callable[[Any], Row], items: Mapping[str, Any], jobs: int, until: float
) -> Iterator[Row]:
    """What `work` makes of the items, as each is ready."""
    _ITEMS.clear()
    _ITEMS.update(items)
    _WORK[:], _UNTIL[:] = [work], [until]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from filter(None, pool.imap_unordered(_do, items))


def _do(key: str) -> Row | None:
    if time.monotonic() > _UNTIL[0]:
        return None
    started = time.process_time()
    row = _WORK[0](_ITEMS[key])
    return {"key": key, **row, "seconds": round(time.process_time() - started, 3)}
