"""numba kernel of `gate_norm`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import (
    fma,
    get,
    load_first,
    mul,
    sigmoid,
    splat,
    store_first,
    sum_lanes,
)


@inline
def _gate(gate: Any, gate_at: int, x: Any, at: int, width: int) -> float:
    """Leave a group's columns gated; the sum of their squares."""
    squares = splat(np.float32(0))
    for column in range(0, width, 16):
        left = width - column
        z = load_first(gate, gate_at + column, left)
        value = mul(load_first(x, at + column, left), mul(z, sigmoid(z)))
        store_first(gate, gate_at + column, value, left)
        squares = fma(value, value, squares)
    return sum_lanes(squares)  # type: ignore[no-any-return]


@cpu_kernel
def gate_norm(
    gate: Any, x: Any, weight: Any, eps: float, counts: Any, num_groups: int, width: int
) -> None:
    """Formula: gate = y / sqrt(mean(y**2) + eps) weight, in place, group by group, with y = x
    silu(gate).
    Shapes: gate and x f32 [num_rows, >= num_groups * width]; weight f32 [num_groups * width];
    counts i32 [2].
    Source: Dao and Gu, arXiv 2405.21060, section 7.2.
    """
    for row in prange(get(counts, 0)):
        for group in range(num_groups):
            first = group * width
            gate_at, at = row * gate.shape[1] + first, row * x.shape[1] + first
            mean_square = _gate(gate, gate_at, x, at, width) / np.float32(width)
            factor = splat(np.float32(1) / np.sqrt(mean_square + eps))
            for column in range(0, width, 16):
                left = width - column
                value = mul(load_first(gate, gate_at + column, left), factor)
                value = mul(value, load_first(weight, first + column, left))
                store_first(gate, gate_at + column, value, left)
