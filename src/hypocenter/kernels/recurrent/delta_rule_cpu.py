"""numba kernel of `delta_rule`: an item is 64 value columns of a head of a sequence."""

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
    sub,
    sum_lanes,
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

_EPS = np.float32(1e-6)


@inline
def _inverse_length(x: Any, at: int, width: int) -> float:
    squares = splat(np.float32(0))
    for column in range(0, width, 16):
        value = load_first(x, at + column, width - column)
        squares = fma(value, value, squares)
    return np.float32(1) / np.sqrt(sum_lanes(squares) + _EPS)  # type: ignore[no-any-return]


@inline
def _decay_of(step: float, rate: float) -> float:
    """e**(rate * softplus(step)), in float64."""
    return np.float32(math.exp(np.float64(rate) * softplus(step)))  # type: ignore[return-value]


@inline
def _sigmoid_of(x: float) -> float:
    return np.float32(1.0 / (1.0 + math.exp(-np.float64(x))))  # type: ignore[return-value]


@inline
def _read(state: Any, at: int, pitch: int, x: Any, key: int, key_dim: int) -> Any:
    """What the state holds at a key: four vectors, each a chain over the key's elements."""
    m0 = m1 = m2 = m3 = splat(np.float32(0))
    for row in range(key_dim):
        k, place = spread(x, key + row), at + row * pitch
        m0 = fma(load(state, place), k, m0)
        m1 = fma(load(state, place + 16), k, m1)
        m2 = fma(load(state, place + 32), k, m2)
        m3 = fma(load(state, place + 48), k, m3)
    return m0, m1, m2, m3


@inline
def _change(
    state: Any,
    at: int,
    pitch: int,
    x: Any,
    key: int,
    query: int,
    key_dim: int,
    decay: Any,
    deltas: Any,
) -> Any:
    """Decay the state, add a delta at a key, and read it at a query: as `_read`."""
    d0, d1, d2, d3 = deltas
    o0 = o1 = o2 = o3 = splat(np.float32(0))
    for row in range(key_dim):
        k, q, place = spread(x, key + row), spread(x, query + row), at + row * pitch
        s0 = fma(k, d0, mul(load(state, place), decay))
        s1 = fma(k, d1, mul(load(state, place + 16), decay))
        s2 = fma(k, d2, mul(load(state, place + 32), decay))
        s3 = fma(k, d3, mul(load(state, place + 48), decay))
        store(state, place, s0)
        store(state, place + 16, s1)
        store(state, place + 32, s2)
        store(state, place + 48, s3)
        o0, o1, o2, o3 = fma(s0, q, o0), fma(s1, q, o1), fma(s2, q, o2), fma(s3, q, o3)
    return o0, o1, o2, o3


@inline
def _delta(x: Any, at: int, left: int, held: Any, factor: float, weight: float) -> Any:
    """What is added for 16 value columns: weight * (value - factor * held)."""
    return mul(sub(load_first(x, at, left), mul(held, splat(factor))), splat(weight))


@inline
def _take_token(
    x: Any, query: int, key: int, value: int, left: int, state: Any, at: int, decay: float,
    beta: float, out: Any, out_at: int,
) -> None:  # fmt: skip
    key_dim, pitch = state.shape[2], state.shape[3]
    # Of keys and queries as they are: their lengths come in where 16 columns are one step.
    of_key = _inverse_length(x, key, key_dim)
    of_query = _inverse_length(x, query, key_dim) / np.float32(math.sqrt(np.float64(key_dim)))
    m0, m1, m2, m3 = _read(state, at, pitch, x, key, key_dim)
    factor, weight = decay * of_key, beta * of_key
    deltas = (
        _delta(x, value, left, m0, factor, weight),
        _delta(x, value + 16, left - 16, m1, factor, weight),
        _delta(x, value + 32, left - 32, m2, factor, weight),
        _delta(x, value + 48, left - 48, m3, factor, weight),
    )
    o0, o1, o2, o3 = _change(state, at, pitch, x, key, query, key_dim, splat(decay), deltas)
    store_first(out, out_at, mul(o0, splat(of_query)), left)
    store_first(out, out_at + 16, mul(o1, splat(of_query)), left - 16)
    store_first(out, out_at + 32, mul(o2, splat(of_query)), left - 32)
    store_first(out, out_at + 48, mul(o3, splat(of_query)), left - 48)


@cpu_kernel
def delta_rule(
    x: Any, betas: Any, steps: Any, step_bias: Any, rates: Any, state: Any, out: Any,
    num_key_heads: int, value_dim: int, heads_in_turn: int, state_slots: Any, state_sources: Any,
    checkpoint_slots: Any, checkpoint_stops: Any, sequence_starts: Any, sequence_rows: Any,
    positions: Any, counts: Any,
) -> None:  # fmt: skip
    """Formula: S = decay S; S += beta k (v - k S); out = q S, token by token, with beta =
    sigmoid(betas), decay = exp(rate softplus(steps + step_bias)), and q and k of length 1.
    Shapes: x f32 [num_tokens, >= 2 * num_key_heads * key_dim + num_heads * value_dim], q, k and
    v; betas and steps f32 [num_tokens, >= num_heads]; step_bias and rates f32 [num_heads];
    state f32 [num_slots, num_heads, key_dim, value_pitch]; out f32 [num_tokens, >= num_heads *
    value_dim]; state_slots, state_sources, checkpoint_slots and checkpoint_stops i32
    [max_sequences]; sequence_starts i32 [max_sequences + 1]; sequence_rows and positions i32
    [num_tokens]; counts i32 [2].
    Source: Yang et al., arXiv 2412.06464, equation 10.
    """
    num_heads, key_dim, pitch = state.shape[1], state.shape[2], state.shape[3]
    num_blocks, values = pitch // BLOCK, 2 * num_key_heads * key_dim
    num_items = num_sequences_of(sequence_rows, counts) * num_heads * num_blocks
    for item in prange(num_items):
        block, head = item % num_blocks, item // num_blocks % num_heads
        sequence, column = item // num_blocks // num_heads, BLOCK * block
        first, stop, slot, position = span_of(sequence, state_slots, sequence_starts, positions)
        num_saved, saved = checkpoint_of(sequence, first, checkpoint_slots, checkpoint_stops)
        source = get(state_sources, sequence)
        slot_size, within = num_heads * key_dim * pitch, head * key_dim * pitch + column
        at = slot * slot_size + within
        query = head // heads_in_turn % num_key_heads * key_dim
        value, left = values + head * value_dim + column, value_dim - column
        if position == 0:
            clear(state, at, key_dim, pitch)
        elif source != slot:
            copy(state, source * slot_size + within, at, key_dim, pitch)
        for row in range(first, stop):
            start = row * x.shape[1]
            step = get(steps, row * steps.shape[1] + head) + get(step_bias, head)
            decay = _decay_of(step, get(rates, head))
            beta = _sigmoid_of(get(betas, row * betas.shape[1] + head))
            key = start + query + num_key_heads * key_dim
            out_at = row * out.shape[1] + head * value_dim + column
            _take_token(
                x, start + query, key, start + value, left, state, at, decay, beta, out, out_at
            )
            if row + 1 == first + num_saved:
                copy(state, at, saved * slot_size + within, key_dim, pitch)
