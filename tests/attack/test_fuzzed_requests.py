"""Fuzzed requests over all routes: no 5xx, no hang, no traceback, no dead worker, nothing open."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from attack.arena import BOSS, MALLORY, Arena, Row, ended, run_program
from attack.attacks import KEYS
from attack.limits import FUZZ_PARTS, FUZZ_REQUESTS
from attack.process import TreeMemory

_NUM_PROCESSES = 4
_SEED = "1"
_SECONDS = 280.0
_PART = FUZZ_REQUESTS // FUZZ_PARTS
#: Of all answers; less would mean that hardly any request is right enough to be worked on.
_RIGHT_SHARE = 0.1


@pytest.mark.parametrize("part", range(FUZZ_PARTS))
def test_fuzzed_requests(
    arenas: Callable[[str], Arena], note: Callable[[Row], None], part: int
) -> None:
    arena = arenas(KEYS)
    before = arena.before()
    row = Row(f"{_PART} fuzzed requests, part {part + 1} of {FUZZ_PARTS}")
    share = _PART // _NUM_PROCESSES
    with TreeMemory(arena.pid) as memory:
        words = (str(arena.served.port), MALLORY, BOSS, _SEED)
        fuzzers = [
            run_program("attack.fuzzer", *words, str(part * _PART + number * share), str(share))
            for number in range(_NUM_PROCESSES)
        ]
        answers = [ended(fuzzer, _SECONDS) for fuzzer in fuzzers]
    statuses, slowest = Counter[str](), 0.0
    for answer in answers:
        told: Any = json.loads(answer) if answer else {"wrong": ["a fuzzer did not end"]}
        row.problems += told["wrong"]
        statuses.update(told.get("statuses", {}))
        slowest = max(slowest, told.get("slowest", 0.0))
    row.seen = dict(statuses) | {"slowest ms": round(slowest * 1000)}
    if sum(statuses.values()) < _PART:
        row.problems.append(f"only {sum(statuses.values())} requests were sent")
    if statuses["200"] < _RIGHT_SHARE * _PART:
        row.problems.append(f"only {statuses['200']} were answered with 200")
    row.tree_bytes = memory.peak
    arena.judge_after(row, before)
    note(row)
