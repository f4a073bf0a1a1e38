"""Triton kernel of `delta_rule`: one program is some value columns of a head of a sequence.

Its part of the state stays in registers over all tokens of the step.
"""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.recurrent.state_gpu import softplus, span_of, state_of, tile_of
from hypocenter.kernels.shared_gpu import as_offset, follow

#: Value columns of a program.
_COLUMNS = 32


@triton.jit
def _unit(x_ptr, key, live):
    """A key or a query, and what its elements are to be multiplied by."""
    x = tl.load(x_ptr + key, mask=live, other=0.0)
    return x, 1.0 / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def delta_rule_kernel(
    x_ptr, betas_ptr, steps_ptr, step_bias_ptr, rates_ptr, state_ptr, out_ptr, state_slots_ptr,
    state_sources_ptr, checkpoint_slots_ptr, checkpoint_stops_ptr, sequence_starts_ptr,
    sequence_rows_ptr, positions_ptr, counts_ptr, num_key_heads, value_dim, heads_in_turn,
    num_heads, key_dim, value_pitch, x_stride, betas_stride, steps_stride, out_stride, root,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Formula: S = decay S; S += beta k (v - k S); out = q S, token by token, with beta =
    sigmoid(betas), decay = exp(rate softplus(steps + step_bias)), and q and k of length 1.
    Shapes: x f32 [num_tokens, >= 2 * num_key_heads * key_dim + num_heads * value_dim], q, k
    and v; betas and steps f32 [num_tokens, >= num_heads]; step_bias and rates f32 [num_heads];
    state f32 [num_slots, num_heads, key_dim, value_pitch]; out f32 [num_tokens, >= num_heads *
    value_dim]; state_slots, state_sources, checkpoint_slots and checkpoint_stops i32
    [max_sequences]; sequence_starts i32 [max_sequences + 1]; sequence_rows and positions i32
    [num_tokens]; counts i32 [2].
    Source: Yang et al., arXiv 2412.06464, equation 10.
    """
    follow(OVERLAPS)
    sequence, head = tl.program_id(0), tl.program_id(1)
    num_tokens = tl.load(counts_ptr)
    if sequence > tl.load(sequence_rows_ptr + num_tokens - 1):
        return
    first, stop, goes_on, saved_stop = span_of(
        sequence, sequence_starts_ptr, positions_ptr, checkpoint_stops_ptr
    )
    key, column, is_key, is_value = tile_of(key_dim, value_dim, KEYS, COLUMNS)
    live = is_key[:, None] & is_value[None, :]
    state_at = state_ptr + key[:, None] * value_pitch + column[None, :]
    source = state_of(state_sources_ptr, sequence, head, num_heads, key_dim, value_pitch, WIDE)
    state = tl.load(state_at + source, mask=live & goes_on, other=0.0)
    bias, rate = tl.load(step_bias_ptr + head), tl.load(rates_ptr + head)
    query = head // heads_in_turn % num_key_heads * key_dim
    keys = query + num_key_heads * key_dim
    values = 2 * num_key_heads * key_dim + head * value_dim
    for row in range(first, stop):
        wide_row = as_offset(row, WIDE)
        x_at = x_ptr + wide_row * x_stride
        q, of_query = _unit(x_at + query, key, is_key)
        k, of_key = _unit(x_at + keys, key, is_key)
        v = tl.load(x_at + values + column, mask=is_value, other=0.0)
        step = tl.load(steps_ptr + wide_row * steps_stride + head) + bias
        wait = softplus(step)
        decay = tl.exp(rate * wait)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(betas_ptr + wide_row * betas_stride + head)))
        k = k * of_key
        state = state * decay
        delta = beta * (v - tl.sum(state * k[:, None], axis=0))
        state = state + k[:, None] * delta[None, :]
        out = tl.sum(state * q[:, None], axis=0) * (of_query / root)
        out_at = out_ptr + wide_row * out_stride + head * value_dim + column
        tl.store(out_at, out, mask=is_value)
        if row + 1 == saved_stop:
            kept = state_of(
                checkpoint_slots_ptr, sequence, head, num_heads, key_dim, value_pitch, WIDE
            )
            tl.store(state_at + kept, state, mask=live)
    own = state_of(state_slots_ptr, sequence, head, num_heads, key_dim, value_pitch, WIDE)
    tl.store(state_at + own, state, mask=live)


def launch(plan: BoundPlan, x: Tensor, state: Tensor, value_dim: int, num_sequences: int) -> None:
    """Append delta_rule for up to `num_sequences` sequences."""
    _, num_heads, key_dim, value_pitch = state.shape
    plan.add_gpu(
        delta_rule_kernel,
        grid=(
            min(num_sequences, x.shape[0]),
            num_heads,
            triton.cdiv(value_dim, _COLUMNS),
        ),
        num_heads=num_heads,
        key_dim=key_dim,
        value_pitch=value_pitch,
        root=float(key_dim) ** 0.5,
        KEYS=triton.next_power_of_2(key_dim),
        COLUMNS=_COLUMNS,
    )
