"""Triton kernels of products with experts: a program has some outputs of the rows of one group.

Rows take the steps that they take in products of few and of many rows (`linear_codes_gpu.py`,
`linear_codes_many_gpu.py`, `linear_float_gpu.py`), by the same code and in the same tiles, so their
bits are those of a product with their expert alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.op import BoundPlan
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
        1,
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
    """Formula: out = x @ weight[expert].T (+ bias[expert]) for the few rows of each group, of one
    weight or two.
    Shapes: x f16 [num_rows, k padded to 128]; row_scales f32 [num_rows]; experts, firsts and
    sizes i32 [num_groups]; words i32, scales and minima f16, packed as in `gpu_layout.py`;
    bias f32 [num_experts, n]; out f32 [num_rows, >= n]; of a second weight words_2, scales_2,
    minima_2, bias_2 and out_2.
    Source: Shazeer et al., arXiv 1701.06538 (mixtures).
    """
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
    """Formula: out = x @ weight[expert].T (+ bias[expert]) for the rows of each group.
    Shapes: x f16 [num_rows, k padded to 128]; row_scales f32 [num_rows]; experts, firsts and
    sizes i32 [num_groups]; words i32, scales and minima f16, packed as in `gpu_layout.py`;
    bias f32 [num_experts, n]; out f32 [num_rows, >= n].
    Source: Shazeer et al., arXiv 1701.06538 (mixtures).
    """
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
    """Formula: out = x @ weights[expert].T (+ bias[expert]) for the rows of each group.
    Shapes: x f32, f16 or bf16 bits [num_rows, >= k]; row_scales f32 [num_rows]; experts,
    firsts and sizes i32 [num_groups]; weights [num_experts, n, k], packed as in
    `gpu_layout.py`; bias f32 [num_experts, n]; out f32 [num_rows, >= n].
    Source: Shazeer et al., arXiv 1701.06538 (mixtures).
    """
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


def _few_form(product: Product, shape: ExpertsShape, fragments: Tensor | None) -> TileForm | None:
    padded = padded_rows(product.weight.shape[1])
    return few_codes_form(shape.group_rows, padded, reads_fragments=fragments is not None)


def _one(product: Product, mark: str = "") -> dict[str, Any]:
    """What kernels of codes take for a product: arrays, bias, out, its stride, and a factor."""
    words, scales, minima, _, factor = product.weight.data.parts
    return {
        f"words{mark}_ptr": words,
        f"scales{mark}_ptr": scales,
        f"minima{mark}_ptr": minima,
        f"bias{mark}_ptr": _bias(product),
        f"out{mark}_ptr": product.out,
        f"out{mark}_stride": product.out.strides[0],
        f"factor{mark}": float(factor),
        f"row_groups{mark}": padded_rows(product.weight.shape[1]) // CODE_LANES,
    }


def launch_codes(
    plan: BoundPlan,
    products: Sequence[Product],
    shape: ExpertsShape,
    rounded: Tensor,
    fragments: Tensor | None,
) -> None:
    """Append one product with experts held as codes, or two that `takes_both` has allowed."""
    only = products[0]
    packed = only.weight.data
    num_units = num_units_of(packed)
    form = _few_form(only, shape, fragments) if shape.is_few else None
    if form is not None:
        x = rounded if fragments is None else fragments
        both = (*products, *products[: _MOST - len(products)])
        tiles = [padded_rows(product.weight.shape[1]) // form.outputs for product in products]
        plan.add_gpu(
            experts_codes_few_kernel,
            grid=(shape.num_groups, sum(tiles)),
            x_ptr=x,
            x_stride=x.strides[0],
            num_tiles=tiles[0],
            num_units=num_units,
            num_warps=form.num_warps,
            NUM_WEIGHTS=len(products),
            IS_FRAGMENTS=fragments is not None,
            IS_EVEN=num_units % CHAINS == 0,
            OUTPUTS=form.outputs,
            ROWS=form.rows,
            STAGES=form.stages,
            **_one(both[0]),
            **_one(both[1], "_2"),
            **constants_of(packed),
        )
        return
    padded = padded_rows(only.weight.shape[1])
    form = codes_form(shape.group_rows, padded, plan.device)
    plan.add_gpu(
        experts_codes_kernel,
        grid=(shape.num_groups, padded // form.outputs, triton.cdiv(shape.group_rows, form.rows)),
        x_ptr=rounded,
        x_stride=rounded.strides[0],
        num_units=num_units,
        num_warps=form.num_warps,
        OUTPUTS=form.outputs,
        ROWS=form.rows,
        STAGES=form.stages,
        **_one(only),
        **constants_of(packed),
    )


def launch_floats(
    plan: BoundPlan, products: Sequence[Product], shape: ExpertsShape, x: Tensor
) -> None:
    """Append one product with experts of F32."""
    _launch_floats(plan, products, shape, x, is_rounded=False, row_scales_ptr=x)


def launch_rounded(
    plan: BoundPlan, products: Sequence[Product], shape: ExpertsShape, rounded: Tensor
) -> None:
    """Append one product with experts of F16 or BF16, which take x rounded."""
    _launch_floats(plan, products, shape, rounded, is_rounded=True)


def _launch_floats(
    plan: BoundPlan,
    products: Sequence[Product],
    shape: ExpertsShape,
    from_x: Tensor,
    *,
    is_rounded: bool,
    **given: Any,
) -> None:
    (only,) = products
    weight = only.weight
    padded, num_columns = padded_rows(weight.shape[1]), weight.shape[2]
    form = float_form(weight.dtype, shape.group_rows, [padded], plan.device, accumulate=False)
    # A group has no more, and the smallest tile of many has 16.
    num_rows = min(form.rows, max(shape.group_rows, 16))
    num_chunks = triton.cdiv(num_columns, 64)
    plan.add_gpu(
        experts_float_kernel,
        grid=(shape.num_groups, padded // form.outputs, triton.cdiv(shape.group_rows, num_rows)),
        x_ptr=from_x,
        x_stride=from_x.strides[0],
        weights_ptr=weight.data.parts[0],
        bias_ptr=_bias(only),
        num_columns=num_columns,
        num_chunks=num_chunks,
        per_expert=padded // LANES,
        num_warps=form.num_warps,
        IS_ROUNDED=is_rounded,
        IS_BF16=weight.dtype is DType.BF16,
        OUTPUTS=form.outputs,
        ROWS=num_rows,
        CHUNKS=min(form.steps, triton.next_power_of_2(num_chunks)),
        STAGES=form.stages,
        **given,
    )


def _bias(product: Product) -> Tensor:
    """A kernel without bias never reads the pointer; Triton wants one all the same."""
    return product.out if product.bias is None else product.bias
