"""GGUF block types: their bytes as codes, scales and minima.

Every block type is `scale * code + minimum` with one scale (and minimum) per group of 16 or 32
columns. They are read with NumPy, or with torch on a GPU. Formats: ggml's `ggml-common.h` (block
structs) and `ggml-quants.c` (dequantize_row_*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hypocenter.base.dtypes import Array, bf16_to_f32
from hypocenter.base.tensor import DType
from hypocenter.device.arrays import AnyArray, bits_as, cast, constants, in_order, join, stack
from hypocenter.kernels.weights import grid_types
from hypocenter.kernels.weights.block_fields import (
    Fields,
    as_signed,
    bit_planes,
    f16_at,
    in_turn,
    nibbles,
    of_table,
)

# The sixteen values of the non-linear 4-bit types (kvalues_iq4nl).
IQ4_VALUES = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
#: What the codes of MXFP4 stand for, twice as much so that they are integers (kvalues_mxfp4): a
#: sign, two bits of exponent and one of mantissa.
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
#: Bits of a scale that are all set where it stands for no number, and how many such scales begin a
#: block (OCP Microscaling Formats, 5.3.1 and 5.4.1). The sign of an e4m3 is not looked at.
RESERVED = {DType.MXFP4: (0xFF, 1), DType.NVFP4: (0x7F, 4)}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Unpacked rows: value = scales * codes + minima, each product and sum rounded to f32.

    codes int8 [num_rows, num_columns]. A scale is a number of its group, f16 (of MXFP4 a power of
    two, of NVFP4 an e4m3) in the file and f32 here, `scale` [num_rows, num_columns / group]; or
    that of its block, `scale` [num_rows, num_columns / 256], times a small integer, `small_scales`
    int8 [num_rows, num_columns / group]. Minima likewise, where there are any.
    """

    codes: AnyArray
    group: int
    scale: AnyArray
    small_scales: AnyArray | None
    minimum: AnyArray | None
    small_minima: AnyArray | None

    @property
    def scales(self) -> AnyArray:
        """f32 [num_rows, num_columns / group]."""
        return _multiply(self.scale, self.small_scales)

    @property
    def minima(self) -> AnyArray | None:
        """f32 [num_rows, num_columns / group], or None."""
        return None if self.minimum is None else _multiply(self.minimum, self.small_minima)

    def values(self) -> Array:
        """f32 [num_rows, num_columns], bit-equal to ggml's dequantisation."""
        num_rows, num_columns = self.codes.shape
        grouped = cast(self.codes.reshape(num_rows, -1, self.group), "float32")
        values: Array = grouped * self.scales[..., None]
        if (minima := self.minima) is not None:
            values += minima[..., None]
        return values.reshape(num_rows, num_columns)


def _multiply(whole: AnyArray, small: AnyArray | None) -> AnyArray:
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


def unpack(raw: AnyArray, dtype: DType, num_columns: int) -> Blocks:
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


def _fifth_bits(blocks: AnyArray, offset: int) -> AnyArray:
    """32 bits at byte `offset`, one per column, as 0 or 16."""
    packed = in_order(blocks[..., offset : offset + 4])[..., None]
    bits = (packed >> constants(range(8), "uint8", packed)) & 1
    return bits.reshape(*blocks.shape[:-1], 32) << 4


def _read_q4_0(blocks: AnyArray) -> Fields:
    return as_signed(nibbles(blocks[..., 2:]), 8), f16_at(blocks, 0), None, None, None


def _read_q4_1(blocks: AnyArray) -> Fields:
    return as_signed(nibbles(blocks[..., 4:]), 0), f16_at(blocks, 0), None, f16_at(blocks, 2), None


def _read_q5_0(blocks: AnyArray) -> Fields:
    codes = nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return as_signed(codes, 16), f16_at(blocks, 0), None, None, None


def _read_q5_1(blocks: AnyArray) -> Fields:
    codes = nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return as_signed(codes, 0), f16_at(blocks, 0), None, f16_at(blocks, 2), None


def _read_q8_0(blocks: AnyArray) -> Fields:
    return bits_as(blocks[..., 2:], "int8"), f16_at(blocks, 0), None, None, None


def _two_bit_codes(quants: AnyArray) -> AnyArray:
    """64 bytes to [..., 2 halves, 4 shifts, 32]: each half holds four columns to a byte."""
    return bit_planes(quants.reshape(*quants.shape[:-1], 2, 32), (0, 2, 4, 6), 3)


def _read_q2_k(blocks: AnyArray) -> Fields:
    packed, codes = blocks[..., :16], _two_bit_codes(blocks[..., 16:80])
    return as_signed(codes, 0), f16_at(blocks, 80), packed & 15, -f16_at(blocks, 82), packed >> 4


def _read_q3_k(blocks: AnyArray) -> Fields:
    low = _two_bit_codes(blocks[..., 32:96])
    high = bit_planes(blocks[..., :32], range(8), 1).reshape(low.shape)
    packed = blocks[..., 96:108]
    low_bits = join([packed[..., :8] & 15, packed[..., :8] >> 4], -1)
    high_bits = bit_planes(packed[..., 8:], (0, 2, 4, 6), 3).reshape(low_bits.shape)
    six_bits = low_bits | (high_bits << 4)
    return as_signed(low | (high << 2), 4), f16_at(blocks, 108), as_signed(six_bits, 32), None, None


def _six_bit_pairs(packed: AnyArray) -> tuple[AnyArray, AnyArray]:
    """The 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = join([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    minima = join([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return scales, minima


def _paired_nibbles(quants: AnyArray) -> AnyArray:
    """128 bytes to 8 groups of 32: each 32 bytes hold one group low and the next one high."""
    chunks = in_order(quants).reshape(*quants.shape[:-1], 4, 32)
    return stack([chunks & 15, chunks >> 4], -2)


def _read_q4_k(blocks: AnyArray) -> Fields:
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    codes = as_signed(_paired_nibbles(blocks[..., 16:]), 0)
    return codes, f16_at(blocks, 0), scales, -f16_at(blocks, 2), minima


def _read_q5_k(blocks: AnyArray) -> Fields:
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    low = _paired_nibbles(blocks[..., 48:])
    codes = low | (bit_planes(blocks[..., 16:48], range(8), 1).reshape(low.shape) << 4)
    return as_signed(codes, 0), f16_at(blocks, 0), scales, -f16_at(blocks, 2), minima


def _read_q6_k(blocks: AnyArray) -> Fields:
    low = in_order(blocks[..., :128]).reshape(*blocks.shape[:-1], 2, 2, 32)
    high = in_order(blocks[..., 128:192]).reshape(*blocks.shape[:-1], 2, 32)
    low_bits = join([low & 15, low >> 4], -2)
    codes = as_signed(low_bits | (bit_planes(high, (0, 2, 4, 6), 3) << 4), 32)
    return codes, f16_at(blocks, 208), bits_as(blocks[..., 192:208], "int8"), None, None


def _read_iq4_nl(blocks: AnyArray) -> Fields:
    return of_table(IQ4_VALUES, nibbles(blocks[..., 2:])), f16_at(blocks, 0), None, None, None


def _read_iq4_xs(blocks: AnyArray) -> Fields:
    # Two bits of each of eight scales, in two bytes; then four bits of each.
    high = blocks[..., 2:4, None] >> constants((0, 2, 4, 6), "uint8", blocks)
    packed = blocks[..., 4:8]
    low_bits = stack([packed & 15, packed >> 4], -1).reshape(*blocks.shape[:-1], 8)
    scales = as_signed(low_bits | ((high & 3).reshape(low_bits.shape) << 4), 32)
    quants = blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)
    return of_table(IQ4_VALUES, nibbles(quants)), f16_at(blocks, 0), scales, None, None


def _read_mxfp4(blocks: AnyArray) -> Fields:
    # A power of two, or half of it, for codes are twice what they stand for: below 2**-126 its bits
    # as f32 are those of a subnormal number.
    exponent = cast(blocks[..., :1], "int32")
    is_normal = cast(exponent >= 2, "int32")
    small = ((exponent & 1) + 1) << 21
    bits = is_normal * ((exponent - 1) << 23) + (1 - is_normal) * small
    codes = of_table(E2M1_VALUES, nibbles(blocks[..., 1:]))
    return codes, bits_as(bits, "float32"), None, None, None


def _read_nvfp4(blocks: AnyArray) -> Fields:
    # Half an e4m3, for codes are twice what they stand for. Its bits are an f16's, but for a bias.
    bits = cast(blocks[..., :4] & 127, "int16") << 7
    scale = cast(bits_as(bits, "float16"), "float32") * 128
    quants = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 8)
    return of_table(E2M1_VALUES, nibbles(quants)), scale, None, None, None


def _read_tq1_0(blocks: AnyArray) -> Fields:
    # Five columns in a byte, as a fraction of 256 in base three: times three, and again.
    parts = []
    for first, end, num_digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        digits = blocks[..., first:end]
        for _ in range(num_digits):
            parts.append((cast(digits, "int32") * 3) >> 8)
            digits = digits * 3
    return cast(join(parts, -1) - 1, "int8"), f16_at(blocks, 52), None, None, None


def _read_tq2_0(blocks: AnyArray) -> Fields:
    return as_signed(_two_bit_codes(blocks[..., :64]), 1), f16_at(blocks, 64), None, None, None


def _read_q1_0(blocks: AnyArray) -> Fields:
    codes = as_signed(2 * in_turn(blocks[..., 2:], range(8), 1), 1)
    return codes, f16_at(blocks, 0), None, None, None


def _read_q2_0(blocks: AnyArray) -> Fields:
    codes = as_signed(in_turn(blocks[..., 2:], (0, 2, 4, 6), 3), 1)
    return codes, f16_at(blocks, 0), None, None, None


def find_reserved(raw: Array, dtype: DType) -> tuple[int, int, int] | None:
    """The row of GGUF bytes, the block in it, and its scale that is a reserved one; or None."""
    if dtype not in RESERVED:
        return None
    bits, num_scales = RESERVED[dtype]
    scales = raw.reshape(len(raw), -1, dtype.block_bytes)[..., :num_scales]
    is_reserved = scales & bits == bits
    if not is_reserved.any():  # where they stand takes three times as long
        return None
    row, block, place = map(int, np.argwhere(is_reserved)[0])
    return row, block, int(scales[row, block, place])


def as_ggml_reads(raw: Array) -> Array:
    """GGUF bytes of NVFP4 with 0 for the scale that is no number, as ggml reads it
    (`ggml_ue4m3_to_fp32`); the same array where there is none."""
    no_number, num_scales = RESERVED[DType.NVFP4]
    block_bytes = DType.NVFP4.block_bytes
    if not (raw.reshape(-1, block_bytes)[:, :num_scales] == no_number).any():
        return raw
    read = raw.copy()
    scales = read.reshape(-1, block_bytes)[:, :num_scales]
    scales[scales == no_number] = 0
    return read


_READERS: dict[DType, Callable[[AnyArray], Fields]] = {
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
    DType.MXFP4: _read_mxfp4,
    DType.NVFP4: _read_nvfp4,
    DType.IQ3_S: grid_types.read_iq3_s,
    DType.IQ3_XXS: grid_types.read_iq3_xxs,
    DType.IQ2_S: grid_types.read_iq2_s,
    DType.IQ2_XS: grid_types.read_iq2_xs,
    DType.IQ2_XXS: grid_types.read_iq2_xxs,
    DType.IQ1_M: grid_types.read_iq1_m,
    DType.IQ1_S: grid_types.read_iq1_s,
    DType.TQ2_0: _read_tq2_0,
    DType.TQ1_0: _read_tq1_0,
    DType.Q2_0: _read_q2_0,
    DType.Q1_0: _read_q1_0,
}
