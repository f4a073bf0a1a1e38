"""Triton kernel of `rope`: one program is one head of one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.contracts.contract import Contract
from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow


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
    cos, sin = angles(positions_ptr, cos_ptr, sin_ptr, token, pair, half, WIDE)
    start = x_ptr + as_offset(token, WIDE) * x_stride + head * head_dim
    first, second = columns(pair, half, NEIGHBOURS)
    a = tl.load(start + first, mask=live, other=0.0)
    b = tl.load(start + second, mask=live, other=0.0)
    a, b = rotate(a, b, cos, sin)
    tl.store(start + first, a, mask=live)
    tl.store(start + second, b, mask=live)


@triton.jit
def angles(positions_ptr, cos_ptr, sin_ptr, token, pair, half, WIDE: tl.constexpr):
    """Cosine and sine of each pair at a token's position."""
    position = as_offset(tl.load(positions_ptr + token), WIDE)
    cos = tl.load(cos_ptr + position * half + pair, mask=pair < half, other=0.0)
    sin = tl.load(sin_ptr + position * half + pair, mask=pair < half, other=0.0)
    return cos, sin


@triton.jit
def columns(pair, half, NEIGHBOURS: tl.constexpr):
    """Where the two numbers of each pair lie in a head."""
    if NEIGHBOURS:
        return 2 * pair, 2 * pair + 1
    else:
        return pair, half + pair


@triton.jit
def rotate(a, b, cos, sin):
    """Both numbers of each pair, turned by its angle."""
    return a * cos - b * sin, a * sin + b * cos


def add(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], neighbours: bool) -> None:
    """Append rope for every head of every token of the bucket."""
    x, cos = facts["x"], facts["cos"]
    plan.add_gpu(
        rope_kernel,
        *(x, facts["counts"], facts["positions"], cos, facts["sin"], facts["head_dim"]),
        *(cos.shape[1], x.strides[0]),
        grid=(x.shape[0], facts["num_heads"]),
        contract=contract,
        facts=facts,
        NEIGHBOURS=neighbours,
        BLOCK=triton.next_power_of_2(cos.shape[1]),
        # Which of two products a compiler joins with their sum is its choice in each kernel, and
        # rope_write has to come to the same bits.
        enable_fp_fusion=False,
    )
