"""Triton kernel of `ssm_scan`: one program is some value columns of a head of a sequence.

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
def ssm_scan_kernel(
    x_ptr, steps_ptr, step_bias_ptr, rates_ptr, skips_ptr, state_ptr, out_ptr, state_slots_ptr,
    state_sources_ptr, checkpoint_slots_ptr, checkpoint_stops_ptr, sequence_starts_ptr,
    sequence_rows_ptr, positions_ptr, counts_ptr, num_groups, value_dim, num_heads, state_dim,
    value_pitch, x_stride, steps_stride, out_stride, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
    follow(OVERLAPS)
    sequence, head = tl.program_id(0), tl.program_id(1)
    num_tokens = tl.load(counts_ptr)
    if sequence > tl.load(sequence_rows_ptr + num_tokens - 1):
        return
    first, stop, goes_on, saved_stop = span_of(
        sequence, sequence_starts_ptr, positions_ptr, checkpoint_stops_ptr
    )
    key, column, is_key, is_value = tile_of(state_dim, value_dim, KEYS, COLUMNS)
    live = is_key[:, None] & is_value[None, :]
    state_at = state_ptr + key[:, None] * value_pitch + column[None, :]
    source = state_of(state_sources_ptr, sequence, head, num_heads, state_dim, value_pitch, WIDE)
    state = tl.load(state_at + source, mask=live & goes_on, other=0.0)
    bias, rate = tl.load(step_bias_ptr + head), tl.load(rates_ptr + head)
    skip = tl.load(skips_ptr + head)
    keys = num_heads * value_dim + head // (num_heads // num_groups) * state_dim
    for row in range(first, stop):
        wide_row = as_offset(row, WIDE)
        x_at = x_ptr + wide_row * x_stride
        k = tl.load(x_at + keys + key, mask=is_key, other=0.0)
        q = tl.load(x_at + keys + num_groups * state_dim + key, mask=is_key, other=0.0)
        v = tl.load(x_at + head * value_dim + column, mask=is_value, other=0.0)
        step = tl.load(steps_ptr + wide_row * steps_stride + head) + bias
        wait = softplus(step)
        state = state * tl.exp(rate * wait) + k[:, None] * (v * wait)[None, :]
        out = tl.sum(state * q[:, None], axis=0) + skip * v
        tl.store(out_ptr + wide_row * out_stride + head * value_dim + column, out, mask=is_value)
        if row + 1 == saved_stop:
            kept = state_of(
                checkpoint_slots_ptr, sequence, head, num_heads, state_dim, value_pitch, WIDE
            )
            tl.store(state_at + kept, state, mask=live)
    own = state_of(state_slots_ptr, sequence, head, num_heads, state_dim, value_pitch, WIDE)
    tl.store(state_at + own, state, mask=live)


def launch(plan: BoundPlan, x: Tensor, state: Tensor, value_dim: int, num_sequences: int) -> None:
    """Append ssm_scan for up to `num_sequences` sequences."""
    _, num_heads, state_dim, value_pitch = state.shape
    plan.add_gpu(
        ssm_scan_kernel,
        grid=(
            min(num_sequences, x.shape[0]),
            num_heads,
            triton.cdiv(value_dim, _COLUMNS),
        ),
        num_heads=num_heads,
        state_dim=state_dim,
        value_pitch=value_pitch,
        KEYS=triton.next_power_of_2(state_dim),
        COLUMNS=_COLUMNS,
    )
