"""Takes each rung of the doctor away in turn, and says how many faults are named no more.

Of a fault only those rungs are taken away that confirmed something of it: what the others say of it
is nothing, or that it is something else. All of each would be hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from faults.catalogue import catalogue
from faults.row import Case, Row
from hypocenter.doctor.doctor import LADDER

#: Rungs that no fault here can need, and the tests that do: real dumps, products on a GPU, programs
#: of others under a guard or a sanitizer, and several processes.
TESTED_ELSEWHERE = {
    "core dump": "doctor/test_gpu_stop.py",
    "guarded run": "foreign/test_again.py",
    "sanitizer": "foreign/test_again.py",
    "adopted blocks": "doctor/test_adopted_blocks.py",
    "compiled code": "doctor/test_compiled_code.py",
    "draws": "doctor/test_draws.py",
    "short operands": "doctor/test_short_operands.py",
    "stale addresses": "doctor/test_stale_addresses.py",
    "launch log": "doctor/test_logged_launch.py",
    "lost rank": "engine/test_rank_faults.py",
}


def named_without(
    rows: Sequence[Row], cases: Sequence[Case], work: Path, num_jobs: int
) -> Mapping[str, Sequence[str]]:
    """By each rung the faults that are named rightly from their bundle with it alone missing.

    Of those that are named rightly with all of them; "" is no rung at all.
    """
    right = {row.key for row in rows if row.is_as_wanted and row.says}
    left = [case.key for case in cases if case.key in right]
    with ProcessPoolExecutor(num_jobs) as pool:
        found = dict(zip(left, pool.map(partial(_by_rung, work), left), strict=True))
    return {rung: [name for name in left if found[name].get(rung)] for rung in ("", *LADDER)}


def _by_rung(work: Path, key: str) -> Mapping[str, bool]:
    case = next(case for case in catalogue() if case.key == key)
    folder = work / case.collection
    whole = case.named_again(folder, ())
    if whole is None or not whole.is_right:
        return {}
    found = dict.fromkeys(("", *LADDER), True)
    for rung in whole.rungs & found.keys():
        without = case.named_again(folder, (rung,))
        found[rung] = without is not None and without.is_right
    return found


def lines_of(named: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A line for all rungs, and one for each that is left out."""
    whole = named[""]
    yield f"all rungs: {len(whole)} named"
    for rung in LADDER:
        lost = [name for name in whole if name not in named[rung]]
        yield f"without {rung}: {len(lost)} fewer{': ' if lost else ''}{', '.join(lost)}"


def idle_rungs(named: Mapping[str, Sequence[str]]) -> list[str]:
    """Those without which nothing is lost, and that nothing else tests."""
    return [
        rung
        for rung in LADDER
        if rung not in TESTED_ELSEWHERE and set(named[""]) <= set(named[rung])
    ]
