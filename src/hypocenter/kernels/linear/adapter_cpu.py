"""numba kernels of `adapter`: few ranks against a row, and a row of outputs out of few ranks.

A sum has 16 chains of columns, added in one tree, or one chain of ranks. Both are the same for each
row, however many rows come with it and whatever adapters these have.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import (
    add,
    fma,
    get,
    load,
    load_first,
    put,
    splat,
    store,
    sum_lanes,
)
from hypocenter.device.cpu.vector_ir import LANES
from hypocenter.kernels.linear.adapter_sizes import OUTPUTS, RANKS

#: Rows of an item.
_ROWS = 16


@inline
def scale_of(scales: Any, sequences: Any, row: int, owner: int) -> float:
    return get(scales, get(sequences, row) * scales.shape[1] + owner)  # type: ignore[no-any-return]


@inline
def ranks_of_row(
    x: Any,
    x_at: int,
    down: Any,
    at: int,
    pitch: int,
    num_columns: int,
    scale: float,
    out: Any,
    out_at: int,
) -> None:
    """The products of a row with RANKS ranks, each `pitch` behind the one before."""
    zero = splat(np.float32(0))
    t0, t1, t2, t3, t4, t5, t6, t7 = zero, zero, zero, zero, zero, zero, zero, zero
    for column in range(0, num_columns, LANES):
        value, w_at = load_first(x, x_at + column, num_columns - column), at + column
        t0 = fma(value, load(down, w_at), t0)
        t1 = fma(value, load(down, w_at + pitch), t1)
        t2 = fma(value, load(down, w_at + 2 * pitch), t2)
        t3 = fma(value, load(down, w_at + 3 * pitch), t3)
        t4 = fma(value, load(down, w_at + 4 * pitch), t4)
        t5 = fma(value, load(down, w_at + 5 * pitch), t5)
        t6 = fma(value, load(down, w_at + 6 * pitch), t6)
        t7 = fma(value, load(down, w_at + 7 * pitch), t7)
    put(out, out_at, sum_lanes(t0) * scale)
    put(out, out_at + 1, sum_lanes(t1) * scale)
    put(out, out_at + 2, sum_lanes(t2) * scale)
    put(out, out_at + 3, sum_lanes(t3) * scale)
    put(out, out_at + 4, sum_lanes(t4) * scale)
    put(out, out_at + 5, sum_lanes(t5) * scale)
    put(out, out_at + 6, sum_lanes(t6) * scale)
    put(out, out_at + 7, sum_lanes(t7) * scale)


@cpu_kernel
def adapter_down(
    x: Any,
    counts: Any,
    count: int,
    down: Any,
    owners: Any,
    factors: Any,
    scales: Any,
    sequences: Any,
    products: Any,
    num_columns: int,
) -> None:
    """Formula: products[t, r] = scales[sequences[t], owners[r / 8]] factors[r / 8] (down[r] x[t]),
    and 0 where that scale is.
    Shapes: x f32 [num_rows, >= num_columns]; counts i32 [2]; down f16 or f32 [num_ranks,
    num_columns padded to 64]; owners i32 and factors f32 [num_ranks / 8]; scales f32
    [num_sequences, num_adapters]; sequences i32 [>= num_rows]; products f32 [num_rows, >=
    num_ranks].
    Source: Hu et al., arXiv 2106.09685, section 4.1.
    """
    num_rows, num_tiles, zero = get(counts, count), owners.shape[0], np.float32(0)
    num_blocks = (num_rows + _ROWS - 1) // _ROWS
    for item in prange(num_tiles * num_blocks):
        tile, block = item % num_tiles, item // num_tiles
        owner, factor = get(owners, tile), get(factors, tile)
        for row in range(_ROWS * block, min(_ROWS * (block + 1), num_rows)):
            scale = scale_of(scales, sequences, row, owner)
            out_at = row * products.shape[1] + RANKS * tile
            if scale == zero:
                for rank in range(RANKS):
                    put(products, out_at + rank, zero)
            else:
                pitch, x_at = down.shape[1], row * x.shape[1]
                at, count_of = RANKS * tile * pitch, scale * factor
                ranks_of_row(x, x_at, down, at, pitch, num_columns, count_of, products, out_at)


@inline
def outputs_of_row(
    products: Any,
    made_at: int,
    up: Any,
    up_at: int,
    pitch: int,
    owners: Any,
    scales: Any,
    sequences: Any,
    row: int,
    out: Any,
    out_at: int,
) -> None:
    """64 outputs of a row of `sequences`, not touched where it has no adapter; each rank of `up`
    is `pitch` behind the one before."""
    zero = splat(np.float32(0))
    t0, t1, t2, t3 = zero, zero, zero, zero
    is_adapted = False
    for tile in range(owners.shape[0]):
        if scale_of(scales, sequences, row, get(owners, tile)) != np.float32(0):
            is_adapted = True
            for rank in range(RANKS * tile, RANKS * (tile + 1)):
                value = splat(get(products, made_at + rank))
                at = up_at + rank * pitch
                t0 = fma(value, load(up, at), t0)
                t1 = fma(value, load(up, at + 16), t1)
                t2 = fma(value, load(up, at + 32), t2)
                t3 = fma(value, load(up, at + 48), t3)
    if is_adapted:
        store(out, out_at, add(load(out, out_at), t0))
        store(out, out_at + 16, add(load(out, out_at + 16), t1))
        store(out, out_at + 32, add(load(out, out_at + 32), t2))
        store(out, out_at + 48, add(load(out, out_at + 48), t3))


@cpu_kernel
def adapter_up(
    products: Any,
    counts: Any,
    count: int,
    up: Any,
    owners: Any,
    scales: Any,
    sequences: Any,
    out: Any,
) -> None:
    """Formula: out[t] += up.T products[t], of ranks r where scales[sequences[t], owners[r / 8]] is
    not 0.
    Shapes: products f32 [num_rows, >= num_ranks]; counts i32 [2]; up f16 or f32 [num_ranks,
    outputs padded to 64]; owners i32 [num_ranks / 8]; scales f32 [num_sequences, num_adapters];
    sequences i32 [>= num_rows]; out f32 [num_rows, >= outputs padded to 64].
    Source: Hu et al., arXiv 2106.09685, section 4.1.
    """
    num_rows = get(counts, count)
    for item in prange(up.shape[1] // OUTPUTS):
        for row in range(num_rows):
            column, pitch = OUTPUTS * item, up.shape[1]
            made_at, out_at = row * products.shape[1], row * out.shape[1] + column
            outputs_of_row(
                products, made_at, up, column, pitch, owners, scales, sequences, row, out, out_at
            )
