"""Sums over blocks of a GPU's KV cache, by which whoever has its memory next knows them whole.

A block is row n of each page. Its sum is that of its 64-bit words, each times an odd number of its
own, modulo 2^64: a change of any one word changes it. The GPU makes the sums and keeps them beside
the pages, so that nobody waits for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import arrays, copies, memory
from hypocenter.device.arrays import AnyArray
from hypocenter.device.devices import backend_of, call_device
from hypocenter.device.lending import LentRoom, room_bytes

_WORD_BYTES = 8
#: Of one pass: what it gathers takes so much memory.
_PASS_BYTES = 128 << 20
#: An odd number whose multiples look like chance (Knuth, The Art of Computer Programming, 6.4).
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Pages of one size that lie one behind the other."""

    address: int
    num_pages: int
    pitch_bytes: int
    block_bytes: int


class BlockSums:
    """Makes and compares sums of blocks; `sums` i64 [num_blocks] are the last that `room` holds.

    Pages must be whole words a block, and lie in lent room.
    """

    def __init__(self, pages: Sequence[Tensor], num_blocks: int, room: LentRoom) -> None:
        self._device = room.device
        self._num_blocks = num_blocks
        self._stretches = tuple(_stretches(pages, num_blocks))
        self._sums = room.take("block_sums", "kv_cache", DType.I64, (num_blocks,))
        block_bytes = sum(run.num_pages * run.block_bytes for run in self._stretches)
        self._num_at_once = max(_PASS_BYTES // block_bytes, 1)
        #: The blocks of the pass that runs, put there without a wait.
        self._ids = memory.allocate(
            "block_ids", "kv_cache", DType.I64, (self._num_at_once,), device=room.device
        )
        self._factors: dict[int, AnyArray] = {}

    def note(self, block_ids: Sequence[int]) -> None:
        """Sum blocks that nobody writes any more; returns before that has run."""
        for some in self._passes(block_ids):
            call_device(self._device, "compute", functools.partial(self._put, len(some)), 0)

    def holds(self, block_ids: Sequence[int]) -> list[bool]:
        """Whether each block is as it was when it was noted; waits for the GPU."""
        found: list[bool] = []
        noted = copies.to_host(self._sums)
        for some in self._passes(block_ids):
            summed = call_device(
                self._device, "compute", functools.partial(self._sum, len(some)), 0
            )
            found += (arrays.on_host(summed) == noted[list(some)]).tolist()
        return found

    def _passes(self, block_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(block_ids), self._num_at_once):
            some = block_ids[start : start + self._num_at_once]
            ids = np.zeros(self._num_at_once, np.int64)
            ids[: len(some)] = some
            copies.to_device(self._ids, ids)
            yield some

    def _ids_of(self, num_blocks: int) -> AnyArray:
        held = backend_of(self._device).bytes_at(self._ids.address, num_blocks * _WORD_BYTES)
        return arrays.seen_as(held, "int64")

    def _put(self, num_blocks: int) -> None:
        backend = backend_of(self._device)
        held = backend.bytes_at(self._sums.address, self._num_blocks * _WORD_BYTES)
        words = arrays.seen_as(held, "int64")
        words[self._ids_of(num_blocks)] = self._sum(num_blocks)

    def _sum(self, num_blocks: int) -> AnyArray:
        """Of the first so many of `_ids`: i64 [num_blocks], where the pages lie."""
        backend, total = backend_of(self._device), None
        for number, run in enumerate(self._stretches):
            raw = backend.bytes_at(run.address, run.num_pages * run.pitch_bytes)
            raw = raw.reshape(run.num_pages, run.pitch_bytes)
            raw = raw[:, : self._num_blocks * run.block_bytes]
            words = arrays.seen_as(raw, "int64")
            words = words.reshape(run.num_pages, self._num_blocks, run.block_bytes // _WORD_BYTES)
            gathered = words[:, self._ids_of(num_blocks)]
            gathered *= self._factors_of(run.block_bytes // _WORD_BYTES, 0, raw)
            of_pages = gathered.sum(-1)
            of_pages *= self._factors_of(run.num_pages, number + 1, raw).reshape(-1, 1)
            of_stretch = of_pages.sum(0)
            total = of_stretch if total is None else total + of_stretch
        return total

    def _factors_of(self, number: int, salt: int, beside: AnyArray) -> AnyArray:
        key = number << 8 | salt
        if key not in self._factors:
            odd = 2 * np.arange(1 + (salt << 32), 1 + (salt << 32) + number, dtype=np.uint64) + 1
            with np.errstate(over="ignore"):
                made = (odd * np.uint64(_GOLDEN)) | np.uint64(1)
            self._factors[key] = arrays.constants(made.view(np.int64), "int64", beside)
        return self._factors[key]


def has_whole_words(pages: Sequence[Tensor], num_blocks: int) -> bool:
    """Whether sums can be made of these pages."""
    return bool(pages) and all(
        page.allocation.num_bytes % (num_blocks * _WORD_BYTES) == 0 for page in pages
    )


def _stretches(pages: Sequence[Tensor], num_blocks: int) -> Iterator[_Stretch]:
    """Runs of pages with the same size, as lent room has them."""
    held = sorted((page.allocation.address, page.allocation.num_bytes) for page in pages)
    for num_bytes, some in groupby(held, key=itemgetter(1)):
        addresses, pitch = [address for address, _ in some], room_bytes(num_bytes)
        assert addresses == [addresses[0] + pitch * n for n in range(len(addresses))], addresses
        yield _Stretch(addresses[0], len(addresses), pitch, num_bytes // num_blocks)
