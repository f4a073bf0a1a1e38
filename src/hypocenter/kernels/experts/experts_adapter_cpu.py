"""numba kernels of `experts_adapter`: the sums of `linear/adapter_cpu.py`, for each choice of a
token with the matrices of the expert that it chose."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, prange
from hypocenter.device.cpu.vector import get, put
from hypocenter.kernels.linear.adapter_cpu import outputs_of_row, ranks_of_row, scale_of
from hypocenter.kernels.linear.adapter_sizes import OUTPUTS, RANKS


@cpu_kernel
def experts_adapter_down(
    x: Any,
    ids: Any,
    places: Any,
    counts: Any,
    down: Any,
    owners: Any,
    factors: Any,
    scales: Any,
    sequences: Any,
    products: Any,
    num_columns: int,
) -> None:
    """Formula: products[t, j, r] = scales[sequences[t], owners[r / 8]] factors[r / 8]
    (down[ids[t, j], r] x[places[t, j]]), and 0 where that scale is.
    Shapes: x f32 [num_rows, >= num_columns]; ids and places i32 [num_tokens, num_used]; counts i32
    [2]; down f16 or f32 [num_experts, num_ranks, num_columns padded to 64]; owners i32 and factors
    f32 [num_ranks / 8]; scales f32 [num_sequences, num_adapters]; sequences i32 [>= num_tokens];
    products f32 [num_tokens, >= num_used * num_ranks].
    Source: Hu et al., arXiv 2106.09685, section 4.1.
    """
    num_used, num_tiles, zero = ids.shape[1], owners.shape[0], np.float32(0)
    for item in prange(get(counts, 0) * num_used * num_tiles):
        tile, choice = item % num_tiles, item // num_tiles
        token = choice // num_used
        scale = scale_of(scales, sequences, token, get(owners, tile))
        first = (choice - token * num_used) * num_tiles + tile
        out_at = token * products.shape[1] + RANKS * first
        if scale == zero:
            for rank in range(RANKS):
                put(products, out_at + rank, zero)
        else:
            row = np.int64(get(ids, choice)) * down.shape[1] + RANKS * tile
            x_at, at = np.int64(get(places, choice)) * x.shape[1], row * down.shape[2]
            count, pitch = scale * get(factors, tile), down.shape[2]
            ranks_of_row(x, x_at, down, at, pitch, num_columns, count, products, out_at)


@cpu_kernel
def experts_adapter_up(
    products: Any,
    ids: Any,
    places: Any,
    counts: Any,
    up: Any,
    owners: Any,
    scales: Any,
    sequences: Any,
    out: Any,
) -> None:
    """Formula: out[places[t, j]] += up[ids[t, j]].T products[t, j], of ranks r where
    scales[sequences[t], owners[r / 8]] is not 0.
    Shapes: products f32 [num_tokens, >= num_used * num_ranks]; ids and places i32 [num_tokens,
    num_used]; counts i32 [2]; up f16 or f32 [num_experts, num_ranks, outputs padded to 64]; owners
    i32 [num_ranks / 8]; scales f32 [num_sequences, num_adapters]; sequences i32 [>= num_tokens];
    out f32 [num_rows, >= outputs padded to 64].
    Source: Hu et al., arXiv 2106.09685, section 4.1.
    """
    num_used, num_ranks, pitch = ids.shape[1], up.shape[1], up.shape[2]
    num_parts = pitch // OUTPUTS
    for item in prange(get(counts, 0) * num_used * num_parts):
        choice, column = item // num_parts, OUTPUTS * (item % num_parts)
        token = choice // num_used
        made_at = token * products.shape[1] + (choice - token * num_used) * num_ranks
        up_at = np.int64(get(ids, choice)) * num_ranks * pitch + column
        out_at = np.int64(get(places, choice)) * out.shape[1] + column
        outputs_of_row(
            products, made_at, up, up_at, pitch, owners, scales, sequences, token, out, out_at
        )
