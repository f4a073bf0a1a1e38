"""numba kernel of `linear_gate_codes`: two products, and the codes of what one lets through."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.sums import keep_zeros, kept_row
from hypocenter.device.cpu.vector import get, keep
from hypocenter.kernels.linear.linear_cpu import add_item, are_together
from hypocenter.kernels.linear.quantise_cpu import put_codes
from hypocenter.kernels.rowwise.activation_cpu import apply_gate
from hypocenter.kernels.weights.row_groups import GROUPS_PER_ITEM, LANES, ROWS_PER_ITEM

_ZERO = np.float32(0)


@inline
def _gate(gate: Any, up: Any, group: int, row: int, kind: int, left: int) -> Any:
    """16 columns, of which the first `left` are there and the others 0."""
    gated = apply_gate(kept_row(gate, group, row), kept_row(up, group, row), kind)
    return keep(gated, 0, left, _ZERO)


@inline
def _rows(
    gate: Any, up: Any, num_rows: int, x: Any, row: int, records: Any, item: int, kind: int,
    column: int, width: int, into: Any,
) -> None:  # fmt: skip
    """The codes of 64 columns of `num_rows` rows, of which `gate` and `up` keep zeros at first."""
    x_codes, x_scales, x_sums, x_weighted = x
    codes, scales, sums, weighted = into
    add_item(gate, x_codes, x_scales, x_sums, x_weighted, row, records, 2 * item)
    add_item(up, x_codes, x_scales, x_sums, x_weighted, row, records, 2 * item + 1)
    for token in range(num_rows):
        for group in range(0, GROUPS_PER_ITEM, 2):
            at = column + LANES * group
            put_codes(
                _gate(gate, up, group, token, kind, width - at),
                _gate(gate, up, group + 1, token, kind, width - at - LANES),
                codes,
                scales,
                sums,
                weighted,
                row + token,
                at // (2 * LANES),
            )


@inline
def gate_item(
    x: Any,
    first: int,
    end: int,
    records: Any,
    item: int,
    kind: int,
    column: int,
    width: int,
    into: Any,
) -> None:
    """Codes of columns `column` and 63 more of rows first .. end - 1, by items 2 * `item` and
    2 * `item` + 1 of two weights that lie by turns."""
    row, tile = first, x[0].shape[2]
    while row < end:
        if are_together(row, 16, end, tile):
            gate, up = keep_zeros(GROUPS_PER_ITEM, 16), keep_zeros(GROUPS_PER_ITEM, 16)
            _rows(gate, up, 16, x, row, records, item, kind, column, width, into)
            row += 16
        elif are_together(row, 4, end, tile):
            few_gate, few_up = keep_zeros(GROUPS_PER_ITEM, 4), keep_zeros(GROUPS_PER_ITEM, 4)
            _rows(few_gate, few_up, 4, x, row, records, item, kind, column, width, into)
            row += 4
        else:
            one_gate, one_up = keep_zeros(GROUPS_PER_ITEM, 1), keep_zeros(GROUPS_PER_ITEM, 1)
            _rows(one_gate, one_up, 1, x, row, records, item, kind, column, width, into)
            row += 1


@cpu_kernel
def linear_gate_codes(
    codes: Any, x_scales: Any, sums: Any, weighted: Any, counts: Any, weight: Any,
    kind: int, width: int, gated_codes: Any, gated_scales: Any, gated_sums: Any,
    gated_weighted: Any,
) -> None:  # fmt: skip
    """Formula: gated = quantise(kind(x @ gate.T) (x @ up.T)); items of gate and up lie by turns
    in weight.
    Shapes: codes i32 [num_tiles, num_groups, tile, 8], x_scales f32 [num_tiles, num_groups,
    tile], sums i32 and weighted f32 [num_tiles, num_groups, 3, tile]; counts i32 [2]; weight
    records of codes [2 (n padded to 64), k] packed as in `row_groups.py`; gated_codes i32
    [num_tiles, num_gated_groups, tile, 8], gated_scales f32 [num_tiles, num_gated_groups, tile],
    gated_sums i32 and gated_weighted f32 [num_tiles, num_gated_groups, 3, tile].
    Source: Shazeer, arXiv 2002.05202.
    """
    x, into = (
        (codes, x_scales, sums, weighted),
        (gated_codes, gated_scales, gated_sums, gated_weighted),
    )
    num_rows = get(counts, 0)
    for item in prange(weight.shape[0] // 2):
        gate_item(x, 0, num_rows, weight, item, kind, ROWS_PER_ITEM * item, width, into)
