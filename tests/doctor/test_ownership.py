"""Whose blocks a step names: what a hostile record costs; verdicts are in test_doctor.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

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


def _having(at: int, blocks: tuple[int, ...], num_adopted: int = 0, id: int = 0) -> RequestRecord:
    return RequestRecord(
        id=id, row=id, first_position=at, num_tokens=1, blocks=blocks, num_adopted=num_adopted
    )


def test_blocks_that_the_cache_shares_have_no_two_owners() -> None:
    filled = _having(40, (3, 4, 5), id=1)
    readers = (_having(35, (3, 4, 7), 2, id=2), _having(20, (3, 8), 1, id=3))
    assert list(ownership._shared_blocks((filled, *readers), 16)) == []
    assert list(ownership._shared_blocks((*readers, filled), 16)) == []
    assert list(ownership._shared_blocks(readers, 16)) == []


@pytest.mark.parametrize(
    ("first", "second", "entry"),
    [
        (_having(40, (3, 4, 5), id=1), _having(35, (3, 4, 7), id=2), 0),  # none adopted it
        (_having(40, (3, 4, 5), id=1), _having(35, (3, 4, 7), 1, id=2), 1),
        (_having(20, (3, 4), id=1), _having(35, (3, 4, 7), 2, id=2), 1),  # the first writes to it
        (_having(40, (3, 4, 5), id=1), _having(35, (4, 9, 7), 1, id=2), 0),  # at another place
    ],
)
def test_a_block_with_two_owners_is_told(
    first: RequestRecord, second: RequestRecord, entry: int
) -> None:
    found = list(ownership._shared_blocks((first, second), 16))
    assert found
    assert found[0].entry == (2, entry)
    assert "belongs to request 1 and to request 2" in found[0].text


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
