"""Triton kernels of products with experts: a program has some outputs of the rows of one group.

Rows take the steps that they take in products of few and of some rows (`linear_codes_gpu.py`,
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
from hypocenter.kernels.linear.linear_codes_many_gpu import some_outputs
from hypocenter.kernels.linear.linear_float_gpu import float_outputs
from hypocenter.kernels.linear.linear_forms import float_form, some_codes_form
from hypocenter.kernels.shared_gpu import as_offset, follow
from hypocenter.kernels.weights.gpu_layout import CODE_LANES, UNITS
from hypocenter.kernels.weights.row_groups import LANES, padded_rows
from hypocenter.tensor import DType, Tensor

_LANES = tl.constexpr(CODE_LANES)


@triton.jit
def _group(experts_ptr, firsts_ptr, sizes_ptr):
    """The expert of this program's group, its first row and its rows."""
    group = tl.program_id(0)
    return tl.load(experts_ptr + group), tl.load(firsts_ptr + group), tl.load(sizes_ptr + group)


@triton.jit
def experts_codes_few_kernel(
    codes_ptr, x_scales_ptr, sums_ptr, experts_ptr, firsts_ptr, sizes_ptr, words_ptr, scales_ptr,
    minima_ptr, out_ptr, out_stride, num_units, x_pitch, lane_groups, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, ON_NVIDIA: tl.constexpr,
    SCALE_BITS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    expert, first, size = _group(experts_ptr, firsts_ptr, sizes_ptr)
    if size == 0:
        return
    units = as_offset(expert, WIDE) * lane_groups * num_units
    few_outputs(
        codes_ptr,
        x_scales_ptr,
        sums_ptr,
        words_ptr + units * (64 * _LANES // PER_WORD),
        scales_ptr + units * (_LANES * (64 // GROUP)),
        minima_ptr + units * (_LANES * (64 // GROUP)) if HAS_MINIMA else minima_ptr,
        out_ptr,
        out_ptr,
        out_stride,
        tl.program_id(1),
        first,
        first + size,
        num_units,
        x_pitch,
        PER_WORD,
        GROUP,
        ZERO,
        HAS_MINIMA,
        False,
        False,
        ON_NVIDIA,
        SCALE_BITS,
        WIDE,
        ROWS,
        OUTPUTS,
        UNROLL,
    )


@triton.jit
def experts_codes_kernel(
    codes_ptr, x_scales_ptr, sums_ptr, experts_ptr, firsts_ptr, sizes_ptr, words_ptr, scales_ptr,
    minima_ptr, out_ptr, out_stride, num_units, x_pitch, lane_groups, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, ON_NVIDIA: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    expert, start, size = _group(experts_ptr, firsts_ptr, sizes_ptr)
    first = start + tl.program_id(2) * ROWS
    if first >= start + size:
        return
    units = as_offset(expert, WIDE) * lane_groups * num_units
    some_outputs(
        codes_ptr,
        x_scales_ptr,
        sums_ptr,
        words_ptr + units * (64 * _LANES // PER_WORD),
        scales_ptr + units * (_LANES * (64 // GROUP)),
        minima_ptr + units * (_LANES * (64 // GROUP)) if HAS_MINIMA else minima_ptr,
        out_ptr,
        out_ptr,
        out_stride,
        tl.program_id(1),
        first,
        start + size,
        num_units,
        x_pitch,
        PER_WORD,
        GROUP,
        ZERO,
        HAS_MINIMA,
        False,
        False,
        ON_NVIDIA,
        WIDE,
        OUTPUTS,
        ROWS,
        STAGES,
    )


@triton.jit
def experts_float_kernel(
    x_ptr, row_scales_ptr, experts_ptr, firsts_ptr, sizes_ptr, weights_ptr, out_ptr, out_stride,
    num_columns, num_chunks, x_stride, per_expert, IS_ROUNDED: tl.constexpr,
    IS_BF16: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    expert, first, size = _group(experts_ptr, firsts_ptr, sizes_ptr)
    if size == 0:
        return
    float_outputs(
        x_ptr,
        row_scales_ptr,
        weights_ptr + as_offset(expert, WIDE) * per_expert * num_chunks * 1024,
        out_ptr,
        out_ptr,
        out_stride,
        tl.program_id(1),
        first,
        first + size,
        num_columns,
        num_chunks,
        x_stride,
        IS_ROUNDED,
        IS_BF16,
        False,
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
    add_form(plan, facts, shape, {"contract": contract, "facts": facts})


def _codes(
    plan: PlanBuilder, facts: Mapping[str, Any], shape: ExpertsShape, shared: dict[str, Any]
) -> None:
    weight, codes, out = facts["weight"], facts["codes"], facts["out"]
    layout, padded = UNITS[weight.dtype], padded_rows(weight.shape[1])
    num_units = -(-weight.shape[2] // 64)
    given = (codes, facts["x_scales"], facts["sums"], *_groups(facts), *weight.data.parts[:3])
    shared |= {
        "PER_WORD": layout.codes_per_word,
        "GROUP": layout.group,
        "ZERO": int(weight.data.parts[3]),
        "HAS_MINIMA": layout.has_minima,
    }
    is_nvidia = plan.device.startswith("cuda")
    if shape.is_few:
        rows = shape.group_rows
        outputs, num_warps = (8, 2) if rows > 1 else (4, 1)
        if not is_nvidia:  # of short groups, RDNA has registers for half as many
            outputs, num_warps = 8 if layout.group == 16 else 16, 8
        plan.add_gpu(
            experts_codes_few_kernel,
            *(*given, out, out.strides[0], num_units, codes.strides[0], padded // CODE_LANES),
            grid=(shape.num_groups, padded // outputs),
            num_warps=num_warps,
            SCALE_BITS=8 * layout.scale_dtype.block_bytes,
            ROWS=rows,
            OUTPUTS=outputs,
            UNROLL=1,
            **shared,
        )
        return
    form = some_codes_form(weight.dtype, shape.group_rows, plan.device)
    # With the expert's place to keep, RDNA has no registers to read short groups ahead.
    stages = 1 if layout.group == 16 and not is_nvidia else form.stages
    plan.add_gpu(
        experts_codes_kernel,
        *(*given, out, out.strides[0], num_units, codes.strides[0], padded // CODE_LANES),
        grid=(shape.num_groups, padded // form.outputs, triton.cdiv(shape.group_rows, form.rows)),
        num_warps=form.num_warps,
        OUTPUTS=form.outputs,
        ROWS=form.rows,
        STAGES=stages,
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
    plan.add_gpu(
        experts_float_kernel,
        *(from_x, facts["row_scales"] if is_rounded else from_x, *_groups(facts)),
        *(weight.data.parts[0], out, out.strides[0], num_columns, triton.cdiv(num_columns, 64)),
        *(from_x.strides[0], padded // LANES),
        grid=(shape.num_groups, padded // form.outputs),
        num_warps=form.num_warps,
        IS_ROUNDED=is_rounded,
        IS_BF16=weight.dtype is DType.BF16,
        OUTPUTS=form.outputs,
        # A group has no more, and the smallest tile of many has 16.
        ROWS=min(form.rows, max(shape.group_rows, 16)),
        CHUNKS=form.steps,
        STAGES=form.stages,
        **shared,
    )


def _groups(facts: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return facts["experts"], facts["firsts"], facts["sizes"]
