"""Which blocks of the KV cache belong to which request; the cached numbers live with the runner.

    append    makes room for the next tokens of a request
    take_back gives up the room of tokens that were tried, and are not the request's
    retrieve  tells where positions of a request lie
    remove    gives the blocks of a request back
    keep      hands full blocks of a request over to the cache, which others may read
    adopt     begins a request with the blocks that the cache keeps of its first tokens
    end_step  what the step computed is settled

Position p of a request lies in slot block_table[p // block_size] * block_size + p % block_size.

A block is blank, or one request's own, or kept by the cache under a digest of the tokens in it and
before it. Only its owner writes to a block; one that is kept is full and never written again, so
that any number of requests may read it. A kept block that nobody reads stays until its room is
needed; the one that was last used longest ago goes first.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hypocenter.base.dtypes import Array, Int32s
from hypocenter.base.errors import IntegrityError, OutOfBlocks
from hypocenter.device.page_watch import PageWatch
from hypocenter.engine.block_archive import BlockArchive
from hypocenter.engine.disk_blocks import DiskBlocks
from hypocenter.engine.host_growth import HostGrowth
from hypocenter.engine.resident_blocks import ResidentBlocks
from hypocenter.engine.state_slots import StateSlots
from hypocenter.record.prefixes import NOBODY
from hypocenter.record.recorder import current


class BlockDigests:
    """The digests of the leading blocks of a sequence of tokens that only grows.

    A digest covers all tokens up to the end of its block, because keys and values depend on all of
    them, and `salt`: sequences of different salts share nothing. So do those of different
    `adapters`, for which these bytes stand. They are BLAKE2b of 32 bytes, so that nobody can make
    two texts with one digest.
    """

    def __init__(self, block_size: int, salt: str = "", adapters: bytes = b"") -> None:
        self._block_size, self.salt, self.adapters = block_size, salt, adapters
        self._digests: list[bytes] = []
        # No salt has the byte 0xff, so none says what another does with adapters.
        behind = b"\xff" + adapters if adapters else b""
        self._before_first = _digest(salt.encode("utf-8", "surrogatepass") + behind)

    def of_long_texts(self) -> BlockDigests:
        """Others for the same tokens: what a model computes of them in a long text is not the
        same (longrope)."""
        others = BlockDigests(self._block_size, self.salt, self.adapters)
        others._before_first = _digest(b"long" + self._before_first)
        return others

    def first(self, num_blocks: int, token_ids: Sequence[int]) -> list[bytes]:
        """The digests of the first `num_blocks` blocks of `token_ids`, which must be that long."""
        size, digests = self._block_size, self._digests
        assert num_blocks * size <= len(token_ids), (num_blocks, size, len(token_ids))
        for number in range(len(digests), num_blocks):
            before = digests[-1] if digests else self._before_first
            ids = token_ids[number * size : (number + 1) * size]
            digests.append(_digest(before + struct.pack(f"<{size}i", *ids)))
        return digests[:num_blocks]


class Placement(NamedTuple):
    """Where tokens lie: `block_table` i32 [num_blocks_of_request], and a slot for each token."""

    block_table: Int32s
    slots: list[int]


@dataclass(slots=True)
class _Block:
    """`owner` may write to it; `digest` is there once it is kept; `num_users` tables name it."""

    owner: int | None = None
    digest: bytes | None = None
    num_users: int = 0


@dataclass(slots=True)
class _Table:
    """The blocks of one request, and how many tokens have room in them.

    `blocks` and `array` are the same as others get it, made once for the many steps in which no
    block is added. The first `num_adopted` blocks came from the cache; the first `num_offered` were
    handed to it, as far as it had not got them already.
    """

    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_adopted: int = 0
    num_offered: int = 0
    blocks: tuple[int, ...] = ()
    array: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))

    def grow(self, block_ids: list[int]) -> None:
        self.block_ids += block_ids
        self.show()

    def show(self) -> None:
        self.blocks = tuple(self.block_ids)
        self.array = np.array(self.block_ids, np.int32)
        self.array.flags.writeable = False


class KVCache:
    """A pool of `num_blocks` blocks of `block_size` tokens each. Not thread-safe.

    What is kept goes to the `archive`, too, and is found there when the cache itself has it no more
    or, in a new process, not yet.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        watch: PageWatch | None = None,
        archive: BlockArchive | None = None,
        states: StateSlots | None = None,
        growth: HostGrowth | None = None,
    ) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._watch, self._archive, self._growth = watch, archive, growth
        #: What tells the process that has these blocks next what is in them, if one will.
        self._resident: ResidentBlocks | None = None
        #: Where blocks outlive the server, if they do.
        self.disk: DiskBlocks | None = None
        #: Of requests with blocks, where layers carry a state.
        self.states = states
        self._blocks = [_Block() for _ in range(num_blocks)]
        # Taken from the end: low blocks first, and those given back last are used again first.
        self._blank = list(range(num_blocks - 1, -1, -1))
        #: So many of them, the first ones, were never taken: they have no memory yet, if it grows.
        self._num_fresh = num_blocks
        #: Kept and read by nobody; the one to go first comes first. A dict for its order.
        self._unread: dict[int, None] = {}
        self._kept: dict[bytes, int] = {}
        self._tables: dict[int, _Table] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `append` may take: the blank ones that there is memory for, and those kept
        that nobody reads."""
        return len(self._blank) - self._num_withheld + len(self._unread)

    @property
    def num_reachable_blocks(self) -> int:
        """Blocks that a request could have if it were alone."""
        return self.num_blocks - self._num_withheld

    @property
    def _num_withheld(self) -> int:
        """Blank blocks that there is no memory for."""
        return self._growth.num_withheld(self._num_fresh) if self._growth is not None else 0

    def look_at_memory(self) -> None:
        """See how many blocks may be written that never were."""
        if self._growth is not None:
            self._growth.look()

    def shortage(self, num_needed: int) -> OutOfBlocks:
        """Why so many blocks more cannot be had: the cache is full, or memory is."""
        if self._growth is not None and self._num_withheld:
            return self._growth.error(num_needed, self.num_free_blocks, self.num_blocks)
        return OutOfBlocks(num_needed, self.num_free_blocks, self.num_blocks)

    @property
    def num_kept_blocks(self) -> int:
        """Blocks that `adopt` may find."""
        return len(self._kept)

    def owners(self) -> set[int]:
        """The ids of all requests that have blocks."""
        return set(self._tables)

    def blocks(self, request_id: int) -> tuple[int, ...]:
        """The blocks of the request, its own and those that it reads, in order of its positions."""
        table = self._tables.get(request_id)
        return table.blocks if table else ()

    def num_adopted(self, request_id: int) -> int:
        """How many of the request's first blocks came from the cache."""
        table = self._tables.get(request_id)
        return table.num_adopted if table else 0

    def num_offered(self, request_id: int) -> int:
        """How many of the request's first blocks came from the cache or were handed to it."""
        table = self._tables.get(request_id)
        return table.num_offered if table else 0

    def num_tokens(self, request_id: int) -> int:
        """Tokens of the request that have room; 0 for a request without blocks."""
        table = self._tables.get(request_id)
        return table.num_tokens if table else 0

    def num_blocks_to_append(self, request_id: int, num_tokens: int) -> int:
        """New blocks that `append` would take from the pool."""
        table = self._tables.get(request_id) or _Table()
        return -(-(table.num_tokens + num_tokens) // self.block_size) - len(table.block_ids)

    def num_tokens_that_fit(self, request_id: int) -> int:
        """The most tokens that `append` can make room for now."""
        table = self._tables.get(request_id) or _Table()
        num_reachable = len(table.block_ids) + self.num_free_blocks
        return num_reachable * self.block_size - table.num_tokens

    def append(self, request_id: int, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens of the request.

        Raises OutOfBlocks, and then has changed nothing.
        """
        assert num_tokens > 0, num_tokens
        num_needed = self.num_blocks_to_append(request_id, num_tokens)
        if num_needed > self.num_free_blocks:
            raise self.shortage(num_needed)
        if self.states is not None and request_id not in self._tables:
            self.states.take(request_id)
        table = self._tables.setdefault(request_id, _Table())
        if num_needed:
            table.grow([self._take_block(request_id) for _ in range(num_needed)])
        table.num_tokens += num_tokens

    def take_back(self, request_id: int, num_tokens: int) -> None:
        """The request has room for its first `num_tokens` tokens only; blocks behind go back.

        They are its own: what is behind its tokens was never kept.
        """
        table = self._tables[request_id]
        num_needed = -(-num_tokens // self.block_size)
        assert table.num_offered <= num_tokens // self.block_size, (table.num_offered, num_tokens)
        table.num_tokens = num_tokens
        if num_needed == len(table.block_ids):
            return
        for block_id in reversed(table.block_ids[num_needed:]):
            self._blocks[block_id] = _Block()
            self._blank.append(block_id)
        del table.block_ids[num_needed:]
        table.show()

    def retrieve(self, request_id: int, start: int, stop: int) -> Placement:
        """The request's block table, and the slots of its positions start .. stop - 1."""
        table, block_size = self._tables[request_id], self.block_size
        assert 0 <= start <= stop <= table.num_tokens, (start, stop, table.num_tokens)
        slots: list[int] = []
        while start < stop:
            block, offset = divmod(start, block_size)
            num_slots = min(stop - start, block_size - offset)
            slot = table.block_ids[block] * block_size + offset
            slots += range(slot, slot + num_slots)
            start += num_slots
        return Placement(table.array, slots)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the leading `digests` that a request may begin with.

        They are kept, and where layers carry a state, one is kept behind the last of them.
        """
        found = self.find_kept(digests)
        if self.states is not None:
            while found and not self.states.has(digests[len(found) - 1]):
                found.pop()
        return found

    def find_kept(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks that are kept of the leading `digests`, up to the first that is not."""
        found: list[int] = []
        taken: list[tuple[int, Array]] = []
        for digest in digests:
            block_id = self._kept.get(digest)
            if block_id is None:
                block_id = self._fetch(digest)
            if block_id is None:
                block_id = self._take_from_disk(digest, found, taken)
            if block_id is None:
                break
            found.append(block_id)
        if taken and self.disk is not None:
            self.disk.fill(taken)
        return found

    def _fetch(self, digest: bytes) -> int | None:
        """Read a block back from the archive, if there is one blank: none is given up for that."""
        if self._archive is None or digest not in self._archive:
            return None
        if len(self._blank) <= self._num_withheld:
            return None
        block_id = self._blank[-1]
        if not self._archive.fetch(digest, block_id):
            return None
        self._take_blank()
        self._keep_unread(digest, block_id, self._archive.made_with(digest))
        return block_id

    def _take_from_disk(
        self, digest: bytes, found: Sequence[int], taken: list[tuple[int, Array]]
    ) -> int | None:
        """A block for one that was read ahead from disk, which is added to `taken`; in the place of
        what nobody reads, if need be, and not of `found`, which the same request begins with."""
        if self.disk is None or (data := self.disk.take(digest)) is None:
            return None
        if (block_id := self._blank_block(found)) is None:
            self.disk.give_back(digest, data)
            return None
        taken.append((block_id, data))
        self._keep_unread(digest, block_id, self.disk.made_with(digest))
        return block_id

    def _blank_block(self, spared: Sequence[int]) -> int | None:
        """A block that is nobody's, if need be one that nobody reads and that is not `spared`."""
        if len(self._blank) <= self._num_withheld:
            mine = set(spared)
            oldest = next((block_id for block_id in self._unread if block_id not in mine), None)
            if oldest is None:
                return None
            self._clear(oldest)
            self._blocks[oldest] = _Block()
            self._blank.append(oldest)
        return self._take_blank()

    def bring_back(self, digests: Sequence[bytes], put: Callable[[int, int], None]) -> int:
        """Keep the leading blocks that were saved before, as far as there is room; `put` fills a
        block with that of a number. Returns how many are kept now."""
        found: list[int] = []
        for number, digest in enumerate(digests):
            block_id = self._kept.get(digest)
            if block_id is None:
                if (block_id := self._blank_block(found)) is None:
                    break
                put(block_id, number)
                self._keep_unread(digest, block_id, {})
            found.append(block_id)
        return len(found)

    def erase(self, digests: Sequence[bytes]) -> int:
        """Keep none of these blocks any longer, but for those that a request reads, nor copies of
        them. Returns how many were kept."""
        num_kept = 0
        for digest in digests:
            block_id = self._kept.get(digest)
            if block_id is not None and block_id in self._unread:
                self._clear(block_id)
                self._blocks[block_id] = _Block()
                self._blank.append(block_id)
                num_kept += 1
            if self._archive is not None:
                self._archive.forget(digest)
            if self.disk is not None:
                self.disk.forget(digest)
        return num_kept

    def _keep_unread(self, digest: bytes, block_id: int, made_with: dict[str, str]) -> None:
        """A block holds what another process computed under that digest."""
        current().record_blocks(NOBODY, (block_id,), made_with=made_with)
        self._blocks[block_id] = _Block(digest=digest)
        self._kept[digest] = block_id
        self._unread[block_id] = None

    def inherit(self, resident: ResidentBlocks) -> None:
        """Keep what the process before left in these blocks, of which none is in use yet."""
        assert self.num_free_blocks == self.num_blocks, "requests have blocks already"
        assert not self._kept, "blocks are kept already"
        self._resident = resident
        for digest, block_id in resident.found.items():
            self._blocks[block_id] = _Block(digest=digest)
            self._kept[digest] = block_id
            self._unread[block_id] = None
        self._blank = [block_id for block_id in self._blank if block_id not in self._unread]
        self._num_fresh = len(self._blank)
        if self._unread:
            current().record_blocks(NOBODY, tuple(self._unread), made_with=resident.made_with)

    @property
    def settings(self) -> str:
        """The settings that blocks depend on which other processes may read; empty where none
        do."""
        left = self._archive or self._resident or self.disk
        return left.settings if left is not None else ""

    def num_unread(self, block_ids: Sequence[int]) -> int:
        """How many of these kept blocks are free until they are adopted."""
        return sum(block_id in self._unread for block_id in block_ids)

    def adopt(self, request_id: int, block_ids: Sequence[int]) -> int:
        """Begin a request with blocks that `find` has found; returns how many tokens they hold."""
        assert request_id not in self._tables, request_id
        if not block_ids:
            return 0
        if self.states is not None:
            self.states.take(request_id, self._blocks[block_ids[-1]].digest)
        for block_id in block_ids:
            self._read(block_id)
        num_blocks, num_tokens = len(block_ids), len(block_ids) * self.block_size
        table = _Table(num_tokens=num_tokens, num_adopted=num_blocks, num_offered=num_blocks)
        table.grow(list(block_ids))
        self._tables[request_id] = table
        return num_tokens

    def keep(self, request_id: int, digests: Sequence[bytes]) -> None:
        """Keep the request's leading blocks, one for each digest, for others to read.

        They must be full, and computed. Where a prefix is kept already, the request reads that from
        now on and gives its own copy back: two that ran side by side then need the room of one, and
        what they share is in use for as long as either runs.
        """
        table = self._tables[request_id]
        assert len(digests) * self.block_size <= table.num_tokens, (len(digests), table.num_tokens)
        for number in range(table.num_offered, len(digests)):
            digest, block_id = digests[number], table.block_ids[number]
            kept_id = self._kept.get(digest)
            if kept_id is None:
                block = self._blocks[block_id]
                block.owner, block.digest = None, digest
                self._kept[digest] = block_id
                if self._watch is not None:
                    self._watch.note_kept(block_id, request_id)
                if self._archive is not None and not self._num_withheld:
                    self._archive.put(digest, block_id)
                if self._resident is not None:
                    self._resident.put(block_id, digest)
                if self.disk is not None:
                    self.disk.put(digest, block_id)
            elif number == table.num_adopted:  # behind a block of its own a copy stays its own, too
                self._blocks[block_id] = _Block()
                self._blank.append(block_id)
                self._read(kept_id)
                table.block_ids[number] = kept_id
                table.num_adopted += 1
                table.show()
        table.num_offered = max(table.num_offered, len(digests))
        if self.states is not None:
            self.states.settle(request_id, digests, self.block_size)

    def remove(self, request_id: int, *, forget: bool = False) -> None:
        """Give all blocks of the request back; a request without blocks is none the worse.

        With `forget` nobody is given any of them to read any more: what is in them is in doubt.
        """
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        if self.states is not None:
            self.states.give_back(request_id, forget=forget)
        # The last block first: a prefix is of use without what follows it, and not the other way.
        for block_id in reversed(table.block_ids):
            block = self._blocks[block_id]
            if forget and block.digest is not None and self._kept.get(block.digest) == block_id:
                self._drop(block.digest)
                if self._archive is not None:
                    self._archive.forget(block.digest)
                if self._resident is not None:
                    self._resident.forget(block_id)
                if self.disk is not None:
                    self.disk.forget(block.digest)
            block.num_users -= 1
            if block.num_users > 0:
                continue
            if block.digest is not None and self._kept.get(block.digest) == block_id:
                self._unread[block_id] = None
            else:
                block.owner = block.digest = None
                self._blank.append(block_id)

    def end_step(self) -> None:
        """What the running step computed has been kept, as far as it is to be."""
        if self._archive is not None:
            self._archive.note_step()
        if self._resident is not None:
            self._resident.note_step()
        if self.disk is not None:
            self.disk.note_step()

    def prefetch(self, digests: Sequence[bytes]) -> None:
        """Have blocks at hand that lie on disk, before a request asks for them; any thread may."""
        if (disk := self.disk) is None:
            return
        for number, digest in enumerate(digests):
            if digest not in self._kept and (self._archive is None or digest not in self._archive):
                disk.prefetch(digests[number:])
                return

    def digests(self, request_id: int) -> list[bytes | None]:
        """Under which digest each block of the request is kept; None: it is the request's own."""
        table = self._tables.get(request_id)
        return [self._blocks[block_id].digest for block_id in table.block_ids] if table else []

    def _read(self, block_id: int) -> None:
        """One more table names a block that is kept."""
        assert self._blocks[block_id].digest is not None, block_id
        self._blocks[block_id].num_users += 1
        self._unread.pop(block_id, None)

    def _take_block(self, request_id: int) -> int:
        """A block for a request to own: blank, or what nobody has read for the longest time."""
        if len(self._blank) > self._num_withheld:
            block_id = self._take_blank()
        else:
            block_id = next(iter(self._unread))
            self._clear(block_id)
        self._blocks[block_id] = _Block(owner=request_id, num_users=1)
        if self._watch is not None:
            self._watch.forget(block_id)
        return block_id

    def _clear(self, block_id: int) -> None:
        """What nobody reads gives its block up."""
        del self._unread[block_id]
        digest = self._blocks[block_id].digest
        assert digest is not None, block_id
        self._drop(digest)
        if self._resident is not None:
            self._resident.forget(block_id)
        if self.disk is not None:
            self.disk.withdraw(digest)

    def _take_blank(self) -> int:
        block_id = self._blank.pop()
        if len(self._blank) < self._num_fresh:
            self._num_fresh -= 1
            if self._growth is not None:
                self._growth.note_taken()
        return block_id

    def _drop(self, digest: bytes) -> None:
        """Nobody finds that block any more; a state behind it is of no use then."""
        del self._kept[digest]
        if self.states is not None:
            self.states.drop(digest)

    def check_integrity(self) -> None:
        """Recompute every invariant from scratch; raises IntegrityError at the first that fails."""
        self._check_places()
        self._check_tables()
        self._check_blocks()
        if self.states is not None:
            self.states.check_integrity(self.owners(), self._kept)

    def _check_places(self) -> None:
        """Each block is free, or in tables: in one, or kept and in any number."""
        seen: dict[int, tuple[str, bool]] = {}
        places = [
            *((block_id, "the free list", False) for block_id in self._blank),
            *((block_id, "the list of unread blocks", False) for block_id in self._unread),
            *(
                (block_id, f"the table of request {request_id}", True)
                for request_id, table in self._tables.items()
                for block_id in table.block_ids
            ),
        ]
        for block_id, place, is_table in places:
            if not 0 <= block_id < self.num_blocks:
                raise IntegrityError(
                    f"KV cache: {place} names block {block_id}, but there are {self.num_blocks}"
                )
            if block_id in seen:
                other, other_is_table = seen[block_id]
                is_kept = self._blocks[block_id].digest is not None
                if not (is_table and other_is_table and is_kept and place != other):
                    raise IntegrityError(
                        f"KV cache: block {block_id} is in {other}, and in {place}"
                    )
            seen[block_id] = (place, is_table)
        if len(seen) != self.num_blocks:
            lost = next(b for b in range(self.num_blocks) if b not in seen)
            num_free = self.num_free_blocks
            raise IntegrityError(
                f"KV cache: block {lost} is neither free nor in a table; {num_free} free "
                f"and {len(seen) - num_free} used are not all {self.num_blocks}"
            )

    def _check_tables(self) -> None:
        for request_id, table in self._tables.items():
            num_needed = -(-table.num_tokens // self.block_size)
            if len(table.block_ids) != num_needed or num_needed == 0:
                raise IntegrityError(
                    f"KV cache: request {request_id} has {len(table.block_ids)} blocks for "
                    f"{table.num_tokens} tokens, but needs {num_needed}"
                )
            if table.blocks != tuple(table.block_ids) or table.array.tolist() != table.block_ids:
                raise IntegrityError(
                    f"KV cache: request {request_id} has blocks {table.block_ids}, but "
                    f"steps hold {table.blocks} and {table.array.tolist()}"
                )
            num_full = table.num_tokens // self.block_size
            if not 0 <= table.num_adopted <= table.num_offered <= num_full:
                raise IntegrityError(
                    f"KV cache: request {request_id} has {num_full} full blocks, "
                    f"{table.num_offered} of them offered and {table.num_adopted} adopted"
                )
            for number, block_id in enumerate(table.block_ids):
                block = self._blocks[block_id]
                is_own = (
                    block.digest is None
                    and block.owner == request_id
                    and number >= table.num_adopted
                )
                is_read = (
                    block.digest is not None and block.owner is None and number < table.num_offered
                )
                if is_own or is_read:
                    continue
                raise IntegrityError(
                    f"KV cache: block {block_id} is in the table of request {request_id} at "
                    f"{number}, but its owner is {_owner_name(block)}"
                )

    def _check_blocks(self) -> None:
        """Counts of users, and what is kept, from both sides."""
        num_users = [0] * self.num_blocks
        for table in self._tables.values():
            for block_id in table.block_ids:
                num_users[block_id] += 1
        for block_id, block in enumerate(self._blocks):
            if block.num_users != num_users[block_id]:
                raise IntegrityError(
                    f"KV cache: block {block_id} counts {block.num_users} users, but is in "
                    f"{num_users[block_id]} tables"
                )
        for block_id in self._blank:
            if (block := self._blocks[block_id]) != _Block():
                raise IntegrityError(
                    f"KV cache: block {block_id} is free, but its owner is {_owner_name(block)}"
                )
        for digest, block_id in self._kept.items():
            if self._blocks[block_id].digest != digest:
                raise IntegrityError(
                    f"KV cache: block {block_id} is found under digest {digest.hex()[:8]}, but its "
                    f"owner is {_owner_name(self._blocks[block_id])}"
                )
        for block_id in self._unread:
            digest_of = self._blocks[block_id].digest
            if digest_of is None or self._kept.get(digest_of) != block_id:
                raise IntegrityError(
                    f"KV cache: block {block_id} waits to be read again, but nobody can find it"
                )


def _owner_name(block: _Block) -> str:
    if block.digest is not None:
        return f"the cache, under digest {block.digest.hex()[:8]}"
    return "nobody" if block.owner is None else f"request {block.owner}"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
