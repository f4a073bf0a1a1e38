"""Triton kernel of `join`."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow

_BLOCK = 256


@triton.jit
def join_kernel(
    parts_ptr, counts_ptr, out_ptr, part_stride, row_stride, num_columns, out_stride,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: out[i, p * num_columns + c] = parts[p, i, c], for i < counts[1].
    Shapes: parts f32 [num_parts, num_logit_rows, >= num_columns]; counts i32 [2]; out f32
    [num_logit_rows, num_parts * num_columns].
    """
    follow(OVERLAPS)
    row, part = tl.program_id(0), tl.program_id(2)
    if row >= tl.load(counts_ptr + 1):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    row = as_offset(row, WIDE)
    start = as_offset(part, WIDE) * part_stride + row * row_stride
    value = tl.load(parts_ptr + start + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * out_stride + part * num_columns + column, value, mask=inside)


def launch(plan: BoundPlan, parts: Tensor, out: Tensor, num_columns: int) -> None:
    """Append join: one program for 256 columns of each row of each part."""
    num_rows, row_stride = out.shape[0], parts.strides[0]
    plan.add_gpu(
        join_kernel,
        grid=(num_rows, triton.cdiv(num_columns, _BLOCK), parts.shape[0] // num_rows),
        part_stride=num_rows * row_stride,
        row_stride=row_stride,
        BLOCK=_BLOCK,
    )
