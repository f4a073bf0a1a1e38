"""Triton kernel of `ssm_scan`: one program is some value columns of a head of a sequence.

Its part of the state stays in registers over all tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.contracts.contract import Contract
from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.recurrent.sequences import Sequences
from hypocenter.kernels.recurrent.state_gpu import softplus, span_of, state_of, tile_of
from hypocenter.kernels.shared_gpu import as_offset, follow

#: Value columns of a program.
_COLUMNS = 32


@triton.jit
def ssm_scan_kernel(
    x_ptr, steps_ptr, step_bias_ptr, rates_ptr, skips_ptr, state_ptr, out_ptr, slots_ptr,
    sources_ptr, checkpoints_ptr, stops_ptr, starts_ptr, rows_ptr, positions_ptr, counts_ptr,
    num_groups, value_dim, num_heads, state_dim, value_pitch, x_stride, steps_stride, out_stride,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    sequence, head = tl.program_id(0), tl.program_id(1)
    num_tokens = tl.load(counts_ptr)
    if sequence > tl.load(rows_ptr + num_tokens - 1):
        return
    first, stop, goes_on, saved_stop = span_of(sequence, starts_ptr, positions_ptr, stops_ptr)
    key, column, is_key, is_value = tile_of(state_dim, value_dim, KEYS, COLUMNS)
    live = is_key[:, None] & is_value[None, :]
    state_at = state_ptr + key[:, None] * value_pitch + column[None, :]
    source = state_of(sources_ptr, sequence, head, num_heads, state_dim, value_pitch, WIDE)
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
                checkpoints_ptr, sequence, head, num_heads, state_dim, value_pitch, WIDE
            )
            tl.store(state_at + kept, state, mask=live)
    own = state_of(slots_ptr, sequence, head, num_heads, state_dim, value_pitch, WIDE)
    tl.store(state_at + own, state, mask=live)


def add(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], num_sequences: int
) -> None:
    """Append ssm_scan for up to `num_sequences` sequences."""
    tensors = ("x", "steps", "step_bias", "rates", "skips", "state", "out")
    _, num_heads, state_dim, value_pitch = facts["state"].shape
    plan.add_gpu(
        ssm_scan_kernel,
        *(facts[name] for name in (*tensors, *Sequences.__slots__, "num_groups", "value_dim")),
        *(num_heads, state_dim, value_pitch),
        *(facts[name].strides[0] for name in ("x", "steps", "out")),
        grid=(
            min(num_sequences, facts["x"].shape[0]),
            num_heads,
            triton.cdiv(facts["value_dim"], _COLUMNS),
        ),
        contract=contract,
        facts=facts,
        KEYS=triton.next_power_of_2(state_dim),
        COLUMNS=_COLUMNS,
    )
