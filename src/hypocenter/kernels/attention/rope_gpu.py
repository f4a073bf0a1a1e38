"""Triton kernel of `rope`: one program is one head of one token."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow


@triton.jit
def rope_kernel(
    x_ptr, counts_ptr, positions_ptr, cos_ptr, sin_ptr, head_dim, half, x_stride,
    NEIGHBOURS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: (a, b) = (a cos - b sin, a sin + b cos) for each pair of columns, in place, with
    the angles of the token's position.
    Shapes: x f32 [num_tokens, >= num_heads * head_dim]; positions i32 [num_tokens]; cos and
    sin f32 [num_positions, half]; counts i32 [2].
    Source: Su et al., arXiv 2104.09864.
    """
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
    """Both numbers of each pair, rotated by its angle."""
    return a * cos - b * sin, a * sin + b * cos


def launch(plan: BoundPlan, x: Tensor, cos: Tensor, num_heads: int) -> None:
    """Append rope for every head of every token of the bucket."""
    half = cos.shape[1]
    plan.add_gpu(
        rope_kernel,
        grid=(x.shape[0], num_heads),
        half=half,
        BLOCK=triton.next_power_of_2(half),
        # Which of two products a compiler joins with their sum is its choice in each kernel, and
        # rope_write has to come to the same bits.
        enable_fp_fusion=False,
    )
