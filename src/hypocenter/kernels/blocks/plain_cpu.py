"""numba kernels that make blocks of 32 columns: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4 and IQ4_NL;
and of NVFP4, four groups of 16.

`weights` says how much each column counts, for all rows alike, or is empty. Blocks are laid out as
`kernels/weights/block_types.py` reads them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import allocating_kernel, inline_allocating, prange
from hypocenter.device.cpu.rounding import half_bits, of_half_bits, rounded_away, truncate
from hypocenter.kernels.blocks.lines_cpu import LANES, LOW, NUM_STATES, SCALE, fit_lines
from hypocenter.kernels.blocks.searches_cpu import (
    NUM_ROWS,
    NUM_TRIES,
    fit_scale,
    largest_size,
)
from hypocenter.kernels.weights.block_types import E2M1_VALUES

_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_LARGEST = np.float32(np.finfo(np.float32).max)
#: How fit_lines goes about codes of four and of five bits where columns have weights.
_LINE_4 = np.float32(15), np.float32(-0.9), np.float32(0.05), 36, False
_LINE_5 = np.float32(31), np.float32(-0.9), np.float32(0.05), 36, False
_E2M1 = np.array(E2M1_VALUES, np.float32)


@inline_allocating
def put_half(blocks: Any, at: int, value: Any) -> Any:
    """Write an f32 as two bytes of f16; what they then stand for."""
    bits = half_bits(value)
    blocks[at], blocks[at + 1] = bits & 255, bits >> 8
    return of_half_bits(bits)


@inline_allocating
def weigh(x: Any, weights: Any, mean_square: Any, found: Any) -> None:
    """How much each number of a group counts: its column's weight times the root of the mean
    square of its surroundings and its own."""
    for i in range(found.shape[0]):
        value = x[i]
        found[i] = weights[i] * np.float32(math.sqrt(mean_square + value * value))


@inline_allocating
def sum_of_squares(x: Any) -> Any:
    """Added up in order."""
    total = _ZERO
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return total


@inline_allocating
def _low_byte(value: Any) -> Any:
    """An f32 without its fraction as a signed byte, as a C program for x86 stores it."""
    low = truncate(value) & 255
    return low - 256 if low > 127 else low


@inline_allocating
def put_nibbles(codes: Any, blocks: Any, at: int) -> None:
    """Write the low four bits of 32 codes, those of the second half high."""
    for i in range(16):
        blocks[at + i] = (codes[i] & 15) | ((codes[16 + i] & 15) << 4)


@inline_allocating
def _put_fifth_bits(codes: Any, blocks: Any, at: int) -> None:
    for byte in range(4):
        found = 0
        for bit in range(8):
            found |= ((codes[8 * byte + bit] >> 4) & 1) << bit
        blocks[at + byte] = found


@inline_allocating
def _codes_by_scale(x: Any, zero: int, codes: Any) -> Any:
    """Codes around `zero` of 32 columns of which the largest becomes 0; the scale."""
    _, extreme = largest_size(x)
    scale = extreme / np.float32(-zero)
    inverse = _ONE / scale if scale != _ZERO else _ZERO
    for i in range(32):
        shifted = x[i] * inverse + (np.float32(zero) + _HALF)
        codes[i] = min(2 * zero - 1, _low_byte(shifted))
    return scale


@inline_allocating
def _codes_by_line(x: Any, most: int, codes: Any) -> Any:
    """Codes from 0 to `most` between the lowest and the highest; the scale and the lowest."""
    low, high = _LARGEST, -_LARGEST
    for i in range(32):
        low = x[i] if x[i] < low else low
        high = x[i] if x[i] > high else high
    scale = (high - low) / np.float32(most)
    inverse = _ONE / scale if scale != _ZERO else _ZERO
    for i in range(32):
        code = _low_byte((x[i] - low) * inverse + _HALF)
        codes[i] = min(most, code) if most == 15 else code
    return scale, low


@inline_allocating
def _make_by_scale(x: Any, weights: Any, zero: int, blocks: Any) -> None:
    """A row of Q4_0 (`zero` 8) or Q5_0 (16)."""
    codes, found = np.empty(32, np.int32), np.empty(32, np.float32)
    room = np.empty((NUM_ROWS, NUM_TRIES), np.float32)
    mean_square = sum_of_squares(x) / np.float32(x.shape[0])
    for n in range(x.shape[0] // 32):
        at = n * (18 if zero == 8 else 22)
        group = x[32 * n : 32 * n + 32]
        if weights.shape[0]:
            weigh(group, weights[32 * n : 32 * n + 32], mean_square, found)
            scale = fit_scale(group, found, np.float32(zero), codes, room)
        else:
            scale = _codes_by_scale(group, zero, codes)
        put_half(blocks, at, scale)
        if zero == 16:
            _put_fifth_bits(codes, blocks, at + 2)
        put_nibbles(codes, blocks, at + (2 if zero == 8 else 6))


@inline_allocating
def _make_by_line(x: Any, most: int, blocks: Any) -> None:
    """A row of Q4_1 (`most` 15) or Q5_1 (31)."""
    codes = np.empty(32, np.int32)
    for n in range(x.shape[0] // 32):
        scale, low = _codes_by_line(x[32 * n : 32 * n + 32], most, codes)
        _put_line(scale, low, codes, most, blocks[(20 if most == 15 else 24) * n :])


@inline_allocating
def _put_line(scale: Any, low: Any, codes: Any, most: int, block: Any) -> None:
    put_half(block, 0, scale)
    put_half(block, 2, low)
    if most == 31:
        _put_fifth_bits(codes, block, 4)
    put_nibbles(codes, block, 4 if most == 15 else 8)


@inline_allocating
def _make_by_weighed_line(x: Any, weights: Any, search: Any, blocks: Any) -> None:
    """Likewise, where columns have weights: by how `search` goes about it, LANES blocks at once.

    Where fewer are left, the last is searched several times.
    """
    most, num_blocks = np.int64(search[0]), x.shape[0] // 32
    block_bytes = blocks.shape[0] // num_blocks
    found, of_block = np.empty(32, np.float32), np.empty(32, np.int32)
    values, of_values = np.empty((32, LANES), np.float32), np.empty((32, LANES), np.float32)
    codes, state = np.empty((32, LANES), np.float32), np.empty((NUM_STATES, LANES), np.float32)
    mean_square = sum_of_squares(x) / np.float32(x.shape[0])
    for first in range(0, num_blocks, LANES):
        for k in range(LANES):
            at = 32 * min(first + k, num_blocks - 1)
            weigh(x[at : at + 32], weights[at : at + 32], mean_square, found)
            for i in range(32):
                values[i, k], of_values[i, k] = x[at + i], found[i]
        fit_lines(values, of_values, search, codes, state)
        for k in range(min(LANES, num_blocks - first)):
            for i in range(32):
                of_block[i] = codes[i, k]
            block = blocks[block_bytes * (first + k) :]
            _put_line(state[SCALE, k], state[LOW, k], of_block, most, block)


@inline_allocating
def _make_q8_0(x: Any, blocks: Any) -> None:
    for n in range(x.shape[0] // 32):
        group = x[32 * n : 32 * n + 32]
        size, _ = largest_size(group)
        scale = size / np.float32(127)
        inverse = _ONE / scale if scale != _ZERO else _ZERO
        put_half(blocks, 34 * n, scale)
        for i in range(32):
            blocks[34 * n + 2 + i] = rounded_away(group[i] * inverse) & 255


@inline_allocating
def _exponent_of(size: Any) -> Any:
    """The byte of a power of two, a quarter of the one below `size` or at it; 0 for 0.

    The logarithm is rounded to f32: a number just below a power of two counts as that power.
    """
    if not size > _ZERO:
        return 0
    return (math.floor(np.float32(math.log2(np.float64(size)))) - 2 + 127) & 255


@inline_allocating
def power_of(exponent: int) -> Any:
    """The f32 of 2**(exponent - 128): half of what the byte stands for, for codes are doubled."""
    if exponent < 2:
        return np.uint32(0x00200000 << exponent).view(np.float32)
    return np.uint32((exponent - 1) << 23).view(np.float32)


@inline_allocating
def nearest_e2m1(value: Any, scale: Any, values: Any) -> Any:
    """The first code whose value times `scale` is nearest."""
    best, least = 0, abs(values[0] * scale - value)
    for code in range(1, 16):
        error = abs(values[code] * scale - value)
        if error < least:
            best, least = code, error
    return best


@inline_allocating
def _make_mxfp4(x: Any, values: Any, blocks: Any) -> None:
    for n in range(x.shape[0] // 32):
        group = x[32 * n : 32 * n + 32]
        size, _ = largest_size(group)
        exponent = _exponent_of(size)
        scale = power_of(exponent)
        blocks[17 * n] = exponent
        for i in range(16):
            low = nearest_e2m1(group[i], scale, values)
            blocks[17 * n + 1 + i] = low | (nearest_e2m1(group[16 + i], scale, values) << 4)


@inline_allocating
def _e4m3_of(size: Any) -> Any:
    """The byte of the e4m3 nearest to a size, halves away from 0. All from 256 on are the largest,
    448: so ggml has it."""
    if not size > _ZERO:
        return 0
    if size < np.float32(0.015625):  # subnormal
        return min(int(size * np.float32(512) + np.float32(0.5)), 7)
    bits = np.int64(np.float32(size).view(np.uint32))
    code = ((bits >> 20) - (120 << 3)) + ((bits >> 19) & 1)
    return code if code < 0x78 else 0x7E


@inline_allocating
def _half_of_e4m3(code: Any) -> Any:
    """Half of what such a byte stands for, for codes are doubled."""
    exponent, part = code >> 3, np.float32(code & 7)
    if exponent == 0:
        return part * np.float32(2.0**-10)
    power = np.uint32((exponent + 119) << 23).view(np.float32)
    return (_ONE + part * np.float32(0.125)) * power


@inline_allocating
def _make_nvfp4(x: Any, values: Any, blocks: Any) -> None:
    for n in range(x.shape[0] // 16):
        group, part = x[16 * n : 16 * n + 16], n % 4
        size, _ = largest_size(group)
        code = _e4m3_of(size / np.float32(6))
        scale, at = _half_of_e4m3(code), 36 * (n // 4)
        blocks[at + part] = code
        for i in range(8):
            low = nearest_e2m1(group[i], scale, values)
            high = nearest_e2m1(group[8 + i], scale, values)
            blocks[at + 4 + 8 * part + i] = low | (high << 4)


@allocating_kernel
def _quantise_plain_cpu(x: Any, weights: Any, blocks: Any, kind: int) -> None:
    """Formula: blocks = the codes and scales nearest to x as each type seeks them, `kind` being the
    type's number in GGUF files: 2, 3, 6, 7, 8, 39 or 40.
    Shapes: x f32 [num_rows, num_columns]; weights f32 [num_columns] or [0]; blocks u8 [num_rows,
    row_bytes], written.
    Source: ggml's ggml-quants.c, quantize_row_*_ref and quantize_row_*_impl of these types.
    """
    values = _E2M1
    for row in prange(x.shape[0]):
        if kind == 2:
            _make_by_scale(x[row], weights, 8, blocks[row])
        elif kind == 3 and weights.shape[0]:
            _make_by_weighed_line(x[row], weights, _LINE_4, blocks[row])
        elif kind == 3:
            _make_by_line(x[row], 15, blocks[row])
        elif kind == 6:
            _make_by_scale(x[row], weights, 16, blocks[row])
        elif kind == 7 and weights.shape[0]:
            _make_by_weighed_line(x[row], weights, _LINE_5, blocks[row])
        elif kind == 7:
            _make_by_line(x[row], 31, blocks[row])
        elif kind == 8:
            _make_q8_0(x[row], blocks[row])
        elif kind == 39:
            _make_mxfp4(x[row], values, blocks[row])
        else:
            _make_nvfp4(x[row], values, blocks[row])
