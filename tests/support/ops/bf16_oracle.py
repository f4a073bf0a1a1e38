"""bf16 in plain numpy, by arithmetic and not by bits: what tests hold kernels against."""

from __future__ import annotations

import numpy as np


def values_of(bits: np.ndarray) -> np.ndarray:
    """uint16 to the float32 that they are the upper half of."""
    return np.asarray((bits.astype(np.uint32) << 16).view(np.float32))


def rounded_bits(values: np.ndarray, least: float = 2.0**-50) -> np.ndarray:
    """float32 to the uint16 of the nearest number of 8 bits, ties to even; zero below `least`."""
    with np.errstate(over="ignore"):
        fraction, exponent = np.frexp(values.astype(np.float64))
        nearest = np.ldexp(np.rint(fraction * 256), exponent - 8).astype(np.float32)
    nearest[np.abs(values) < least] = 0
    return np.asarray((nearest.view(np.uint32) >> 16).astype(np.uint16))


def pairs_in_order(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """f32 [rows, outputs] of bits [rows, k] and [outputs, k]: of each two columns the odd one
    first, each sum rounded to f32.

    Right to the last bit while sums and products lie within 2**29 of each other, so that their sum
    is exact in float64.
    """
    left, right = (values_of(one).astype(np.float64) for one in (x, weights))
    total = np.zeros((len(x), len(weights)), np.float32)
    for even in range(0, x.shape[1], 2):
        for column in (even + 1, even):
            product = np.multiply.outer(left[:, column], right[:, column])
            total = (total + product).astype(np.float32)
    return total
