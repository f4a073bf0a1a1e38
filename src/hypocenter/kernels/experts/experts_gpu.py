"""Triton kernels of products with experts: a program has some outputs of the rows of one group.

Rows take the steps that they take in `linear_codes_gpu.py` and `linear_float_gpu.py`, by the same
code, so their bits are those of a product with their expert alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.experts.experts_table import ExpertsShape
from hypocenter.kernels.linear.linear_codes_gpu import few_outputs, many_outputs
from hypocenter.kernels.linear.linear_float_gpu import few_float_outputs, many_float_outputs
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
    minima_ptr, out_ptr, out_stride, num_units, num_steps, x_pitch, lane_groups,
    PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    expert, first, size = _group(experts_ptr, firsts_ptr, sizes_ptr)
    if size == 0:
        return
    units = as_offset(expert, WIDE) * lane_groups * num_units
    many_outputs(
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
        num_steps,
        x_pitch,
        PER_WORD,
        GROUP,
        ZERO,
        HAS_MINIMA,
        False,
        False,
        WIDE,
        OUTPUTS,
        ROWS,
        STAGES,
    )


@triton.jit
def experts_float_few_kernel(
    x_ptr, row_scales_ptr, experts_ptr, firsts_ptr, sizes_ptr, weights_ptr, out_ptr, out_stride,
    num_columns, num_chunks, x_stride, plane, per_expert, NUM_PIECES: tl.constexpr,
    IS_BF16: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    expert, first, size = _group(experts_ptr, firsts_ptr, sizes_ptr)
    if size == 0:
        return
    few_float_outputs(
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
        plane,
        NUM_PIECES,
        IS_BF16,
        False,
        False,
        WIDE,
        ROWS,
        STAGES,
    )


@triton.jit
def experts_float_kernel(
    x_ptr, row_scales_ptr, experts_ptr, firsts_ptr, sizes_ptr, weights_ptr, out_ptr, out_stride,
    num_columns, num_chunks, num_steps, x_stride, plane, per_expert, NUM_PIECES: tl.constexpr,
    IS_BF16: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    expert, first, size = _group(experts_ptr, firsts_ptr, sizes_ptr)
    if size == 0:
        return
    many_float_outputs(
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
        num_steps,
        x_stride,
        plane,
        NUM_PIECES,
        IS_BF16,
        False,
        False,
        WIDE,
        OUTPUTS,
        ROWS,
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
    if shape.is_few:
        is_nvidia = plan.device.startswith("cuda")
        rows = shape.group_rows
        outputs, num_warps = (16, 8) if not is_nvidia else (8, 2) if rows > 1 else (4, 1)
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
    plan.add_gpu(
        experts_codes_kernel,
        *(*given, out, out.strides[0], num_units, triton.cdiv(num_units, 16), codes.strides[0]),
        padded // CODE_LANES,
        grid=(shape.num_groups, padded // 32),
        num_warps=2 if shape.group_rows == 16 else 4,
        OUTPUTS=32,
        ROWS=shape.group_rows,
        STAGES=3 if layout.group == 32 else 2,
        **shared,
    )


def _floats(
    plan: PlanBuilder, facts: Mapping[str, Any], shape: ExpertsShape, shared: dict[str, Any]
) -> None:
    weight, out = facts["weight"], facts["out"]
    # F32 weights take x as it is: one piece, which nobody scaled.
    from_x: Tensor = facts["pieces"] if "pieces" in facts else facts["x"]
    row_scales, num_pieces, strides = from_x, 1, (from_x.strides[0], 0)
    if "pieces" in facts:
        row_scales, num_pieces = facts["row_scales"], from_x.shape[1]
        strides = (from_x.strides[0], from_x.strides[1])
    padded, num_columns = padded_rows(weight.shape[1]), weight.shape[2]
    num_chunks = -(-num_columns // 64)
    given = (from_x, row_scales, *_groups(facts), *weight.data.parts[:1], out, out.strides[0])
    shared |= {"NUM_PIECES": num_pieces, "IS_BF16": weight.dtype is DType.BF16}
    if shape.group_rows <= 16:
        is_single = shape.group_rows == 1 and plan.device.startswith("cuda")
        plan.add_gpu(
            experts_float_few_kernel,
            *(*given, num_columns, num_chunks, *strides, padded // LANES),
            grid=(shape.num_groups, padded // LANES),
            ROWS=1 if is_single else 16,
            STAGES=2 if num_pieces != 2 else 4 if is_single else 3,
            **shared,
        )
        return
    plan.add_gpu(
        experts_float_kernel,
        *(*given, num_columns, num_chunks, triton.cdiv(num_chunks, 4), *strides, padded // LANES),
        grid=(shape.num_groups, padded // 64),
        num_warps=8 if num_pieces == 1 else 4,  # four have no registers for f32 on an A100
        OUTPUTS=64,
        ROWS=shape.group_rows,
        STAGES=3 if num_pieces == 2 else 2,
        **shared,
    )


def _groups(facts: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return facts["experts"], facts["firsts"], facts["sizes"]
