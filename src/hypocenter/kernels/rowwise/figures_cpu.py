"""numba kernels of `measure`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.measuring import add_words, clear_words, measure_stretch
from hypocenter.device.cpu.vector import get
from hypocenter.device.digests import BLOCK, NUM_WORDS


@inline
def _measure_part(
    x: Any, width: int, num_rows: int, part: int, num_parts: int, parts: Any, at: int
) -> None:
    num_tiles = -(-width // BLOCK)
    clear_words(parts, at)
    for unit in range(part, num_rows * num_tiles, num_parts):
        row, column = unit // num_tiles, unit % num_tiles * BLOCK
        first, num = row * x.shape[1] + column, min(BLOCK, width - column)
        measure_stretch(x, first, num, row * width + column, parts, at)


@cpu_kernel
def measure(
    x: Any,
    x1: Any,
    x2: Any,
    x3: Any,
    x4: Any,
    counts: Any,
    count: int,
    parts: Any,
    width: int,
    width1: int,
    width2: int,
    width3: int,
    width4: int,
    parts_each: int,
) -> None:
    """Formula: parts[i * n + p] = the figures of units p, p + n, ... of tensor i, each BLOCK
    columns of one of its live rows, with n = parts_each.
    Shapes: x, x1, x2, x3 and x4 f32 [num_rows, >= width] of each, those behind the last one of no
    row; counts i32 [2]; parts i64 [num_tensors * parts_each, NUM_WORDS].
    """
    num_rows, num_parts = np.int64(get(counts, count)), parts_each
    for item in prange(parts.shape[0]):
        tensor, part, at = item // num_parts, item % num_parts, item * NUM_WORDS
        if tensor == 0:
            _measure_part(x, width, num_rows, part, num_parts, parts, at)
        elif tensor == 1:
            _measure_part(x1, width1, num_rows, part, num_parts, parts, at)
        elif tensor == 2:
            _measure_part(x2, width2, num_rows, part, num_parts, parts, at)
        elif tensor == 3:
            _measure_part(x3, width3, num_rows, part, num_parts, parts, at)
        else:
            _measure_part(x4, width4, num_rows, part, num_parts, parts, at)


@cpu_kernel
def join_figures(parts: Any, firsts: Any, figures: Any) -> None:
    """Formula: figures[i] = the sums, and the widest range, of parts[firsts[i] : firsts[i + 1]].
    Shapes: parts i64 [num_parts, NUM_WORDS]; firsts i32 [num_tensors + 1]; figures i64
    [num_tensors, NUM_WORDS].
    """
    for tensor in prange(figures.shape[0]):
        at = tensor * NUM_WORDS
        clear_words(figures, at)
        for part in range(get(firsts, tensor), get(firsts, tensor + 1)):
            add_words(figures, at, parts, part * NUM_WORDS)
