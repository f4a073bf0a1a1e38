"""numba kernel of `mix`. Rows are padded to 64 columns, so whole vectors are safe."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import add, fma, get, load, splat, spread, store

#: Columns of an item: tokens are few where time is short.
_COLUMNS = 256
_ZERO = np.float32(0)


@inline
def _mix_columns(
    x: Any,
    expert_rows: Any,
    places: Any,
    weights: Any,
    shared: Any,
    row: int,
    begin: int,
    end: int,
    accumulate: bool,
) -> None:
    num_used = places.shape[1]
    for k in range(begin, end, 16):
        total = splat(_ZERO)
        for slot in range(num_used):
            place = np.int64(get(places, row * num_used + slot)) * expert_rows.shape[1]
            weight = spread(weights, row * (num_used + 1) + slot)
            total = fma(weight, load(expert_rows, place + k), total)
        if shared.shape[0] > 0:
            weight = spread(weights, row * (num_used + 1) + num_used)
            total = fma(weight, load(shared, row * shared.shape[1] + k), total)
        at = row * x.shape[1] + k
        if accumulate:
            total = add(total, load(x, at))
        store(x, at, total)


@cpu_kernel
def mix(
    x: Any,
    expert_rows: Any,
    places: Any,
    weights: Any,
    shared: Any,
    counts: Any,
    width: int,
    accumulate: bool,
) -> None:
    """Formula: x[t] (+)= sum over j of weights[t, j] expert_rows[places[t, j]], plus weights[t,
    num_used] shared[t], added in that order.
    Shapes: x f32 [num_tokens, >= width]; expert_rows f32 [num_rows, >= width]; places i32
    [num_tokens, num_used]; weights f32 [num_tokens, num_used + 1]; shared f32 [num_tokens, >=
    width] or empty; counts i32 [2].
    Source: Shazeer et al., arXiv 1701.06538.
    """
    num_parts = (width + _COLUMNS - 1) // _COLUMNS
    for item in prange(get(counts, 0) * num_parts):
        row, begin = item // num_parts, item % num_parts * _COLUMNS
        end = min(begin + _COLUMNS, width)
        _mix_columns(x, expert_rows, places, weights, shared, row, begin, end, accumulate)
