"""Triton kernel of `round`, and what other kernels that round rows share with it."""

from __future__ import annotations

from typing import Any

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow, lead

#: Columns of a row that one program takes at once.
_MAX_BLOCK = 16384


@triton.jit
def power_of(largest):
    """The power of two that brings `largest` to 2**14 .. 2**15, and its inverse."""
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    field = tl.minimum(tl.maximum(268 - exponent, 1), 253)
    up = (field << 23).to(tl.float32, bitcast=True)
    return up, ((254 - field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_halves(
    values,
    column,
    stop,
    rounded_row,
    fragments_row,
    HAS_FRAGMENTS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Store f16 `values` of columns below `stop`: in order, and as lanes of a matrix unit read.

    Of 32 columns those that lane t of four feeds to it lie together: of the first 16 columns and
    of the last 16 those from 2 * t and those from 8 + 2 * t on, two each. IS_WHOLE says that
    `column` begins at a multiple of 32: then numbers move and not addresses, which is faster.
    """
    tl.store(rounded_row + column, values, mask=column < stop)
    NUM: tl.constexpr = values.shape[0]
    if HAS_FRAGMENTS:
        if IS_WHOLE and NUM % 32 == 0:
            # [32 columns, half of them, pair, lane, even and odd]
            apart = tl.reshape(values, (NUM // 32, 2, 2, 4, 2))
            by_lanes = tl.reshape(tl.permute(apart, (0, 3, 1, 2, 4)), (NUM,))
            tl.store(fragments_row + column, by_lanes, mask=column < stop)
        else:
            at = column % 32
            lane, pair, odd = at % 8 // 2, at % 16 // 8, at % 2
            place = column - at + lane * 8 + at // 16 * 4 + pair * 2 + odd
            tl.store(fragments_row + place, values, mask=column < stop)


@triton.jit
def store_rounded(
    values,
    column,
    width,
    row,
    rounded_ptr,
    row_scales_ptr,
    fragments_ptr,
    pitch,
    HAS_FRAGMENTS: tl.constexpr,
):
    """Store a whole row of f32 `values`, 0 from `width` on, as f16 with its scale."""
    up, down = power_of(tl.max(tl.maximum(tl.abs(values), 0.0), axis=0))
    tl.store(row_scales_ptr + row, down)
    store_halves(
        (values * up).to(tl.float16),
        column,
        (width + 127) // 128 * 128,
        rounded_ptr + row * pitch,
        fragments_ptr + row * pitch,
        HAS_FRAGMENTS,
        True,
    )


@triton.jit
def round_kernel(
    x_ptr, sources_ptr, counts_ptr, rounded_ptr, row_scales_ptr, fragments_ptr, count, width,
    x_stride, pitch, GATHERS: tl.constexpr, IS_BF16: tl.constexpr, IS_PLAIN: tl.constexpr,
    HAS_FRAGMENTS: tl.constexpr, LEADS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: rounded = f16(2**e x) and row_scales = 2**-e, with e such that a row's largest
    number lies in 2**14 .. 2**15; as bf16, or plain, e = 0.
    Shapes: x f32 [num_tokens, >= width]; sources i32 [num_rows], which row of x each one is;
    counts i32 [2]; rounded f16 (or bf16 bits) and fragments f16 [num_rows, pitch]; row_scales
    f32 [num_rows].
    """
    lead(OVERLAPS and LEADS)
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + count):
        return
    source = as_offset(tl.load(sources_ptr + row) if GATHERS else row, WIDE)
    row = as_offset(row, WIDE)
    step = tl.arange(0, BLOCK)
    up = 1.0
    if IS_BF16 or IS_PLAIN:
        tl.store(row_scales_ptr + row, 1.0)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + step
            x = tl.load(x_ptr + source * x_stride + column, mask=column < width, other=0.0)
            largest = tl.maximum(largest, tl.abs(x))
        up, down = power_of(tl.max(largest, axis=0))
        tl.store(row_scales_ptr + row, down)
    stop = (width + 127) // 128 * 128
    for start in range(0, stop, BLOCK):
        column = start + step
        x = tl.load(x_ptr + source * x_stride + column, mask=column < width, other=0.0)
        if IS_BF16:
            rounded = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
            tl.store(rounded_ptr + row * pitch + column, rounded, mask=column < stop)
        else:
            store_halves(
                (x * up).to(tl.float16),
                column,
                stop,
                rounded_ptr + row * pitch,
                fragments_ptr + row * pitch,
                HAS_FRAGMENTS,
                True,
            )


def leads(fragments: Tensor | None) -> bool:
    """Whether the product that reads what is rounded may begin before it is: that of few rows asks
    for its weights first. Of more rows programs would crowd on the processors that are free."""
    return fragments is not None and fragments.shape[0] <= 8


def launch(
    plan: BoundPlan,
    width: int,
    rounded: Tensor,
    fragments: Tensor | None,
    counts: Tensor,
    is_plain: bool,
) -> None:
    """Append round: one program for each row of the bucket; `is_plain`: f16 have no factor."""
    # Without sources the pointer is never used.
    _launch(plan, width, rounded, fragments, sources_ptr=counts, GATHERS=False, IS_PLAIN=is_plain)


def launch_gathered(plan: BoundPlan, width: int, rounded: Tensor, fragments: Tensor | None) -> None:
    """Append round of the rows of x that `sources` name."""
    _launch(plan, width, rounded, fragments, count=0, GATHERS=True, IS_PLAIN=False)


def _launch(
    plan: BoundPlan, width: int, rounded: Tensor, fragments: Tensor | None, **given: Any
) -> None:
    plan.add_gpu(
        round_kernel,
        grid=(rounded.shape[0],),
        # Without fragments the pointer is never used.
        fragments_ptr=fragments or rounded,
        pitch=rounded.shape[1],
        IS_BF16=rounded.dtype is not DType.F16,
        LEADS=leads(fragments),
        BLOCK=min(triton.next_power_of_2(width), _MAX_BLOCK),
        num_warps=8,
        **given,
    )
