"""Triton kernel of `mix`: one program is a stretch of one token."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow

_BLOCK = 256


@triton.jit
def mix_kernel(
    x_ptr, expert_rows_ptr, places_ptr, weights_ptr, shared_ptr, counts_ptr, width, x_pitch,
    rows_pitch, shared_pitch, HAS_SHARED: tl.constexpr, ACCUMULATE: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, NUM_USED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: x[t] (+)= sum over j of weights[t, j] expert_rows[places[t, j]], plus weights[t,
    num_used] shared[t], added in that order.
    Shapes: x and shared f32 [num_tokens, >= width]; expert_rows f32 [num_rows, >= width];
    places i32 [num_tokens, num_used]; weights f32 [num_tokens, num_used + 1]; counts i32 [2].
    Source: Shazeer et al., arXiv 1701.06538.
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(NUM_USED):
        place = as_offset(tl.load(places_ptr + row * NUM_USED + slot), WIDE)
        weight = tl.load(weights_ptr + row * (NUM_USED + 1) + slot)
        part = tl.load(expert_rows_ptr + place * rows_pitch + column, mask=inside, other=0.0)
        total = tl.fma(part, weight, total)
    row = as_offset(row, WIDE)
    if HAS_SHARED:
        weight = tl.load(weights_ptr + row * (NUM_USED + 1) + NUM_USED)
        part = tl.load(shared_ptr + row * shared_pitch + column, mask=inside, other=0.0)
        total = tl.fma(part, weight, total)
    at = x_ptr + row * x_pitch + column
    if ACCUMULATE:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total, mask=inside)


def launch(
    plan: BoundPlan,
    x: Tensor,
    expert_rows: Tensor,
    places: Tensor,
    shared: Tensor | None,
    width: int,
) -> None:
    """Append mix: one program for 256 columns of each token of the bucket."""
    given = expert_rows if shared is None else shared
    plan.add_gpu(
        mix_kernel,
        grid=(x.shape[0], triton.cdiv(width, _BLOCK)),
        # Without a shared expert the pointer is never used.
        shared_ptr=given,
        x_pitch=x.strides[0],
        rows_pitch=expert_rows.strides[0],
        shared_pitch=given.strides[0],
        NUM_USED=places.shape[1],
        BLOCK=_BLOCK,
    )
