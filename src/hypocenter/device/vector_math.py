"""More words for CPU kernels: functions of one number, lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.lang import inline, word
from hypocenter.device.vector import add, div, fma, larger, mul, splat, sub
from hypocenter.device.vector_ir import VEC_F32, VEC_I32, Codegen, constant, f32x16

# Adding it rounds to an integer, whatever instruction the machine lacks; the low bits of the sum
# are then that integer with the bias of an exponent.
_ROUND = np.float32(1.5 * 2**23 + 127)
_EXP_LOW, _EXP_HIGH, _EXP2_LOW = np.float32(-87.33654), np.float32(88.0), np.float32(-126)
LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_ONE, _ZERO = np.float32(1), np.float32(0)
# Minimax coefficients for f32, the highest power's first: of exp on [-ln2/2, ln2/2], all but the
# last two, which are 1 (Cephes, expf); of 2**r on [-1/2, 1/2], all but the last, 1 (Cephes, exp2f).
_OF_EXP = tuple(
    map(
        np.float32,
        (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
         5.0000001201e-1),
    )
)  # fmt: skip
_OF_EXP2 = tuple(
    map(
        np.float32,
        (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
         2.402264791363012e-1, 6.931472028550421e-1),
    )
)  # fmt: skip


@inline
def _polynomial(r: Any, coefficients: Any) -> Any:
    """Of degree 5 in r."""
    p = fma(splat(coefficients[0]), r, splat(coefficients[1]))
    p = fma(p, r, splat(coefficients[2]))
    p = fma(p, r, splat(coefficients[3]))
    p = fma(p, r, splat(coefficients[4]))
    return fma(p, r, splat(coefficients[5]))


@word
def _power_of_two(typing: Any, shifted: Any) -> tuple[Any, Codegen]:
    """2**n for a lane that holds n + `_ROUND`: its low bits, moved to the exponent."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], VEC_I32)
        return builder.bitcast(builder.shl(bits, constant(23, VEC_I32)), VEC_F32)

    return f32x16(f32x16), build


@inline
def exp(x: Any) -> Any:
    """e**x per lane, within 2 ulp for -87.3 <= x <= 88; below that 1.2e-38, above it e**88.

    Range reduction by ln 2 in two parts, then Cephes' polynomial for expf.
    """
    x = larger(splat(_EXP_LOW), sub(splat(_ZERO), larger(splat(-_EXP_HIGH), sub(splat(_ZERO), x))))
    shifted = add(mul(x, splat(LOG2_E)), splat(_ROUND))
    n = sub(shifted, splat(_ROUND))
    r = fma(n, splat(_LN2_LOW), fma(n, splat(_LN2_HIGH), x))
    p = _polynomial(r, _OF_EXP)
    p = fma(mul(p, r), r, add(r, splat(_ONE)))
    return mul(p, _power_of_two(shifted))


@inline
def exp2(x: Any) -> Any:
    """2**x per lane, within 2 ulp for -126 <= x <= 126; below that 1.2e-38.

    Cephes' polynomial for exp2f: fewer steps than `exp`, whose range takes two of reduction.
    """
    x = larger(splat(_EXP2_LOW), x)
    shifted = add(x, splat(_ROUND))
    r = sub(x, sub(shifted, splat(_ROUND)))
    p = _polynomial(r, _OF_EXP2)
    return mul(fma(p, r, splat(_ONE)), _power_of_two(shifted))


@inline
def sigmoid(x: Any) -> Any:
    """1 / (1 + e**-x) per lane."""
    return div(splat(_ONE), add(splat(_ONE), exp(sub(splat(_ZERO), x))))


@inline
def tanh(x: Any) -> Any:
    """Hyperbolic tangent per lane as 2 * sigmoid(2x) - 1: absolute error below 2e-7."""
    return sub(mul(splat(np.float32(2)), sigmoid(add(x, x))), splat(_ONE))
