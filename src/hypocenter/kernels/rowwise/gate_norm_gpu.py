"""Triton kernel of `gate_norm`: one program is one group of a row."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.rowwise.norm_gpu import warps_of_norm
from hypocenter.kernels.shared_gpu import as_offset, follow


@triton.jit
def gate_norm_kernel(
    gate_ptr, x_ptr, weight_ptr, counts_ptr, eps, width, gate_stride, x_stride,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: gate = y / sqrt(mean(y**2) + eps) weight, in place, group by group, with y = x
    silu(gate).
    Shapes: gate and x f32 [num_rows, >= num_groups * width]; weight f32 [num_groups * width];
    counts i32 [2].
    Source: Dao and Gu, arXiv 2405.21060, section 7.2.
    """
    follow(OVERLAPS)
    row, group = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(counts_ptr):
        return
    row = as_offset(row, WIDE)
    column = tl.arange(0, BLOCK)
    live, at = column < width, group * width + column
    gate_at = gate_ptr + row * gate_stride + at
    z = tl.load(gate_at, mask=live, other=0.0)
    x = tl.load(x_ptr + row * x_stride + at, mask=live, other=0.0)
    value = x * (z / (1.0 + tl.exp(-z)))
    mean_square = tl.sum(value * value, axis=0) / width
    weight = tl.load(weight_ptr + at, mask=live, other=0.0)
    tl.store(gate_at, value * (1.0 / tl.sqrt(mean_square + eps)) * weight, mask=live)


def launch(plan: BoundPlan, x: Tensor, num_groups: int, width: int) -> None:
    """Append gate_norm for every group of every row of the bucket."""
    plan.add_gpu(
        gate_norm_kernel,
        grid=(x.shape[0], num_groups),
        num_warps=warps_of_norm(plan, width),
        BLOCK=triton.next_power_of_2(width),
    )
