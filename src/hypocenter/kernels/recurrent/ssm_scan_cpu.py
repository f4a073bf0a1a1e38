"""numba kernel of `ssm_scan`: an item is 64 value columns of a head of a sequence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import (
    fma,
    get,
    load,
    load_first,
    mul,
    splat,
    spread,
    store,
    store_first,
)
from hypocenter.kernels.recurrent.state_cpu import (
    BLOCK,
    checkpoint_of,
    clear,
    copy,
    num_sequences_of,
    softplus,
    span_of,
)


@inline
def _take_token(
    x: Any, value: int, key: int, query: int, left: int, state: Any, at: int, step: float,
    decay: float, skip: float, out: Any, out_at: int,
) -> None:  # fmt: skip
    """Decay the state, add the token's values at its key, and read it at its query."""
    state_dim, pitch = state.shape[2], state.shape[3]
    v0, v1 = load_first(x, value, left), load_first(x, value + 16, left - 16)
    v2, v3 = load_first(x, value + 32, left - 32), load_first(x, value + 48, left - 48)
    t, d, s = splat(step), splat(decay), splat(skip)
    a0, a1, a2, a3 = mul(v0, t), mul(v1, t), mul(v2, t), mul(v3, t)
    o0, o1, o2, o3 = mul(v0, s), mul(v1, s), mul(v2, s), mul(v3, s)
    for row in range(state_dim):
        k, q, place = spread(x, key + row), spread(x, query + row), at + row * pitch
        s0 = fma(k, a0, mul(load(state, place), d))
        s1 = fma(k, a1, mul(load(state, place + 16), d))
        s2 = fma(k, a2, mul(load(state, place + 32), d))
        s3 = fma(k, a3, mul(load(state, place + 48), d))
        store(state, place, s0)
        store(state, place + 16, s1)
        store(state, place + 32, s2)
        store(state, place + 48, s3)
        o0, o1, o2, o3 = fma(s0, q, o0), fma(s1, q, o1), fma(s2, q, o2), fma(s3, q, o3)
    store_first(out, out_at, o0, left)
    store_first(out, out_at + 16, o1, left - 16)
    store_first(out, out_at + 32, o2, left - 32)
    store_first(out, out_at + 48, o3, left - 48)


@cpu_kernel
def ssm_scan(
    x: Any, steps: Any, step_bias: Any, rates: Any, skips: Any, state: Any, out: Any,
    num_groups: int, value_dim: int, state_slots: Any, state_sources: Any, checkpoint_slots: Any,
    checkpoint_stops: Any, sequence_starts: Any, sequence_rows: Any, positions: Any, counts: Any,
) -> None:  # fmt: skip
    """Formula: S = exp(rate t) S + t B x; out = C S + skip x, token by token, with t =
    softplus(steps + step_bias).
    Shapes: x f32 [num_tokens, >= num_heads * value_dim + 2 * num_groups * state_dim], x, B and
    C; steps f32 [num_tokens, >= num_heads]; step_bias, rates and skips f32 [num_heads]; state
    f32 [num_slots, num_heads, state_dim, value_pitch]; out f32 [num_tokens, >= num_heads *
    value_dim]; state_slots, state_sources, checkpoint_slots and checkpoint_stops i32
    [max_sequences]; sequence_starts i32 [max_sequences + 1]; sequence_rows and positions i32
    [num_tokens]; counts i32 [2].
    Source: Dao and Gu, arXiv 2405.21060, section 6.
    """
    num_heads, state_dim, pitch = state.shape[1], state.shape[2], state.shape[3]
    num_blocks, slot_size = pitch // BLOCK, num_heads * state_dim * pitch
    num_items = num_sequences_of(sequence_rows, counts) * num_heads * num_blocks
    for item in prange(num_items):
        block, head = item % num_blocks, item // num_blocks % num_heads
        sequence, column = item // num_blocks // num_heads, BLOCK * block
        first, stop, slot, position = span_of(sequence, state_slots, sequence_starts, positions)
        num_saved, saved = checkpoint_of(sequence, first, checkpoint_slots, checkpoint_stops)
        source, within = get(state_sources, sequence), head * state_dim * pitch + column
        at = slot * slot_size + within
        group = head // (num_heads // num_groups) * state_dim
        value, key = head * value_dim + column, num_heads * value_dim + group
        if position == 0:
            clear(state, at, state_dim, pitch)
        elif source != slot:
            copy(state, source * slot_size + within, at, state_dim, pitch)
        for row in range(first, stop):
            start = row * x.shape[1]
            step = softplus(get(steps, row * steps.shape[1] + head) + get(step_bias, head))
            decay = np.float32(math.exp(np.float64(get(rates, head)) * step))
            query = start + key + num_groups * state_dim
            out_at = row * out.shape[1] + value
            _take_token(
                x,
                start + value,
                start + key,
                query,
                value_dim - column,
                state,
                at,
                np.float32(step),
                decay,
                get(skips, head),
                out,
                out_at,
            )
            if row + 1 == first + num_saved:
                copy(state, at, saved * slot_size + within, state_dim, pitch)
