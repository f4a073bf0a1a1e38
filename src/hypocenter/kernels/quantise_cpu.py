"""numba kernel of `quantise`: codes of activations, in tiles of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.lang import cpu_kernel, inline, prange
from hypocenter.device.vector import (
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
_ZERO, _LARGEST_CODE, _INVERSE = np.float32(0), np.float32(127), np.float32(1 / 127)
#: Adding it rounds to the nearest integer, ties to even, which then is the low bits of the sum.
_ROUND = np.float32(1.5 * 2**23)
#: Groups of an item: in a tile of one row as many as have their scales in one cache line.
ITEM_GROUPS = 16


@inline
def _code_half(values: Any, inverse: float, codes: Any, at: int) -> float:
    """Store the codes of 16 columns; their sum."""
    scaled = add(mul(finite_or(values, _ZERO), splat(inverse)), splat(_ROUND))
    store_low_bytes(codes, at, scaled)
    return sum_lanes(sub(scaled, splat(_ROUND)))  # type: ignore[no-any-return]


@inline
def put_codes(
    first: Any, last: Any, codes: Any, scales: Any, sums: Any, weighted: Any, group: int, lane: int
) -> None:
    """Store the codes of both halves of a group, and what belongs to them."""
    sizes = larger(absolute(finite_or(first, _INFINITY)), absolute(finite_or(last, _INFINITY)))
    largest = max_lanes(sizes)
    usable = largest >= _TINY and largest < _INFINITY
    inverse = _LARGEST_CODE / largest if usable else _ZERO
    scale = largest * _INVERSE if usable else (_NAN if largest == _INFINITY else _ZERO)
    tile = codes.shape[2]
    row = group * tile + lane
    low = _code_half(first, inverse, codes, 8 * row)
    high = _code_half(last, inverse, codes, 8 * row + 4)
    put(scales, row, scale)
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


@cpu_kernel
def quantise(
    x: Any, counts: Any, count: int, width: int, codes: Any, scales: Any, sums: Any, weighted: Any
) -> None:
    # An item is some groups of a whole tile, and not a row: what the rows of a tile have of one
    # group lies in one cache line, which threads that each have a row would take from one another.
    num_rows, num_groups, tile = get(counts, count), num_groups_of(width), codes.shape[2]
    num_parts = (num_groups + ITEM_GROUPS - 1) // ITEM_GROUPS
    for item in prange(num_tiles_of(num_rows, codes) * num_parts):
        begin, part = item // num_parts * tile, item % num_parts * ITEM_GROUPS
        for row in range(begin, min(begin + tile, num_rows)):
            for group in range(part, min(part + ITEM_GROUPS, num_groups)):
                at, left = row * x.shape[1] + 32 * group, width - 32 * group
                put_codes(
                    load_first(x, at, left), load_first(x, at + 16, left - 16), codes, scales,
                    sums, weighted, begin // tile * codes.shape[1] + group, row - begin,
                )  # fmt: skip
