"""The three steps of AMD's exact division: scale, multiply with what was scaled, fix up.

Source: the pseudocode of V_DIV_SCALE, V_DIV_FMAS and V_DIV_FIXUP in the CDNA3 and RDNA3 manuals.
Their text of V_DIV_FMAS has the factor 2^32; what V_DIV_SCALE does needs 2^64 or 2^-64, by the
size of the quotient. `test_division.py` shows it: with these the steps that compilers write give
the nearest number to the exact quotient, with 2^32 or with one of the two they do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.amd.values.arithmetic import (
    _inline,
    as_f32,
    as_f64,
    bits32,
    bits64,
    exponent_of,
    fma32,
    fma64,
    scale,
)


@_inline
def _scaling(num: Any, den: Any, exponents: tuple[int, int], limits: tuple[int, ...]) -> int:
    """What V_DIV_SCALE decides: bit 0 VCC, bit 1 scale the denominator up, bit 2 down,
    bit 3 scale the numerator up, bit 4 scale whatever is asked for up."""
    near_largest, smallest, tiny = limits[0], limits[1], limits[2]
    if exponents[0] - exponents[1] >= near_largest:
        return 1 | 2
    if exponents[1] == 0:
        return 16
    # The reciprocal of a number with an exponent this high has none of its own.
    reciprocal_is_small = exponents[1] >= smallest
    quotient = num / den
    quotient_is_small = quotient != 0 and abs(scale(np.float64(quotient), 0)) < _smallest(limits[3])
    quotient_is_small = quotient_is_small or (quotient == 0 and num != 0)
    if reciprocal_is_small and quotient_is_small:
        return 1 | 2
    if reciprocal_is_small:
        return 4
    if quotient_is_small:
        return 1 | 8
    return 16 if exponents[0] <= tiny else 0


@_inline
def _smallest(num_exponent: int) -> float:
    """The smallest normal number of float32 (8) or float64 (11)."""
    return as_f64((1023 - 126) << 52) if num_exponent == 8 else as_f64(1 << 52)


@_inline
def _by(plan: int, is_den: bool, is_num: bool, step: int) -> int:
    """The power of two to scale with."""
    if plan & 16 or (plan & 2 and is_den) or (plan & 8 and is_num):
        return step
    return -step if plan & 4 else 0


@_inline
def _plan32(b: Any, c: Any) -> int:
    exponents = exponent_of(bits32(c), 8, 23), exponent_of(bits32(b), 8, 23)
    return _scaling(c, b, exponents, (96, 253, 23, 8))


@_inline
def _plan64(b: Any, c: Any) -> int:
    exponents = exponent_of(bits64(c), 11, 52), exponent_of(bits64(b), 11, 52)
    return _scaling(c, b, exponents, (768, 2045, 53, 11))


@_inline
def scale32(a: Any, b: Any, c: Any) -> Any:
    """V_DIV_SCALE_F32 of a, which is denominator `b` or numerator `c`."""
    if b == 0 or c == 0:
        return as_f32(0x7FC00000)
    by = _by(_plan32(b, c), a == b, a == c, 64)
    return np.float32(scale(np.float64(a), by))


@_inline
def scale64(a: Any, b: Any, c: Any) -> Any:
    """V_DIV_SCALE_F64."""
    if b == 0 or c == 0:
        return as_f64(0x7FF8000000000000)
    return scale(a, _by(_plan64(b, c), a == b, a == c, 128))


@_inline
def scale32_flag(b: Any, c: Any) -> bool:
    """Whether V_DIV_FMAS_F32 has to scale back."""
    return b != 0 and c != 0 and (_plan32(b, c) & 1) == 1


@_inline
def scale64_flag(b: Any, c: Any) -> bool:
    """Whether V_DIV_FMAS_F64 has to scale back."""
    return b != 0 and c != 0 and (_plan64(b, c) & 1) == 1


@_inline
def fmas32(a: Any, b: Any, c: Any, is_scaled: bool) -> Any:
    """V_DIV_FMAS_F32."""
    value = fma32(a, b, c)
    if not is_scaled:
        return value
    return np.float32(scale(np.float64(value), 64 if exponent_of(bits32(c), 8, 23) > 127 else -64))


@_inline
def fmas64(a: Any, b: Any, c: Any, is_scaled: bool) -> Any:
    """V_DIV_FMAS_F64."""
    value = fma64(a, b, c)
    if not is_scaled:
        return value
    return scale(value, 128 if exponent_of(bits64(c), 11, 52) > 1023 else -128)


@_inline
def fixup32(a: Any, b: Any, c: Any) -> Any:
    """V_DIV_FIXUP_F32."""
    power = exponent_of(bits32(c), 8, 23) - exponent_of(bits32(b), 8, 23)
    return np.float32(fixup(a, b, c, power < -150))


@_inline
def fixup64(a: Any, b: Any, c: Any) -> Any:
    """V_DIV_FIXUP_F64."""
    power = exponent_of(bits64(c), 11, 52) - exponent_of(bits64(b), 11, 52)
    return fixup(a, b, c, power < -1075)


@_inline
def fixup(a: Any, b: Any, c: Any, is_below_all: bool) -> float:
    """V_DIV_FIXUP: the quotient `a` of c / b, or what IEEE gives for special operands.

    The manuals' branch for an overflow asks for a denominator that branches before it have taken;
    steps before it leave infinity or NaN as the quotient then, and that is asked for here.
    """
    quotient, den, num = np.float64(a), np.float64(b), np.float64(c)
    if num != num or den != den:
        return num if num != num else den
    sign = np.copysign(1.0, den) * np.copysign(1.0, num)
    if den == 0.0 or abs(num) == np.inf:
        if num == 0.0 or abs(den) == np.inf:
            return np.nan
        return sign * np.inf
    if abs(den) == np.inf or num == 0.0 or is_below_all:
        return sign * 0.0
    return sign * (np.inf if quotient != quotient else abs(quotient))
