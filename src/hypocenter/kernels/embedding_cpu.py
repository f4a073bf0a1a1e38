"""numba kernels of `embedding`, over the packed layouts of `quant.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.lang import cpu_kernel, prange
from hypocenter.device.vector import (
    codes_per_word,
    fma,
    get,
    load,
    load_code,
    mul,
    pick,
    put,
    splat,
    store,
    store_first,
)


@cpu_kernel
def lookup_float(token_ids: Any, counts: Any, weights: Any, out: Any) -> None:
    num_columns = weights.shape[1]
    for row in prange(get(counts, 0)):
        token = np.int64(get(token_ids, row))
        at = token // 16 * num_columns * 16
        for k in range(num_columns):
            put(out, row * out.shape[1] + k, pick(load(weights, at + 16 * k), token % 16))


@cpu_kernel
def lookup_codes(
    token_ids: Any, counts: Any, words: Any, scales: Any, minima: Any, zero: float, out: Any
) -> None:
    per_word, num_words, num_scales = codes_per_word(words), words.shape[1], scales.shape[1]
    columns_per_scale = num_words * per_word // num_scales
    for row in prange(get(counts, 0)):
        token = np.int64(get(token_ids, row))
        group, lane = token // 16, token % 16
        for k in range(num_words * per_word):
            scale_at = 16 * (group * num_scales + k // columns_per_scale)
            scale = load(scales, scale_at)
            low = load(minima, scale_at) if minima.shape[0] > 0 else mul(splat(-zero), scale)
            code = load_code(words, 16 * (group * num_words + k // per_word), k % per_word)
            put(out, row * out.shape[1] + k, pick(fma(code, scale, low), lane))


@cpu_kernel
def gather(x: Any, rows: Any, counts: Any, out: Any) -> None:
    width = x.shape[1]
    for i in prange(get(counts, 1)):
        source = np.int64(get(rows, i)) * width
        for k in range(0, width, 16):
            store(out, i * width + k, load(x, source + k))


@cpu_kernel
def narrow(x: Any, counts: Any, out: Any) -> None:
    width = out.shape[1]
    for i in prange(get(counts, 1)):
        for k in range(0, width, 16):
            store_first(out, i * width + k, load(x, i * x.shape[1] + k), width - k)
