"""Triton kernel of `short_conv`: one program is a block of channels of a sequence."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow

_BLOCK = 64


@triton.jit
def _input(
    x_ptr, first, offset, kept_ptr, num_kept, position, column, channels, WIDE: tl.constexpr
):
    """What came `offset` tokens behind the first of the step: of the step, kept, or zeros."""
    x_at = x_ptr + as_offset(first + offset, WIDE) * channels + column
    kept_at = kept_ptr + (num_kept + offset) * channels + column
    is_here = column * 0 + offset >= 0
    is_kept = (column * 0 + offset < 0) & (column * 0 + position + offset >= 0)
    came = tl.load(x_at, mask=is_here, other=0.0)
    return came + tl.load(kept_at, mask=is_kept, other=0.0)


@triton.jit
def _keep(
    x_ptr,
    first,
    num_tokens,
    source_ptr,
    target_ptr,
    position,
    column,
    channels,
    NUM_KEPT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Leave the last inputs. In order: each is read from behind the place that it takes, by the
    thread that writes it."""
    for place in tl.static_range(NUM_KEPT):
        came = num_tokens + place - NUM_KEPT
        value = _input(x_ptr, first, came, source_ptr, NUM_KEPT, position, column, channels, WIDE)
        tl.store(target_ptr + place * channels + column, value)


@triton.jit
def short_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, state_slots_ptr, state_sources_ptr,
    checkpoint_slots_ptr, checkpoint_stops_ptr, sequence_starts_ptr, sequence_rows_ptr,
    positions_ptr, counts_ptr, channels, HAS_BIAS: tl.constexpr, ACTIVATES: tl.constexpr,
    NUM_KEPT: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: out[t] = f(bias + sum over i of weight[i] x[t - NUM_KEPT + i]), with f = silu
    where ACTIVATES.
    Shapes: x and out f32 [num_tokens, channels]; weight f32 [NUM_KEPT + 1, channels]; bias f32
    [channels]; state f32 [num_slots, NUM_KEPT, channels]; state_slots, state_sources,
    checkpoint_slots and checkpoint_stops i32 [max_sequences]; sequence_starts i32
    [max_sequences + 1]; sequence_rows and positions i32 [num_tokens]; counts i32 [2].
    Source: Yang et al., arXiv 2412.06464, section 3.4.
    """
    follow(OVERLAPS)
    sequence = tl.program_id(0)
    num_tokens = tl.load(counts_ptr)
    if sequence > tl.load(sequence_rows_ptr + num_tokens - 1):
        return
    first, stop = (
        tl.load(sequence_starts_ptr + sequence),
        tl.load(sequence_starts_ptr + sequence + 1),
    )
    position = tl.load(positions_ptr + first)
    source = as_offset(tl.load(state_sources_ptr + sequence), WIDE)
    kept_ptr = state_ptr + source * NUM_KEPT * channels
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for token in range(0, stop - first):
        total = tl.zeros([BLOCK], tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_ptr + column)
        for tap in tl.static_range(NUM_KEPT + 1):
            came = token + tap - NUM_KEPT
            value = _input(x_ptr, first, came, kept_ptr, NUM_KEPT, position, column, channels, WIDE)
            total += value * tl.load(weight_ptr + tap * channels + column)
        out_at = out_ptr + as_offset(first + token, WIDE) * channels + column
        if ACTIVATES:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out_at, total)
    num_saved = tl.load(checkpoint_stops_ptr + sequence) - first
    if num_saved > 0:
        saved = as_offset(tl.load(checkpoint_slots_ptr + sequence), WIDE)
        saved_ptr = state_ptr + saved * NUM_KEPT * channels
        _keep(
            x_ptr, first, num_saved, kept_ptr, saved_ptr, position, column, channels, NUM_KEPT, WIDE
        )
    slot = as_offset(tl.load(state_slots_ptr + sequence), WIDE)
    own_ptr = state_ptr + slot * NUM_KEPT * channels
    num_new = stop - first
    _keep(x_ptr, first, num_new, kept_ptr, own_ptr, position, column, channels, NUM_KEPT, WIDE)


def launch(
    plan: BoundPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    activates: int,
    num_sequences: int,
) -> None:
    """Append short_conv for up to `num_sequences` sequences."""
    num_tokens, channels = x.shape
    plan.add_gpu(
        short_conv_kernel,
        grid=(min(num_sequences, num_tokens), channels // _BLOCK),
        # Without a bias the pointer is never used.
        bias_ptr=bias or weight,
        channels=channels,
        num_warps=2,
        ACTIVATES=activates == 1,
        NUM_KEPT=state.shape[1],
        BLOCK=_BLOCK,
    )
