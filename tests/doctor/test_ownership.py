"""Whose blocks a step names: what a hostile record costs; verdicts are in test_doctor.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from recorded.bundles import Run, inputs, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.rungs.engine import ownership
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


def _steps(*steps: tuple[RequestRecord, ...]) -> list[Stepped]:
    return [
        Stepped(seq=10 * number, step=number, plan=1, requests=requests)
        for number, requests in enumerate(steps, 1)
    ]


def test_a_block_that_was_given_away_and_is_written_by_its_old_owner_is_told() -> None:
    old, new = _having(0, (812,), id=7), _having(0, (812,), id=9)
    found = ownership._taken_from_owners(_steps((old,), (new,), (_having(1, (812,), id=7),)))
    assert list(found) == [30]
    assert found[30].text == (
        "block 812 was written for request 7 in step 3, after it had been given to request 9 in "
        "step 2"
    )
    assert found[30].cause is Cause.FOREIGN_BLOCK


def test_a_block_that_changes_hands_by_right_is_none_of_another() -> None:
    for steps in (
        # The first ended; the first was put back, and got the same block when the other ended.
        ((_having(0, (3,), id=1),), (_having(0, (3,), id=2),), (_having(1, (3,), id=2),)),
        ((_having(0, (3,), id=1),), (_having(0, (3,), id=2),), (_having(0, (3,), id=1),)),
        # The second reads what the first keeps, which goes on.
        ((_having(0, (3,), id=1),), (_having(16, (3, 4), 1, id=2),), (_having(1, (3,), id=1),)),
    ):
        assert ownership._taken_from_owners(_steps(*steps)) == {}


def test_the_step_of_a_block_that_was_given_away_is_proven_with_a_block_of_its_own() -> None:
    run = Run()
    tensors_of_decoder(run)
    names = ("k_cache", "v_cache", "block_tables", "sequence_rows", "positions", "counts")
    plan = run.plan(run.launch("attention", {"q": "q", **{name: name for name in names}}))
    for request in (_having(0, (2,), id=7), _having(0, (2,), id=9), _having(1, (2,), id=7)):
        held = inputs(
            block_tables=[[2, 0], [0, 0]], sequence_rows=[0, 0, 0],
            positions=[request.first_position, 0, 0], counts=[1, 1],
        )  # fmt: skip
        one = msgspec.structs.replace(request, row=0)
        run.run(plan, {name: held[name] for name in names if name in held}, (one,))
    [root, *_] = diagnose(run.bundle(), without=("replay",)).roots
    assert (root.cause, root.argument) == (Cause.FOREIGN_BLOCK, "block_tables")
    assert "after it had been given to request 9 in step 2" in root.sentence
    assert "no block has two owners" in root.proof.green
