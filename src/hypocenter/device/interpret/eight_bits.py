"""Numbers to the formats of 8 bits, rounded to the nearest, ties to even, as compiled code rounds.

Triton's interpreter loses the carry of a fraction that is rounded up to the next power of two, and
rounds every tie up. Finite numbers that are too large become the largest one, as Triton's compilers
have it for NVIDIA and AMD; infinite ones and NaN become what the format has for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array, bf16_to_f32


@dataclass(frozen=True, slots=True)
class _Format:
    """Bits of the fraction, bias, and codes of the largest number, of infinity and of NaN;
    `has_sign` is whether there is a -0, and NaN has either sign."""

    num_fraction: int
    bias: int
    largest: int
    infinity: int
    nan: int
    has_sign: bool = True

    @property
    def sizes(self) -> Array:
        """float64[largest + 1]: the number of each code that has no sign."""
        code = np.arange(self.largest + 1)
        exponent, fraction = code >> self.num_fraction, code & ((1 << self.num_fraction) - 1)
        whole = fraction + np.where(exponent > 0, 1 << self.num_fraction, 0)
        sizes: Array = np.ldexp(whole, np.maximum(exponent, 1) - self.bias - self.num_fraction)
        return sizes


_FORMATS = {
    "fp8e4nv": _Format(3, 7, 0x7E, 0x7F, 0x7F),
    "fp8e5": _Format(2, 15, 0x7B, 0x7C, 0x7F),
    "fp8e4b8": _Format(3, 8, 0x7F, 0x80, 0x80, has_sign=False),
    "fp8e5b16": _Format(2, 16, 0x7F, 0x80, 0x80, has_sign=False),
}


def is_rounded_here(source: Any, dest: Any) -> bool:
    """Whether numbers of Triton's type `source` become `dest` by `to_eight_bits`."""
    return str(dest) in _FORMATS and str(source) in ("fp16", "bf16", "fp32", "fp64")


def to_eight_bits(values: Array, source: Any, dest: Any) -> Array:
    """uint8 codes, in the shape of `values`: an array of numbers, of bfloat16 as bits."""
    form = _FORMATS[str(dest)]
    if str(source) == "bf16":
        values = bf16_to_f32(values.view(np.uint16))
    numbers = values.astype(np.float64)
    middles = _middles(str(dest))
    size = np.where(np.isfinite(numbers), np.abs(numbers), 0.0)
    code = np.searchsorted(middles, size)
    is_tie = size == middles[np.minimum(code, len(middles) - 1)]
    code = np.where(is_tie & (code % 2 == 1), code + 1, code)
    sign = np.where(np.signbit(numbers) & (form.has_sign | (code > 0)), 0x80, 0)
    code = np.where(np.isinf(numbers), form.infinity, np.where(np.isnan(numbers), form.nan, code))
    return (code | sign).astype(np.uint8)


@cache
def _middles(name: str) -> Array:
    sizes = _FORMATS[name].sizes
    return (sizes[:-1] + sizes[1:]) / 2
