"""numba kernel of `short_conv`: an item is 64 channels of a sequence, token after token.

Also how kernels with a state find sequences (`sequences.py` says what these tensors hold).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import fma, get, load, mul, sigmoid, splat, store

_BLOCK = 64


@inline
def num_sequences_of(sequence_rows: Any, counts: Any) -> int:
    """How many sequences the step has, which has at least one token."""
    last: int = get(sequence_rows, get(counts, 0) - 1)
    return last + 1


@inline
def span_of(
    sequence: int, state_slots: Any, sequence_starts: Any, positions: Any
) -> tuple[int, int, int, int]:
    """A sequence's tokens, from the first to the one behind the last; its slot; where it stands."""
    first: int = get(sequence_starts, sequence)
    stop: int = get(sequence_starts, sequence + 1)
    slot: int = get(state_slots, sequence)
    position: int = get(positions, first)
    return first, stop, slot, position


@inline
def _input(
    x: Any, first: int, offset: int, state: Any, base: int, num_kept: int, position: int,
    column: int,
) -> Any:  # fmt: skip
    """16 channels of what came `offset` tokens behind the first: of the step, kept, or zeros."""
    if offset >= 0:
        return load(x, (first + offset) * x.shape[1] + column)
    if position + offset >= 0:
        return load(state, base + (num_kept + offset) * state.shape[2] + column)
    return splat(np.float32(0))


@cpu_kernel
def short_conv(
    x: Any, weight: Any, state: Any, out: Any, state_slots: Any, sequence_starts: Any,
    sequence_rows: Any, positions: Any, counts: Any,
) -> None:  # fmt: skip
    num_kept, pitch = state.shape[1], state.shape[2]
    num_blocks = pitch // _BLOCK
    for item in prange(num_sequences_of(sequence_rows, counts) * num_blocks):
        sequence, block = item // num_blocks, item % num_blocks
        first, stop, slot, position = span_of(sequence, state_slots, sequence_starts, positions)
        base, num_tokens = slot * num_kept * pitch, stop - first
        for column in range(_BLOCK * block, _BLOCK * (block + 1), 16):
            for token in range(num_tokens):
                total = splat(np.float32(0))
                for tap in range(num_kept + 1):
                    came = token + tap - num_kept
                    value = _input(x, first, came, state, base, num_kept, position, column)
                    total = fma(value, load(weight, tap * pitch + column), total)
                total = mul(total, sigmoid(total))
                store(out, (first + token) * out.shape[1] + column, total)
            # In order: each is read from behind the place that it takes.
            for place in range(num_kept):
                came = num_tokens + place - num_kept
                value = _input(x, first, came, state, base, num_kept, position, column)
                store(state, base + place * pitch + column, value)
