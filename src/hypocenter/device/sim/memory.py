"""The memory of a simulated GPU: addresses, pages, torch's way to allocate, a kernel's accesses.

A page is mapped or it is not; nothing here knows tensors, launches or what a fault does to anybody.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError, IntegrityError, OutOfMemory, UsageError
from hypocenter.device.interpret.builder import Exact
from hypocenter.device.interpret.interpret import block_of_others

MIB = 1 << 20
PAGE_BITS = 21
PAGE_BYTES = 1 << PAGE_BITS
#: NaN as a floating-point number, -1 as an index: nothing that looks like a result.
POISON = 0xFF

# The caching allocator of torch (c10/cuda/CUDACachingAllocator.cpp): its rounding, what counts as
# small, and how much it takes from the driver for a small and for a middling block.
ROUND_BYTES = 512
SMALL_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
MIDDLING_BYTES = 10 * MIB
MIDDLING_SEGMENT_BYTES = 20 * MIB

_UNMAPPED, _FRESH, _READY = 0, 1, 2
# Python knows the flag from 3.13 on; the number is Linux's.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class BadAccess(Exception):
    """A kernel's access that the hardware does not do; `what` is `read` or `write`."""

    def __init__(self, what: str, address: int, *, is_misaligned: bool = False) -> None:
        self.what, self.address, self.is_misaligned = what, address, is_misaligned
        problem = "is misaligned" if is_misaligned else "is in no mapped page"
        super().__init__(f"{what} of {address:#x}, which {problem}")


class SimMemory:
    """A range of device addresses in pages of 2 MiB, and the Memory of an interpretation.

    What lies in a mapped page can be accessed, whoever it belongs to. Fresh pages are poisoned as
    they are first touched, so that a mapping alone costs no memory. `requires_alignment` makes an
    access at no multiple of its width a BadAccess.
    """

    def __init__(self, base: int, num_bytes: int, native: Any, *, requires_alignment: bool) -> None:
        assert base % PAGE_BYTES == 0
        assert num_bytes % PAGE_BYTES == 0
        self.exact: Exact | None = None
        self.base, self.num_bytes = base, num_bytes
        self._native = native
        self._requires_alignment = requires_alignment
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._arena = mmap.mmap(-1, num_bytes, flags=flags)
        except (OSError, ValueError) as error:
            raise HypoError(
                f"simulated memory: {num_bytes} bytes of address space asked for, but the system "
                f"refuses ({error}); raise the limit on virtual memory (ulimit -v)"
            ) from error
        if hasattr(mmap, "MADV_DONTDUMP"):
            self._arena.madvise(mmap.MADV_DONTDUMP)
        self._bytes: Array = np.frombuffer(self._arena, np.uint8)
        self._host_base = self._bytes.ctypes.data
        self._views: dict[np.dtype[Any], Array] = {}
        self._pages = np.zeros(num_bytes >> PAGE_BITS, np.uint8)

    # -- pages ----------------------------------------------------------------------------------

    def map(self, offset: int, num_bytes: int) -> None:
        """Make whole pages accessible; their contents are poison."""
        self._pages[_page_range(offset, num_bytes)] = _FRESH

    def unmap(self, offset: int, num_bytes: int) -> None:
        """Whole pages: an access faults from now on."""
        self._pages[_page_range(offset, num_bytes)] = _UNMAPPED
        self._arena.madvise(mmap.MADV_DONTNEED, offset, num_bytes)

    def is_mapped(self, address: int, num_bytes: int) -> bool:
        """Whether all of `num_bytes` at `address` lies in mapped pages."""
        offset = address - self.base
        if not 0 <= offset <= self.num_bytes - num_bytes:
            return num_bytes == 0
        return bool((self._pages[_page_range(offset, num_bytes)] != _UNMAPPED).all())

    def num_mapped_bytes(self) -> int:
        return int(np.count_nonzero(self._pages)) << PAGE_BITS

    def poison(self, offset: int, num_bytes: int) -> None:
        """Overwrite mapped memory with poison; whole pages of it cost nothing afterwards."""
        end = offset + num_bytes
        first_whole = -(-offset // PAGE_BYTES) * PAGE_BYTES
        end_whole = end // PAGE_BYTES * PAGE_BYTES
        if first_whole < end_whole:
            self.map(first_whole, end_whole - first_whole)
            self._arena.madvise(mmap.MADV_DONTNEED, first_whole, end_whole - first_whole)
            edges = [(offset, first_whole), (end_whole, end)]
        else:
            edges = [(offset, end)]
        for start, stop in edges:
            if start < stop:
                self._make_ready(start, stop - start)
                self._bytes[start:stop] = POISON

    def _make_ready(self, offset: int, num_bytes: int) -> None:
        pages = _page_range(offset, num_bytes)
        for page in np.flatnonzero(self._pages[pages] == _FRESH) + pages.start:
            self._bytes[page << PAGE_BITS : (page + 1) << PAGE_BITS] = POISON
            self._pages[page] = _READY

    def region(self) -> tuple[int, int, int, int, int]:
        """First address, end, where it lies in this process, that it may be written, and where its
        table of pages lies: a byte a page."""
        end = self.base + self.num_bytes
        return self.base, end, self._host_base, 1, self._pages.ctypes.data

    def make_ready(self, address: int) -> None:
        """Poison the page around an address where nobody has touched it."""
        self._make_ready(address - self.base, 1)

    # -- the host's copies, of ranges that is_mapped holds for ------------------------------------

    def write_bytes(self, address: int, data: Array) -> None:
        offset = address - self.base
        self._make_ready(offset, data.size)
        self._bytes[offset : offset + data.size] = data

    def bytes_at(self, address: int, num_bytes: int) -> Array:
        """The bytes themselves."""
        offset = address - self.base
        self._make_ready(offset, num_bytes)
        return self._bytes[offset : offset + num_bytes]

    def clear_bytes(self, address: int, num_bytes: int) -> None:
        offset = address - self.base
        self._make_ready(offset, num_bytes)
        self._bytes[offset : offset + num_bytes] = 0

    def read_bytes(self, address: int, num_bytes: int) -> Array:
        offset = address - self.base
        self._make_ready(offset, num_bytes)
        return self._bytes[offset : offset + num_bytes].copy()

    # -- the four accesses of a kernel ------------------------------------------------------------

    def load(self, pointers: Array, mask: Array, other: Array, dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        offsets, lanes = self._reach("read", pointers, mask, dtype.itemsize)
        if lanes is None:
            return self._gather(offsets, dtype).reshape(pointers.shape)
        loaded = block_of_others(other, pointers.shape, dtype)
        loaded.reshape(-1)[lanes] = self._gather(offsets, dtype)
        return loaded

    def store(self, pointers: Array, values: Array, mask: Array) -> None:
        width = values.dtype.itemsize
        offsets, lanes = self._reach("write", pointers, mask, width)
        flat = np.broadcast_to(values, pointers.shape).reshape(-1)
        flat = flat if lanes is None else flat[lanes]
        if (offsets % width).any():
            picked = np.ascontiguousarray(flat)[:, None].view(np.uint8).reshape(-1, width)
            self._bytes[offsets[:, None] + np.arange(width)] = picked
        else:
            self._view(values.dtype)[offsets // width] = flat

    def atomic_rmw(
        self, operation: Any, pointers: Array, values: Array, mask: Array, order: Any
    ) -> Array:
        offsets, lanes = self._reach("write", pointers, mask, values.dtype.itemsize)
        real = np.zeros(pointers.shape, np.uint64)
        real.reshape(-1)[slice(None) if lanes is None else lanes] = self._real(offsets)
        allowed = np.ascontiguousarray(np.broadcast_to(mask, pointers.shape))
        result: Array = self._native.atomic_rmw(operation, real, values, allowed, order)
        return result

    def atomic_cas(self, pointers: Array, compare: Array, values: Array, order: Any) -> Array:
        offsets, _ = self._reach("write", pointers, np.True_, values.dtype.itemsize)
        real = self._real(offsets).reshape(pointers.shape)
        result: Array = self._native.atomic_cas(real, compare, values, order)
        return result

    def _reach(
        self, what: str, pointers: Array, mask: Any, width: int
    ) -> tuple[Array, Array | None]:
        """Offsets (int64) of the active lanes, and which lanes these are; None: all, in order.

        Raises BadAccess for the first lane that the hardware would stop at.
        """
        flat = pointers.reshape(-1)
        active = np.broadcast_to(mask, pointers.shape).reshape(-1)
        lanes = None if active.all() else np.flatnonzero(active)
        flat = flat if lanes is None else flat[lanes]
        # Unsigned: an address below the base becomes one far above the end.
        offsets = flat - np.uint64(self.base)
        if offsets.size:
            if self._requires_alignment and (odd := offsets % np.uint64(width)).any():
                raise BadAccess(what, int(flat[int(odd.argmax())]), is_misaligned=True)
            low, high = int(offsets.min()), int(offsets.max())
            span = self._pages[low >> PAGE_BITS : (high + width - 1 >> PAGE_BITS) + 1]
            if high > self.num_bytes - width or not (span == _READY).all():
                self._reach_slowly(what, offsets, width)
        return offsets.view(np.int64), lanes

    def _reach_slowly(self, what: str, offsets: Array, width: int) -> None:
        """Each lane by itself; makes the fresh pages among them ready."""
        outside = offsets > self.num_bytes - width
        inside = np.where(outside, np.uint64(0), offsets)
        pages = [(inside + np.uint64(far)) >> np.uint64(PAGE_BITS) for far in (0, width - 1)]
        bad = [outside | (self._pages[page] == _UNMAPPED) for page in pages]
        if bad[0].any() or bad[1].any():
            lane = int((bad[0] | bad[1]).argmax())
            far = 0 if bad[0][lane] else width - 1
            # Python's integers: the address of what wrapped below zero shows as what it was.
            address = (int(offsets[lane]) + self.base + far) % (1 << 64)
            raise BadAccess(what, address)
        for page in np.unique(np.concatenate(pages)):
            self._make_ready(int(page) << PAGE_BITS, 1)

    def _gather(self, offsets: Array, dtype: np.dtype[Any]) -> Array:
        width = dtype.itemsize
        if dtype == np.bool_:  # poison is no bool
            return np.not_equal(self._bytes[offsets], 0)
        if not (offsets % width).any():
            aligned: Array = self._view(dtype)[offsets // width]
            return aligned
        picked = self._bytes[offsets[:, None] + np.arange(width)]
        values: Array = np.ascontiguousarray(picked).view(dtype)[:, 0]
        return values

    def _view(self, dtype: np.dtype[Any]) -> Array:
        if dtype not in self._views:
            self._views[dtype] = self._bytes.view(dtype)
        return self._views[dtype]

    def _real(self, offsets: Array) -> Array:
        return offsets.astype(np.uint64) + np.uint64(self._host_base)


def _page_range(offset: int, num_bytes: int) -> slice:
    return slice(offset >> PAGE_BITS, -(-(offset + num_bytes) // PAGE_BYTES))


@dataclass(slots=True, eq=False)
class _Block:
    """A stretch of a segment, with its neighbours in the same segment."""

    offset: int
    num_bytes: int
    is_small: bool
    is_used: bool = False
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Gives out stretches of a SimMemory as torch does: blocks of segments, kept when freed.

    A freed block is poisoned, stays mapped and is given out again best-fit. Between two segments
    lie `num_guard_pages` unmapped pages. Offsets count from the memory's base.
    """

    def __init__(
        self, memory: SimMemory, device: str, limit_bytes: int, num_guard_pages: int
    ) -> None:
        self.limit_bytes = limit_bytes
        #: Rounded bytes that are given out, their highest so far, and bytes of all segments.
        self.used_bytes = self.peak_bytes = self.mapped_bytes = 0
        self._memory, self._device = memory, device
        self._guard_bytes = num_guard_pages * PAGE_BYTES
        self._segments: dict[int, int] = {}  # offset to size
        self._blocks: dict[int, _Block] = {}  # offset to block
        #: For small and large blocks: (size, offset) of those that are free, sorted.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}

    def allocate(self, num_bytes: int) -> int:
        """Offset of a block of at least `num_bytes` (1 or more), a multiple of 512.

        Raises OutOfMemory when no cached block fits and no segment can be added.
        """
        rounded = -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
        is_small = rounded <= SMALL_BYTES
        pool = self._free[is_small]
        at = bisect.bisect_left(pool, (rounded, 0))
        block = self._blocks[pool[at][1]] if at < len(pool) else self._new_segment(rounded)
        self._drop_free(block)
        left = block.num_bytes - rounded
        # torch keeps the rest of a large block with it unless it would be a large block itself.
        if left >= ROUND_BYTES if is_small else left > SMALL_BYTES:
            self._split(block, rounded)
        block.is_used = True
        self.used_bytes += block.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return block.offset

    def free(self, offset: int) -> None:
        """Raises UsageError when no used block begins there."""
        block = self._blocks.get(offset)
        if block is None or not block.is_used:
            raise UsageError(
                f"{self._device}: no allocation begins at {self._memory.base + offset:#x}; "
                "it was freed before, or is the inside of one"
            )
        block.is_used = False
        self.used_bytes -= block.num_bytes
        self._memory.poison(offset, block.num_bytes)
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.is_used:
                self._drop_free(neighbour)
                first, second = sorted((block, neighbour), key=lambda b: b.offset)
                block = self._merge(first, second)
        self._add_free(block)

    def block_at(self, offset: int) -> tuple[int, int] | None:
        """Offset and bytes of the used block around `offset`; None when there is none."""
        found = self._blocks.get(max((at for at in self._blocks if at <= offset), default=-1))
        if found is None or not found.is_used or offset >= found.offset + found.num_bytes:
            return None
        return found.offset, found.num_bytes

    def used_blocks_of(self, num_bytes: int) -> list[tuple[int, int]]:
        """Offset and bytes of each used block that has so many or more."""
        return [
            (block.offset, block.num_bytes)
            for block in self._blocks.values()
            if block.is_used and block.num_bytes >= num_bytes
        ]

    def release_cached(self) -> int:
        """Unmap every segment that is wholly free; returns the bytes given back."""
        before = self.mapped_bytes
        for offset, num_bytes in list(self._segments.items()):
            block = self._blocks[offset]
            if not block.is_used and block.after is None:
                self._drop_free(block)
                del self._blocks[offset], self._segments[offset]
                self._memory.unmap(offset, num_bytes)
                self.mapped_bytes -= num_bytes
        return before - self.mapped_bytes

    def check_integrity(self) -> None:
        """Raises IntegrityError with the first thing that contradicts another."""
        covered = used = 0
        for offset, num_bytes in sorted(self._segments.items()):
            if offset < covered:
                raise IntegrityError(
                    f"segment {offset:#x} begins within another one's {covered:#x}"
                )
            covered = offset + num_bytes + self._guard_bytes
            used += self._check_segment(offset, num_bytes)
        free = sorted((b.num_bytes, b.offset) for b in self._blocks.values() if not b.is_used)
        if free != sorted(self._free[True] + self._free[False]):
            raise IntegrityError("the lists of free blocks differ from the blocks that are free")
        if any(pool != sorted(pool) for pool in self._free.values()):
            raise IntegrityError("a list of free blocks is not sorted")
        for name, counted, kept in (
            ("used_bytes", used, self.used_bytes),
            ("mapped_bytes", sum(self._segments.values()), self.mapped_bytes),
            ("mapped pages", self.mapped_bytes, self._memory.num_mapped_bytes()),
        ):
            if counted != kept:
                raise IntegrityError(f"{name}: {kept} kept, but {counted} counted")

    def _check_segment(self, offset: int, num_bytes: int) -> int:
        """Its blocks follow each other without a hole, and no two free ones do; bytes in use."""
        end, used, before, block = offset, 0, None, self._blocks.get(offset)
        while block is not None:
            if block.offset != end or block.before is not before:
                raise IntegrityError(f"block {block.offset:#x} does not follow {end:#x}")
            if self._blocks.get(block.offset) is not block:
                raise IntegrityError(f"block {block.offset:#x} is not in the table")
            if before is not None and not before.is_used and not block.is_used:
                raise IntegrityError(f"free blocks {before.offset:#x}, {block.offset:#x} adjoin")
            used += block.num_bytes if block.is_used else 0
            end, before, block = end + block.num_bytes, block, block.after
        if end != offset + num_bytes or not self._memory.is_mapped(
            self._memory.base + offset, num_bytes
        ):
            raise IntegrityError(f"segment {offset:#x} of {num_bytes} bytes ends at {end:#x}")
        return used

    def _new_segment(self, rounded: int) -> _Block:
        if is_small := rounded <= SMALL_BYTES:
            num_bytes = SMALL_SEGMENT_BYTES
        elif rounded < MIDDLING_BYTES:
            num_bytes = MIDDLING_SEGMENT_BYTES
        else:
            num_bytes = -(-rounded // PAGE_BYTES) * PAGE_BYTES
        offset = self._place(num_bytes)
        if self.mapped_bytes + num_bytes > self.limit_bytes or offset is None:
            raise OutOfMemory(self._device, rounded, self.mapped_bytes, self.limit_bytes)
        self._memory.map(offset, num_bytes)
        self._segments[offset] = num_bytes
        self.mapped_bytes += num_bytes
        block = self._blocks[offset] = _Block(offset, num_bytes, is_small)
        self._add_free(block)
        return block

    def _place(self, num_bytes: int) -> int | None:
        """The lowest gap that holds a segment with its guard pages."""
        ends = [0, *(at + size + self._guard_bytes for at, size in sorted(self._segments.items()))]
        starts = [*sorted(self._segments), self._memory.num_bytes]
        for end, start in itertools.zip_longest(ends, starts):
            if start - end >= num_bytes + self._guard_bytes:
                return int(end)
        return None

    def _split(self, block: _Block, num_bytes: int) -> None:
        rest = _Block(block.offset + num_bytes, block.num_bytes - num_bytes, block.is_small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.num_bytes, block.after = num_bytes, rest
        self._blocks[rest.offset] = rest
        self._add_free(rest)

    def _merge(self, first: _Block, second: _Block) -> _Block:
        first.num_bytes += second.num_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._blocks[second.offset]
        return first

    def _add_free(self, block: _Block) -> None:
        bisect.insort(self._free[block.is_small], (block.num_bytes, block.offset))

    def _drop_free(self, block: _Block) -> None:
        pool = self._free[block.is_small]
        pool.pop(bisect.bisect_left(pool, (block.num_bytes, block.offset)))
