"""Small mistakes in what moves memory and lanes of AMD's machine code: which do the cases see?

The mistakes and cases are those of tests/device/amd/test_changed_machine.py. A mistake is tried
with the cases that run its lines. A turn goes on where the last one of the same --folder ended, and
prints the figures of all turns.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [
    *(str(ROOT / name) for name in ("benchmarks", "tests/device/amd", "tests/support", "src"))
]

from machine.amd_changed import Case, Change, cases_by_block, is_found  # noqa: E402
from test_changed_machine import GROUPS, cases_of, changes_in  # noqa: E402
from turns import Row, parser_of_turns, rows_of_turns  # noqa: E402


def main() -> int:
    given = parser_of_turns(__doc__ or "").parse_args()
    until = time.monotonic() + given.seconds
    given.folder.mkdir(parents=True, exist_ok=True)
    items = {
        f"{group}: {change.number} {change}": (group, change)
        for group in (given.only.split(",") if given.only else GROUPS)
        for change in changes_in(group)
    }
    for group in {group for group, _ in items.values()}:
        _cases(group)  # once, before there are processes that inherit them
    print(f"cases are known after {given.seconds - (until - time.monotonic()):.0f} s")
    rows = rows_of_turns(given.folder / "changes.jsonl", items, _try, given.jobs, until)
    figures = {}
    for group in dict.fromkeys(group for group, _ in items.values()):
        tried = [row for row in rows if row["group"] == group]
        num_seen = sum(row["seen"] for row in tried)
        lost = sorted(f"{row['key']} ({row['cases']} cases)" for row in tried if not row["seen"])
        num = sum(of == group for of, _ in items.values())
        figures[group] = {"changes": num, "tried": len(tried), "seen": num_seen, "lost": lost}
        print(f"{group}: {num_seen} of {len(tried)} seen, {num} in all")
        print("".join(f"    {text}\n" for text in lost), end="")
    (given.folder / "changes.json").write_text(json.dumps(figures, indent=1))
    return 0


@cache
def _cases(group: str) -> tuple[list[Case], dict[int, set[Case]]]:
    """The cases of a group, and those that run each block of its functions."""
    module, _, names = GROUPS[group]
    cases = list(cases_of(*names))
    return cases, cases_by_block(module, cases)


def _try(item: tuple[str, Change]) -> Row:
    group, change = item
    cases, by_block = _cases(group)
    reach = by_block.get(change.block, set())
    return {"group": group, "seen": is_found(change, cases, reach, 10.0), "cases": len(reach)}


if __name__ == "__main__":
    sys.exit(main())
