"""Bfloat16 in NumPy, which lacks it: bits to numbers and back."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]

#: Where products are of two bf16, numbers below this one are taken for zero. The others have their
#: last bit at 2**-57 or above, so sums of products have theirs at 2**-114: none is ever subnormal,
#: which `vdpbf16ps` flushes to zero and other instructions do not.
LEAST = 2.0**-50


def bf16_to_f32(bits: Array) -> Array:
    """uint16 bfloat16 bits of any shape to float32, exact."""
    wide: Array = np.left_shift(bits, 16, dtype=np.uint32)
    return wide.view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """float32 of any shape to uint16 bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    odd = (bits >> 16) & np.uint32(1)
    rounded = ((bits + (odd + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    # Rounding up a NaN whose payload lies in the dropped bits would carry into the sign.
    quiet = ((bits >> 16) | np.uint32(0x40)).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)


def factors_of_products(values: Array) -> Array:
    """float32 to the uint16 bfloat16 bits that products in bf16 take, those below `LEAST` zero."""
    return np.where(np.abs(values) < np.float32(LEAST), np.uint16(0), f32_to_bf16(values))
