"""Words of CPU kernels that round as C programs do on x86, also what lies beyond all bounds.

LLVM leaves the conversion of a float that no integer can hold undefined. Programs that are to be
matched bit for bit get there, with numbers near the ends of the range of f32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import inline, intrinsic, ir, types

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
#: Adding it puts the nearest integer, ties to even, into the low 22 bits of the sum and their sign.
_MAGIC, _LOW_BITS, _HALF = 12582912.0, 0x7FFFFF, 0x400000
_LEAST_I32 = -(1 << 31)


def _nearest(builder: Any, value: Any) -> Any:
    """i32: the low bits of `value` + 1.5 * 2**23, less their half, whatever the sum is."""
    bits = builder.bitcast(builder.fadd(value, ir.Constant(_F32, _MAGIC)), _I32)
    low = builder.and_(bits, ir.Constant(_I32, _LOW_BITS))
    return builder.sub(low, ir.Constant(_I32, _HALF))


@intrinsic
def nearest(typing: Any, value: Any) -> Any:
    """The integer next to an f32, as an f32; ties go to the even one. 0 for NaN, -2**22 for
    infinity. What is beyond 2**22 gives another integer."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(_nearest(builder, args[0]), _F32)

    return types.float32(types.float32), build


@intrinsic
def nearest_integer(typing: Any, value: Any) -> Any:
    """Does what `nearest` does; an i64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(_nearest(builder, args[0]), _I64)

    return types.int64(types.float32), build


@intrinsic
def truncate(typing: Any, value: Any) -> Any:
    """An f32 without its fraction, as an i64; -2**31 for NaN and what no i32 holds (CVTTSS2SI)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        least = ir.Constant(_F32, float(_LEAST_I32))
        beyond = ir.Constant(_F32, -float(_LEAST_I32))
        fits = builder.and_(
            builder.fcmp_ordered(">=", args[0], least), builder.fcmp_ordered("<", args[0], beyond)
        )
        held = builder.select(fits, args[0], ir.Constant(_F32, 0.0))
        found = builder.select(fits, builder.fptosi(held, _I32), ir.Constant(_I32, _LEAST_I32))
        return builder.sext(found, _I64)

    return types.int64(types.float32), build


@inline
def rounded_away(value: Any) -> Any:
    """The integer next to an f32, halves away from zero (C's `roundf`), as `truncate` gives it."""
    whole = truncate(value)
    if whole == _LEAST_I32:
        return whole
    rest = value - np.float32(whole)
    if rest >= np.float32(0.5):
        return whole + 1
    if rest <= np.float32(-0.5):
        return whole - 1
    return whole


@inline
def half_bits(value: Any) -> Any:
    """The bits of an f32 as an f16, rounded to nearest even; beyond its range infinity, and
    0x7E00 or 0xFE00 for NaN."""
    bits = np.int64(np.float32(value).view(np.uint32))
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if size > 0x7F800000:
        return sign | 0x7E00
    if size >= 0x47800000:  # 65536
        return sign | 0x7C00
    if size < 0x38800000:  # below 2**-14: in steps of 2**-24, which are those of f32 above 0.5
        shifted = np.uint32(size).view(np.float32) + np.float32(0.5)
        return sign | (np.int64(np.float32(shifted).view(np.uint32)) - 0x3F000000)
    return sign | ((size - 0x38000000 + 0xFFF + ((size >> 13) & 1)) >> 13)


@inline
def of_half_bits(bits: int) -> Any:
    """The f32 of an f16's bits."""
    exponent, fraction = (bits >> 10) & 31, bits & 0x3FF
    if exponent == 0:
        size = np.float32(fraction) * np.float32(2.0**-24)
    elif exponent == 31:
        size = np.uint32(0x7F800000 | (fraction << 13)).view(np.float32)
    else:
        size = np.uint32(((exponent + 112) << 23) | (fraction << 13)).view(np.float32)
    return -size if bits & 0x8000 else size
