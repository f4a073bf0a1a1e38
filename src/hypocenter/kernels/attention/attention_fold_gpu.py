"""Triton kernels that fold what the split form of `attention` leaves of each tile of keys.

The order is that of the whole form, and so are the bits (`attention_gpu.py`).
"""

from __future__ import annotations

from typing import Any

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.attention.attention_tile_gpu import fold, with_sink
from hypocenter.kernels.linear.quantise_gpu import store_halves
from hypocenter.kernels.shared_gpu import as_offset, follow

#: Partial results that a fold asks for at a time.
_FOLDED = tl.constexpr(8)


@triton.jit
def _fold(
    token, head, positions_ptr, sums_ptr, values_ptr, sinks_ptr, window, num_heads, max_tiles,
    values_pitch, VALUE_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[BLOCK]: what the tiles of a head of a token come to."""
    d = tl.arange(0, BLOCK)
    column = d < VALUE_DIM
    last = tl.load(positions_ptr + token)
    first = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    row = (as_offset(token, WIDE) * num_heads + head) * max_tiles
    top, norm = -float("inf"), 0.0
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(first // TILE, last // TILE + 1, _FOLDED):
        for step in tl.static_range(_FOLDED):
            at, live = row + start + step, start + step <= last // TILE
            tile_top = tl.load(sums_ptr + at * 2, mask=live, other=-float("inf"))
            tile_norm = tl.load(sums_ptr + at * 2 + 1, mask=live, other=0.0)
            values = tl.load(values_ptr + at * values_pitch + d, mask=column & live, other=0.0)
            top, old, new = fold(top, tile_top)
            norm = tl.fma(norm, old, tile_norm * new)
            total = tl.fma(total, old, values * new)
    if HAS_SINKS:
        norm = with_sink(norm, top, tl.load(sinks_ptr + head))
    return total * (1.0 / norm)


@triton.jit
def attention_fold_kernel(
    counts_ptr, positions_ptr, sums_ptr, values_ptr, out_ptr, sinks_ptr, window, num_heads,
    max_tiles, values_pitch, out_stride, VALUE_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: out = (sum over tiles of exp(top_i - top) values_i) / (sum of exp(top_i - top)
    norm_i + exp(sink - top)), with top the largest top_i.
    Shapes: values f32 [max_tokens, num_heads, max_tiles, values_pitch]; sums f32 [max_tokens,
    num_heads, max_tiles, 2], top_i and norm_i of each tile; positions i32 [num_tokens]; counts
    i32 [2]; sinks f32 [num_heads]; out f32 [num_tokens, >= num_heads * value_dim].
    Source: Online softmax of Milakov and Gimelshein, arXiv 1805.02867; tiles as in Dao et al.,
    arXiv 2205.14135.
    """
    follow(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    found = _fold(
        token,
        head,
        positions_ptr,
        sums_ptr,
        values_ptr,
        sinks_ptr,
        window,
        num_heads,
        max_tiles,
        values_pitch,
        VALUE_DIM,
        HAS_SINKS,
        WIDE,
        TILE,
        BLOCK,
    )
    d = tl.arange(0, BLOCK)
    out = out_ptr + as_offset(token, WIDE) * out_stride + head * VALUE_DIM
    tl.store(out + d, found, mask=d < VALUE_DIM)


@triton.jit
def attention_fold_round_kernel(
    counts_ptr, positions_ptr, sums_ptr, values_ptr, rounded_ptr, row_scales_ptr, fragments_ptr,
    sinks_ptr, window, num_heads, max_tiles, values_pitch, pitch, VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_FRAGMENTS: tl.constexpr, OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: rounded = f16(attention_fold), with a row scale of 1.
    Shapes: values f32 [max_tokens, num_heads, max_tiles, values_pitch]; sums f32 [max_tokens,
    num_heads, max_tiles, 2]; positions i32 [num_tokens]; counts i32 [2]; sinks f32
    [num_heads]; rounded and fragments f16 [num_tokens, pitch]; row_scales f32 [num_tokens].
    """
    follow(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    if head < num_heads:
        found = _fold(
            token,
            head,
            positions_ptr,
            sums_ptr,
            values_ptr,
            sinks_ptr,
            window,
            num_heads,
            max_tiles,
            values_pitch,
            VALUE_DIM,
            HAS_SINKS,
            WIDE,
            TILE,
            BLOCK,
        )
    else:  # what is left of the last 128 columns
        found = tl.zeros([BLOCK], tl.float32)
    d, row = tl.arange(0, BLOCK), as_offset(token, WIDE)
    if head == 0:
        tl.store(row_scales_ptr + row, 1.0)
    stop = (num_heads * VALUE_DIM + 127) // 128 * 128
    store_halves(
        found.to(tl.float16),
        head * VALUE_DIM + d,
        tl.minimum((head + 1) * VALUE_DIM, stop),
        rounded_ptr + row * pitch,
        fragments_ptr + row * pitch,
        HAS_FRAGMENTS,
        VALUE_DIM % 32 == 0,
    )


def launch(
    plan: BoundPlan,
    values: Tensor,
    out: Tensor,
    sinks: Tensor | None,
    value_dim: int,
    keys_per_tile: int,
) -> None:
    """Append out = what the tiles of each token's keys come to."""
    _launch(
        plan,
        attention_fold_kernel,
        values,
        value_dim,
        keys_per_tile,
        grid=(out.shape[0], values.shape[1]),
        # A kernel without sinks never reads the pointer, which Triton wants all the same.
        sinks_ptr=sinks or out,
    )


def launch_rounded(
    plan: BoundPlan,
    values: Tensor,
    rounded: Tensor,
    fragments: Tensor | None,
    sinks: Tensor | None,
    value_dim: int,
    keys_per_tile: int,
) -> None:
    """Append attention_fold_round: as attention_fold, rounded to f16."""
    filled = triton.cdiv(values.shape[1] * value_dim, 128) * 128
    _launch(
        plan,
        attention_fold_round_kernel,
        values,
        value_dim,
        keys_per_tile,
        grid=(rounded.shape[0], triton.cdiv(filled, value_dim)),
        # Without sinks or fragments their pointers are never used.
        sinks_ptr=sinks or values,
        fragments_ptr=fragments or rounded,
        pitch=rounded.shape[1],
    )


def _launch(
    plan: BoundPlan,
    kernel: Any,
    values: Tensor,
    value_dim: int,
    keys_per_tile: int,
    **given: Any,
) -> None:
    _, num_heads, max_tiles, values_pitch = values.shape
    plan.add_gpu(
        kernel,
        num_warps=block_of(value_dim) // 128 or 1,
        num_heads=num_heads,
        max_tiles=max_tiles,
        values_pitch=values_pitch,
        enable_fp_fusion=False,
        TILE=keys_per_tile,
        BLOCK=block_of(value_dim),
        **given,
    )


def block_of(head_dim: int) -> int:
    """Columns that a program has for a head."""
    return max(16, int(triton.next_power_of_2(head_dim)))
