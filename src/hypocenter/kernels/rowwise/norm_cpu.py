"""numba kernels of `rms_norm`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import (
    add,
    fma,
    get,
    keep,
    load_first,
    mul,
    splat,
    store_first,
    sum_lanes,
)
from hypocenter.kernels.linear.quantise_cpu import num_groups_of, num_tiles_of, put_codes


@inline
def _factor(x: Any, at: int, eps: float, width: int) -> float:
    """What a row, or a head, is multiplied by."""
    squares = splat(np.float32(0))
    for column in range(0, width, 16):
        value = load_first(x, at + column, width - column)
        squares = fma(value, value, squares)
    mean_square = sum_lanes(squares) / np.float32(width)
    return np.float32(1) / np.sqrt(mean_square + eps)  # type: ignore[no-any-return]


@inline
def _normalise(x: Any, at: int, weight: Any, column: int, width: int, factor: float) -> Any:
    """16 columns of a row that begins at `at`; 0 behind its width, even of an undefined row."""
    left = width - column
    value = mul(load_first(x, at + column, left), splat(factor))
    return keep(mul(value, load_first(weight, column, left)), 0, left, np.float32(0))


@inline
def _norm_row(
    x: Any, at: int, weight: Any, eps: float, out: Any, out_at: int, width: int, accumulate: bool
) -> None:
    factor = _factor(x, at, eps, width)
    for column in range(0, width, 16):
        left = width - column
        value = _normalise(x, at, weight, column, width, factor)
        if accumulate:
            value = add(load_first(out, out_at + column, left), value)
        store_first(out, out_at + column, value, left)


@cpu_kernel
def rms_norm(
    x: Any, counts: Any, count: int, weight: Any, eps: float, out: Any, num_heads: int,
    width: int, accumulate: bool,
) -> None:  # fmt: skip
    """Formula: out (+)= x / sqrt(mean(x**2) + eps) weight, head by head.
    Shapes: x and out f32 [num_rows, >= num_heads * width]; weight f32 [>= width]; counts i32
    [2].
    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    for row in prange(get(counts, count)):
        for head in range(num_heads):
            at = row * x.shape[1] + head * width
            out_at = row * out.shape[1] + head * width
            _norm_row(x, at, weight, eps, out, out_at, width, accumulate)


@cpu_kernel
def rms_norm_codes(
    x: Any, counts: Any, count: int, weight: Any, eps: float, width: int, codes: Any, scales: Any,
    sums: Any, weighted: Any,
) -> None:  # fmt: skip
    """Formula: codes = quantise(rms_norm(x)), as the kernels rms_norm and quantise make it.
    Shapes: x f32 [num_rows, >= width]; weight f32 [>= width]; counts i32 [2]; codes i32
    [num_tiles, num_groups, tile, 8], scales f32 [num_tiles, num_groups, tile], sums i32 and
    weighted f32 [num_tiles, num_groups, 3, tile].
    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    num_rows, num_groups, tile = get(counts, count), num_groups_of(width), codes.shape[2]
    # An item is a tile of rows, whose codes lie side by side.
    for item in prange(num_tiles_of(num_rows, codes)):
        for row in range(item * tile, min((item + 1) * tile, num_rows)):
            at = row * x.shape[1]
            factor = _factor(x, at, eps, width)
            for group in range(num_groups):
                put_codes(
                    _normalise(x, at, weight, 32 * group, width, factor),
                    _normalise(x, at, weight, 32 * group + 16, width, factor),
                    codes,
                    scales,
                    sums,
                    weighted,
                    row,
                    group,
                )
