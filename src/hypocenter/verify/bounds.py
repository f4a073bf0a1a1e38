"""How far a right result may be from what float64 makes of the same numbers.

Each bound follows from the types of the numbers and from how many of them are added in a chain.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType
from hypocenter.kernels.attention import attention
from hypocenter.kernels.weights import block_types
from hypocenter.verify.file_weights import block_sizes

#: Half the distance from 1 to the next f32: what one rounding changes, at most.
EPS = 2.0**-24
#: The same of f16, and half of its smallest step.
EPS_F16, TINY_F16 = 2.0**-11, 2.0**-25
#: A share of a bound that is no more than the float64 side's own rounding.
LEAST = 1e-38


def of_chain(length: int, num_more: int = 8) -> float:
    """The share of the sum of sizes by which a sum of f32 may be off: a chain of `length` additions
    and `num_more` other roundings. Matrix units cut off instead of rounding, so each counts twice.
    """
    return 2 * (length + num_more) * EPS


def chain_of_product(num_columns: int, *, on_cpu_as_floats: bool) -> int:
    """How many additions a product's sum runs through.

    Floats on the CPU take one per column; codes there one per group of 32 and one for its minimum;
    a matrix unit one per 16 columns, beside those within.
    """
    if on_cpu_as_floats:
        return num_columns
    return -(-num_columns // 16) + 8


def of_block_rounding(raw: Array, dtype: DType) -> Array:
    """How far weights, and x with them, may be off where scales and what comes of them are f16:
    f64 [num_rows, num_columns]. x, scale, minimum and their sum are each off by 2**-11 at most."""
    num_columns = raw.shape[1] // dtype.block_bytes * dtype.block_elements
    return 3.01 * EPS_F16 * block_sizes(block_types.unpack(raw, dtype, num_columns))


def as_f16(q: Array) -> Array:
    """q as it is multiplied with a cache of f16, float64: rounded to f16 once.

    Before that each head's largest number is brought to 2**13 .. 2**14 by a power of two.
    """
    largest = np.abs(q).max(axis=-1, keepdims=True).astype(np.float64)
    unit = 2.0 ** (13 - np.floor(np.log2(np.where(largest > 0, largest, 1))))
    return np.asarray((q * unit).astype(np.float16) / unit, np.float64)


class Scoring(NamedTuple):
    """How attention weighs keys, as its reference takes it."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Array | None = None


def of_attention(
    q: Array,
    k: Array,
    v: Array,
    scoring: Scoring,
    *,
    is_f16: bool,
) -> tuple[Array, Array]:
    """What comes of attention, and how far it may be off, both [num_tokens, num_heads, dim].

    Sums are f32. With an f16 cache a weight is rounded to f16 as well, by a share of up to 2**-11.
    So a sum of p v is off by that times the mean of |v - sum|, which is at most the square root of
    the mean of (v - sum)**2.
    """
    largest = max(k.shape[0], k.shape[2])
    sums = (math.log2(largest) + 4) * EPS * 4 * float(np.abs(v).max())
    if not is_f16:
        right = attention.reference(q, k, v, *scoring)
        return right, np.full(right.shape, sums)
    q, v = as_f16(q), v.astype(np.float64)
    right = attention.reference(q, k, v, *scoring)
    squares = attention.reference(q, k, v**2, *scoring)
    return right, EPS_F16 * np.sqrt(np.maximum(squares - right**2, 0)) * 1.001 + sums
