"""Triton kernels of products with experts: a program has some outputs of the rows of one group.

Rows take the steps that they take in products of few and of many rows (`linear_codes_gpu.py`,
`linear_codes_many_gpu.py`, `linear_float_gpu.py`), by the same code and in the same tiles, so their
bits are those of a product with their expert alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.experts.experts_table import ExpertsShape, ExpertsTable
from hypocenter.kernels.linear.linear_codes_gpu import few_outputs
from hypocenter.kernels.linear.linear_codes_many_gpu import many_outputs
from hypocenter.kernels.linear.linear_float_gpu import float_outputs
from hypocenter.kernels.linear.linear_forms import (
    TileForm,
    codes_form,
    few_codes_form,
    float_form,
)
from hypocenter.kernels.linear.linear_gpu import constants_of, num_units_of
from hypocenter.kernels.linear.operands import Operands, Product
from hypocenter.kernels.linear.unpack_gpu import UNIT_WORDS
from hypocenter.kernels.shared_gpu import as_offset, follow
from hypocenter.kernels.weights.gpu_layout import CHAINS, CODE_LANES
from hypocenter.kernels.weights.row_groups import LANES, padded_rows

#: Weights that the kernel for few rows takes.
_MOST = 2
_CODE_LANES, _LANES = tl.constexpr(CODE_LANES), tl.constexpr(LANES)


@triton.jit
def _group(experts_ptr, firsts_ptr, sizes_ptr):
    """The expert of this program's group, its first row and its rows."""
    group = tl.program_id(0)
    return tl.load(experts_ptr + group), tl.load(firsts_ptr + group), tl.load(sizes_ptr + group)


@triton.jit
def _few_of_expert(
    x_ptr, row_scales_ptr, live_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr,
    out_stride, factor, expert, tile, first, num_units, x_stride, row_groups,
    PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr,
    HAS_BIAS: tl.constexpr, ON_NVIDIA: tl.constexpr, WIDE: tl.constexpr,
    IS_FRAGMENTS: tl.constexpr, IS_EVEN: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one expert's weight for the rows of a group, from `first` on."""
    units = as_offset(expert, WIDE) * row_groups * num_units
    few_outputs(
        x_ptr,
        row_scales_ptr,
        live_ptr,
        words_ptr + units * UNIT_WORDS,
        scales_ptr + units * (UNIT_WORDS * PER_WORD // GROUP),
        minima_ptr + units * (UNIT_WORDS * PER_WORD // GROUP) if HAS_MINIMA else minima_ptr,
        bias_ptr + expert * (row_groups * _CODE_LANES) if HAS_BIAS else bias_ptr,
        out_ptr,
        out_stride,
        factor,
        tile,
        first,
        num_units,
        x_stride,
        PER_WORD,
        GROUP,
        ZERO,
        HAS_MINIMA,
        HAS_BIAS,
        False,
        ON_NVIDIA,
        False,
        WIDE,
        IS_FRAGMENTS,
        IS_EVEN,
        OUTPUTS,
        ROWS,
        STAGES,
    )


@triton.jit
def experts_codes_few_kernel(
    x_ptr, row_scales_ptr, experts_ptr, firsts_ptr, sizes_ptr, words_ptr, scales_ptr, minima_ptr,
    bias_ptr, out_ptr, out_stride, factor, row_groups, words_2_ptr, scales_2_ptr, minima_2_ptr,
    bias_2_ptr, out_2_ptr, out_2_stride, factor_2, row_groups_2, num_tiles, num_units, x_stride,
    NUM_WEIGHTS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr, ON_NVIDIA: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, IS_FRAGMENTS: tl.constexpr,
    IS_EVEN: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    expert, first, size = _group(experts_ptr, firsts_ptr, sizes_ptr)
    if size == 0:
        return
    live_ptr, tile = sizes_ptr + tl.program_id(0), tl.program_id(1)
    # Each weight has code of its own: guarded, an access is held against that weight alone.
    if NUM_WEIGHTS == 2:
        if tile >= num_tiles:
            _few_of_expert(
                x_ptr,
                row_scales_ptr,
                live_ptr,
                words_2_ptr,
                scales_2_ptr,
                minima_2_ptr,
                bias_2_ptr,
                out_2_ptr,
                out_2_stride,
                factor_2,
                expert,
                tile - num_tiles,
                first,
                num_units,
                x_stride,
                row_groups_2,
                PER_WORD,
                GROUP,
                ZERO,
                HAS_MINIMA,
                HAS_BIAS,
                ON_NVIDIA,
                WIDE,
                IS_FRAGMENTS,
                IS_EVEN,
                OUTPUTS,
                ROWS,
                STAGES,
            )
            return
    _few_of_expert(
        x_ptr,
        row_scales_ptr,
        live_ptr,
        words_ptr,
        scales_ptr,
        minima_ptr,
        bias_ptr,
        out_ptr,
        out_stride,
        factor,
        expert,
        tile,
        first,
        num_units,
        x_stride,
        row_groups,
        PER_WORD,
        GROUP,
        ZERO,
        HAS_MINIMA,
        HAS_BIAS,
        ON_NVIDIA,
        WIDE,
        IS_FRAGMENTS,
        IS_EVEN,
        OUTPUTS,
        ROWS,
        STAGES,
    )


@triton.jit
def experts_codes_kernel(
    x_ptr, row_scales_ptr, experts_ptr, firsts_ptr, sizes_ptr, words_ptr, scales_ptr, minima_ptr,
    bias_ptr, out_ptr, out_stride, factor, num_units, x_stride, row_groups, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    ON_NVIDIA: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    expert, start, size = _group(experts_ptr, firsts_ptr, sizes_ptr)
    first = start + tl.program_id(2) * ROWS
    if first >= start + size:
        return
    units = as_offset(expert, WIDE) * row_groups * num_units
    many_outputs(
        x_ptr,
        row_scales_ptr,
        words_ptr + units * UNIT_WORDS,
        scales_ptr + units * (UNIT_WORDS * PER_WORD // GROUP),
        minima_ptr + units * (UNIT_WORDS * PER_WORD // GROUP) if HAS_MINIMA else minima_ptr,
        bias_ptr + expert * (row_groups * _CODE_LANES) if HAS_BIAS else bias_ptr,
        out_ptr,
        out_stride,
        factor,
        tl.program_id(1),
        first,
        start + size,
        num_units,
        x_stride,
        PER_WORD,
        GROUP,
        ZERO,
        HAS_MINIMA,
        HAS_BIAS,
        False,
        ON_NVIDIA,
        WIDE,
        OUTPUTS,
        ROWS,
        STAGES,
    )


@triton.jit
def experts_float_kernel(
    x_ptr, row_scales_ptr, experts_ptr, firsts_ptr, sizes_ptr, weights_ptr, bias_ptr, out_ptr,
    out_stride, num_columns, num_chunks, x_stride, per_expert, IS_ROUNDED: tl.constexpr,
    IS_BF16: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    expert, start, size = _group(experts_ptr, firsts_ptr, sizes_ptr)
    first = start + tl.program_id(2) * ROWS
    if first >= start + size:
        return
    float_outputs(
        x_ptr,
        row_scales_ptr,
        weights_ptr + as_offset(expert, WIDE) * per_expert * num_chunks * 1024,
        bias_ptr + expert * (per_expert * _LANES) if HAS_BIAS else bias_ptr,
        out_ptr,
        out_stride,
        tl.program_id(1),
        first,
        start + size,
        num_columns,
        num_chunks,
        x_stride,
        IS_ROUNDED,
        IS_BF16,
        HAS_BIAS,
        False,
        WIDE,
        OUTPUTS,
        ROWS,
        CHUNKS,
        STAGES,
    )


def takes_both(products: Sequence[Product], operands: Operands, table: ExpertsTable) -> bool:
    """Whether two products of the same rows share a launch: of codes of one type, of few rows."""
    first, second = products
    dtype, shape = first.weight.dtype, table.shape
    is_alike = dtype is second.weight.dtype and (first.bias is None) == (second.bias is None)
    if not is_alike or not dtype.is_quantised or not shape.is_few:
        return False
    return _few_form(first, shape, operands.fragments) is not None


def add(
    plan: PlanBuilder,
    contract: Contract,
    facts: Mapping[str, Any],
    products: Sequence[Product],
    shape: ExpertsShape,
) -> None:
    """Append one product with experts, or two that `takes_both` has allowed, over the operands
    among `facts`."""
    add_form = _codes if facts["weight"].dtype.is_quantised else _floats
    shared = {"contract": contract, "facts": facts, "HAS_BIAS": facts["bias"] is not None}
    add_form(plan, facts, products, shape, shared)


def _few_form(product: Product, shape: ExpertsShape, fragments: Tensor | None) -> TileForm | None:
    padded = padded_rows(product.weight.shape[1])
    return few_codes_form(shape.group_rows, padded, reads_fragments=fragments is not None)


def _one(product: Product) -> list[Any]:
    """What kernels of codes take for a product: arrays, bias, out and its stride, and a factor."""
    arrays = product.weight.data.parts
    out, factor = product.out, float(arrays[4])
    return [*arrays[:3], _bias(product), out, out.strides[0], factor]


def _codes(
    plan: PlanBuilder,
    facts: Mapping[str, Any],
    products: Sequence[Product],
    shape: ExpertsShape,
    shared: dict[str, Any],
) -> None:
    only, rounded, fragments = products[0], facts["rounded"], facts["fragments"]
    packed = only.weight.data
    num_units = num_units_of(packed)
    shared |= constants_of(packed)
    form = _few_form(only, shape, fragments) if shape.is_few else None
    if form is not None:
        x = rounded if fragments is None else fragments
        taken: list[Any] = []
        for product in (*products, *products[: _MOST - len(products)]):
            taken += [*_one(product), _row_groups(product)]
        tiles = [padded_rows(product.weight.shape[1]) // form.outputs for product in products]
        plan.add_gpu(
            experts_codes_few_kernel,
            *(x, facts["row_scales"], *_groups(facts), *taken, tiles[0], num_units, x.strides[0]),
            grid=(shape.num_groups, sum(tiles)),
            num_warps=form.num_warps,
            NUM_WEIGHTS=len(products),
            IS_FRAGMENTS=fragments is not None,
            IS_EVEN=num_units % CHAINS == 0,
            OUTPUTS=form.outputs,
            ROWS=form.rows,
            STAGES=form.stages,
            **shared,
        )
        return
    padded = padded_rows(only.weight.shape[1])
    form = codes_form(shape.group_rows, padded, plan.device)
    plan.add_gpu(
        experts_codes_kernel,
        *(rounded, facts["row_scales"], *_groups(facts), *_one(only)),
        *(num_units, rounded.strides[0], _row_groups(only)),
        grid=(shape.num_groups, padded // form.outputs, triton.cdiv(shape.group_rows, form.rows)),
        num_warps=form.num_warps,
        OUTPUTS=form.outputs,
        ROWS=form.rows,
        STAGES=form.stages,
        **shared,
    )


def _row_groups(product: Product) -> int:
    return padded_rows(product.weight.shape[1]) // CODE_LANES


def _floats(
    plan: PlanBuilder,
    facts: Mapping[str, Any],
    products: Sequence[Product],
    shape: ExpertsShape,
    shared: dict[str, Any],
) -> None:
    (only,) = products
    weight, out = only.weight, only.out
    # F32 weights take x as it is.
    is_rounded = "rounded" in facts
    from_x: Tensor = facts["rounded"] if is_rounded else facts["x"]
    padded, num_columns = padded_rows(weight.shape[1]), weight.shape[2]
    form = float_form(weight.dtype, shape.group_rows, [padded], plan.device, accumulate=False)
    # A group has no more, and the smallest tile of many has 16.
    num_rows = min(form.rows, max(shape.group_rows, 16))
    num_chunks = triton.cdiv(num_columns, 64)
    plan.add_gpu(
        experts_float_kernel,
        *(from_x, facts["row_scales"] if is_rounded else from_x, *_groups(facts)),
        *(weight.data.parts[0], _bias(only), out, out.strides[0], num_columns, num_chunks),
        *(from_x.strides[0], padded // LANES),
        grid=(shape.num_groups, padded // form.outputs, triton.cdiv(shape.group_rows, num_rows)),
        num_warps=form.num_warps,
        IS_ROUNDED=is_rounded,
        IS_BF16=weight.dtype is DType.BF16,
        OUTPUTS=form.outputs,
        ROWS=num_rows,
        CHUNKS=min(form.steps, triton.next_power_of_2(num_chunks)),
        STAGES=form.stages,
        **shared,
    )


def _bias(product: Product) -> Tensor:
    """A kernel without bias never reads the pointer; Triton wants one all the same."""
    return product.out if product.bias is None else product.bias


def _groups(facts: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return facts["experts"], facts["firsts"], facts["sizes"]
