"""Triton kernel of `rms_norm`: one program is one head of one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.gpu_lang import tl, triton
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.index_gpu import as_offset
from hypocenter.kernels.overlap_gpu import follow


@triton.jit(do_not_specialize=["count"])
def rms_norm_kernel(
    x_ptr, counts_ptr, weight_ptr, out_ptr, count, eps, width, x_stride, out_stride,
    ACCUMULATE: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(counts_ptr + count):
        return
    row = as_offset(row, WIDE)
    column = tl.arange(0, BLOCK)
    live = column < width
    at = head * width + column
    x = tl.load(x_ptr + row * x_stride + at, mask=live, other=0.0)
    mean_square = tl.sum(x * x, axis=0) / width
    out = x * (1.0 / tl.sqrt(mean_square + eps))
    out = out * tl.load(weight_ptr + column, mask=live, other=0.0)
    out_at = out_ptr + row * out_stride + at
    if ACCUMULATE:
        out += tl.load(out_at, mask=live, other=0.0)
    tl.store(out_at, out, mask=live)


def launch(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], count: int, accumulate: bool
) -> None:
    """Append rms_norm for every head of every row of the bucket."""
    x, out, width = facts["x"], facts["out"], facts["width"]
    plan.launch_gpu(
        rms_norm_kernel,
        *(x, facts["counts"], facts["weight"], out, count, facts["eps"], width),
        *(x.strides[0], out.strides[0]),
        grid=(x.shape[0], facts["num_heads"]),
        contract=contract,
        facts=facts,
        ACCUMULATE=accumulate,
        BLOCK=triton.next_power_of_2(width),
    )
