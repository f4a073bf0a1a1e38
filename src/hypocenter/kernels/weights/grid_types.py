"""The block types IQ1, IQ2 and IQ3: eight or four columns are one entry of a grid, with signs.

Formats: ggml's `ggml-common.h` (block structs and grids) and `ggml-quants.c` (dequantize_row_iq*).
What a file calls `d * (2 s + 1) / 8` is a scale of d / 8 and a small integer here, so that all
codes are integers. The grids lie in `assets/grids.safetensors`, as levels of two bits, or of four
for IQ3, the lowest bits first.
"""

from __future__ import annotations

import functools

import numpy as np
from safetensors.numpy import load_file

from hypocenter.base.dtypes import Array
from hypocenter.base.package import ASSETS
from hypocenter.device.arrays import AnyArray, bits_as, cast, constants, look_up, stack
from hypocenter.kernels.weights.block_fields import Fields, f16_at, in_turn, words

#: The sizes of the codes of each type; a sign is beside them.
IQ1_SIZES, IQ2_SIZES = (1, 7, 9), (8, 25, 43)
IQ3_XXS_SIZES, IQ3_S_SIZES = (2, 6, 10, 14, 18, 22, 26, 31), (1, 3, 5, 7, 9, 11, 13, 15)
#: What the levels of each grid stand for, and the columns of an entry.
_GRIDS = {
    "iq1": ((-8, 0, 8), 8),
    "iq2_xxs": (IQ2_SIZES, 8),
    "iq2_xs": (IQ2_SIZES, 8),
    "iq2_s": (IQ2_SIZES, 8),
    "iq3_xxs": (IQ3_XXS_SIZES, 4),
    "iq3_s": (IQ3_S_SIZES, 4),
}


@functools.cache
def grid(name: str) -> Array:
    """i8 [num_entries, columns of an entry]; eight times as much of IQ1."""
    levels, num_columns = _GRIDS[name]
    bits = 2 if len(levels) == 3 else 4
    packed = _packed_grids()[name]
    parts = (packed[:, None] >> np.arange(0, 8, bits, dtype=np.uint8)) & ((1 << bits) - 1)
    entries: Array = np.array(levels, np.int8)[parts].reshape(-1, num_columns)
    return entries


@functools.cache
def _packed_grids() -> dict[str, Array]:
    return load_file(ASSETS / "grids.safetensors")


def _entries(name: str, at: AnyArray) -> AnyArray:
    """Entries [..., n] of a grid as codes [..., n * columns]."""
    found = look_up(constants(grid(name), "int8", at), at)
    return found.reshape(*at.shape[:-1], -1)


def _signs(packed: AnyArray) -> AnyArray:
    """A bit for each column, set where it is negative, as 1 and -1."""
    return 1 - 2 * bits_as(in_turn(packed, range(8), 1), "int8")


def _even_signs(sevens: AnyArray) -> AnyArray:
    """Seven of eight signs; the eighth makes the number of negative ones even."""
    odd = sevens ^ (sevens >> 4)
    odd = odd ^ (odd >> 2)
    return _signs(sevens | ((odd ^ (odd >> 1)) << 7))


def _signs_and_scale(packed: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Words of four times seven signs, and of four bits of a scale above them."""
    found = words(packed, 4)
    sevens = in_turn(found, (0, 7, 14, 21), 127, "int32")
    return _even_signs(cast(sevens, "uint8")), _odd((found >> 28) & 15)


def _odd(small: AnyArray) -> AnyArray:
    return cast(2 * small + 1, "uint8")


def _with_high_bits(low: AnyArray, high: AnyArray) -> AnyArray:
    return cast(low, "int32") | (cast(high, "int32") << 8)


def read_iq2_xxs(blocks: AnyArray) -> Fields:
    groups = blocks[..., 2:66].reshape(*blocks.shape[:-1], 8, 8)
    at = groups[..., :4].reshape(*blocks.shape[:-1], 32)
    signs, small = _signs_and_scale(groups[..., 4:].reshape(at.shape))
    return _entries("iq2_xxs", at) * signs, f16_at(blocks, 0) / 8, small, None, None


def read_iq2_xs(blocks: AnyArray) -> Fields:
    low, high = blocks[..., 2:66:2], blocks[..., 3:66:2]
    codes = _entries("iq2_xs", _with_high_bits(low, high & 1)) * _even_signs(high >> 1)
    small = _odd(in_turn(blocks[..., 66:74], (0, 4), 15))
    return codes, f16_at(blocks, 0) / 8, small, None, None


def read_iq2_s(blocks: AnyArray) -> Fields:
    high = in_turn(blocks[..., 66:74], (0, 2, 4, 6), 3)
    codes = _entries("iq2_s", _with_high_bits(blocks[..., 2:34], high))
    small = _odd(in_turn(blocks[..., 74:82], (0, 4), 15))
    return codes * _signs(blocks[..., 34:66]), f16_at(blocks, 0) / 8, small, None, None


def read_iq3_xxs(blocks: AnyArray) -> Fields:
    signs, small = _signs_and_scale(blocks[..., 66:98])
    return _entries("iq3_xxs", blocks[..., 2:66]) * signs, f16_at(blocks, 0) / 2, small, None, None


def read_iq3_s(blocks: AnyArray) -> Fields:
    at = _with_high_bits(blocks[..., 2:66], in_turn(blocks[..., 66:74], range(8), 1))
    codes = _entries("iq3_s", at) * _signs(blocks[..., 74:106])
    return codes, f16_at(blocks, 0), _odd(in_turn(blocks[..., 106:110], (0, 4), 15)), None, None


def _grid_beside(at: AnyArray, is_below: AnyArray) -> AnyArray:
    """Entries of the grid of IQ1, each an eighth above its levels or below them."""
    deltas = 1 - 2 * cast(is_below, "int8")
    codes = _entries("iq1", at).reshape(*at.shape, 8)
    return (codes + deltas[..., None]).reshape(*at.shape[:-1], -1)


def read_iq1_s(blocks: AnyArray) -> Fields:
    high = words(blocks[..., 34:50], 2)
    at = _with_high_bits(blocks[..., 2:34], in_turn(high, (0, 3, 6, 9), 7, "int32"))
    is_below = in_turn(high, (15, 15, 15, 15), 1, "int32")
    codes = _grid_beside(at, is_below)
    return codes, f16_at(blocks, 0) / 8, _odd((high >> 12) & 7), None, None


def bytes_of_iq1_m_scale(blocks: AnyArray) -> AnyArray:
    """The f16 of each block, u8 [..., 2]: four bits of it are the highest of each of four words."""
    tops = blocks[..., 49:56:2]
    return stack([tops[..., i] >> 4 | (tops[..., i + 1] & 240) for i in (0, 2)], -1)


def read_iq1_m(blocks: AnyArray) -> Fields:
    high = in_turn(blocks[..., 32:48], (0, 4), 15)
    scale = cast(bits_as(bytes_of_iq1_m_scale(blocks), "float16"), "float32") / 8
    small = _odd(in_turn(words(blocks[..., 48:56], 2), (0, 3, 6, 9), 7, "int32"))
    codes = _grid_beside(_with_high_bits(blocks[..., :32], high & 7), high >> 3)
    return codes, scale, small, None, None
