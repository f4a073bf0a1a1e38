"""numba kernels that make blocks whose codes are entries of a grid: IQ2 and IQ3.

`weights` says how much each column counts, for all rows alike, or is empty. `grid` is a
`grids.Grid`. Blocks are laid out as `kernels/weights/grid_types.py` reads them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import allocating_kernel, inline_allocating, prange
from hypocenter.device.cpu.rounding import nearest_integer
from hypocenter.kernels.blocks.grids import Grid
from hypocenter.kernels.blocks.plain_cpu import put_half, sum_of_squares, weigh
from hypocenter.kernels.blocks.searches_cpu import LEAST, clamp, fit_small_scales

_ZERO, _ONE, _TWO, _HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)
_QUARTER = np.float32(0.25)
_LARGEST = np.float32(np.finfo(np.float32).max)
#: Below this, groups of IQ2_S and IQ3_XXS are taken for zeros.
_SMALL = np.float32(1e-8)
#: The factors by which scales of whole blocks are written.
_OF_IQ2_S, _OF_IQ3_XXS = np.float32(0.9875), np.float32(1.0125)
_OF_IQ3_S = np.float32(1.033)
#: GGUF's numbers of the types.
IQ2_XXS, IQ2_XS, IQ3_XXS, IQ3_S, IQ2_S = 16, 17, 18, 21, 22


@inline_allocating
def _split_signs(x: Any, weights: Any, is_even: bool, sizes: Any, signs: Any) -> None:
    """Sizes of a group, and a byte of signs for each eight. With `is_even` the number of negative
    ones becomes even: where it is odd, the number that counts least changes its sign."""
    for k in range(signs.shape[0]):
        found, num_negative = 0, 0
        for i in range(8 * k, 8 * k + 8):
            sizes[i] = x[i]
            if not x[i] >= _ZERO:
                sizes[i] = -x[i]
                found |= 1 << (i - 8 * k)
                num_negative += 1
        if is_even and num_negative % 2:
            least, at = weights[8 * k] * x[8 * k] * x[8 * k], 8 * k
            for i in range(8 * k + 1, 8 * k + 8):
                square = weights[i] * x[i] * x[i]
                if square < least:
                    least, at = square, i
            sizes[at] = -sizes[at]
            found ^= 1 << (at - 8 * k)
        signs[k] = found


@inline_allocating
def _level(value: Any, inverse: Any, most: int) -> Any:
    return clamp(nearest_integer(_HALF * (inverse * value - _ONE)), 0, most)


@inline_allocating
def _nearest_entry(sizes: Any, roots: Any, scale: Any, at: int, grid: Any) -> Any:
    """The nearest of the entries that are near the codes of number `at`."""
    best, found = _LARGEST, grid.near[grid.starts[at]]
    for n in range(grid.starts[at], grid.starts[at + 1]):
        distance = _ZERO
        for i in range(sizes.shape[0]):
            level = np.float32(2 * grid.levels[grid.near[n], i] + 1)
            rest = scale * level - sizes[i]
            distance += roots[i] * rest * rest
        if distance < best:
            best, found = distance, grid.near[n]
    return found


@inline_allocating
def _choose(sizes: Any, roots: Any, inverse: Any, scale: Any, grid: Any) -> Any:
    """The entry for some columns, and whether their own codes are one."""
    num_levels = 3 if sizes.shape[0] == 8 else 8
    number = 0
    for i in range(sizes.shape[0] - 1, -1, -1):
        number = number * num_levels + _level(sizes[i], inverse, num_levels - 1)
    found = grid.exact[number]
    if found >= 0:
        return found, True
    return _nearest_entry(sizes, roots, scale, number, grid), False


@inline_allocating
def _sums(sizes: Any, weights: Any, entries: Any, grid: Any) -> Any:
    """Weighted products of sizes with what the entries stand for, and squares of that."""
    num = grid.levels.shape[1]
    products, squares = _ZERO, _ZERO
    for i in range(sizes.shape[0]):
        value = np.float32(2 * grid.levels[entries[i // num], i % num] + 1)
        products += weights[i] * sizes[i] * value
        squares += weights[i] * value * value
    return products, squares


@inline_allocating
def _fit_to_grid(sizes: Any, weights: Any, search: Any, found: Any, grid: Any) -> Any:
    """The scale of a group with which entries of the grid are nearest; stores their numbers.

    `search` is (what the highest level is made to be, how many scales are tried on either side, the
    step between them, whether entries that fitted at once stay, whether all fit before any is
    tried, whether all are chosen anew even if they fit). `found` is (roots of weights, entries,
    tried entries, whether each fitted, and whether those that are tried do).
    """
    highest, num_beside, step, keeps, fits_at_first, always = search
    roots, entries, tried, fitted, tried_fitted = found
    num = grid.levels.shape[1]
    top = np.float32(5) if num == 8 else np.float32(15)
    scale, best = highest / top, _ZERO
    for k in range(entries.shape[0]):
        entries[k], fitted[k] = grid.exact[0], fits_at_first
    for n in range(-num_beside, num_beside + 1):
        inverse = (top + np.float32(n) * step) / highest
        for k in range(entries.shape[0]):
            part = slice(num * k, num * k + num)
            tried[k], tried_fitted[k] = _choose(
                sizes[part], roots[part], inverse, _ONE / inverse, grid
            )
        products, squares = _sums(sizes, weights, tried, grid)
        if squares > _ZERO and products * products > best * squares:
            scale = products / squares
            best = scale * products
            entries[:] = tried
            fitted[:] = tried_fitted
    if scale > _ZERO and (always or not fitted.all()):
        inverse = _ONE / scale
        for k in range(entries.shape[0]):
            part = slice(num * k, num * k + num)
            if not (keeps and fitted[k]):
                entries[k], _ = _choose(sizes[part], roots[part], inverse, scale, grid)
        products, squares = _sums(sizes, weights, entries, grid)
        scale = products / squares if squares > _ZERO else scale
    return scale


@inline_allocating
def _weigh_group(x: Any, weights: Any, mean_square: Any, kind: int, of_columns: Any) -> None:
    if weights.shape[0]:
        weigh(x, weights, mean_square, of_columns)
        return
    for i in range(x.shape[0]):
        of_columns[i] = x[i] * x[i]
        if kind == IQ2_S:
            of_columns[i] = _QUARTER * mean_square + of_columns[i]


@inline_allocating
def _fit_group(x: Any, kind: int, found: Any, grid: Any) -> Any:
    """The scale of a group, and its entries and signs in `found`; of zeros none is above 0."""
    of_columns, sizes, signs, small, of_grid = found
    is_even = kind in (IQ2_XXS, IQ2_XS, IQ3_XXS)
    _split_signs(x, of_columns, is_even, sizes, signs)
    highest = sizes[0]
    for i in range(x.shape[0]):
        highest = sizes[i] if sizes[i] > highest else highest
        of_grid[0][i] = np.float32(math.sqrt(of_columns[i]))
    least = _SMALL if kind in (IQ2_S, IQ3_XXS) else LEAST
    if highest == _ZERO or (kind != IQ3_S and highest < least):
        return _ZERO
    if kind == IQ2_XXS:
        highest = fit_small_scales(sizes, of_columns, np.float32(4), small) * np.float32(3)
        if highest <= _ZERO:
            return _ZERO
        search = highest, 6, np.float32(0.1), False, False, True
    elif kind == IQ3_XXS:
        search = highest, 15, np.float32(0.2), True, True, False
    elif kind == IQ3_S:
        search = highest, 9, np.float32(0.2), False, False, False
    else:
        search = highest, 9, np.float32(0.1), True, True, False
    scale = _fit_to_grid(sizes, of_columns, search, of_grid, grid)
    if scale < _ZERO:
        for k in range(signs.shape[0]):
            signs[k] ^= 255
        return -scale
    return scale


@inline_allocating
def _put_group(found: Any, kind: int, j: int, block: Any) -> None:
    """Entries and signs of group `j`."""
    _, _, signs, _, (_, entries, _, _, _) = found
    if kind == IQ2_XXS:
        word = np.int64(0)
        for k in range(4):
            block[2 + 8 * j + k] = entries[k]
            word |= (signs[k] & 127) << (7 * k)
        _put_word(block, 6 + 8 * j, word)
    elif kind == IQ2_XS:
        for k in range(2):
            block[2 + 4 * j + 2 * k] = entries[k] & 255
            block[3 + 4 * j + 2 * k] = (entries[k] >> 8) | ((signs[k] & 127) << 1)
    elif kind == IQ2_S:
        for k in range(2):
            block[2 + 2 * j + k] = entries[k] & 255
            block[34 + 2 * j + k] = signs[k]
            block[66 + j // 2] |= (entries[k] >> 8) << (2 * ((2 * j + k) % 4))
    elif kind == IQ3_XXS:
        word = np.int64(0)
        for k in range(8):
            block[2 + 8 * j + k] = entries[k]
        for k in range(4):
            word |= (signs[k] & 127) << (7 * k)
        _put_word(block, 66 + 4 * j, word)
    else:
        for k in range(8):
            block[2 + 8 * j + k] = entries[k] & 255
            block[66 + j] |= (entries[k] >> 8) << k
        for k in range(4):
            block[74 + 4 * j + k] = signs[k]


@inline_allocating
def _put_word(block: Any, at: int, word: int) -> None:
    for byte in range(4):
        block[at + byte] = (word >> (8 * byte)) & 255


@inline_allocating
def _put_scales(scales: Any, kind: int, block: Any) -> None:
    """Small scales of four bits, each 2 * bits + 1 times the block's."""
    highest = _ZERO
    for j in range(scales.shape[0]):
        highest = scales[j] if scales[j] > highest else highest
    if highest == _ZERO:
        return
    whole = highest / np.float32(31)
    factor = _ONE
    if kind == IQ2_S:
        factor = _OF_IQ2_S
    elif kind == IQ3_XXS:
        factor = _OF_IQ3_XXS
    elif kind == IQ3_S:
        factor = _OF_IQ3_S
    put_half(block, 0, whole * factor)
    for j in range(scales.shape[0]):
        small = _level(scales[j], _ONE / whole, 15)
        if kind == IQ2_XXS:
            block[9 + 8 * j] |= small << 4
        elif kind == IQ3_XXS:
            block[69 + 4 * j] |= small << 4
        else:
            first = 106 if kind == IQ3_S else 66 if kind == IQ2_XS else 74
            block[first + j // 2] |= small << (4 * (j % 2))


@allocating_kernel
def _quantise_grid_cpu(
    x: Any, weights: Any, blocks: Any, kind: int, levels: Any, exact: Any, starts: Any, near: Any
) -> None:
    """Formula: blocks = the entries of a grid, signs and scales nearest to x, `kind` being the
    type's number in GGUF files: 16, 17, 18, 21 or 22.
    Shapes: x f32 [num_rows, num_columns]; weights f32 [num_columns] or [0]; blocks u8 [num_rows,
    row_bytes], written; levels i32 [num_entries, 8 or 4]; exact i32 [num_numbers]; starts i32
    [num_numbers + 1]; near i32 [num_near], as `grids.Grid` says.
    Source: ggml's ggml-quants.c, quantize_row_iq2_xxs_impl to that of iq3_s.
    """
    grid = Grid(levels, exact, starts, near)
    num = 16 if kind in (IQ2_XS, IQ2_S) else 32
    num_blocks = x.shape[1] // 256
    block_bytes = blocks.shape[1] // num_blocks
    num_entries = num // levels.shape[1]
    for row in prange(x.shape[0]):
        of_grid = (
            np.empty(num, np.float32),
            np.empty(num_entries, np.int32),
            np.empty(num_entries, np.int32),
            np.empty(num_entries, np.bool_),
            np.empty(num_entries, np.bool_),
        )
        found = (
            np.empty(num, np.float32),
            np.empty(num, np.float32),
            np.empty(num // 8, np.int64),
            np.empty(num, np.int32),
            of_grid,
        )
        scales = np.empty(256 // num, np.float32)
        for n in range(num_blocks):
            block = blocks[row, block_bytes * n : block_bytes * n + block_bytes]
            block[:] = 0
            of_block = x[row, 256 * n : 256 * n + 256]
            mean_square = sum_of_squares(of_block)
            if kind not in (IQ2_XXS, IQ2_XS):
                mean_square = mean_square + mean_square
            mean_square = mean_square / np.float32(256)
            for j in range(256 // num):
                group = of_block[num * j : num * j + num]
                of_columns = weights[256 * n + num * j : 256 * n + num * j + num]
                _weigh_group(group, of_columns, mean_square, kind, found[0])
                scales[j] = _fit_group(group, kind, found, grid)
                if scales[j] > _ZERO:
                    _put_group(found, kind, j, block)
            _put_scales(scales, kind, block)
