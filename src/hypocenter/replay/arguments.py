"""The tensors of a replayed launch: addresses of their own, and the bytes and shadows behind them.

Judges no access: `memory.py` does.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import contiguous_strides, span_of
from hypocenter.replay.findings import StridedShape

#: An address names its argument: number `i` lies at (i << 40) + 2**39, so an offset may be wrong
#: by 512 GiB either way and still be attributed to the argument that it was added to.
SPACE_BITS = 40
_MIDDLE = 1 << (SPACE_BITS - 1)

#: An epoch: several.
MANY = -1

_LARGE_BYTES = 64 << 20
#: Linux: the shadow of a tensor of gigabytes is hardly touched, so it must not count as memory.
_MAP_NORESERVE = 0x4000


class Region:
    """Bytes that one or more arguments lie in, and what this launch did to them.

    `writer` and `reader` hold, per granule, the epoch that wrote or read it last: 0 is nobody, -1
    is several; `stamps` and `stamped` are those of `lanes.py`. `init` says of each byte whether it
    was ever written; None: all were. A region without bytes (`data` None) keeps nothing: reads give
    zeros, writes vanish.
    """

    def __init__(
        self, data: Array | None, num_bytes: int, granule: int, init: Array | None
    ) -> None:
        self.data = data
        self.granule = granule
        self.init = init
        num_granules = -(-num_bytes // granule) if data is not None else 0
        self.writer = _lazy_zeros(num_granules)
        self.reader = _lazy_zeros(num_granules)
        self.stamps = _lazy_zeros(num_granules, np.int64)
        self.stamped = 0
        self.is_written = False
        self.is_changed = False  # by more than an atomic that leaves its word as it was


@dataclass(eq=False, slots=True)
class Argument:
    """A tensor argument: `num_bytes` from `start` of its region, from its first to last element."""

    name: str
    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    region: Region
    start: int
    num_bytes: int
    alignment: int = 0
    #: Where it really lies, when a kernel found it through a table of pointers.
    real_address: int | None = None
    is_output: bool = False
    #: Whether an access must be as wide as an element; a kernel may cast a pointer by right.
    keeps_width: bool = False
    was_written: bool = False
    was_read: bool = False
    was_updated: bool = False  # by an atomic
    store_seen: bool = False
    #: Whether a store went where loaded values said, as that of rows into the slots of a pool.
    is_scattered: bool = False
    _gaps: Gaps | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._gaps = Gaps.of(self.shape, self.strides)

    @property
    def address(self) -> int:
        if self.real_address is not None:
            return self.real_address
        return (self.number << SPACE_BITS) + _MIDDLE + self.alignment

    @property
    def layout(self) -> StridedShape | None:
        """Shape and strides where a reader must know them; None of a contiguous tensor."""
        packed = contiguous_strides(self.shape)
        pairs = zip(self.shape, self.strides, packed, strict=True)
        is_plain = all(size < 2 or stride == wanted for size, stride, wanted in pairs)
        return None if is_plain else StridedShape(self.shape, self.strides)

    def element(self, offset: int) -> tuple[int, ...] | None:
        """Byte offset to index; None outside, or where a broadcast axis makes it ambiguous."""
        if not 0 <= offset < self.num_bytes:
            return None
        rest = offset // self.item_bytes
        index = [0] * len(self.shape)
        for axis in sorted(range(len(self.shape)), key=lambda a: -self.strides[a]):
            if self.strides[axis] > 0 and self.shape[axis] > 1:
                index[axis] = min(rest // self.strides[axis], self.shape[axis] - 1)
                rest -= index[axis] * self.strides[axis]
        return tuple(index) if rest == 0 else None

    def between(self, offsets: Array, width: int) -> Array | None:
        """Which accesses of `width` bytes at byte `offsets`, which lie inside, touch no element.

        They touch what lies between the elements of a view, as between its rows. None: none does.
        """
        if self._gaps is None:
            return None
        first = offsets // self.item_bytes
        last = first if width <= self.item_bytes else (offsets + (width - 1)) // self.item_bytes
        held = self._gaps.holds(first)
        if last is not first:
            held &= self._gaps.holds(last)
        return None if held.all() else ~held

    def place(self, offset: int) -> str:
        """Where a byte offset lies, in words."""
        index = self.element(offset)
        if index is not None:
            return f"[{', '.join(map(str, index))}]"
        number = offset // self.item_bytes
        if 0 <= offset < self.num_bytes:
            return f"element {number}, between the rows of shape {self.shape}"
        side = "before the first" if offset < 0 else "past the last"
        return f"element {number} (byte {offset}), {side} of shape {self.shape}"

    def read(self, offsets: Array, dtype: np.dtype[Any]) -> Array:
        """Elements at byte `offsets`, which lie inside; zeros where there are no bytes."""
        data, width = self._bytes(), dtype.itemsize
        if data is None:
            return np.zeros(offsets.size, dtype)
        if _is_aligned(data, offsets, width):
            aligned: Array = data[: data.size // width * width].view(dtype)[offsets // width]
            return aligned
        picked = data[offsets[:, None] + np.arange(width)]
        values: Array = np.ascontiguousarray(picked).view(dtype)[:, 0]
        return values

    def write(self, offsets: Array, values: Array) -> None:
        data, width = self._bytes(), values.dtype.itemsize
        if data is None:
            return
        if _is_aligned(data, offsets, width):
            data[: data.size // width * width].view(values.dtype)[offsets // width] = values
        else:
            picked = np.ascontiguousarray(values)[:, None].view(np.uint8).reshape(-1, width)
            data[offsets[:, None] + np.arange(width)] = picked

    def _bytes(self) -> Array | None:
        data = self.region.data
        return None if data is None else data[self.start : self.start + self.num_bytes]


class Gaps:
    """What lies between the elements of a strided tensor, from its first to its last element."""

    #: Elements of a tensor whose rows overlap, up to which a map of them is made.
    _MAX_MAPPED = 1 << 24

    def __init__(self, axes: tuple[tuple[int, int], ...], span: int, is_nested: bool) -> None:
        self._axes, self._span = axes, span
        self._map: Array | None = None
        if not is_nested:
            self._map = np.zeros(span, bool)
            sizes, strides = zip(*axes, strict=True)
            np.lib.stride_tricks.as_strided(self._map, sizes, strides)[...] = True

    @classmethod
    def of(cls, shape: tuple[int, ...], strides: tuple[int, ...]) -> Gaps | None:
        """None of a tensor that has none, whichever way its axes lie, and of one that repeats."""
        if len(shape) != len(strides) or 0 in shape or min(strides, default=0) < 0:
            return None
        pairs = [(size, by) for size, by in zip(shape, strides, strict=True) if size > 1 and by]
        axes = tuple(sorted(pairs, key=lambda pair: -pair[1]))
        span = 1 + sum((size - 1) * by for size, by in axes)
        is_nested = all(
            by > sum((size - 1) * below for size, below in axes[number + 1 :])
            for number, (_, by) in enumerate(axes)
        )
        if is_nested:
            return None if math.prod(size for size, _ in axes) == span else cls(axes, span, True)
        if span > cls._MAX_MAPPED:
            return None
        gaps = cls(axes, span, False)
        return None if gaps._map is not None and gaps._map.all() else gaps

    def holds(self, numbers: Array) -> Array:
        """Which element numbers, counted from the first along memory, are the tensor's own."""
        if self._map is not None:
            inside: Array = self._map[np.minimum(numbers, self._span - 1)]
        else:
            rest, inside = numbers, np.ones(numbers.shape, bool)
            for size, by in self._axes:
                index, rest = np.divmod(rest, by)
                inside &= index < size
            inside &= rest == 0
        return inside | (numbers >= self._span)


def extent_bytes(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> int:
    """Bytes from the first element to the end of the last; 0 for an empty tensor."""
    return span_of(shape, strides) * item_bytes


def _lazy_zeros(count: int, kind: Any = np.int32) -> Array:
    """Zeros whose pages cost nothing until they are touched, however many there are."""
    num_bytes = count * np.dtype(kind).itemsize
    if num_bytes < _LARGE_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return np.zeros(count, kind)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), kind)


def _is_aligned(data: Array, offsets: Array, width: int) -> bool:
    return width == 1 or (data.ctypes.data % width == 0 and not (offsets % width).any())
