"""Triton kernel of `add_parts`."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow

_BLOCK = 512


@triton.jit
def add_parts_kernel(
    parts_ptr,
    counts_ptr,
    out_ptr,
    part_stride,
    num_parts,
    width,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: out[i, c] = (parts[0, i, c] + parts[1, i, c]) + ..., in this order, for
    i < counts[0].
    Shapes: parts f32 [num_parts, num_tokens, width]; counts i32 [2]; out f32 [num_tokens, width].
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = as_offset(row, WIDE) * width + column
    total = tl.load(parts_ptr + place, mask=inside, other=0.0)
    for part in range(1, num_parts):
        start = as_offset(part, WIDE) * part_stride
        total += tl.load(parts_ptr + start + place, mask=inside, other=0.0)
    tl.store(out_ptr + place, total, mask=inside)


def launch(plan: BoundPlan, out: Tensor, num_parts: int) -> None:
    """Append add_parts: one program for 512 columns of each row."""
    num_rows, width = out.shape
    plan.add_gpu(
        add_parts_kernel,
        grid=(num_rows, triton.cdiv(width, _BLOCK)),
        part_stride=num_rows * width,
        num_parts=num_parts,
        width=width,
        BLOCK=_BLOCK,
    )
