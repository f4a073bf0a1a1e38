"""numba kernels of `quantise`: codes of activations, in tiles of rows, and bits of bf16."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.packed_floats import store_rounded
from hypocenter.device.cpu.vector import (
    absolute,
    add,
    finite_or,
    get,
    larger,
    load_first,
    max_lanes,
    mul,
    put,
    splat,
    store_low_bytes,
    sub,
    sum_lanes,
)

_TINY, _INFINITY, _NAN = np.float32(1e-30), np.float32(np.inf), np.float32(np.nan)
_ZERO, _ONE, _INVERSE = np.float32(0), np.float32(1), np.float32(1 / 127)
#: Adding it rounds to the nearest integer, ties to even, which then is the low bits of the sum.
_ROUND = np.float32(1.5 * 2**23)
#: Groups of an item: in a tile of one row as many as have their scales in one cache line.
_ITEM_GROUPS = 16


@inline
def _code_half(values: Any, inverse: float, codes: Any, at: int) -> float:
    """Store the codes of 16 columns; their sum."""
    scaled = add(mul(finite_or(values, _ZERO), splat(inverse)), splat(_ROUND))
    store_low_bytes(codes, at, scaled)
    return sum_lanes(sub(scaled, splat(_ROUND)))  # type: ignore[no-any-return]


@inline
def round_up(scale: Any) -> Any:
    """The next f32 from `scale` on that has four bits that count (see `quantise.py`)."""
    bits = np.float32(scale).view(np.int32)
    return np.int32((bits + np.int32(0xFFFFF)) & np.int32(-0x100000)).view(np.float32)


@inline
def put_codes(
    first: Any, last: Any, codes: Any, scales: Any, sums: Any, weighted: Any, row: int, group: int
) -> None:
    """Store the codes of both halves of a group of a row, and what belongs to them."""
    sizes = larger(absolute(finite_or(first, _INFINITY)), absolute(finite_or(last, _INFINITY)))
    largest = max_lanes(sizes)
    usable = largest >= _TINY and largest < _INFINITY
    scale = round_up(largest * _INVERSE)
    inverse = _ONE / scale if usable else _ZERO
    if not usable:
        scale = _NAN if largest == _INFINITY else _ZERO
    tile = codes.shape[2]
    group, lane = row // tile * codes.shape[1] + group, row % tile
    at = group * tile + lane
    low = _code_half(first, inverse, codes, 8 * at)
    high = _code_half(last, inverse, codes, 8 * at + 4)
    put(scales, at, scale)
    at = 3 * tile * group + lane
    put(sums, at, np.int32(low))
    put(sums, at + tile, np.int32(high))
    put(sums, at + 2 * tile, np.int32(low + high))
    put(weighted, at, low * scale)
    put(weighted, at + tile, high * scale)
    put(weighted, at + 2 * tile, (low + high) * scale)


@inline
def num_groups_of(width: int) -> int:
    """Groups of a row: products read them by two."""
    return (width + 63) // 64 * 2


@inline
def num_tiles_of(num_rows: int, codes: Any) -> int:
    """Tiles of codes that have live rows."""
    tile: int = codes.shape[2]
    return (num_rows + tile - 1) // tile


@inline
def num_parts_of(width: int) -> int:
    """Items that a tile is cut into."""
    num_parts: int = (num_groups_of(width) + _ITEM_GROUPS - 1) // _ITEM_GROUPS
    return num_parts


@inline
def part_of(item: int, num_rows: int, width: int, codes: Any) -> tuple[int, int, int, int]:
    """The rows of an item from the first to behind the last, and its groups likewise.

    An item is some groups of a whole tile, and not a row: what the rows of a tile have of one group
    lies in one cache line, which threads that each have a row would take from one another.
    """
    tile, num_parts = codes.shape[2], num_parts_of(width)
    row, group = item // num_parts * tile, item % num_parts * _ITEM_GROUPS
    last = min(group + _ITEM_GROUPS, num_groups_of(width))
    return row, min(row + tile, num_rows), group, last


@cpu_kernel
def quantise(
    x: Any, counts: Any, count: int, width: int, codes: Any, scales: Any, sums: Any, weighted: Any
) -> None:
    """Formula: codes = round(x / scale) in each group of 32 columns, with scale = max|x| / 127
    rounded up to four bits that count.
    Shapes: x f32 [num_rows, >= width]; counts i32 [2]; codes i32 [num_tiles, num_groups, tile,
    8], scales f32 [num_tiles, num_groups, tile], sums i32 and weighted f32 [num_tiles,
    num_groups, 3, tile].
    """
    num_rows = get(counts, count)
    for item in prange(num_tiles_of(num_rows, codes) * num_parts_of(width)):
        begin, end, first, last = part_of(item, num_rows, width, codes)
        for row in range(begin, end):
            for group in range(first, last):
                at, left = row * x.shape[1] + 32 * group, width - 32 * group
                put_codes(
                    load_first(x, at, left),
                    load_first(x, at + 16, left - 16),
                    codes,
                    scales,
                    sums,
                    weighted,
                    row,
                    group,
                )


@cpu_kernel
def round_bf16(x: Any, counts: Any, count: int, width: int, rounded: Any) -> None:
    """Formula: rounded = x as bf16, to the nearest, and 0 from `width` to whole vectors.
    Shapes: x f32 [num_rows, >= width]; counts i32 [2]; rounded bf16 bits [num_rows, >= width
    padded to 16].
    """
    for row in prange(get(counts, count)):
        for k in range(0, width, 16):
            values = load_first(x, row * x.shape[1] + k, width - k)
            store_rounded(rounded, row * rounded.shape[1] + k, values)
