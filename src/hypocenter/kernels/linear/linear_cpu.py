"""numba kernels of `linear`: a few activation rows or many against a packed weight.

Each output adds its columns in order, in the lane of its interleaved row: one fused step per
column of float weights (of two bf16 the odd one first, where both factors are bf16), one per group
of codes that share a scale. Rows are taken by 16, 4 or 1 and do the same steps each, so a row's
result does not depend on how many rows came with it or on the number of threads.
"""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.cache_lines import fetch_ahead
from hypocenter.device.cpu.codes import add_products
from hypocenter.device.cpu.lang import always_inline, cpu_kernel, inline, prange
from hypocenter.device.cpu.packed_codes import (
    fetch_early,
    has_minima,
    is_halved,
    load_codes,
    load_factors,
    load_minimum,
    load_smalls,
    num_steps,
)
from hypocenter.device.cpu.packed_floats import add_step, columns_of
from hypocenter.device.cpu.sums import (
    add_scaled,
    add_stored,
    add_to_each,
    keep_totals,
    keep_zeros,
    kept_totals,
    store_totals,
    zero_totals,
)
from hypocenter.device.cpu.vector import get, load
from hypocenter.kernels.weights.row_groups import GROUPS_PER_ITEM, LANES, ROWS_PER_ITEM


@inline
def _finish(
    totals: Any, out: Any, row: int, bias: Any, bias_at: int, column: int, accumulate: bool
) -> None:
    at, pitch = row * out.shape[1] + column, out.shape[1]
    if bias.shape[0] > 0:
        totals = add_to_each(totals, load(bias, bias_at))
    if accumulate:
        totals = add_stored(totals, out, at, pitch)
    store_totals(out, at, pitch, totals)


@inline
def _float_rows(
    t0: Any, x: Any, row: int, weights: Any, item: int, out: Any, bias: Any, bias_at: int,
    column: int, accumulate: bool,
) -> None:  # fmt: skip
    """64 outputs of as many rows as t0 has."""
    t1, t2, t3 = t0, t0, t0
    num_steps, pitch = weights.shape[1], x.shape[1]
    for step in range(num_steps):
        w_at, at = 64 * (item * num_steps + step), row * pitch + columns_of(weights) * step
        fetch_ahead(weights, w_at, 64)
        t0 = add_step(t0, weights, w_at, x, at, pitch)
        t1 = add_step(t1, weights, w_at + 16, x, at, pitch)
        t2 = add_step(t2, weights, w_at + 32, x, at, pitch)
        t3 = add_step(t3, weights, w_at + 48, x, at, pitch)
    _finish(t0, out, row, bias, bias_at, column, accumulate)
    _finish(t1, out, row, bias, bias_at + 16, column + 16, accumulate)
    _finish(t2, out, row, bias, bias_at + 32, column + 32, accumulate)
    _finish(t3, out, row, bias, bias_at + 48, column + 48, accumulate)


@inline
def float_item(
    x: Any, first: int, end: int, weights: Any, item: int, out: Any, bias: Any, bias_at: int,
    column: int, accumulate: bool,
) -> None:  # fmt: skip
    """Outputs `column` and 63 more of rows first .. end - 1, by item `item` of the weights; their
    biases, where there are any, lie at `bias_at`."""
    row = first
    while row + 4 <= end:
        _float_rows(zero_totals(4), x, row, weights, item, out, bias, bias_at, column, accumulate)
        row += 4
    while row < end:
        _float_rows(zero_totals(1), x, row, weights, item, out, bias, bias_at, column, accumulate)
        row += 1


@cpu_kernel
def linear_float(
    x: Any, counts: Any, count: int, accumulate: bool, weight: Any, bias: Any, out: Any,
    weight_2: Any, bias_2: Any, out_2: Any, weight_3: Any, bias_3: Any, out_3: Any,
) -> None:  # fmt: skip
    """Formula: out (+)= x @ weight.T (+ bias) of three weights, of which one without rows is
    not there.
    Shapes: x f32 [num_rows, >= k] or, beside weight of bf16, bits of bf16; counts i32 [2];
    weight [n, k] packed as in `row_groups.py`, bias f32 [>= n padded to 64] or empty, out f32
    [num_rows, >= n padded to 64]; of the others weight_2, bias_2, out_2, weight_3, bias_3 and
    out_3.
    """
    num_rows = get(counts, count)
    second = weight.shape[0]
    third = second + weight_2.shape[0]
    for item in prange(third + weight_3.shape[0]):
        if item < second:
            at = ROWS_PER_ITEM * item
            float_item(x, 0, num_rows, weight, item, out, bias, at, at, accumulate)
        elif item < third:
            at = ROWS_PER_ITEM * (item - second)
            float_item(x, 0, num_rows, weight_2, item - second, out_2, bias_2, at, at, accumulate)
        else:
            at = ROWS_PER_ITEM * (item - third)
            float_item(x, 0, num_rows, weight_3, item - third, out_3, bias_3, at, at, accumulate)


@always_inline
def _add_minima(
    totals: Any,
    records: Any,
    at: int,
    step: int,
    smalls: Any,
    x_weighted: Any,
    tile: int,
    x_at: int,
) -> Any:
    if is_halved(records):
        low = load_minimum(records, at, 2 * step, smalls)
        high = load_minimum(records, at, 2 * step + 1, smalls)
        totals = add_scaled(totals, low, x_weighted, x_at, 1)
        return add_scaled(totals, high, x_weighted, x_at + tile, 1)
    low = load_minimum(records, at, step, smalls)
    return add_scaled(totals, low, x_weighted, x_at + 2 * tile, 1)


@always_inline
def _add_step(
    totals: Any, x_codes: Any, x_scales: Any, x_sums: Any, x_weighted: Any, x_at: int, lane: int,
    records: Any, at: int, step: int, smalls: Any,
) -> Any:  # fmt: skip
    """Add 32 columns of 16 outputs for as many rows as totals has."""
    fetch_early(records, at, step)
    codes, tile = load_codes(records, at, step), x_codes.shape[2]
    factors = load_factors(records, at, step, smalls)
    totals = add_products(totals, codes, factors, x_codes, x_scales, x_sums, tile, x_at, lane)
    if has_minima(records):
        totals = _add_minima(
            totals, records, at, step, smalls, x_weighted, tile, 3 * tile * x_at + lane
        )
    return totals


@inline
def add_item(
    kept: Any,
    x_codes: Any,
    x_scales: Any,
    x_sums: Any,
    x_weighted: Any,
    row: int,
    records: Any,
    item: int,
) -> None:
    """Add 64 outputs of as many rows as is kept totals of: what is read of x serves four groups."""
    num_records, steps = records.shape[1], num_steps(records)
    first, lane = row // x_codes.shape[2] * x_codes.shape[1], row % x_codes.shape[2]
    for record in range(num_records):
        for group in range(GROUPS_PER_ITEM):
            at = GROUPS_PER_ITEM * (item * num_records + record) + group
            totals, smalls = kept_totals(kept, group), load_smalls(records, at)
            for step in range(steps):
                totals = _add_step(
                    totals,
                    x_codes,
                    x_scales,
                    x_sums,
                    x_weighted,
                    first + record * steps + step,
                    lane,
                    records,
                    at,
                    step,
                    smalls,
                )
            keep_totals(kept, group, totals)


@inline
def _code_rows(
    kept: Any, x_codes: Any, x_scales: Any, x_sums: Any, x_weighted: Any, row: int, records: Any,
    item: int, out: Any, bias: Any, bias_at: int, column: int, accumulate: bool,
) -> None:  # fmt: skip
    """64 outputs of as many rows as is kept totals of, which are zero at first."""
    add_item(kept, x_codes, x_scales, x_sums, x_weighted, row, records, item)
    for group in range(GROUPS_PER_ITEM):
        at = LANES * group
        totals = kept_totals(kept, group)
        _finish(totals, out, row, bias, bias_at + at, column + at, accumulate)


@inline
def are_together(row: int, count: int, end: int, tile: int) -> bool:
    """Whether `count` rows from `row` on lie before `end`, and in one tile of codes."""
    return row + count <= end and row % tile + count <= tile


@inline
def code_item(
    x_codes: Any, x_scales: Any, x_sums: Any, x_weighted: Any, first: int, end: int, records: Any,
    item: int, out: Any, bias: Any, bias_at: int, column: int, accumulate: bool,
) -> None:  # fmt: skip
    """Does what `float_item` does, of codes."""
    row, tile = first, x_codes.shape[2]
    while row < end:
        if are_together(row, 16, end, tile):
            _code_rows(
                keep_zeros(GROUPS_PER_ITEM, 16),
                x_codes,
                x_scales,
                x_sums,
                x_weighted,
                row,
                records,
                item,
                out,
                bias,
                bias_at,
                column,
                accumulate,
            )
            row += 16
        elif are_together(row, 4, end, tile):
            _code_rows(
                keep_zeros(GROUPS_PER_ITEM, 4),
                x_codes,
                x_scales,
                x_sums,
                x_weighted,
                row,
                records,
                item,
                out,
                bias,
                bias_at,
                column,
                accumulate,
            )
            row += 4
        else:
            _code_rows(
                keep_zeros(GROUPS_PER_ITEM, 1),
                x_codes,
                x_scales,
                x_sums,
                x_weighted,
                row,
                records,
                item,
                out,
                bias,
                bias_at,
                column,
                accumulate,
            )
            row += 1


@cpu_kernel
def linear_codes(
    codes: Any, x_scales: Any, sums: Any, weighted: Any, counts: Any, count: int,
    accumulate: bool, weight: Any, bias: Any, out: Any,
    weight_2: Any, bias_2: Any, out_2: Any,
    weight_3: Any, bias_3: Any, out_3: Any,
) -> None:  # fmt: skip
    """Formula: out (+)= x @ weight.T (+ bias) of three weights, with weight = scale code +
    minimum and x about x_scales codes.
    Shapes: codes i32 [num_tiles, num_groups, tile, 8], x_scales f32 [num_tiles, num_groups,
    tile], sums i32 and weighted f32 [num_tiles, num_groups, 3, tile]; counts i32 [2]; weight
    records of codes [n, k] packed as in `row_groups.py`, bias f32 [>= n padded to 64] or empty,
    out f32 [num_rows, >= n padded to 64]; of the others weight_2, bias_2, out_2, weight_3,
    bias_3 and out_3.
    """
    num_rows = get(counts, count)
    second = weight.shape[0]
    third = second + weight_2.shape[0]
    for item in prange(third + weight_3.shape[0]):
        if item < second:
            code_item(
                codes,
                x_scales,
                sums,
                weighted,
                0,
                num_rows,
                weight,
                item,
                out,
                bias,
                ROWS_PER_ITEM * item,
                ROWS_PER_ITEM * item,
                accumulate,
            )
        elif item < third:
            code_item(
                codes,
                x_scales,
                sums,
                weighted,
                0,
                num_rows,
                weight_2,
                item - second,
                out_2,
                bias_2,
                ROWS_PER_ITEM * (item - second),
                ROWS_PER_ITEM * (item - second),
                accumulate,
            )
        else:
            code_item(
                codes,
                x_scales,
                sums,
                weighted,
                0,
                num_rows,
                weight_3,
                item - third,
                out_3,
                bias_3,
                ROWS_PER_ITEM * (item - third),
                ROWS_PER_ITEM * (item - third),
                accumulate,
            )
