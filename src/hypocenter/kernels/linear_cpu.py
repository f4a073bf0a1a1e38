"""numba kernels of `linear`: a few activation rows or many against a packed weight.

Each output adds its columns in order, one fused step per column, in the lane of its interleaved
row. The forms below (4 activation rows x 16 outputs, 1 x 64) do the same steps per output, so a
row's result does not depend on how many rows came with it or on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.lang import cpu_kernel, inline, prange
from hypocenter.device.vector import (
    add,
    codes_per_word,
    fma,
    get,
    load,
    load_code,
    mul,
    splat,
    spread,
    store,
)

_GROUPS_PER_ITEM = 4  # 4 x 16 = 64 outputs: enough independent sums to hide the latency of one
_ZERO = np.float32(0)


@inline
def _finish(out: Any, index: int, total: Any, bias: Any, column: int, accumulate: bool) -> None:
    if bias.shape[0] > 0:
        total = add(total, load(bias, column))
    if accumulate:
        total = add(load(out, index), total)
    store(out, index, total)


@inline
def _finish_rows(
    out: Any, at: int, pitch: int, sums: Any, bias: Any, g: int, accumulate: bool
) -> None:
    _finish(out, at, sums[0], bias, 16 * g, accumulate)
    _finish(out, at + pitch, sums[1], bias, 16 * g, accumulate)
    _finish(out, at + 2 * pitch, sums[2], bias, 16 * g, accumulate)
    _finish(out, at + 3 * pitch, sums[3], bias, 16 * g, accumulate)


@inline
def _finish_columns(out: Any, at: int, sums: Any, bias: Any, g: int, accumulate: bool) -> None:
    _finish(out, at, sums[0], bias, 16 * g, accumulate)
    _finish(out, at + 16, sums[1], bias, 16 * g + 16, accumulate)
    _finish(out, at + 32, sums[2], bias, 16 * g + 32, accumulate)
    _finish(out, at + 48, sums[3], bias, 16 * g + 48, accumulate)


@inline
def _lowest(minima: Any, scale: Any, index: int, zero: float) -> Any:
    """The value of code 0: the minimum, or -zero * scale (exact: zero is a power of two or 0)."""
    if minima.shape[0] > 0:
        return load(minima, index)
    return mul(splat(-zero), scale)


@inline
def _float_4x16(x: Any, at: int, pitch: int, num_columns: int, weights: Any, w_at: int) -> Any:
    t0 = t1 = t2 = t3 = splat(_ZERO)
    for k in range(num_columns):
        w = load(weights, w_at + 16 * k)
        t0 = fma(w, spread(x, at + k), t0)
        t1 = fma(w, spread(x, at + pitch + k), t1)
        t2 = fma(w, spread(x, at + 2 * pitch + k), t2)
        t3 = fma(w, spread(x, at + 3 * pitch + k), t3)
    return t0, t1, t2, t3


@inline
def _float_1x64(x: Any, at: int, num_columns: int, weights: Any, w_at: int) -> Any:
    t0 = t1 = t2 = t3 = splat(_ZERO)
    step = 16 * num_columns
    for k in range(num_columns):
        value = spread(x, at + k)
        t0 = fma(load(weights, w_at + 16 * k), value, t0)
        t1 = fma(load(weights, w_at + step + 16 * k), value, t1)
        t2 = fma(load(weights, w_at + 2 * step + 16 * k), value, t2)
        t3 = fma(load(weights, w_at + 3 * step + 16 * k), value, t3)
    return t0, t1, t2, t3


@cpu_kernel
def linear_float(
    x: Any, counts: Any, count: int, weights: Any, bias: Any, out: Any, accumulate: bool
) -> None:
    """out [rows, n] (+)= x [rows, k] @ weights.T (+ bias); rows = counts[count]."""
    num_rows, x_pitch, out_pitch = get(counts, count), x.shape[1], out.shape[1]
    num_groups, num_columns = weights.shape[0], weights.shape[1]
    for item in prange(num_groups // _GROUPS_PER_ITEM):
        first = item * _GROUPS_PER_ITEM
        row = 0
        while row + 4 <= num_rows:
            for g in range(first, first + _GROUPS_PER_ITEM):
                sums = _float_4x16(
                    x, row * x_pitch, x_pitch, num_columns, weights, 16 * g * num_columns
                )
                _finish_rows(out, row * out_pitch + 16 * g, out_pitch, sums, bias, g, accumulate)
            row += 4
        while row < num_rows:
            sums = _float_1x64(x, row * x_pitch, num_columns, weights, 16 * first * num_columns)
            _finish_columns(out, row * out_pitch + 16 * first, sums, bias, first, accumulate)
            row += 1


@inline
def _codes_4x16(
    x: Any, at: int, pitch: int, num_columns: int, words: Any, scales: Any, minima: Any,
    zero: float, g: int,
) -> Any:  # fmt: skip
    t0 = t1 = t2 = t3 = splat(_ZERO)
    per_word, num_scales = codes_per_word(words), scales.shape[1]
    words_per_scale = words.shape[1] // num_scales
    for s in range(num_scales):
        scale_at = 16 * (g * num_scales + s)
        scale = load(scales, scale_at)
        low = _lowest(minima, scale, scale_at, zero)
        for word in range(s * words_per_scale, (s + 1) * words_per_scale):
            word_at = 16 * (g * words.shape[1] + word)
            for j in range(per_word):
                k = at + word * per_word + j
                w = fma(load_code(words, word_at, j), scale, low)
                t0 = fma(w, spread(x, k), t0)
                t1 = fma(w, spread(x, pitch + k), t1)
                t2 = fma(w, spread(x, 2 * pitch + k), t2)
                t3 = fma(w, spread(x, 3 * pitch + k), t3)
    return t0, t1, t2, t3


@inline
def _codes_1x64(
    x: Any, at: int, num_columns: int, words: Any, scales: Any, minima: Any, zero: float, g: int
) -> Any:
    t0 = t1 = t2 = t3 = splat(_ZERO)
    per_word, num_scales, num_words = codes_per_word(words), scales.shape[1], words.shape[1]
    words_per_scale = num_words // num_scales
    for s in range(num_scales):
        s0 = 16 * (g * num_scales + s)
        s1, s2, s3 = s0 + 16 * num_scales, s0 + 32 * num_scales, s0 + 48 * num_scales
        scale0, scale1 = load(scales, s0), load(scales, s1)
        scale2, scale3 = load(scales, s2), load(scales, s3)
        low0, low1 = _lowest(minima, scale0, s0, zero), _lowest(minima, scale1, s1, zero)
        low2, low3 = _lowest(minima, scale2, s2, zero), _lowest(minima, scale3, s3, zero)
        for word in range(s * words_per_scale, (s + 1) * words_per_scale):
            w0 = 16 * (g * num_words + word)
            w1, w2, w3 = w0 + 16 * num_words, w0 + 32 * num_words, w0 + 48 * num_words
            for j in range(per_word):
                value = spread(x, at + word * per_word + j)
                t0 = fma(fma(load_code(words, w0, j), scale0, low0), value, t0)
                t1 = fma(fma(load_code(words, w1, j), scale1, low1), value, t1)
                t2 = fma(fma(load_code(words, w2, j), scale2, low2), value, t2)
                t3 = fma(fma(load_code(words, w3, j), scale3, low3), value, t3)
    return t0, t1, t2, t3


@cpu_kernel
def linear_codes(
    x: Any, counts: Any, count: int, words: Any, scales: Any, minima: Any, zero: float,
    bias: Any, out: Any, accumulate: bool,
) -> None:  # fmt: skip
    """As `linear_float`, for weights held as codes with a scale and minimum per group."""
    num_rows, x_pitch, out_pitch = get(counts, count), x.shape[1], out.shape[1]
    num_groups, num_columns = words.shape[0], words.shape[1] * codes_per_word(words)
    for item in prange(num_groups // _GROUPS_PER_ITEM):
        first = item * _GROUPS_PER_ITEM
        row = 0
        while row + 4 <= num_rows:
            for g in range(first, first + _GROUPS_PER_ITEM):
                sums = _codes_4x16(
                    x, row * x_pitch, x_pitch, num_columns, words, scales, minima, zero, g
                )
                _finish_rows(out, row * out_pitch + 16 * g, out_pitch, sums, bias, g, accumulate)
            row += 4
        while row < num_rows:
            sums = _codes_1x64(x, row * x_pitch, num_columns, words, scales, minima, zero, first)
            _finish_columns(out, row * out_pitch + 16 * first, sums, bias, first, accumulate)
            row += 1
