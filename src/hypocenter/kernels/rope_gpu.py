"""Triton kernel of `rope`: one program is one head of one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.gpu_lang import tl, triton
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.index_gpu import as_offset
from hypocenter.kernels.overlap_gpu import follow


@triton.jit
def rope_kernel(
    x_ptr, counts_ptr, positions_ptr, cos_ptr, sin_ptr, head_dim, half, x_stride,
    NEIGHBOURS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    pair = tl.arange(0, BLOCK)
    live = pair < half
    position = as_offset(tl.load(positions_ptr + token), WIDE)
    cos = tl.load(cos_ptr + position * half + pair, mask=live, other=0.0)
    sin = tl.load(sin_ptr + position * half + pair, mask=live, other=0.0)
    start = x_ptr + as_offset(token, WIDE) * x_stride + head * head_dim
    if NEIGHBOURS:
        first, second = start + 2 * pair, start + 2 * pair + 1
    else:
        first, second = start + pair, start + half + pair
    a = tl.load(first, mask=live, other=0.0)
    b = tl.load(second, mask=live, other=0.0)
    tl.store(first, a * cos - b * sin, mask=live)
    tl.store(second, a * sin + b * cos, mask=live)


def launch(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], neighbours: bool
) -> None:
    """Append rope for every head of every token of the bucket."""
    x, cos = facts["x"], facts["cos"]
    plan.launch_gpu(
        rope_kernel,
        *(x, facts["counts"], facts["positions"], cos, facts["sin"], facts["head_dim"]),
        *(cos.shape[1], x.strides[0]),
        grid=(x.shape[0], facts["num_heads"]),
        contract=contract,
        facts=facts,
        NEIGHBOURS=neighbours,
        BLOCK=triton.next_power_of_2(cos.shape[1]),
    )
