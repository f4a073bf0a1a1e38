"""Triton kernels of `experts_adapter`: a program is a stretch of one choice of one token.

Sums are those of `linear/adapter_gpu.py` for one row, whoever else is in the batch.
"""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.linear.adapter_gpu import products_with_ranks
from hypocenter.kernels.linear.adapter_sizes import OUTPUTS, RANKS
from hypocenter.kernels.shared_gpu import as_offset, follow

#: Blocks of 64 columns whose loads are under way together.
_CHUNKS = 16


@triton.jit
def _scale_of(scales_ptr, sequences_ptr, owners_ptr, token, tile, num_adapters):
    """What the adapter of a tile of ranks counts for a token."""
    sequence, owner = tl.load(sequences_ptr + token), tl.load(owners_ptr + tile)
    return tl.load(scales_ptr + sequence * num_adapters + owner)


@triton.jit(do_not_specialize=["num_adapters", "num_tiles"])
def experts_adapter_down_kernel(
    x_ptr,
    ids_ptr,
    places_ptr,
    counts_ptr,
    down_ptr,
    owners_ptr,
    factors_ptr,
    scales_ptr,
    sequences_ptr,
    products_ptr,
    num_columns,
    num_tiles,
    num_adapters,
    x_stride,
    down_stride,
    products_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    NUM_USED: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Formula: products[t, j, r] = scales[sequences[t], owners[r / 8]] factors[r / 8]
    (down[ids[t, j], r] x[places[t, j]]), and 0 where that scale is.
    Shapes: x f32 [num_rows, >= num_columns]; ids and places i32 [num_tokens, num_used]; counts i32
    [2]; down f16 or f32 [num_experts, num_ranks, num_columns padded to 64]; owners i32 and factors
    f32 [num_ranks / 8]; scales f32 [num_sequences, num_adapters]; sequences i32 [>= num_tokens];
    products f32 [num_tokens, >= num_used * num_ranks].
    Source: Hu et al., arXiv 2106.09685, section 4.1.
    """
    follow(OVERLAPS)
    choice, tile = tl.program_id(0), tl.program_id(1)
    token = choice // NUM_USED
    if token >= tl.load(counts_ptr):
        return
    rank, column = tl.arange(0, RANKS), tl.arange(0, 64)
    scale = _scale_of(scales_ptr, sequences_ptr, owners_ptr, token, tile, num_adapters)
    total = tl.zeros([RANKS, 1], tl.float32)
    if scale != 0:
        expert = as_offset(tl.load(ids_ptr + choice), WIDE)
        place = as_offset(tl.load(places_ptr + choice), WIDE)
        w_row = (expert * num_tiles + tile) * RANKS + rank
        w = down_ptr + (w_row * down_stride)[:, None, None] + column[None, None, :]
        x = x_ptr + place * x_stride + column[None, None, :]
        active = tl.full([1], 1, tl.int1)
        total = products_with_ranks(x, w, active, num_columns, RANKS, 1, CHUNKS)
        total *= scale * tl.load(factors_ptr + tile)
    slot = choice - token * NUM_USED
    to = products_ptr + as_offset(token, WIDE) * products_stride
    to += (slot * num_tiles + tile) * RANKS + rank[:, None]
    tl.store(to, total)


@triton.jit(do_not_specialize=["num_adapters", "num_tiles"])
def experts_adapter_up_kernel(
    products_ptr,
    ids_ptr,
    places_ptr,
    counts_ptr,
    up_ptr,
    owners_ptr,
    scales_ptr,
    sequences_ptr,
    out_ptr,
    num_tiles,
    num_adapters,
    products_stride,
    up_stride,
    out_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    NUM_USED: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Formula: out[places[t, j]] += up[ids[t, j]].T products[t, j], of ranks r where
    scales[sequences[t], owners[r / 8]] is not 0.
    Shapes: products f32 [num_tokens, >= num_used * num_ranks]; ids and places i32 [num_tokens,
    num_used]; counts i32 [2]; up f16 or f32 [num_experts, num_ranks, outputs padded to 64]; owners
    i32 [num_ranks / 8]; scales f32 [num_sequences, num_adapters]; sequences i32 [>= num_tokens];
    out f32 [num_rows, >= outputs padded to 64].
    Source: Hu et al., arXiv 2106.09685, section 4.1.
    """
    follow(OVERLAPS)
    choice, output = tl.program_id(0), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = choice // NUM_USED
    if token >= tl.load(counts_ptr):
        return
    expert = as_offset(tl.load(ids_ptr + choice), WIDE)
    place = as_offset(tl.load(places_ptr + choice), WIDE)
    slot = choice - token * NUM_USED
    products = products_ptr + as_offset(token, WIDE) * products_stride + slot * num_tiles * RANKS
    total = tl.zeros([OUTPUTS], tl.float32)
    num_adapted = 0
    for tile in range(num_tiles):
        scale = _scale_of(scales_ptr, sequences_ptr, owners_ptr, token, tile, num_adapters)
        if scale != 0:
            num_adapted += 1
            for index in tl.static_range(RANKS):
                rank = tile * RANKS + index
                value = tl.load(products + rank)
                row = expert * num_tiles * RANKS + rank
                factor = tl.load(up_ptr + row * up_stride + output).to(tl.float32)
                total = tl.fma(tl.zeros_like(factor) + value, factor, total)
    if num_adapted > 0:
        out = out_ptr + place * out_stride + output
        tl.store(out, tl.load(out) + total)


def launch_down(plan: BoundPlan, down: Tensor, ids: Tensor, scales: Tensor) -> None:
    """Append experts_adapter_down for every choice of the bucket."""
    plan.add_gpu(
        experts_adapter_down_kernel,
        grid=(ids.shape[0] * ids.shape[1], down.shape[1] // RANKS),
        down_stride=down.strides[1],
        num_tiles=down.shape[1] // RANKS,
        num_adapters=scales.shape[1],
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=False,
        NUM_USED=ids.shape[1],
        RANKS=RANKS,
        CHUNKS=_CHUNKS,
    )


def launch_up(plan: BoundPlan, up: Tensor, ids: Tensor, scales: Tensor) -> None:
    """Append experts_adapter_up for every choice of the bucket."""
    plan.add_gpu(
        experts_adapter_up_kernel,
        grid=(ids.shape[0] * ids.shape[1], up.shape[2] // OUTPUTS),
        up_stride=up.strides[1],
        num_tiles=up.shape[1] // RANKS,
        num_adapters=scales.shape[1],
        num_warps=2,
        num_stages=1,
        enable_fp_fusion=False,
        NUM_USED=ids.shape[1],
        RANKS=RANKS,
        OUTPUTS=OUTPUTS,
    )
