"""What Triton kernels share that have a matrix for a state; a program takes some columns of it."""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset


@triton.jit
def state_of(slots_ptr, sequence, head, num_heads, key_dim, value_pitch, WIDE: tl.constexpr):
    """Where the state of a head lies in the slot that a sequence has.

    Slots hold f32 [num_heads, key_dim, value_pitch] each, and there may be 2**31 numbers and more.
    """
    slot = as_offset(tl.load(slots_ptr + sequence), WIDE)
    return (slot * num_heads + head) * key_dim * value_pitch


@triton.jit
def span_of(sequence, starts_ptr, positions_ptr, stops_ptr):
    """A sequence's tokens, from the first to the one behind the last; whether it goes on from a
    state; and behind which token its checkpoint is left.

    `sequences.py` says what these tensors hold. At position 0 nothing is read of a state.
    """
    first, stop = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    goes_on = tl.load(positions_ptr + first) > 0
    return first, stop, goes_on, tl.load(stops_ptr + sequence)


@triton.jit
def softplus(x):
    """log(1 + e**x), without an overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def tile_of(key_dim, value_dim, KEYS: tl.constexpr, COLUMNS: tl.constexpr):
    """Keys and value columns of a program, and which of them there are."""
    key, column = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    return key, column, key < key_dim, column < value_dim
