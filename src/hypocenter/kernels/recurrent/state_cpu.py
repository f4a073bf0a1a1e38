"""What numba kernels share that carry a state, of which they take 64 columns at once.

How they find sequences: `sequences.py` says what these tensors hold.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import inline
from hypocenter.device.cpu.vector import get, load, splat, store

BLOCK = 64


@inline
def softplus(x: float) -> float:
    """log(1 + e**x), in float64."""
    wide = np.float64(x)
    return max(wide, 0.0) + math.log(1.0 + math.exp(-abs(wide)))


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
def checkpoint_of(
    sequence: int, first: int, checkpoint_slots: Any, checkpoint_stops: Any
) -> tuple[int, int]:
    """How many tokens of the step a sequence's checkpoint has, or none (0 or less); its slot."""
    num_tokens: int = get(checkpoint_stops, sequence) - first
    slot: int = get(checkpoint_slots, sequence)
    return num_tokens, slot


@inline
def clear(state: Any, at: int, num_rows: int, pitch: int) -> None:
    """Zeros from `at` on."""
    for row in range(num_rows):
        for column in range(0, BLOCK, 16):
            store(state, at + row * pitch + column, splat(np.float32(0)))


@inline
def copy(state: Any, source: int, target: int, num_rows: int, pitch: int) -> None:
    """What lies at `source`, at `target` too."""
    for row in range(num_rows):
        for column in range(0, BLOCK, 16):
            place = row * pitch + column
            store(state, target + place, load(state, source + place))
