"""numba kernel of `short_conv`: an item is 64 channels of a sequence, token after token."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import fma, get, load, mul, sigmoid, splat, store
from hypocenter.kernels.recurrent.state_cpu import (
    BLOCK,
    checkpoint_of,
    num_sequences_of,
    span_of,
)


@inline
def _keep(
    x: Any,
    first: int,
    num_tokens: int,
    state: Any,
    base: int,
    position: int,
    column: int,
    kept_at: int,
) -> None:
    """Leave 16 channels of the last inputs at `kept_at`, where nothing is read that comes later."""
    num_kept, pitch = state.shape[1], state.shape[2]
    for place in range(num_kept):
        came = num_tokens + place - num_kept
        value = _input(x, first, came, state, base, num_kept, position, column)
        store(state, kept_at + place * pitch + column, value)


@inline
def _input(
    x: Any,
    first: int,
    offset: int,
    state: Any,
    base: int,
    num_kept: int,
    position: int,
    column: int,
) -> Any:
    """16 channels of what came `offset` tokens behind the first: of the step, kept, or zeros."""
    if offset >= 0:
        return load(x, (first + offset) * x.shape[1] + column)
    if position + offset >= 0:
        return load(state, base + (num_kept + offset) * state.shape[2] + column)
    return splat(np.float32(0))


@cpu_kernel
def short_conv(
    x: Any, weight: Any, bias: Any, state: Any, out: Any, activates: int, state_slots: Any,
    state_sources: Any, checkpoint_slots: Any, checkpoint_stops: Any, sequence_starts: Any,
    sequence_rows: Any, positions: Any, counts: Any,
) -> None:  # fmt: skip
    """Formula: out[t] = f(bias + sum over i of weight[i] x[t - num_kept + i]), with f = silu
    where `activates`.
    Shapes: x and out f32 [num_tokens, channels]; weight f32 [num_kept + 1, channels]; bias f32
    [channels] or empty; state f32 [num_slots, num_kept, channels]; state_slots, state_sources,
    checkpoint_slots and checkpoint_stops i32 [max_sequences]; sequence_starts i32
    [max_sequences + 1]; sequence_rows and positions i32 [num_tokens]; counts i32 [2].
    Source: Yang et al., arXiv 2412.06464, section 3.4.
    """
    num_kept, pitch = state.shape[1], state.shape[2]
    num_blocks = pitch // BLOCK
    for item in prange(num_sequences_of(sequence_rows, counts) * num_blocks):
        sequence, block = item // num_blocks, item % num_blocks
        first, stop, slot, position = span_of(sequence, state_slots, sequence_starts, positions)
        num_saved, saved = checkpoint_of(sequence, first, checkpoint_slots, checkpoint_stops)
        base, num_tokens = get(state_sources, sequence) * num_kept * pitch, stop - first
        for column in range(BLOCK * block, BLOCK * (block + 1), 16):
            for token in range(num_tokens):
                total = load(bias, column) if bias.size else splat(np.float32(0))
                for tap in range(num_kept + 1):
                    came = token + tap - num_kept
                    value = _input(x, first, came, state, base, num_kept, position, column)
                    total = fma(value, load(weight, tap * pitch + column), total)
                if activates:
                    total = mul(total, sigmoid(total))
                store(out, (first + token) * out.shape[1] + column, total)
            if num_saved > 0:
                _keep(x, first, num_saved, state, base, position, column, saved * num_kept * pitch)
            # Last, and in order: each is read from behind the place that it takes.
            _keep(x, first, num_tokens, state, base, position, column, slot * num_kept * pitch)
