"""The block pool: its tables against a plain model of them, and the check of its own invariants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from hypocenter.engine.kv_cache import KVCache
from hypocenter.errors import IntegrityError, OutOfBlocks

NUM_BLOCKS = 13
BLOCK_SIZE = 4


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of append, retrieve and remove; each slot holds what was last written there."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(NUM_BLOCKS, BLOCK_SIZE)
        self.slots = np.full((NUM_BLOCKS * BLOCK_SIZE, 2), -1)
        self.lengths: dict[int, int] = {}
        self.num_made = 0

    def num_blocks_of(self, num_tokens: int) -> int:
        return (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE

    def num_used(self) -> int:
        return sum(map(self.num_blocks_of, self.lengths.values()))

    @rule(target=requests)
    def make(self) -> int:
        self.num_made += 1
        return self.num_made

    @rule(request=requests, num_tokens=st.integers(1, 30))
    def append(self, request: int, num_tokens: int) -> None:
        before = self.lengths.get(request, 0)
        after = before + num_tokens
        needed = self.num_blocks_of(after) - self.num_blocks_of(before)
        free = NUM_BLOCKS - self.num_used()
        assert self.cache.num_blocks_to_append(request, num_tokens) == needed
        assert (self.cache.num_tokens_that_fit(request) >= num_tokens) == (needed <= free)
        if needed > free:
            with pytest.raises(OutOfBlocks, match=f"{needed} blocks needed, but {free} of 13"):
                self.cache.append(request, num_tokens)
            return
        self.cache.append(request, num_tokens)
        placement = self.cache.retrieve(request, before, after)
        assert len(placement.block_table) == self.num_blocks_of(after)
        assert len(set(placement.slots)) == num_tokens
        self.slots[placement.slots, 0] = request
        self.slots[placement.slots, 1] = range(before, after)
        self.lengths[request] = after

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def retrieve(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.lengths)))
        start = data.draw(st.integers(0, self.lengths[request]))
        stop = data.draw(st.integers(start, self.lengths[request]))
        positions = np.arange(start, stop)
        table, slots = self.cache.retrieve(request, start, stop)
        expected = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        assert slots == expected.tolist()
        assert (self.slots[slots, 0] == request).all()
        assert (self.slots[slots, 1] == positions).all()

    @rule(target=requests, request=consumes(requests), again=st.booleans())
    def remove(self, request: int, again: bool) -> object:
        self.cache.remove(request)
        self.lengths.pop(request, None)
        return request if again else multiple()

    @invariant()
    def whole(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_free_blocks == NUM_BLOCKS - self.num_used()
        assert self.cache.owners() == set(self.lengths)
        for request, length in self.lengths.items():
            assert self.cache.num_tokens(request) == length


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_append_that_fails_changes_nothing() -> None:
    cache = KVCache(3, 4)
    cache.append(1, 5)
    with pytest.raises(OutOfBlocks) as caught:
        cache.append(1, 8)
    assert (caught.value.num_needed, caught.value.num_free, caught.value.num_blocks) == (2, 1, 3)
    assert cache.num_tokens(1) == 5
    with pytest.raises(OutOfBlocks):
        cache.append(2, 5)
    assert cache.owners() == {1}
    cache.check_integrity()


def test_low_blocks_are_taken_first_and_a_table_stays_as_it_grows() -> None:
    cache = KVCache(4, 4)
    cache.append(1, 6)
    first = cache.retrieve(1, 0, 6)
    assert first.block_table.tolist() == [0, 1]
    assert first.slots == [0, 1, 2, 3, 4, 5]
    cache.append(2, 1)
    cache.append(1, 3)
    grown = cache.retrieve(1, 6, 9)
    assert grown.block_table.tolist() == [0, 1, 3]
    assert grown.slots == [6, 7, 12]
    for start, stop in ((8, 10), (-1, 2), (2, 1)):
        with pytest.raises(AssertionError):
            cache.retrieve(1, start, stop)


def _steal(cache: KVCache) -> None:
    cache._tables[2].block_ids[0] = cache._tables[1].block_ids[0]


def _free_twice(cache: KVCache) -> None:
    cache._free.append(cache._free[0])


def _free_in_use(cache: KVCache) -> None:
    cache._free[0] = cache._tables[1].block_ids[0]


def _lose(cache: KVCache) -> None:
    cache._free.pop()


def _invent(cache: KVCache) -> None:
    cache._free.append(99)


def _miscount(cache: KVCache) -> None:
    cache._tables[1].num_tokens = 9


def _empty_table(cache: KVCache) -> None:
    cache._tables[1].num_tokens = 0
    cache._free += cache._tables[1].block_ids
    cache._tables[1].block_ids.clear()


def _misattribute(cache: KVCache) -> None:
    cache._block_to_owner[0] = 2


def _tell_others(cache: KVCache) -> None:
    cache._tables[1].array = np.array([4, 4], np.int32)


def _own_free(cache: KVCache) -> None:
    cache._block_to_owner[cache._free[0]] = 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_steal, "block 0 is in the table of request 1, and in the table of request 2"),
        (_free_twice, "block 5 is in the free list, and in the free list"),
        (_free_in_use, "block 0 is in the free list, and in the table of request 1"),
        (_lose, "block 3 is neither free nor in a table; 2 free and 3 owned are not all 6"),
        (_invent, "the free list names block 99, but there are 6"),
        (_miscount, "request 1 has 2 blocks for 9 tokens, but needs 3"),
        (_empty_table, "request 1 has 0 blocks for 0 tokens, but needs 0"),
        (_misattribute, "block 0 is in the table of request 1, but its owner is 2"),
        (_tell_others, "request 1 has blocks [0, 1], but others are told (0, 1) and [4, 4]"),
        (_own_free, "block 5 is free, but its owner is request 2"),
    ],
)
def test_every_contradiction_is_named(damage: Callable[[KVCache], None], message: str) -> None:
    cache = KVCache(6, 4)
    cache.append(1, 5)
    cache.append(2, 4)
    cache.check_integrity()
    damage(cache)
    with pytest.raises(IntegrityError) as caught:
        cache.check_integrity()
    assert message in str(caught.value)
