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
    x: Any, experts: Any, firsts: Any, sizes: Any, found: Any, weight: Any, per_expert: int,
    bias: Any, out: Any,
) -> None:  # fmt: skip
    """out [rows of a group, n] = x [rows, k] @ weight.T (+ bias) of its expert, which has
    `per_expert` items."""
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
    """As `experts_float`, for weights held as codes and x as `quantise` left it."""
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
    """Codes of kind(x @ gate.T) * (x @ up.T); of an expert's `per_expert` pairs of items each has
    one of the gate and one of up."""
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
