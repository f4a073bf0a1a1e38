"""numba kernels that make blocks of 256 columns with small scales: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

`weights` says how much each column counts, for all rows alike, or is empty. Blocks are laid out as
`kernels/weights/block_types.py` reads them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import allocating_kernel, inline_allocating, prange
from hypocenter.device.cpu.rounding import nearest_integer
from hypocenter.kernels.blocks.lines_cpu import LANES, LOW, NUM_STATES, SCALE, fit_lines
from hypocenter.kernels.blocks.plain_cpu import put_half, sum_of_squares, weigh
from hypocenter.kernels.blocks.searches_cpu import (
    LEAST,
    NUM_ROWS,
    NUM_TRIES,
    code_of,
    fit_by_turns,
    fit_scale,
    fit_small_scales,
)

_ZERO, _ONE = np.float32(0), np.float32(1)
#: How fit_lines goes about each type, without and with weights of columns.
_SEARCHES_2 = (
    (np.float32(3), np.float32(-0.5), np.float32(0.1), 15, True),
    (np.float32(3), np.float32(-0.9), np.float32(0.05), 36, False),
)
_SEARCHES_4 = (
    (np.float32(15), np.float32(-1), np.float32(0.1), 20, False),
    (np.float32(15), np.float32(-0.9), np.float32(0.05), 36, False),
)
_SEARCHES_5 = (
    (np.float32(31), np.float32(-0.5), np.float32(0.1), 15, False),
    (np.float32(31), np.float32(-0.9), np.float32(0.05), 36, False),
)


@inline_allocating
def _put_two_bits(codes: Any, blocks: Any, at: int) -> None:
    """The two low bits of 256 codes in 64 bytes, four columns that are 32 apart in each."""
    for half in range(2):
        for i in range(32):
            found = 0
            for part in range(4):
                found |= (codes[128 * half + 32 * part + i] & 3) << (2 * part)
            blocks[at + 32 * half + i] = found


@inline_allocating
def _put_planes(codes: Any, shift: int, blocks: Any, at: int) -> None:
    """Bit `shift` of 256 codes in 32 bytes, eight columns that are 32 apart in each."""
    for i in range(32):
        found = 0
        for part in range(8):
            found |= ((codes[32 * part + i] >> shift) & 1) << part
        blocks[at + i] = found


@inline_allocating
def _fit_groups(x: Any, weights: Any, searches: Any, found: Any) -> None:
    """A scale, a minimum and codes for each group of a block; how much each group counts.

    `searches` are those without and with weights of columns. `found` is (codes i32 [256], scales,
    minima and sums of weights f32 [num_groups], room of fit_scale, room of fit_lines).
    """
    codes, scales, minima, sums, _, (values, of_values, tried, state) = found
    num = 256 // scales.shape[0]
    mean_square = sum_of_squares(x)
    mean_square = (mean_square if num == 16 else mean_square + mean_square) / np.float32(256)
    of_columns = np.empty(num, np.float32)
    for first in range(0, scales.shape[0], LANES):
        for k in range(LANES):
            at = num * (first + k)
            group = x[at : at + num]
            if weights.shape[0]:
                weigh(group, weights[at : at + num], mean_square, of_columns)
            else:
                _weigh_by_size(group, of_columns)
            sums[first + k] = _ZERO
            for i in range(num):
                sums[first + k] += of_columns[i]
                values[i, k], of_values[i, k] = group[i], of_columns[i]
        if weights.shape[0]:
            fit_lines(values[:num], of_values[:num], searches[1], tried[:num], state)
        else:
            fit_lines(values[:num], of_values[:num], searches[0], tried[:num], state)
        for k in range(LANES):
            scales[first + k], minima[first + k] = state[SCALE, k], -state[LOW, k]
            for i in range(num):
                codes[num * (first + k) + i] = tried[i, k]


@inline_allocating
def _weigh_by_size(group: Any, of_columns: Any) -> None:
    """What counts where columns have no weights: the size of each number; of groups of 32 more by
    the root of their mean square."""
    num = group.shape[0]
    level = _ZERO
    if num == 32:
        level = np.float32(math.sqrt(sum_of_squares(group) / np.float32(32)))
    for i in range(num):
        of_columns[i] = level + abs(group[i])


@inline_allocating
def _codes_on_lines(x: Any, codes: Any, scales: Any, minima: Any, most: int) -> None:
    """The codes of each group by its scale and minimum as they are written; with a scale of 0 they
    stay."""
    num = 256 // scales.shape[0]
    for j in range(scales.shape[0]):
        if scales[j] != _ZERO:
            for i in range(num * j, num * j + num):
                codes[i] = code_of((x[i] + minima[j]) / scales[j], 0, most)


@inline_allocating
def _small_codes(values: Any, most: Any, small: Any) -> Any:
    """Codes from 0 to `most` of values of which none counts that is below 0; what 1 stands for."""
    highest = _ZERO
    for j in range(values.shape[0]):
        highest = values[j] if values[j] > highest else highest
    inverse = most / highest if highest > _ZERO else _ZERO
    for j in range(values.shape[0]):
        small[j] = nearest_integer(inverse * values[j]) & 255
    return highest / most


@inline_allocating
def _make_q2_k(x: Any, weights: Any, blocks: Any, found: Any) -> None:
    codes, scales, minima, sums, _, _ = found
    small, small_minima = np.zeros(16, np.int32), np.zeros(16, np.int32)
    _fit_groups(x, weights, _SEARCHES_2, found)
    if weights.shape[0]:
        scale = fit_small_scales(scales, sums, np.float32(15), small)
        low = fit_small_scales(minima, sums, np.float32(15), small_minima)
    else:
        scale = _small_codes(scales, np.float32(15), small)
        low = _small_codes(minima, np.float32(15), small_minima)
    scale, low = put_half(blocks, 80, scale), put_half(blocks, 82, low)
    for j in range(16):
        packed = (small[j] | (small_minima[j] << 4)) & 255
        blocks[j] = packed
        scales[j] = scale * np.float32(packed & 15)
        minima[j] = low * np.float32(packed >> 4)
    _codes_on_lines(x, codes, scales, minima, 3)
    _put_two_bits(codes, blocks, 16)


@inline_allocating
def _make_q3_k(x: Any, weights: Any, blocks: Any, found: Any) -> None:
    codes, scales, _, sums, room, _ = found
    small, of_columns = np.zeros(16, np.int32), np.empty(16, np.float32)
    mean_square = sum_of_squares(x)
    mean_square = (mean_square + mean_square) / np.float32(256)
    for j in range(16):
        group, of_group = x[16 * j : 16 * j + 16], codes[16 * j : 16 * j + 16]
        if weights.shape[0]:
            weigh(group, weights[16 * j : 16 * j + 16], mean_square, of_columns)
            sums[j] = _ZERO
            for i in range(16):
                sums[j] += of_columns[i]
            scales[j] = fit_scale(group, of_columns, np.float32(4), of_group, room)
        else:
            scales[j] = fit_by_turns(group, np.float32(4), of_group)
    if weights.shape[0]:
        scale = fit_scale(scales, sums, np.float32(32), small, room)
    else:
        scale = _small_signed(scales, small)
    scale = put_half(blocks, 108, scale)
    blocks[96:108] = 0
    for j in range(16):
        blocks[96 + j % 8] |= (small[j] & 15) << (4 * (j // 8))
        blocks[104 + j % 4] |= ((small[j] >> 4) & 3) << (2 * (j // 4))
        of_group = scale * np.float32((small[j] & 63) - 32)
        if of_group != _ZERO:
            for i in range(16 * j, 16 * j + 16):
                codes[i] = code_of(x[i] / of_group, -4, 3) + 4
    _put_planes(codes, 2, blocks, 0)
    _put_two_bits(codes, blocks, 32)


@inline_allocating
def _small_signed(scales: Any, small: Any) -> Any:
    """Codes from 0 to 63, 32 being 0, of scales of which the largest becomes 0; what 1 stands for.
    All codes are 0 where all scales are."""
    size, extreme = _ZERO, _ZERO
    for j in range(16):
        if abs(scales[j]) > size:
            size, extreme = abs(scales[j]), scales[j]
    if extreme == _ZERO:
        small[:] = 0
        return _ZERO
    inverse = np.float32(-32) / extreme
    for j in range(16):
        code = nearest_integer(inverse * scales[j]) & 255  # kept as a signed byte
        code = code - 256 if code > 127 else code
        small[j] = min(max(code, -32), 31) + 32
    return _ONE / inverse


@inline_allocating
def _make_q45_k(x: Any, weights: Any, blocks: Any, found: Any, most: int) -> None:
    """A block of Q4_K (`most` 15) or Q5_K (31)."""
    codes, scales, minima, sums, _, _ = found
    small, small_minima = np.zeros(8, np.int32), np.zeros(8, np.int32)
    if most == 15:
        _fit_groups(x, weights, _SEARCHES_4, found)
    else:
        _fit_groups(x, weights, _SEARCHES_5, found)
    if weights.shape[0]:
        scale = fit_small_scales(scales, sums, np.float32(63), small)
        low = fit_small_scales(minima, sums, np.float32(63), small_minima)
    else:
        scale = _small_codes(scales, np.float32(63), small)
        low = _small_codes(minima, np.float32(63), small_minima)
    scale, low = put_half(blocks, 0, scale), put_half(blocks, 2, low)
    _put_six_bits(small, small_minima, weights.shape[0] > 0 and most == 15, blocks)
    for j in range(8):
        scales[j] = scale * np.float32(_six_bits(blocks, j, 0))
        minima[j] = low * np.float32(_six_bits(blocks, j, 4))
    _codes_on_lines(x, codes, scales, minima, most)
    at = 16
    if most == 31:
        _put_planes(codes, 4, blocks, 16)
        at = 48
    for part in range(4):
        for i in range(32):
            low_code, high_code = codes[64 * part + i], codes[64 * part + 32 + i]
            blocks[at + 32 * part + i] = (low_code & 15) | ((high_code & 15) << 4)


@inline_allocating
def _put_six_bits(small: Any, small_minima: Any, as_bytes: bool, blocks: Any) -> None:
    """Eight scales and eight minima in twelve bytes from byte 4 on, as ggml puts them there.

    What is above 63 is 63, or with `as_bytes` spills into its neighbour as a byte does.
    """
    for j in range(8):
        scale, low = small[j], small_minima[j]
        if not as_bytes:
            scale, low = min(scale, 63), min(low, 63)
        if j < 4:
            blocks[4 + j], blocks[8 + j] = scale, low
        else:
            blocks[8 + j] = (scale & 15) | ((low & 15) << 4)
            blocks[j] |= ((scale >> 4) << 6) & 255
            blocks[4 + j] |= ((low >> 4) << 6) & 255


@inline_allocating
def _six_bits(blocks: Any, j: int, beside: int) -> Any:
    """The scale (`beside` 0) or the minimum (4) of group `j` that `_put_six_bits` has put there."""
    if j < 4:
        return blocks[4 + beside + j] & 63
    low = (blocks[8 + j] >> beside) & 15
    return low | ((blocks[beside + j] >> 6) << 4)


@inline_allocating
def _make_q6_k(x: Any, weights: Any, blocks: Any, found: Any) -> None:
    codes, scales, _, _, room, _ = found
    of_columns = np.empty(16, np.float32)
    size, extreme = _ZERO, _ZERO
    for j in range(16):
        group = x[16 * j : 16 * j + 16]
        for i in range(16):
            of_columns[i] = weights[16 * j + i] if weights.shape[0] else group[i] * group[i]
        scales[j] = fit_scale(group, of_columns, np.float32(32), codes[16 * j : 16 * j + 16], room)
        if abs(scales[j]) > size:
            size, extreme = abs(scales[j]), scales[j]
    if size < LEAST:
        blocks[:] = 0
        return
    inverse = np.float32(-128) / extreme
    scale = put_half(blocks, 208, _ONE / inverse)
    for j in range(16):
        small = min(127, nearest_integer(inverse * scales[j])) & 255
        blocks[192 + j] = small
        of_group = scale * np.float32(small - 256 if small > 127 else small)
        if of_group != _ZERO:
            for i in range(16 * j, 16 * j + 16):
                codes[i] = code_of(x[i] / of_group, -32, 31) + 32
    for half in range(2):
        for i in range(32):
            high = 0
            for part in range(4):
                high |= ((codes[128 * half + 32 * part + i] >> 4) & 3) << (2 * part)
            blocks[128 + 32 * half + i] = high
            for part in range(2):
                low, above = (
                    codes[128 * half + 32 * part + i],
                    codes[128 * half + 64 + 32 * part + i],
                )
                blocks[64 * half + 32 * part + i] = (low & 15) | ((above & 15) << 4)


@allocating_kernel
def _quantise_k_cpu(x: Any, weights: Any, blocks: Any, kind: int) -> None:
    """Formula: blocks = the codes, small scales and scales nearest to x as each type seeks them,
    `kind` being the type's number in GGUF files: 10 to 14.
    Shapes: x f32 [num_rows, num_columns]; weights f32 [num_columns] or [0]; blocks u8 [num_rows,
    row_bytes], written.
    Source: ggml's ggml-quants.c, quantize_row_q2_K_ref and _impl to those of q6_K.
    """
    for row in prange(x.shape[0]):
        num_groups = 8 if kind == 12 or kind == 13 else 16
        num_blocks = x.shape[1] // 256
        block_bytes = blocks.shape[1] // num_blocks
        found = (
            np.empty(256, np.int32),
            np.empty(num_groups, np.float32),
            np.empty(num_groups, np.float32),
            np.empty(num_groups, np.float32),
            np.empty((NUM_ROWS, NUM_TRIES), np.float32),
            (
                np.empty((32, LANES), np.float32),
                np.empty((32, LANES), np.float32),
                np.empty((32, LANES), np.float32),
                np.empty((NUM_STATES, LANES), np.float32),
            ),
        )
        for n in range(num_blocks):
            of_block = x[row, 256 * n : 256 * n + 256]
            of_columns = weights[256 * n : 256 * n + 256]  # empty where there are none
            to = blocks[row, block_bytes * n : block_bytes * n + block_bytes]
            if kind == 10:
                _make_q2_k(of_block, of_columns, to, found)
            elif kind == 11:
                _make_q3_k(of_block, of_columns, to, found)
            elif kind == 12:
                _make_q45_k(of_block, of_columns, to, found, 15)
            elif kind == 13:
                _make_q45_k(of_block, of_columns, to, found, 31)
            else:
                _make_q6_k(of_block, of_columns, to, found)
