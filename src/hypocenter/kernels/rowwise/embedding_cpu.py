"""numba kernels of `embedding`, over the packed layouts of `cpu_layout.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.codes import store_values
from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.packed_codes import (
    has_minima,
    is_halved,
    load_codes,
    load_minimum,
    load_scale,
    load_smalls,
    num_steps,
)
from hypocenter.device.cpu.packed_floats import columns_of, load_column
from hypocenter.device.cpu.vector import add, get, load, pick, put, splat, store, store_first
from hypocenter.kernels.weights.row_groups import GROUPS_PER_ITEM, LANES, ROWS_PER_ITEM

_ZERO = np.float32(0)


@cpu_kernel
def lookup_float(token_ids: Any, counts: Any, table: Any, out: Any) -> None:
    """Formula: out[i] = table[token_ids[i]], for i < counts[0].
    Shapes: token_ids i32 [num_tokens]; counts i32 [2]; table f32, f16 or bf16 [vocab_size,
    num_columns], packed as in `row_groups.py`; out f32 [num_tokens, >= num_columns].
    """
    num_steps, per_step = table.shape[1], columns_of(table)
    for row in prange(get(counts, 0)):
        token = np.int64(get(token_ids, row))
        at = token // 64 * num_steps * 64 + token % 64 // 16 * 16
        for k in range(num_steps * per_step):
            value = load_column(table, at + 64 * (k // per_step), k)
            put(out, row * out.shape[1] + k, pick(value, token % 16))


@inline
def _low(records: Any, at: int, index: int, smalls: Any) -> Any:
    return load_minimum(records, at, index, smalls) if has_minima(records) else splat(_ZERO)


@cpu_kernel
def lookup_codes(token_ids: Any, counts: Any, table: Any, num_columns: int, out: Any) -> None:
    """Formula: out[i] = scale code + minimum of row token_ids[i] of table, for i < counts[0].
    Shapes: token_ids i32 [num_tokens]; counts i32 [2]; table records of codes [vocab_size,
    num_columns], packed as in `row_groups.py`; out f32 [num_tokens, >= num_columns].
    """
    steps = num_steps(table)
    for row in prange(get(counts, 0)):
        token = np.int64(get(token_ids, row))
        first, place = token // ROWS_PER_ITEM * table.shape[1], token % ROWS_PER_ITEM
        group, lane = place // LANES, place % LANES
        for step in range(num_columns // 32):
            at, step_of = GROUPS_PER_ITEM * (first + step // steps) + group, step % steps
            codes, smalls = load_codes(table, at, step_of), load_smalls(table, at)
            to = row * out.shape[1] + 32 * step
            left = right = step_of
            if is_halved(table):
                left, right = 2 * step_of, 2 * step_of + 1
            scale, low = load_scale(table, at, left, smalls), _low(table, at, left, smalls)
            store_values(out, to, codes, 0, scale, low, lane)
            scale, low = load_scale(table, at, right, smalls), _low(table, at, right, smalls)
            store_values(out, to + 16, codes, 1, scale, low, lane)


@cpu_kernel
def gather(x: Any, rows: Any, counts: Any, count: int, out: Any) -> None:
    """Formula: out[i] = x[rows[i]], for i < counts[count].
    Shapes: x f32 [num_rows, width]; rows i32 [>= num_taken]; counts i32 [2]; out f32 [num_taken,
    width].
    """
    width = x.shape[1]
    for i in prange(get(counts, count)):
        source = np.int64(get(rows, i)) * width
        for k in range(0, width, 16):
            store(out, i * width + k, load(x, source + k))


@cpu_kernel
def add_rows(x: Any, table: Any, rows: Any, counts: Any) -> None:
    """Formula: x[i] += table[rows[i]], for i < counts[0].
    Shapes: x f32 [num_tokens, width]; table f32 [num_rows, width]; rows i32 [num_tokens]; counts
    i32 [2].
    """
    width = x.shape[1]
    for i in prange(get(counts, 0)):
        source = np.int64(get(rows, i)) * width
        for k in range(0, width, 16):
            store(x, i * width + k, add(load(x, i * width + k), load(table, source + k)))


@cpu_kernel
def keep_rows(x: Any, rows: Any, counts: Any, count: int, table: Any) -> None:
    """Formula: table[rows[i]] = x[i], for i < counts[count].
    Shapes: x f32 [num_rows, width]; rows i32 [>= num_rows]; counts i32 [2]; table f32 [num_kept,
    width].
    """
    width = x.shape[1]
    for i in prange(get(counts, count)):
        target = np.int64(get(rows, i)) * width
        for k in range(0, width, 16):
            store(table, target + k, load(x, i * width + k))


@cpu_kernel
def narrow(x: Any, counts: Any, out: Any) -> None:
    """Formula: out[i] = x[i, :width], for i < counts[1].
    Shapes: x f32 [num_logit_rows, >= width]; counts i32 [2]; out f32 [num_logit_rows, width].
    """
    width = out.shape[1]
    for i in prange(get(counts, 1)):
        for k in range(0, width, 16):
            store_first(out, i * width + k, load(x, i * x.shape[1] + k), width - k)
