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


@inline
def _code_half(values: Any, inverse: float, codes: Any, at: int) -> float:
    """Store the codes of 16 columns; their sum."""
    scaled = add(mul(finite_or(values, _ZERO), splat(inverse)), splat(_ROUND))
    store_low_bytes(codes, at, scaled)
    return sum_lanes(sub(scaled, splat(_ROUND)))  # type: ignore[no-any-return]


@inline
def _quantise_group(
    x: Any, at: int, left: int, codes: Any, scales: Any, sums: Any, weighted: Any, group: int,
    lane: int,
) -> None:  # fmt: skip
    first, last = load_first(x, at, left), load_first(x, at + 16, left - 16)
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


@cpu_kernel
def quantise(
    x: Any, counts: Any, count: int, width: int, codes: Any, scales: Any, sums: Any, weighted: Any
) -> None:
    for row in prange(get(counts, count)):
        tile = codes.shape[2]
        first = row // tile * codes.shape[1]
        for group in range((width + 63) // 64 * 2):
            _quantise_group(
                x, row * x.shape[1] + 32 * group, width - 32 * group, codes, scales, sums,
                weighted, first + group, row % tile,
            )  # fmt: skip
