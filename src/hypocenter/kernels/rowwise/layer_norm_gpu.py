"""Triton kernels of `layer_norm`: one program is one row, or a head of one."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.linear.quantise_gpu import leads, store_rounded
from hypocenter.kernels.rowwise.norm_gpu import warps_of_norm
from hypocenter.kernels.shared_gpu import as_offset, follow, lead


@triton.jit
def _moments(x, live, width, eps):
    """The mean of a row, all of which x is, and what the row less that is multiplied by."""
    mean = tl.sum(x, axis=0) / width
    centred = tl.where(live, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / width
    return mean, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def _normalise(x, weight_ptr, bias_ptr, column, live, width, eps):
    mean, inverse = _moments(x, live, width, eps)
    out = (x - mean) * inverse
    out = out * tl.load(weight_ptr + column, mask=live, other=0.0)
    return out + tl.load(bias_ptr + column, mask=live, other=0.0)


@triton.jit(do_not_specialize=["count"])
def layer_norm_kernel(
    x_ptr, counts_ptr, weight_ptr, bias_ptr, out_ptr, count, eps, width, x_stride, out_stride,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: out = (x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps) weight + bias, head by
    head.
    Shapes: x and out f32 [num_rows, >= num_heads * width]; weight and bias f32 [num_heads *
    width]; counts i32 [2].
    Source: Ba, Kiros and Hinton, arXiv 1607.06450.
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + count):
        return
    row, first = as_offset(row, WIDE), tl.program_id(1) * width
    column = tl.arange(0, BLOCK)
    live = column < width
    x = tl.load(x_ptr + row * x_stride + first + column, mask=live, other=0.0)
    out = _normalise(x, weight_ptr + first, bias_ptr + first, column, live, width, eps)
    tl.store(out_ptr + row * out_stride + first + column, out, mask=live)


@triton.jit(do_not_specialize=["count"])
def layer_norm_round_kernel(
    x_ptr, counts_ptr, weight_ptr, bias_ptr, rounded_ptr, row_scales_ptr, fragments_ptr, count, eps,
    width, x_stride, pitch, HAS_FRAGMENTS: tl.constexpr, LEADS: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: rounded = round(layer_norm(x)), as the kernels layer_norm and round make it.
    Shapes: x f32 [num_rows, >= width]; weight and bias f32 [width]; counts i32 [2]; rounded
    and fragments f16 [num_rows, pitch]; row_scales f32 [num_rows].
    Source: Ba, Kiros and Hinton, arXiv 1607.06450.
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
    out = _normalise(x, weight_ptr, bias_ptr, column, live, width, eps)
    # An undefined row is so up to its width.
    store_rounded(
        tl.where(live, out, 0.0),
        column,
        width,
        row,
        rounded_ptr,
        row_scales_ptr,
        fragments_ptr,
        pitch,
        HAS_FRAGMENTS,
    )


def launch(plan: BoundPlan, x: Tensor, width: int, num_heads: int) -> None:
    """Append layer_norm for every head of every row of the bucket."""
    plan.add_gpu(
        layer_norm_kernel,
        grid=(x.shape[0], num_heads),
        # As where it is rounded at once: the compiler might round otherwise.
        enable_fp_fusion=False,
        num_warps=warps_of_norm(plan, width),
        BLOCK=triton.next_power_of_2(width),
    )


def launch_rounded(
    plan: BoundPlan, x: Tensor, width: int, rounded: Tensor, fragments: Tensor | None
) -> None:
    """Append layer_norm_round: one program for each row of the bucket."""
    plan.add_gpu(
        layer_norm_round_kernel,
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
