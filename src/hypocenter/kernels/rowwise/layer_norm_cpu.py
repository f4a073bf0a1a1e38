"""numba kernels of `layer_norm`."""

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
    sub,
    sum_lanes,
)
from hypocenter.kernels.linear.quantise_cpu import num_groups_of, num_tiles_of, put_codes


@inline
def _mean(x: Any, at: int, width: int) -> float:
    total = splat(np.float32(0))
    for column in range(0, width, 16):
        total = add(load_first(x, at + column, width - column), total)
    return sum_lanes(total) / np.float32(width)  # type: ignore[no-any-return]


@inline
def _centre(x: Any, at: int, column: int, width: int, mean: float) -> Any:
    """16 columns of a row that begins at `at`, less its mean; 0 behind its width."""
    left = width - column
    return keep(sub(load_first(x, at + column, left), splat(mean)), 0, left, np.float32(0))


@inline
def _factor(x: Any, at: int, eps: float, width: int, mean: float) -> float:
    """What a row, less its mean, is multiplied by."""
    squares = splat(np.float32(0))
    for column in range(0, width, 16):
        value = _centre(x, at, column, width, mean)
        squares = fma(value, value, squares)
    variance = sum_lanes(squares) / np.float32(width)
    return np.float32(1) / np.sqrt(variance + eps)  # type: ignore[no-any-return]


@inline
def _normalise(
    x: Any,
    at: int,
    weight: Any,
    bias: Any,
    first: int,
    column: int,
    width: int,
    mean: float,
    factor: float,
) -> Any:
    """16 columns of a row that begins at `at`, its weights and biases at `first`; 0 behind its
    width, even of an undefined row."""
    left = width - column
    value = mul(_centre(x, at, column, width, mean), splat(factor))
    value = mul(value, load_first(weight, first + column, left))
    value = add(value, load_first(bias, first + column, left))
    return keep(value, 0, left, np.float32(0))


@cpu_kernel
def layer_norm(
    x: Any,
    counts: Any,
    count: int,
    weight: Any,
    bias: Any,
    eps: float,
    out: Any,
    width: int,
    num_heads: int,
) -> None:
    """Formula: out = (x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps) weight + bias, head by
    head.
    Shapes: x and out f32 [num_rows, >= num_heads * width]; weight and bias f32 [num_heads *
    width]; counts i32 [2].
    Source: Ba, Kiros and Hinton, arXiv 1607.06450.
    """
    for row in prange(get(counts, count)):
        for first in range(0, num_heads * width, width):
            at, out_at = row * x.shape[1] + first, row * out.shape[1] + first
            mean = _mean(x, at, width)
            factor = _factor(x, at, eps, width, mean)
            for column in range(0, width, 16):
                value = _normalise(x, at, weight, bias, first, column, width, mean, factor)
                store_first(out, out_at + column, value, width - column)


@cpu_kernel
def layer_norm_codes(
    x: Any, counts: Any, count: int, weight: Any, bias: Any, eps: float, width: int, codes: Any,
    scales: Any, sums: Any, weighted: Any,
) -> None:  # fmt: skip
    """Formula: codes = quantise(layer_norm(x)), as the kernels layer_norm and quantise make it.
    Shapes: x f32 [num_rows, >= width]; weight and bias f32 [width]; counts i32 [2]; codes i32
    [num_tiles, num_groups, tile, 8], scales f32 [num_tiles, num_groups, tile], sums i32 and
    weighted f32 [num_tiles, num_groups, 3, tile].
    Source: Ba, Kiros and Hinton, arXiv 1607.06450.
    """
    num_rows, num_groups, tile = get(counts, count), num_groups_of(width), codes.shape[2]
    # An item is a tile of rows, whose codes lie side by side.
    for item in prange(num_tiles_of(num_rows, codes)):
        for row in range(item * tile, min((item + 1) * tile, num_rows)):
            at = row * x.shape[1]
            mean = _mean(x, at, width)
            factor = _factor(x, at, eps, width, mean)
            for group in range(num_groups):
                put_codes(
                    _normalise(x, at, weight, bias, 0, 32 * group, width, mean, factor),
                    _normalise(x, at, weight, bias, 0, 32 * group + 16, width, mean, factor),
                    codes,
                    scales,
                    sums,
                    weighted,
                    row,
                    group,
                )
