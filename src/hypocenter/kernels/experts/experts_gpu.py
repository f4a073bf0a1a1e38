"""Triton kernels of products with experts: a program has some outputs of the rows of one group.

Rows take the steps that they take in products of few and of many rows (`linear_codes_gpu.py`,
`linear_codes_many_gpu.py`, `linear_float_gpu.py`), by the same code and in the same tiles, so their
bits are those of a product with their expert alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.experts.experts_table import ExpertsShape
from hypocenter.kernels.linear.linear_codes_gpu import few_outputs
from hypocenter.kernels.linear.linear_codes_many_gpu import many_outputs
from hypocenter.kernels.linear.linear_float_gpu import float_outputs
from hypocenter.kernels.linear.linear_forms import codes_form, few_codes_form, float_form
from hypocenter.kernels.linear.linear_gpu import constants_of, num_units_of
from hypocenter.kernels.linear.unpack_gpu import UNIT_WORDS
from hypocenter.kernels.shared_gpu import as_offset, follow
from hypocenter.kernels.weights.gpu_layout import CHAINS, CODE_LANES
from hypocenter.kernels.weights.row_groups import LANES, padded_rows
from hypocenter.tensor import DType, Tensor

_CODE_LANES, _LANES = tl.constexpr(CODE_LANES), tl.constexpr(LANES)


@triton.jit
def _group(experts_ptr, firsts_ptr, sizes_ptr):
    """The expert of this program's group, its first row and its rows."""
    group = tl.program_id(0)
    return tl.load(experts_ptr + group), tl.load(firsts_ptr + group), tl.load(sizes_ptr + group)


@triton.jit
def experts_codes_few_kernel(
    x_ptr, row_scales_ptr, experts_ptr, firsts_ptr, sizes_ptr, words_ptr, scales_ptr, minima_ptr,
    bias_ptr, out_ptr, out_stride, factor, num_units, x_stride, row_groups, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    ON_NVIDIA: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, IS_FRAGMENTS: tl.constexpr,
    IS_EVEN: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    expert, first, size = _group(experts_ptr, firsts_ptr, sizes_ptr)
    if size == 0:
        return
    units = as_offset(expert, WIDE) * row_groups * num_units
    few_outputs(
        x_ptr,
        row_scales_ptr,
        sizes_ptr + tl.program_id(0),
        words_ptr + units * UNIT_WORDS,
        scales_ptr + units * (UNIT_WORDS * PER_WORD // GROUP),
        minima_ptr + units * (UNIT_WORDS * PER_WORD // GROUP) if HAS_MINIMA else minima_ptr,
        bias_ptr + expert * (row_groups * _CODE_LANES) if HAS_BIAS else bias_ptr,
        out_ptr,
        out_stride,
        factor,
        tl.program_id(1),
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


def add(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], shape: ExpertsShape
) -> None:
    """Append a product with experts over the operands among `facts`."""
    add_form = _codes if facts["weight"].dtype.is_quantised else _floats
    shared = {"contract": contract, "facts": facts, "HAS_BIAS": facts["bias"] is not None}
    add_form(plan, facts, shape, shared)


def _codes(
    plan: PlanBuilder, facts: Mapping[str, Any], shape: ExpertsShape, shared: dict[str, Any]
) -> None:
    weight, out = facts["weight"], facts["out"]
    rounded, fragments = facts["rounded"], facts["fragments"]
    packed, padded = weight.data, padded_rows(weight.shape[1])
    num_units, row_groups = num_units_of(packed), padded // CODE_LANES
    arrays, factor = packed.parts[:3], float(packed.parts[4])
    shared |= constants_of(packed)
    form = None
    if shape.is_few:
        form = few_codes_form(shape.group_rows, padded, reads_fragments=fragments is not None)
    if form is not None:
        x = rounded if fragments is None else fragments
        plan.add_gpu(
            experts_codes_few_kernel,
            *(
                x,
                facts["row_scales"],
                *_groups(facts),
                *arrays,
                _bias(facts),
                out,
                out.strides[0],
                factor,
            ),
            *(num_units, x.strides[0], row_groups),
            grid=(shape.num_groups, padded // form.outputs),
            num_warps=form.num_warps,
            IS_FRAGMENTS=fragments is not None,
            IS_EVEN=num_units % CHAINS == 0,
            OUTPUTS=form.outputs,
            ROWS=form.rows,
            STAGES=form.stages,
            **shared,
        )
        return
    form = codes_form(shape.group_rows, padded, plan.device)
    plan.add_gpu(
        experts_codes_kernel,
        *(
            rounded,
            facts["row_scales"],
            *_groups(facts),
            *arrays,
            _bias(facts),
            out,
            out.strides[0],
            factor,
        ),
        *(num_units, rounded.strides[0], row_groups),
        grid=(shape.num_groups, padded // form.outputs, triton.cdiv(shape.group_rows, form.rows)),
        num_warps=form.num_warps,
        OUTPUTS=form.outputs,
        ROWS=form.rows,
        STAGES=form.stages,
        **shared,
    )


def _floats(
    plan: PlanBuilder, facts: Mapping[str, Any], shape: ExpertsShape, shared: dict[str, Any]
) -> None:
    weight, out = facts["weight"], facts["out"]
    # F32 weights take x as it is.
    is_rounded = "rounded" in facts
    from_x: Tensor = facts["rounded"] if is_rounded else facts["x"]
    padded, num_columns = padded_rows(weight.shape[1]), weight.shape[2]
    form = float_form(weight.dtype, shape.group_rows, [padded], plan.device, accumulate=False)
    # A group has no more, and the smallest tile of many has 16.
    num_rows = min(form.rows, max(shape.group_rows, 16))
    plan.add_gpu(
        experts_float_kernel,
        *(from_x, facts["row_scales"] if is_rounded else from_x, *_groups(facts)),
        *(weight.data.parts[0], _bias(facts), out, out.strides[0], num_columns),
        triton.cdiv(num_columns, 64),
        *(from_x.strides[0], padded // LANES),
        grid=(shape.num_groups, padded // form.outputs, triton.cdiv(shape.group_rows, num_rows)),
        num_warps=form.num_warps,
        IS_ROUNDED=is_rounded,
        IS_BF16=weight.dtype is DType.BF16,
        OUTPUTS=form.outputs,
        ROWS=num_rows,
        CHUNKS=form.steps,
        STAGES=form.stages,
        **shared,
    )


def _bias(facts: Mapping[str, Any]) -> Tensor:
    """A kernel without bias never reads the pointer; Triton wants one all the same."""
    bias: Tensor = facts["out"] if facts["bias"] is None else facts["bias"]
    return bias


def _groups(facts: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return facts["experts"], facts["firsts"], facts["sizes"]
