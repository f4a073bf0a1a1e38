"""numba kernel of `rms_norm`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.lang import cpu_kernel, inline, prange
from hypocenter.device.vector import add, fma, get, load_first, mul, splat, store_first, sum_lanes


@inline
def _norm_row(
    x: Any, at: int, weight: Any, eps: float, out: Any, out_at: int, width: int, accumulate: bool
) -> None:
    squares = splat(np.float32(0))
    for column in range(0, width, 16):
        value = load_first(x, at + column, width - column)
        squares = fma(value, value, squares)
    mean_square = sum_lanes(squares) / np.float32(width)
    factor = splat(np.float32(1) / np.sqrt(mean_square + eps))
    for column in range(0, width, 16):
        left = width - column
        value = mul(load_first(x, at + column, left), factor)
        value = mul(value, load_first(weight, column, left))
        if accumulate:
            value = add(load_first(out, out_at + column, left), value)
        store_first(out, out_at + column, value, left)


@cpu_kernel
def rms_norm(
    x: Any, counts: Any, count: int, weight: Any, eps: float, out: Any, num_heads: int,
    width: int, accumulate: bool,
) -> None:  # fmt: skip
    for row in prange(get(counts, count)):
        for head in range(num_heads):
            at = row * x.shape[1] + head * width
            out_at = row * out.shape[1] + head * width
            _norm_row(x, at, weight, eps, out, out_at, width, accumulate)
