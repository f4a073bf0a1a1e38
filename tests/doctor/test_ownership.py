"""Whose blocks a step names: what a hostile record costs; verdicts are in test_doctor.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from hypocenter.doctor.rungs import ownership
from hypocenter.record.events import RequestRecord, Stepped

#: The seconds of a processor, where one step of a million blocks took seven.
MAX_SECONDS = 2.0


def _requests(num_requests: int, num_blocks: int) -> tuple[RequestRecord, ...]:
    """Requests of which each says that the same blocks are its own."""
    blocks = tuple(range(num_blocks))
    return tuple(
        RequestRecord(id=row, row=row, first_position=0, num_tokens=1, blocks=blocks)
        for row in range(num_requests)
    )


def test_a_million_blocks_with_two_owners_are_told_once() -> None:
    event = Stepped(seq=1, step=1, plan=1, requests=_requests(500, 2000))
    index = SimpleNamespace(launches_of=lambda event: [])
    case: Any = SimpleNamespace(steps=[event], index=index, is_foreign=False, launches=())
    began = time.process_time()
    ownership.ownership(case)
    assert time.process_time() - began < MAX_SECONDS


def test_whose_a_block_is_takes_no_search_for_each_token() -> None:
    requests = tuple(
        RequestRecord(id=row, row=row, first_position=0, num_tokens=1, blocks=(10**6 + row,))
        for row in range(4000)
    )
    use: Any = None
    paged = ownership._Paged(use, 1, {"slots": np.full(4000, 5)})
    began = time.process_time()
    wrong = list(ownership._wrong_slots(paged, requests))
    assert time.process_time() - began < MAX_SECONDS / 4
    assert len(wrong) == 4000
