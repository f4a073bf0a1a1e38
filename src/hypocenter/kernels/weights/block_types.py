"""GGUF block types: their bytes as codes, scales and minima.

Every block type is `scale * code + minimum` with one scale (and minimum) per group of 16 or 32
columns. Formats: ggml's `ggml-common.h` (block structs) and `ggml-quants.c` (dequantize_row_*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hypocenter.dtypes import Array, bf16_to_f32
from hypocenter.tensor import DType

# The sixteen values of the non-linear 4-bit types (kvalues_iq4nl).
_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Unpacked rows: value = scales * codes + minima, each product and sum rounded to f32.

    codes int8 [num_rows, num_columns]. A scale is a number of its group, f16 in the file and f32
    here, `scale` [num_rows, num_columns / group]; or that of its block, `scale` [num_rows,
    num_columns / 256], times a small integer, `small_scales` int8 [num_rows, num_columns / group].
    Minima likewise, where there are any.
    """

    codes: Array
    group: int
    scale: Array
    small_scales: Array | None
    minimum: Array | None
    small_minima: Array | None

    @property
    def scales(self) -> Array:
        """f32 [num_rows, num_columns / group]."""
        return _multiply(self.scale, self.small_scales)

    @property
    def minima(self) -> Array | None:
        """f32 [num_rows, num_columns / group], or None."""
        return None if self.minimum is None else _multiply(self.minimum, self.small_minima)

    def values(self) -> Array:
        """f32 [num_rows, num_columns], bit-equal to ggml's dequantisation."""
        num_rows, num_columns = self.codes.shape
        grouped = self.codes.reshape(num_rows, -1, self.group).astype(np.float32)
        values = grouped * self.scales[..., None]
        if (minima := self.minima) is not None:
            values += minima[..., None]
        return values.reshape(num_rows, num_columns)


def _multiply(whole: Array, small: Array | None) -> Array:
    if small is None:
        return whole
    per_block = small.shape[1] // whole.shape[1]
    grouped = whole[..., None] * small.reshape(*whole.shape, per_block)
    return grouped.reshape(small.shape)


def dequantise(raw: Array, dtype: DType, num_columns: int) -> Array:
    """Rows of GGUF bytes (uint8 [num_rows, row_bytes]) as f32 [num_rows, num_columns]."""
    if dtype is DType.F32:
        return raw.view(np.float32)
    if dtype is DType.F16:
        return raw.view(np.float16).astype(np.float32)
    if dtype is DType.BF16:
        return bf16_to_f32(raw.view(np.uint16))
    return unpack(raw, dtype, num_columns).values()


def unpack(raw: Array, dtype: DType, num_columns: int) -> Blocks:
    """Rows of GGUF bytes of a block type as codes, scales and minima."""
    num_rows = raw.shape[0]
    blocks = raw.reshape(num_rows, num_columns // dtype.block_elements, dtype.block_bytes)
    codes, scale, *others = _READERS[dtype](blocks)
    scale = scale.reshape(num_rows, -1)
    small_scales, minimum, small_minima = (
        None if found is None else found.reshape(num_rows, -1) for found in others
    )
    num_groups = (scale if small_scales is None else small_scales).shape[1]
    codes, group = codes.reshape(num_rows, num_columns), num_columns // num_groups
    return Blocks(codes, group, scale, small_scales, minimum, small_minima)


def _f16(blocks: Array, offset: int) -> Array:
    """The f16 field at byte `offset` of each block, as f32 [num_rows, num_blocks, 1]."""
    field = np.ascontiguousarray(blocks[..., offset : offset + 2])
    return field.view(np.float16).astype(np.float32)


def _nibbles(quants: Array) -> Array:
    """Bytes [..., n] to codes [..., 2n]: all low nibbles, then all high ones."""
    quants = np.ascontiguousarray(quants)  # numpy is slow where it may go a few bytes at a time
    return np.concatenate([quants & 15, quants >> 4], axis=-1)


def _fifth_bits(blocks: Array, offset: int) -> Array:
    """32 bits at byte `offset`, one per column, as 0 or 16."""
    packed = np.ascontiguousarray(blocks[..., offset : offset + 4])
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


#: Codes, then scale, small scales, minimum and small minima as in Blocks.
Fields = tuple[Array, Array, Array | None, Array | None, Array | None]


def _read_q4_0(blocks: Array) -> Fields:
    return _nibbles(blocks[..., 2:]).view(np.int8) - np.int8(8), _f16(blocks, 0), None, None, None


def _read_q4_1(blocks: Array) -> Fields:
    return _nibbles(blocks[..., 4:]).view(np.int8), _f16(blocks, 0), None, _f16(blocks, 2), None


def _read_q5_0(blocks: Array) -> Fields:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return codes.view(np.int8) - np.int8(16), _f16(blocks, 0), None, None, None


def _read_q5_1(blocks: Array) -> Fields:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return codes.view(np.int8), _f16(blocks, 0), None, _f16(blocks, 2), None


def _read_q8_0(blocks: Array) -> Fields:
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _f16(blocks, 0), None, None, None


def _two_bit_codes(quants: Array) -> Array:
    """64 bytes to [..., 2 halves, 4 shifts, 32]: each half holds four columns to a byte."""
    halves = quants.reshape(*quants.shape[:-1], 2, 1, 32)
    return (halves >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3


def _read_q2_k(blocks: Array) -> Fields:
    packed, codes = blocks[..., :16], _two_bit_codes(blocks[..., 16:80])
    return codes.view(np.int8), _f16(blocks, 80), packed & 15, -_f16(blocks, 82), packed >> 4


def _read_q3_k(blocks: Array) -> Fields:
    low = _two_bit_codes(blocks[..., 32:96])
    mask = blocks[..., None, None, :32]
    bit = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    codes = (low | (((mask >> bit) & 1) << 2)).view(np.int8) - np.int8(4)
    packed = blocks[..., 96:108]
    low_bits = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high_bits = (packed[..., None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    six_bits = low_bits | (high_bits.reshape(low_bits.shape) << 4)
    return codes, _f16(blocks, 108), six_bits.view(np.int8) - np.int8(32), None, None


def _six_bit_pairs(packed: Array) -> tuple[Array, Array]:
    """The 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales, minima


def _paired_nibbles(quants: Array) -> Array:
    """128 bytes to 8 groups of 32: each 32 bytes hold one group low and the next one high."""
    chunks = np.ascontiguousarray(quants).reshape(*quants.shape[:-1], 4, 32)
    return np.stack([chunks & 15, chunks >> 4], axis=-2)


def _read_q4_k(blocks: Array) -> Fields:
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    codes = _paired_nibbles(blocks[..., 16:]).view(np.int8)
    return codes, _f16(blocks, 0), scales, -_f16(blocks, 2), minima


def _read_q5_k(blocks: Array) -> Fields:
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    high = blocks[..., None, None, 16:48]
    bit = np.arange(8, dtype=np.uint8).reshape(4, 2, 1)
    codes = _paired_nibbles(blocks[..., 48:]) | (((high >> bit) & 1) << 4)
    return codes.view(np.int8), _f16(blocks, 0), scales, -_f16(blocks, 2), minima


def _read_q6_k(blocks: Array) -> Fields:
    low = np.ascontiguousarray(blocks[..., :128]).reshape(*blocks.shape[:-1], 2, 2, 32)
    high = np.ascontiguousarray(blocks[..., 128:192]).reshape(*blocks.shape[:-1], 2, 32)
    low_bits = np.concatenate([low & 15, low >> 4], axis=-2)
    high_bits = np.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-2)
    codes = (low_bits | (high_bits << 4)).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return codes, _f16(blocks, 208), scales, None, None


def _read_iq4_nl(blocks: Array) -> Fields:
    return _IQ4_VALUES[_nibbles(blocks[..., 2:])], _f16(blocks, 0), None, None, None


def _read_iq4_xs(blocks: Array) -> Fields:
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16)
    high_bits = ((high >> (2 * np.arange(8, dtype=np.uint16))) & 3).astype(np.uint8)
    packed = blocks[..., 4:8]
    low_bits = np.stack([packed & 15, packed >> 4], axis=-1).reshape(high_bits.shape)
    scales = (low_bits | (high_bits << 4)).view(np.int8) - np.int8(32)
    quants = blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)
    return _IQ4_VALUES[_nibbles(quants)], _f16(blocks, 0), scales, None, None


_READERS: dict[DType, Callable[[Array], Fields]] = {
    DType.Q4_0: _read_q4_0,
    DType.Q4_1: _read_q4_1,
    DType.Q5_0: _read_q5_0,
    DType.Q5_1: _read_q5_1,
    DType.Q8_0: _read_q8_0,
    DType.Q2_K: _read_q2_k,
    DType.Q3_K: _read_q3_k,
    DType.Q4_K: _read_q4_k,
    DType.Q5_K: _read_q5_k,
    DType.Q6_K: _read_q6_k,
    DType.IQ4_NL: _read_iq4_nl,
    DType.IQ4_XS: _read_iq4_xs,
}
