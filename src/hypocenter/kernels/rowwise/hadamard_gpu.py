"""Triton kernel of `hadamard`: one program is `size` columns of a row."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow

#: Of 512 columns, the longest heads.
_MOST_STEPS = tl.constexpr(9)


@triton.jit
def sums_and_differences(x, SIZE: tl.constexpr):
    """The product of x [SIZE] with the Hadamard matrix, by steps of 1, 2, 4 ... columns."""
    for bit in tl.static_range(_MOST_STEPS):
        if (1 << bit) < SIZE:
            pairs = tl.reshape(x, (SIZE // (2 << bit), 2, 1 << bit))
            a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (SIZE,))
    return x


@triton.jit
def hadamard_kernel(
    x_ptr,
    counts_ptr,
    factor,
    x_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Formula: y = H x factor of each SIZE columns, in place, H[i, j] = (-1)**(ones of i & j).
    Shapes: x f32 [num_rows, >= width]; counts i32 [2].
    Source: Sylvester's construction; as a step before rounding QuaRot, arXiv 2404.00456.
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    start = x_ptr + as_offset(row, WIDE) * x_stride + tl.program_id(1) * SIZE
    at = start + tl.arange(0, SIZE)
    tl.store(at, sums_and_differences(tl.load(at), SIZE) * factor)


def launch(plan: BoundPlan, x: Tensor, width: int, size: int) -> None:
    """Append hadamard for every stretch of every row of the bucket."""
    plan.add_gpu(
        hadamard_kernel,
        grid=(x.shape[0], width // size),
        num_warps=1,
        SIZE=size,
        # Of sums and a product nothing is to be joined that the CPU rounds apart.
        enable_fp_fusion=False,
    )
