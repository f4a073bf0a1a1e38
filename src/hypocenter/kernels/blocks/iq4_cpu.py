"""numba kernels that make blocks whose codes stand for sixteen unequal values: IQ4_NL and IQ4_XS.

`weights` says how much each column counts, for all rows alike, or is empty. Blocks are laid out as
`kernels/weights/block_types.py` reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import allocating_kernel, inline_allocating, prange
from hypocenter.device.cpu.rounding import nearest_integer
from hypocenter.kernels.blocks.plain_cpu import put_half, put_nibbles, sum_of_squares, weigh
from hypocenter.kernels.blocks.searches_cpu import LEAST, largest_size
from hypocenter.kernels.weights.block_types import IQ4_VALUES

_ZERO, _ONE = np.float32(0), np.float32(1)
_VALUES = np.array(IQ4_VALUES, np.float32)
#: Scales that are tried beside the one that makes the largest number the lowest value.
_NUM_BESIDE = 7


@inline_allocating
def _nearest_value(value: Any, values: Any) -> Any:
    """The code whose value is nearest; the higher one where two are."""
    if value <= values[0]:
        return 0
    if value >= values[15]:
        return 15
    low, high = 0, 15
    while high - low > 1:
        middle = (low + high) // 2
        if value < values[middle]:
            high = middle
        else:
            low = middle
    return high - 1 if value - values[high - 1] < values[high] - value else high


@inline_allocating
def _sums(x: Any, of_columns: Any, inverse: Any, values: Any) -> Any:
    """Weighted products of x with what its codes stand for, and squares of that."""
    products, squares = _ZERO, _ZERO
    for i in range(32):
        value = values[_nearest_value(inverse * x[i], values)]
        products += of_columns[i] * value * x[i]
        squares += of_columns[i] * value * value
    return products, squares


@inline_allocating
def _fit(x: Any, of_columns: Any, values: Any) -> Any:
    """The scale of 32 columns with which their codes are nearest, by weighted squares."""
    size, extreme = largest_size(x)
    if size < LEAST:
        return _ZERO
    products, squares = _sums(x, of_columns, _ONE / (-extreme / values[0]), values)
    scale = products / squares if squares > _ZERO else _ZERO
    best = scale * products
    for k in range(-_NUM_BESIDE, _NUM_BESIDE + 1):
        inverse = (np.float32(k) + values[0]) / extreme
        products, squares = _sums(x, of_columns, inverse, values)
        if squares > _ZERO and products * products > best * squares:
            scale = products / squares
            best = scale * products
    return scale


@inline_allocating
def _weigh_group(x: Any, weights: Any, mean_square: Any, of_columns: Any) -> None:
    if weights.shape[0]:
        weigh(x, weights, mean_square, of_columns)
    else:
        for i in range(32):
            of_columns[i] = x[i] * x[i]


@inline_allocating
def _make_nl(x: Any, weights: Any, values: Any, blocks: Any) -> None:
    of_columns, codes = np.empty(32, np.float32), np.empty(32, np.int32)
    for n in range(x.shape[0] // 32):
        group = x[32 * n : 32 * n + 32]
        mean_square = sum_of_squares(group) * np.float32(2 / 32)
        _weigh_group(group, weights[32 * n : 32 * n + 32], mean_square, of_columns)
        scale = _fit(group, of_columns, values)
        put_half(blocks, 18 * n, scale)
        inverse = _ONE / scale if scale != _ZERO else _ZERO
        for i in range(32):
            codes[i] = _nearest_value(inverse * group[i], values)
        put_nibbles(codes, blocks, 18 * n + 2)


@inline_allocating
def _make_xs(x: Any, weights: Any, values: Any, block: Any) -> None:
    of_columns, codes = np.empty(32, np.float32), np.empty(32, np.int32)
    scales = np.empty(8, np.float32)
    mean_square = sum_of_squares(x) * np.float32(2 / 256)
    for j in range(8):
        of_group = weights[32 * j : 32 * j + 32]  # empty where there are none
        _weigh_group(x[32 * j : 32 * j + 32], of_group, mean_square, of_columns)
        scales[j] = _fit(x[32 * j : 32 * j + 32], of_columns, values)
    _, extreme = largest_size(scales)
    whole = -extreme / np.float32(32)
    put_half(block, 0, whole)
    inverse = _ONE / whole if whole != _ZERO else _ZERO
    high_bits = 0
    block[4:8] = 0
    for j in range(8):
        small = min(max(nearest_integer(inverse * scales[j]), -32), 31)
        scale = whole * np.float32(small)
        of_group = _ONE / scale if scale != _ZERO else _ZERO
        for i in range(32):
            codes[i] = _nearest_value(of_group * x[32 * j + i], values)
        put_nibbles(codes, block, 8 + 16 * j)
        block[4 + j // 2] |= ((small + 32) & 15) << (4 * (j % 2))
        high_bits |= ((small + 32) >> 4) << (2 * j)
    block[2], block[3] = high_bits & 255, high_bits >> 8


@allocating_kernel
def _quantise_iq4_cpu(x: Any, weights: Any, blocks: Any, kind: int) -> None:
    """Formula: blocks = the codes of unequal values and scales nearest to x, `kind` being the
    type's number in GGUF files: 20 (IQ4_NL) or 23 (IQ4_XS).
    Shapes: x f32 [num_rows, num_columns]; weights f32 [num_columns] or [0]; blocks u8 [num_rows,
    row_bytes], written.
    Source: ggml's ggml-quants.c, quantize_row_iq4_nl_impl.
    """
    values = _VALUES
    for row in prange(x.shape[0]):
        if kind == 20:
            _make_nl(x[row], weights, values, blocks[row])
        else:
            for n in range(x.shape[1] // 256):
                of_columns = weights[256 * n : 256 * n + 256]
                block = blocks[row, 136 * n : 136 * n + 136]
                _make_xs(x[row, 256 * n : 256 * n + 256], of_columns, values, block)
