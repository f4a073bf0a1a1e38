"""How far attention on a GPU may be from what float64 makes of the same numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hypocenter.kernels.attention import attention

EPS = 2.0**-24
Array = np.ndarray[Any, Any]


def as_f16(q: Array) -> Array:
    """q as it is multiplied with a cache of f16, float64: rounded to f16 once.

    Before that each head's largest number is brought to 2**13 .. 2**14 by a power of two.
    """
    largest = np.abs(q).max(axis=-1, keepdims=True).astype(np.float64)
    unit = 2.0 ** (13 - np.floor(np.log2(largest)))
    return np.asarray((q * unit).astype(np.float16) / unit, np.float64)


def expected(
    q: Array, k: Array, v: Array, scale: float, window: int = 0, softcap: float = 0.0,
    sinks: Array | None = None, *, is_f16: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """What comes of attention, and how far it may be off, both [num_tokens, num_heads, dim].

    Sums are f32. With an f16 cache a weight is rounded to f16 as well, by a share of up to 2**-11.
    So a sum of p v is off by that times the mean of |v - sum|, which is at most the square root of
    the mean of (v - sum)**2.
    """
    largest = max(k.shape[0], k.shape[2])
    sums = (math.log2(largest) + 4) * EPS * 4 * float(np.abs(v).max())
    if not is_f16:
        right = attention.reference(q, k, v, scale, window, softcap, sinks)
        return right, np.full(right.shape, sums)
    q, v = as_f16(q), v.astype(np.float64)
    right = attention.reference(q, k, v, scale, window, softcap, sinks)
    squares = attention.reference(q, k, v**2, scale, window, softcap, sinks)
    return right, 2.0**-11 * np.sqrt(np.maximum(squares - right**2, 0)) * 1.001 + sums
