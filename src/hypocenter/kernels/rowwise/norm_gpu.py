"""Triton kernels of `rms_norm`: one program is one head of one row, or some groups of codes."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.linear.quantise_gpu import leads, store_rounded
from hypocenter.kernels.shared_gpu import as_offset, follow, lead


@triton.jit
def inverse_of(x, width, eps):
    """What a row is multiplied by, all of which x is."""
    mean_square = tl.sum(x * x, axis=0) / width
    return 1.0 / tl.sqrt(mean_square + eps)


@triton.jit(do_not_specialize=["count"])
def rms_norm_kernel(
    x_ptr, counts_ptr, weight_ptr, out_ptr, count, eps, width, x_stride, out_stride,
    ACCUMULATE: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: out (+)= x / sqrt(mean(x**2) + eps) weight, head by head.
    Shapes: x and out f32 [num_rows, >= num_heads * width]; weight f32 [width]; counts i32 [2].
    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    follow(OVERLAPS)
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(counts_ptr + count):
        return
    row = as_offset(row, WIDE)
    column = tl.arange(0, BLOCK)
    live = column < width
    at = head * width + column
    x = tl.load(x_ptr + row * x_stride + at, mask=live, other=0.0)
    out = x * inverse_of(x, width, eps)
    out = out * tl.load(weight_ptr + column, mask=live, other=0.0)
    out_at = out_ptr + row * out_stride + at
    if ACCUMULATE:
        out += tl.load(out_at, mask=live, other=0.0)
    tl.store(out_at, out, mask=live)


@triton.jit(do_not_specialize=["count"])
def rms_norm_round_kernel(
    x_ptr, counts_ptr, weight_ptr, rounded_ptr, row_scales_ptr, fragments_ptr, count, eps, width,
    x_stride, pitch, HAS_FRAGMENTS: tl.constexpr, LEADS: tl.constexpr, OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: rounded = round(rms_norm(x)), as the kernels rms_norm and round make it.
    Shapes: x f32 [num_rows, >= width]; weight f32 [width]; counts i32 [2]; rounded and
    fragments f16 [num_rows, pitch]; row_scales f32 [num_rows].
    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    lead(OVERLAPS and LEADS)
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + count):
        return
    row = as_offset(row, WIDE)
    column = tl.arange(0, BLOCK)
    live = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0)
    inverse = inverse_of(x, width, eps)
    found = x * inverse * tl.load(weight_ptr + column, mask=live, other=0.0)
    # An undefined row is so up to its width.
    store_rounded(
        tl.where(live, found, 0.0),
        column,
        width,
        row,
        rounded_ptr,
        row_scales_ptr,
        fragments_ptr,
        pitch,
        HAS_FRAGMENTS,
    )


def warps_of_norm(plan: BoundPlan, width: int) -> int:
    """Warps of a program that norms a row of so many columns, however its results are stored.

    They decide in which order squares are added, so a norm and its rounded form have as many. On an
    H100 16 took 3 % less of a step of an 8B model than 4.
    """
    return 16 if width >= 2048 and plan.device.startswith("cuda") else 4


def launch(plan: BoundPlan, x: Tensor, width: int, num_heads: int) -> None:
    """Append rms_norm for every head of every row of the bucket."""
    plan.add_gpu(
        rms_norm_kernel,
        grid=(x.shape[0], num_heads),
        # As where it is rounded at once: the compiler might round otherwise.
        enable_fp_fusion=False,
        num_warps=warps_of_norm(plan, width),
        BLOCK=triton.next_power_of_2(width),
    )


def launch_rounded(
    plan: BoundPlan, x: Tensor, width: int, rounded: Tensor, fragments: Tensor | None
) -> None:
    """Append rms_norm_round: one program for each row of the bucket."""
    plan.add_gpu(
        rms_norm_round_kernel,
        grid=(x.shape[0],),
        # Without fragments the pointer is never used.
        fragments_ptr=fragments or rounded,
        pitch=rounded.shape[1],
        # A product and a sum rounded once would not be what the norm by itself rounds twice.
        enable_fp_fusion=False,
        num_warps=warps_of_norm(plan, width),
        LEADS=leads(fragments),
        BLOCK=max(triton.next_power_of_2(width), 128),
    )
