"""The block pool: its tables against a plain model of them, and the check of its own invariants.

The machine gives each request one of few texts, so that many begin alike. It writes what a block
should hold where a runner would, and reads it back through every table.
"""

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

from hypocenter.base.errors import IntegrityError, OutOfBlocks
from hypocenter.engine.kv_cache import BlockDigests, KVCache

NUM_BLOCKS = 13
BLOCK_SIZE = 4


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of the pool's calls; each slot holds what its reader's text has there."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(NUM_BLOCKS, BLOCK_SIZE)
        #: Of each slot the part of a text that its numbers depend on.
        self.slots: list[tuple[int, ...]] = [()] * (NUM_BLOCKS * BLOCK_SIZE)
        self.lengths: dict[int, int] = {}
        self.texts: dict[int, list[int]] = {}
        self.digests: dict[int, BlockDigests] = {}
        self.num_made = 0

    def num_blocks_of(self, num_tokens: int) -> int:
        return (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE

    def num_used(self) -> int:
        return len({block for request in self.lengths for block in self.cache.blocks(request)})

    @rule(target=requests, common=st.integers(0, 40), kind=st.integers(1, 2))
    def make(self, common: int, kind: int) -> int:
        self.num_made += 1
        # Alike up to `common`, and then like no other.
        text = [kind] * common + [100 + self.num_made] * (200 - common)
        self.texts[self.num_made] = text
        self.digests[self.num_made] = BlockDigests(BLOCK_SIZE)
        return self.num_made

    @rule(request=requests, num_blocks=st.integers(1, 10))
    def adopt(self, request: int, num_blocks: int) -> None:
        if request in self.lengths:
            return
        found = self.cache.find(self.digests[request].first(num_blocks, self.texts[request]))
        assert len(found) <= num_blocks
        free = self.cache.num_free_blocks
        num_unread = self.cache.num_unread(found)
        num_tokens = self.cache.adopt(request, found)
        assert num_tokens == len(found) * BLOCK_SIZE
        assert self.cache.num_adopted(request) == len(found)
        assert self.cache.num_free_blocks == free - num_unread
        if found:
            self.lengths[request] = num_tokens

    @rule(request=requests, num_tokens=st.integers(1, 30))
    def append(self, request: int, num_tokens: int) -> None:
        before = self.lengths.get(request, 0)
        after = before + num_tokens
        if after > 200:
            return
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
        for position, slot in enumerate(placement.slots, before):
            self.slots[slot] = tuple(self.texts[request][: position + 1])
        self.lengths[request] = after

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.lengths)))
        num_blocks = data.draw(st.integers(0, self.lengths[request] // BLOCK_SIZE))
        digests = self.digests[request].first(num_blocks, self.texts[request])
        self.cache.keep(request, digests)
        if request not in self.forgotten():
            assert len(self.cache.find(digests)) == num_blocks

    def forgotten(self) -> set[int]:
        """Requests that read a block which nobody else is given any more."""
        return {
            request
            for request in self.lengths
            for number, digest in enumerate(self.cache.digests(request))
            if digest is not None
            and self.cache.find([digest]) != [self.cache.blocks(request)[number]]
        }

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

    @rule(target=requests, request=consumes(requests), again=st.booleans(), forget=st.booleans())
    def remove(self, request: int, again: bool, forget: bool) -> object:
        digests = self.cache.digests(request)
        self.cache.remove(request, forget=forget)
        if forget:
            assert self.cache.find([d for d in digests[:1] if d]) == []
        self.lengths.pop(request, None)
        return request if again else multiple()

    @invariant()
    def whole(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_free_blocks == NUM_BLOCKS - self.num_used()
        assert self.cache.owners() == set(self.lengths)
        for request, length in self.lengths.items():
            assert self.cache.num_tokens(request) == length
            for position, slot in enumerate(self.cache.retrieve(request, 0, length).slots):
                assert self.slots[slot] == tuple(self.texts[request][: position + 1])


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
    cache._blank.append(cache._blank[0])


def _free_in_use(cache: KVCache) -> None:
    cache._blank[0] = cache._tables[1].block_ids[0]


def _lose(cache: KVCache) -> None:
    cache._blank.pop()


def _invent(cache: KVCache) -> None:
    cache._blank.append(99)


def _miscount(cache: KVCache) -> None:
    cache._tables[1].num_tokens = 9


def _empty_table(cache: KVCache) -> None:
    cache._tables[1].num_tokens = 0
    cache._blank += cache._tables[1].block_ids
    cache._tables[1].block_ids.clear()


def _misattribute(cache: KVCache) -> None:
    cache._blocks[0].owner = 2


def _tell_others(cache: KVCache) -> None:
    cache._tables[1].array = np.array([4, 4], np.int32)


def _own_free(cache: KVCache) -> None:
    cache._blocks[cache._blank[0]].owner = 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_steal, "block 0 is in the table of request 1, and in the table of request 2"),
        (_free_twice, "block 5 is in the free list, and in the free list"),
        (_free_in_use, "block 0 is in the free list, and in the table of request 1"),
        (_lose, "block 3 is neither free nor in a table; 2 free and 3 used are not all 6"),
        (_invent, "the free list names block 99, but there are 6"),
        (_miscount, "request 1 has 2 blocks for 9 tokens, but needs 3"),
        (_empty_table, "request 1 has 0 blocks for 0 tokens, but needs 0"),
        (_misattribute, "block 0 is in the table of request 1 at 0, but its owner is request 2"),
        (_tell_others, "request 1 has blocks [0, 1], but steps hold (0, 1) and [4, 4]"),
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


def kept(cache: KVCache, request_id: int, token_ids: list[int], num_blocks: int) -> list[bytes]:
    """Append the tokens to a new request, and keep so many of its blocks."""
    digests = BlockDigests(4).first(num_blocks, token_ids)
    cache.append(request_id, len(token_ids))
    cache.keep(request_id, digests)
    return digests


def test_what_was_read_longest_ago_goes_first_and_a_prefix_after_what_follows_it() -> None:
    cache = KVCache(6, 4)
    first = kept(cache, 1, [1] * 8, 2)
    second = kept(cache, 2, [2] * 8, 2)
    cache.remove(1)
    cache.remove(2)
    assert cache.adopt(3, cache.find(first)) == 8
    cache.remove(3)  # so that the first was read last
    cache.append(4, 8)  # the two blank blocks
    assert (len(cache.find(first)), len(cache.find(second))) == (2, 2)
    cache.append(4, 4)
    assert (len(cache.find(first)), len(cache.find(second))) == (2, 1)
    cache.append(4, 8)
    assert (len(cache.find(first)), len(cache.find(second))) == (1, 0)
    cache.check_integrity()


def test_of_two_copies_of_a_prefix_one_is_kept_and_both_read_it() -> None:
    cache = KVCache(6, 4)
    digests = kept(cache, 1, [1] * 8, 2)
    kept(cache, 2, [1] * 8, 2)
    assert cache.find(digests) == [0, 1]
    assert (cache.digests(2), cache.blocks(2)) == (digests, (0, 1))
    assert (cache.num_adopted(1), cache.num_adopted(2)) == (0, 2)
    assert cache.num_free_blocks == 4
    cache.check_integrity()
    # What the other still reads is not taken for want of room.
    cache.remove(1)
    cache.append(3, 16)
    assert cache.find(digests) == [0, 1]
    cache.check_integrity()
    cache.remove(3)
    cache.remove(2)
    assert (cache.num_free_blocks, cache.num_kept_blocks) == (6, 2)
    cache.check_integrity()


def test_behind_a_block_of_its_own_a_copy_stays_its_own() -> None:
    """Those that were adopted are always the first ones, which a step's record relies on."""
    cache = KVCache(6, 4)
    digests = kept(cache, 1, [1] * 8, 2)
    cache.append(2, 8)
    cache.remove(1)
    cache.append(3, 12)  # takes the second block of the first request
    cache.remove(3)
    assert len(cache.find(digests)) == 1
    cache.keep(2, digests)
    assert cache.num_adopted(2) == 1
    cache.check_integrity()
    assert len(cache.find(digests)) == 2
    kept(cache, 4, [1] * 8, 2)
    cache.check_integrity()


def test_what_is_forgotten_is_found_by_nobody_and_freed_when_the_last_reader_goes() -> None:
    cache = KVCache(6, 4)
    digests = kept(cache, 1, [1] * 8, 2)
    cache.adopt(2, cache.find(digests[:1]))
    cache.remove(1, forget=True)
    assert cache.find(digests) == []
    cache.check_integrity()
    assert cache.num_free_blocks == 5
    again = kept(cache, 3, [1] * 8, 2)
    assert cache.find(again) != [0, 1]
    cache.remove(2)
    assert cache.num_free_blocks == 4
    cache.check_integrity()


def test_digests_tell_texts_salts_and_places_apart() -> None:
    ids = [1, 2, 3, 4] * 3
    plain = BlockDigests(4).first(3, ids)
    assert len(set(plain)) == 3  # the same tokens, after other ones
    assert BlockDigests(4).first(2, ids) == plain[:2]
    assert not set(plain) & set(BlockDigests(4, "salt").first(3, ids))
    assert not set(plain) & set(BlockDigests(2).first(6, ids))
    growing = BlockDigests(4)
    assert [*growing.first(1, ids[:5]), *growing.first(3, ids)[1:]] == plain


def _count_wrongly(cache: KVCache) -> None:
    cache._blocks[0].num_users = 2


def _find_elsewhere(cache: KVCache) -> None:
    cache._kept[next(iter(cache._kept))] = 1


def _hide(cache: KVCache) -> None:
    cache._kept.popitem()


def _own_kept(cache: KVCache) -> None:
    cache._blocks[0].owner = 1


def _write_to_kept(cache: KVCache) -> None:
    cache._tables[2].num_offered = cache._tables[2].num_adopted = 0


def _adopt_own(cache: KVCache) -> None:
    cache._tables[1].num_adopted = 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_count_wrongly, "block 0 counts 2 users, but is in 3 tables"),
        (_find_elsewhere, "block 1 is found under digest"),
        (_hide, "block 3 waits to be read again, but nobody can find it"),
        (_own_kept, "block 0 is in the table of request 1 at 0, but its owner is the cache"),
        (_write_to_kept, "block 0 is in the table of request 2 at 0, but its owner is the cache"),
        (_adopt_own, "request 1 has 1 full blocks, 1 of them offered and 2 adopted"),
    ],
)
def test_contradictions_of_what_is_shared_are_named(
    damage: Callable[[KVCache], None], message: str
) -> None:
    cache = KVCache(6, 4)
    digests = kept(cache, 1, [1] * 6, 1)
    cache.adopt(2, cache.find(digests))
    cache.adopt(3, cache.find(digests))
    cache.append(2, 1)
    kept(cache, 4, [2] * 4, 1)
    cache.remove(4)
    cache.check_integrity()
    damage(cache)
    with pytest.raises(IntegrityError) as caught:
        cache.check_integrity()
    assert message in str(caught.value)
