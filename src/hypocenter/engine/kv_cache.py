"""Which blocks of the KV cache belong to which request; the cached numbers live with the runner.

    append    makes room for the next tokens of a request
    retrieve  tells where positions of a request lie
    remove    gives the blocks of a request back

Position p of a request lies in slot block_table[p // block_size] * block_size + p % block_size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hypocenter.dtypes import Int32s
from hypocenter.errors import IntegrityError, OutOfBlocks


class Placement(NamedTuple):
    """Where tokens lie: `block_table` i32 [num_blocks_of_request], and a slot for each token."""

    block_table: Int32s
    slots: list[int]


@dataclass(slots=True)
class _Table:
    """The blocks of one request, and how many tokens have room in them.

    `blocks` and `array` are the same as others get it, made once for the many steps in which no
    block is added.
    """

    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    blocks: tuple[int, ...] = ()
    array: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))

    def grow(self, block_ids: list[int]) -> None:
        self.block_ids += block_ids
        self.blocks = tuple(self.block_ids)
        self.array = np.array(self.block_ids, np.int32)
        self.array.flags.writeable = False


class KVCache:
    """A pool of `num_blocks` blocks of `block_size` tokens each. Not thread-safe."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Taken from the end: low blocks first, and those given back last are used again first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: dict[int, _Table] = {}
        self._block_to_owner: list[int | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def owners(self) -> set[int]:
        """The ids of all requests that have blocks."""
        return set(self._tables)

    def blocks(self, request_id: int) -> tuple[int, ...]:
        """The blocks that the request owns, in the order of its positions."""
        table = self._tables.get(request_id)
        return table.blocks if table else ()

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
        num_reachable = len(table.block_ids) + len(self._free)
        return num_reachable * self.block_size - table.num_tokens

    def append(self, request_id: int, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens of the request.

        Raises OutOfBlocks, and then has changed nothing.
        """
        assert num_tokens > 0, num_tokens
        num_needed = self.num_blocks_to_append(request_id, num_tokens)
        if num_needed > len(self._free):
            raise OutOfBlocks(num_needed, len(self._free), self.num_blocks)
        table = self._tables.setdefault(request_id, _Table())
        if num_needed:
            taken = [self._free.pop() for _ in range(num_needed)]
            for block_id in taken:
                self._block_to_owner[block_id] = request_id
            table.grow(taken)
        table.num_tokens += num_tokens

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

    def remove(self, request_id: int) -> None:
        """Give all blocks of the request back; a request without blocks is none the worse."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        for block_id in reversed(table.block_ids):
            self._block_to_owner[block_id] = None
            self._free.append(block_id)

    def check_integrity(self) -> None:
        """Recompute every invariant from scratch; raises IntegrityError at the first that fails."""
        seen: dict[int, str] = {}
        places = [(block_id, "the free list") for block_id in self._free] + [
            (block_id, f"the table of request {request_id}")
            for request_id, table in self._tables.items()
            for block_id in table.block_ids
        ]
        for block_id, place in places:
            if not 0 <= block_id < self.num_blocks:
                raise IntegrityError(
                    f"KV cache: {place} names block {block_id}, but there are {self.num_blocks}"
                )
            if block_id in seen:
                raise IntegrityError(
                    f"KV cache: block {block_id} is in {seen[block_id]}, and in {place}"
                )
            seen[block_id] = place
        if len(seen) != self.num_blocks:
            lost = next(b for b in range(self.num_blocks) if b not in seen)
            raise IntegrityError(
                f"KV cache: block {lost} is neither free nor in a table; {len(self._free)} free "
                f"and {len(seen) - len(self._free)} owned are not all {self.num_blocks}"
            )
        self._check_tables()

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
                    f"KV cache: request {request_id} has blocks {table.block_ids}, but others are "
                    f"told {table.blocks} and {table.array.tolist()}"
                )
            for block_id in table.block_ids:
                if (owner := self._block_to_owner[block_id]) != request_id:
                    raise IntegrityError(
                        f"KV cache: block {block_id} is in the table of request {request_id}, "
                        f"but its owner is {owner}"
                    )
        for block_id in self._free:
            if (owner := self._block_to_owner[block_id]) is not None:
                raise IntegrityError(
                    f"KV cache: block {block_id} is free, but its owner is request {owner}"
                )
