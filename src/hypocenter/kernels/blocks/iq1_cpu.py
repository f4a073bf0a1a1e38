"""numba kernels that make blocks of three levels, of which eight are an entry of a grid: IQ1.

Levels are -1, 0 and 1, an eighth more or less: that is the shift of eight columns. With so few the
best cuts of a group's sorted numbers are found by trying all. `weights` says how much each column
counts, for all rows alike, or is empty. `grid` is a `grids.Grid`. Blocks are laid out as
`kernels/weights/grid_types.py` reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import allocating_kernel, inline_allocating, prange
from hypocenter.device.cpu.rounding import half_bits, nearest_integer
from hypocenter.kernels.blocks.grids import Grid
from hypocenter.kernels.blocks.plain_cpu import put_half, sum_of_squares, weigh
from hypocenter.kernels.blocks.searches_cpu import clamp, largest_size

_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_LARGEST = np.float32(np.finfo(np.float32).max)
_EIGHTH = np.float32(0.125)
#: GGUF's number of IQ1_S; that of IQ1_M is 29.
IQ1_S = 19
#: Below this, groups are taken for zeros.
_SMALL_S, _SMALL_M = np.float32(1e-12), np.float32(1e-7)
#: Cuts of a group of 32 and of one of 16, in whole vectors; those beyond the last are passed over.
_CUTS, _CUTS_OF_HALVES = 40, 24
#: The factors by which scales of whole blocks are written.
_OF_S, _OF_M = np.float32(1.125), np.float32(1.1125)


@inline_allocating
def _sort(x: Any, order: Any) -> None:
    """Numbers of columns by what they hold, the lowest first; equal ones stay in turn."""
    for i in range(x.shape[0]):
        at, value = i, x[i]
        while at > 0 and x[order[at - 1]] > value:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i


@inline_allocating
def _cut_as_one(x: Any, weights: Any, order: Any, sums: Any, shifts: Any) -> Any:
    """The scale of a group with one shift, and the two cuts: below the first are the lowest levels,
    from the second on the highest. No cut is found where all weights are 0; then -1, -1.

    All second cuts are tried side by side, those below the first and beyond the last for nothing.
    """
    num = x.shape[0]
    products, squares, tried = sums[0], sums[1], sums[4:]
    products[0] = squares[0] = _ZERO
    for i in range(num):
        at = order[i]
        products[i + 1] = products[i] + weights[at] * x[at]
        squares[i + 1] = squares[i] + weights[at]
    total, of_total = products[num], squares[num]
    scale, best = _ZERO, -_LARGEST
    first, second, chosen = -1, -1, _EIGHTH
    for low_cut in range(num + 1):
        low, of_low = products[low_cut], squares[low_cut]
        for high_cut in range(_CUTS):
            middle, high = products[high_cut] - low, total - products[high_cut]
            of_middle, of_high = squares[high_cut] - of_low, of_total - squares[high_cut]
            for sign in range(2):
                shift = _EIGHTH if sign == 0 else -_EIGHTH
                below, above = shift - _ONE, shift + _ONE
                tried[sign, high_cut] = low * below + middle * shift + high * above
                square = of_low * below * below + of_middle * shift * shift
                tried[4 + sign, high_cut] = square + of_high * above * above
        for high_cut in range(low_cut, num + 1):
            for sign in range(2):
                product, square = tried[sign, high_cut], tried[4 + sign, high_cut]
                if square > _ZERO and product * product > best * square:
                    scale = product / square
                    best = scale * product
                    first, second, chosen = low_cut, high_cut, _EIGHTH if sign == 0 else -_EIGHTH
    shifts[:] = chosen
    return scale, first, second


@inline_allocating
def _cut_in_halves(x: Any, weights: Any, order: Any, sums: Any, shifts: Any) -> Any:
    """Likewise of a group whose halves have each a shift of its own."""
    num = x.shape[0]
    tried = sums[4:]
    sums[:4, 0] = _ZERO
    for i in range(num):
        at = order[i]
        for half in range(2):
            here = (at >= num // 2) == (half == 1)
            sums[half, i + 1] = sums[half, i] + (weights[at] * x[at] if here else _ZERO)
            sums[2 + half, i + 1] = sums[2 + half, i] + (weights[at] if here else _ZERO)
    scale, best = _ZERO, -_LARGEST
    first, second, chosen = -1, -1, 0
    for low_cut in range(num + 1):
        for high_cut in range(_CUTS_OF_HALVES):
            for sign in range(4):
                product, square = _ZERO, _ZERO
                for half in range(2):
                    shift = _EIGHTH if (sign >> (1 - half)) & 1 == 0 else -_EIGHTH
                    below, above = shift - _ONE, shift + _ONE
                    of_half = sums[half, num] * above - (sums[half, low_cut] + sums[half, high_cut])
                    product = of_half if half == 0 else product + of_half
                    of_half = sums[2 + half, num] * above * above
                    of_half += sums[2 + half, low_cut] * (below * below - shift * shift)
                    of_half += sums[2 + half, high_cut] * (shift * shift - above * above)
                    square = of_half if half == 0 else square + of_half
                tried[sign, high_cut], tried[4 + sign, high_cut] = product, square
        for high_cut in range(low_cut, num + 1):
            for sign in range(4):
                product, square = tried[sign, high_cut], tried[4 + sign, high_cut]
                if square > _ZERO and product * product > best * square:
                    scale = product / square
                    best = scale * product
                    first, second, chosen = low_cut, high_cut, sign
    shifts[0] = _EIGHTH if chosen < 2 else -_EIGHTH
    shifts[1] = _EIGHTH if chosen % 2 == 0 else -_EIGHTH
    return scale, first, second


@inline_allocating
def _nearest_entry(x: Any, weights: Any, scale: Any, shift: Any, number: int, grid: Any) -> Any:
    """The nearest of the entries that are near the levels of that number."""
    least, found = _LARGEST, grid.near[grid.starts[number]]
    for n in range(grid.starts[number], grid.starts[number + 1]):
        distance = _ZERO
        for i in range(8):
            level = np.float32(grid.levels[grid.near[n], i] - 1) + shift
            rest = scale * level - x[i]
            distance += weights[i] * rest * rest
        if distance < least:
            least, found = distance, grid.near[n]
    return found


@inline_allocating
def _add_sums(x: Any, weights: Any, of_group: Any, factor: Any, before: Any, grid: Any) -> Any:
    """Weighted products of x with what the entries stand for, `factor` times, and squares of that,
    on top of those before. `of_group` is (entries, shifts)."""
    entries, shifts = of_group
    per_shift = x.shape[0] // shifts.shape[0]
    products, squares = before
    for i in range(x.shape[0]):
        level = np.float32(grid.levels[entries[i // 8], i % 8] - 1)
        value = (level + shifts[i // per_shift]) * factor
        products += weights[i] * value * x[i]
        squares += weights[i] * value * value
    return products, squares


@inline_allocating
def _fit_group(x: Any, weights: Any, of_group: Any, room: Any, grid: Any) -> Any:
    """The scale of a group, which is not negative; its entries and shifts in `of_group`.

    `room` is (order, levels, sums) to work in.
    """
    entries, shifts = of_group
    order, levels, sums = room
    num, num_shifts = x.shape[0], shifts.shape[0]
    entries[:] = 0
    shifts[:] = _EIGHTH
    size, _ = largest_size(x)
    if size < (_SMALL_S if num_shifts == 1 else _SMALL_M):
        return _ZERO
    _sort(x, order)
    if num_shifts == 1:
        scale, first, second = _cut_as_one(x, weights, order, sums, shifts)
    else:
        scale, first, second = _cut_in_halves(x, weights, order, sums, shifts)
    if first < 0:
        return _ZERO
    is_negative = scale < _ZERO
    for i in range(num):
        level = 0 if i < first else 1 if i < second else 2
        levels[order[i]] = 2 - level if is_negative else level
    if is_negative:
        scale = -scale
        for k in range(num_shifts):
            shifts[k] = -shifts[k]
    fits = True
    for k in range(num // 8):
        number = 0
        for i in range(8 * k + 7, 8 * k - 1, -1):
            number = 3 * number + levels[i]
        entries[k] = grid.exact[number]
        if entries[k] < 0:
            fits = False
            part = slice(8 * k, 8 * k + 8)
            shift = shifts[k * num_shifts * 8 // num]
            entries[k] = _nearest_entry(x[part], weights[part], scale, shift, number, grid)
    if not fits:
        sums_of_fit = _add_sums(x, weights, of_group, _ONE, (_ZERO, _ZERO), grid)
        if sums_of_fit[0] > _ZERO and sums_of_fit[1] > _ZERO:
            scale = sums_of_fit[0] / sums_of_fit[1]
    return scale


@inline_allocating
def _weigh_group(x: Any, weights: Any, mean_square: Any, of_columns: Any) -> None:
    if weights.shape[0]:
        weigh(x, weights, mean_square, of_columns)
    else:
        for i in range(x.shape[0]):
            of_columns[i] = x[i] * x[i]


@inline_allocating
def _small_scale(scale: Any, inverse: Any) -> Any:
    """What 2 * small + 1 times the block's scale is nearest."""
    return clamp(nearest_integer(_HALF * (inverse * scale - _ONE)), 0, 7)


@inline_allocating
def _make_s(x: Any, weights: Any, block: Any, found: Any, grid: Any) -> None:
    """A block of IQ1_S: groups of 32 columns with one shift."""
    of_columns, scales, entries, shifts, room = found
    mean_square = sum_of_squares(x)
    mean_square = (mean_square + mean_square) / np.float32(256)
    highest = _ZERO
    block[:] = 0
    for j in range(8):
        group = x[32 * j : 32 * j + 32]
        _weigh_group(group, weights[32 * j : 32 * j + 32], mean_square, of_columns)
        of_group = entries[4 * j : 4 * j + 4], shifts[j : j + 1]
        scales[j] = _fit_group(group, of_columns, of_group, room, grid)
        highest = scales[j] if scales[j] > highest else highest
        for k in range(4):
            block[2 + 4 * j + k] = entries[4 * j + k] & 255
    inverse = _ZERO
    if highest > _ZERO:
        whole = highest / np.float32(15)
        put_half(block, 0, whole * _OF_S)
        inverse = _ONE / whole
    for j in range(8):
        word = 0
        for k in range(4):
            word |= (entries[4 * j + k] >> 8) << (3 * k)
        if highest > _ZERO:
            word |= _small_scale(scales[j], inverse) << 12
            word |= (1 if shifts[j] < _ZERO else 0) << 15
        block[34 + 2 * j], block[35 + 2 * j] = word & 255, word >> 8


@inline_allocating
def _make_m(x: Any, weights: Any, block: Any, found: Any, grid: Any) -> None:
    """A block of IQ1_M: groups of 16 columns with two shifts."""
    of_columns, scales, entries, shifts, room = found
    mean_square = sum_of_squares(x)
    mean_square = (mean_square + mean_square) / np.float32(256)
    highest = _ZERO
    block[:] = 0
    for j in range(16):
        group = x[16 * j : 16 * j + 16]
        _weigh_group(group, weights[16 * j : 16 * j + 16], mean_square, of_columns)
        of_group = entries[2 * j : 2 * j + 2], shifts[2 * j : 2 * j + 2]
        scales[j] = _fit_group(group, of_columns, of_group, room, grid)
        highest = scales[j] if scales[j] > highest else highest
        for k in range(2):
            block[2 * j + k] = entries[2 * j + k] & 255
            block[32 + j] |= (entries[2 * j + k] >> 8) << (4 * k)
    if highest == _ZERO:
        return
    whole = highest / np.float32(15)
    inverse = _ONE / whole
    sums = _ZERO, _ZERO
    words = np.zeros(4, np.int64)
    for j in range(16):
        small = _small_scale(scales[j], inverse)
        words[j // 4] |= small << (3 * (j % 4))
        for k in range(2):
            block[32 + j] |= (8 if shifts[2 * j + k] < _ZERO else 0) << (4 * k)
        group = x[16 * j : 16 * j + 16]
        _weigh_group(group, weights[16 * j : 16 * j + 16], mean_square, of_columns)
        of_group = entries[2 * j : 2 * j + 2], shifts[2 * j : 2 * j + 2]
        sums = _add_sums(group, of_columns, of_group, np.float32(2 * small + 1), sums, grid)
    if sums[1] > _ZERO:
        whole = sums[0] / sums[1]
    bits = half_bits(whole * _OF_M)
    for k in range(4):
        words[k] |= ((bits >> (4 * k)) & 15) << 12
        block[48 + 2 * k], block[49 + 2 * k] = words[k] & 255, words[k] >> 8


@allocating_kernel
def _quantise_iq1_cpu(
    x: Any, weights: Any, blocks: Any, kind: int, levels: Any, exact: Any, starts: Any, near: Any
) -> None:
    """Formula: blocks = the entries of a grid, shifts and scales nearest to x, `kind` being the
    type's number in GGUF files: 19 (IQ1_S) or 29 (IQ1_M).
    Shapes: x f32 [num_rows, num_columns]; weights f32 [num_columns] or [0]; blocks u8 [num_rows,
    row_bytes], written; levels i32 [num_entries, 8]; exact i32 [num_numbers]; starts i32
    [num_numbers + 1]; near i32 [num_near], as `grids.Grid` says.
    Source: ggml's ggml-quants.c, quantize_row_iq1_s_impl and quantize_row_iq1_m_impl.
    """
    grid = Grid(levels, exact, starts, near)
    num = 32 if kind == IQ1_S else 16
    num_blocks = x.shape[1] // 256
    block_bytes = blocks.shape[1] // num_blocks
    for row in prange(x.shape[0]):
        room = np.empty(num, np.int64), np.empty(num, np.int64), np.zeros((12, _CUTS), np.float32)
        found = (
            np.empty(num, np.float32),
            np.empty(256 // num, np.float32),
            np.empty(32, np.int64),
            np.empty(32, np.float32),
            room,
        )
        for n in range(num_blocks):
            of_block = x[row, 256 * n : 256 * n + 256]
            of_columns = weights[256 * n : 256 * n + 256]  # empty where there are none
            block = blocks[row, block_bytes * n : block_bytes * n + block_bytes]
            if kind == IQ1_S:
                _make_s(of_block, of_columns, block, found, grid)
            else:
                _make_m(of_block, of_columns, block, found, grid)
