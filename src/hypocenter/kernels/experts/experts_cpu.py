"""numba kernels of products with experts: an item is 64 outputs of all rows of one group.

An item's weights are read once for these rows, and each row takes the steps that it takes in a
product with a single weight (`linear_cpu.py`).
"""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.lang import cpu_kernel, prange
from hypocenter.device.cpu.vector import get
from hypocenter.kernels.linear.linear_cpu import code_item, float_item
from hypocenter.kernels.linear.linear_gate_cpu import gate_item
from hypocenter.kernels.weights.row_groups import ROWS_PER_ITEM


@cpu_kernel
def experts_float(
    x: Any,
    experts: Any,
    firsts: Any,
    sizes: Any,
    found: Any,
    weight: Any,
    per_expert: int,
    bias: Any,
    out: Any,
) -> None:
    """Formula: out = x @ weight[expert].T (+ bias[expert]) for the rows of each group; an
    expert has `per_expert` items.
    Shapes: x f32 [num_rows, >= k] or, beside weight of bf16, bits of bf16; experts, firsts and
    sizes i32 [num_groups]; found i32 [1], how many groups there are; weight [num_experts, n,
    k], packed as in `row_groups.py`; bias f32 [num_experts, >= n] or empty; out f32 [num_rows,
    >= n].
    Source: Shazeer et al., arXiv 1701.06538 (mixtures).
    """
    for index in prange(get(found, 0) * per_expert):
        group, item = index // per_expert, index % per_expert
        first = get(firsts, group)
        float_item(
            x,
            first,
            first + get(sizes, group),
            weight,
            get(experts, group) * per_expert + item,
            out,
            bias,
            ROWS_PER_ITEM * (get(experts, group) * per_expert + item),
            ROWS_PER_ITEM * item,
            False,
        )


@cpu_kernel
def experts_codes(
    codes: Any, x_scales: Any, sums: Any, weighted: Any, experts: Any, firsts: Any,
    sizes: Any, found: Any, weight: Any, per_expert: int, bias: Any, out: Any,
) -> None:  # fmt: skip
    """Formula: out = x @ weight[expert].T (+ bias[expert]) for the rows of each group, with x
    about x_scales codes.
    Shapes: codes i32 [num_tiles, num_groups, tile, 8], x_scales f32 [num_tiles, num_groups,
    tile], sums i32 and weighted f32 [num_tiles, num_groups, 3, tile]; experts, firsts and sizes
    i32 [num_groups]; found i32 [1], how many groups there are; weight records of codes
    [num_experts, n, k], packed as in `row_groups.py`; bias f32 [num_experts, >= n] or empty;
    out f32 [num_rows, >= n].
    Source: Shazeer et al., arXiv 1701.06538 (mixtures).
    """
    for index in prange(get(found, 0) * per_expert):
        group, item = index // per_expert, index % per_expert
        first = get(firsts, group)
        code_item(
            codes,
            x_scales,
            sums,
            weighted,
            first,
            first + get(sizes, group),
            weight,
            get(experts, group) * per_expert + item,
            out,
            bias,
            ROWS_PER_ITEM * (get(experts, group) * per_expert + item),
            ROWS_PER_ITEM * item,
            False,
        )


@cpu_kernel
def experts_gate_codes(
    codes: Any, x_scales: Any, sums: Any, weighted: Any, experts: Any, firsts: Any,
    sizes: Any, found: Any, weight: Any, per_expert: int, kind: int, width: int,
    gated_codes: Any, gated_scales: Any, gated_sums: Any, gated_weighted: Any,
) -> None:  # fmt: skip
    """Formula: gated = quantise(kind(x @ gate.T) (x @ up.T)) for the rows of each group; of an
    expert's `per_expert` pairs of items each has one of the gate and one of up.
    Shapes: codes i32 [num_tiles, num_groups, tile, 8], x_scales f32 [num_tiles, num_groups,
    tile], sums i32 and weighted f32 [num_tiles, num_groups, 3, tile]; experts, firsts and sizes
    i32 [num_groups]; found i32 [1], how many groups there are; weight records of codes, packed
    as in `row_groups.py`; gated_codes i32 [num_tiles, num_gated_groups, tile, 8], gated_scales
    f32 [num_tiles, num_gated_groups, tile], gated_sums i32 and gated_weighted f32 [num_tiles,
    num_gated_groups, 3, tile].
    Source: Shazeer, arXiv 2002.05202.
    """
    x, into = (
        (codes, x_scales, sums, weighted),
        (gated_codes, gated_scales, gated_sums, gated_weighted),
    )
    for index in prange(get(found, 0) * per_expert):
        group, item = index // per_expert, index % per_expert
        first = get(firsts, group)
        gate_item(
            x,
            first,
            first + get(sizes, group),
            weight,
            get(experts, group) * per_expert + item,
            kind,
            ROWS_PER_ITEM * item,
            width,
            into,
        )
