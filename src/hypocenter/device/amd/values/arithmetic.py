"""What the expressions of `meanings.py` call: numbers of AMD's formats inside numba's machine code.

Every integer is an int64, whatever its width: an unsigned word is one of 0 to 2^32 - 1, a signed
one has its sign. So nothing is promoted to a float, and a result counts by its low bits only.
Formats and rounding are IEEE 754's; FP8 is OCP's, and on gfx942 that of AMD's CDNA3 manual.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

import hypocenter.device.cpu.numba_target  # noqa: F401  # before anything is compiled

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_F32, _F64 = ir.FloatType(), ir.DoubleType()


@intrinsic
def as_f32(context: Any, bits: Any) -> Any:
    """The float32 with the low 32 bits of an int64."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], _I32), _F32)

    return types.float32(types.int64), emit


@intrinsic
def as_f64(context: Any, bits: Any) -> Any:
    """The float64 with the bits of an int64."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F64)

    return types.float64(types.int64), emit


@intrinsic
def bits32(context: Any, value: Any) -> Any:
    """The bits of a float32, as an int64 of 0 to 2^32 - 1."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.zext(builder.bitcast(args[0], _I32), _I64)

    return types.int64(types.float32), emit


@intrinsic
def bits64(context: Any, value: Any) -> Any:
    """The bits of a float64, as an int64."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I64)

    return types.int64(types.float64), emit


@intrinsic
def fma32(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), emit


@intrinsic
def fma64(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float64, rounded once."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float64(types.float64, types.float64, types.float64), emit


@intrinsic
def popcount(context: Any, bits: Any) -> Any:
    """Set bits of an int64."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.int64), emit


@intrinsic
def clz(context: Any, bits: Any) -> Any:
    """Zero bits above the highest set bit of an int64; 64 for 0."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), emit


@intrinsic
def ctz(context: Any, bits: Any) -> Any:
    """Zero bits below the lowest set bit of an int64; 64 for 0."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), emit


@intrinsic
def reverse_bits(context: Any, bits: Any) -> Any:
    """The 64 bits of an int64 in reverse."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.bitreverse(args[0])

    return types.int64(types.int64), emit


@intrinsic
def shift_right(context: Any, bits: Any, by: Any) -> Any:
    """`bits` shifted right by 0 to 63 places, zeros coming in."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.lshr(args[0], args[1])

    return types.int64(types.int64, types.int64), emit


@intrinsic
def below(context: Any, a: Any, b: Any) -> Any:
    """a < b of 64-bit numbers without sign."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.icmp_unsigned("<", args[0], args[1])

    return types.boolean(types.int64, types.int64), emit


@intrinsic
def high_product(context: Any, a: Any, b: Any) -> Any:
    """The upper 64 bits of the product of two 64-bit numbers without sign."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _I64)

    return types.int64(types.int64, types.int64), emit


def _inline(function: Callable[..., Any]) -> Any:
    """Compiled with IEEE's division and no check of bounds."""
    return njit(function, error_model="numpy", nogil=True)


@_inline
def sign_extend(value: int, num_bits: int) -> int:
    """The low `num_bits` of an int64, with their sign."""
    up = 64 - num_bits
    return (value << up) >> up


@_inline
def field(value: int, shift: int, num_bits: int) -> int:
    """`num_bits` (0 to 63) of a word from `shift` on."""
    return shift_right(value, shift) & ((1 << num_bits) - 1)


@_inline
def as_f16(bits: int) -> Any:
    """The float32 of a half; exact."""
    sign, exponent, fraction = bits & 0x8000, (bits >> 10) & 31, bits & 0x3FF
    if exponent == 31:
        return as_f32(sign << 16 | 0x7F800000 | fraction << 13)
    if exponent == 0:
        # 2^-24 is the smallest half.
        value = np.float32(fraction) * np.float32(5.9604644775390625e-08)
        return as_f32(bits32(value) | sign << 16)
    return as_f32(sign << 16 | (exponent + 112) << 23 | fraction << 13)


@_inline
def narrow(value: float, num_exponent: int, num_fraction: int) -> int:
    """The bits of a float64 in a smaller format of IEEE's kind, rounded to nearest even, once."""
    bits = bits64(np.float64(value))
    sign = shift_right(bits, 63) << (num_exponent + num_fraction)
    magnitude = bits & 0x7FFFFFFFFFFFFFFF
    infinity = ((1 << num_exponent) - 1) << num_fraction
    if magnitude > 0x7FF0000000000000:
        return sign | infinity | 1 << (num_fraction - 1)
    exponent = (magnitude >> 52) - 1023 + (1 << (num_exponent - 1)) - 1
    whole = magnitude & 0xFFFFFFFFFFFFF
    drop = 52 - num_fraction
    if exponent <= 0:
        whole |= 1 << 52
        drop += 1 - exponent
        exponent = 0
        if drop > 54:
            return sign
    kept = whole >> drop
    rest, half = whole & ((1 << drop) - 1), 1 << (drop - 1)
    kept += int(rest > half or (rest == half and (kept & 1) == 1))
    return sign | min((exponent << num_fraction) + kept, infinity)


@_inline
def bits16(value: float) -> int:
    """The half nearest to a number, ties to even."""
    return narrow(value, 5, 10)


@_inline
def bits16_cut(value: float) -> int:
    """The half of a number, cut towards zero."""
    nearest = narrow(value, 5, 10)
    if value - value != 0.0:
        return nearest
    back = as_f16(nearest)
    return nearest - int(abs(np.float64(back)) > abs(np.float64(value)))


@_inline
def bits_bf16(value: float) -> int:
    """The bfloat16 nearest to a number, ties to even."""
    return narrow(value, 8, 7)


@_inline
def bits_bf16_cut(value: float) -> int:
    """The bfloat16 of a number, cut towards zero; that of a NaN has one sign and no payload."""
    if value != value:
        return 0x7FC0
    nearest = narrow(value, 8, 7)
    if value - value != 0.0:
        return nearest
    back = as_f32(nearest << 16)
    return nearest - int(abs(np.float64(back)) > abs(np.float64(value)))


@_inline
def as_bf16(bits: int) -> Any:
    """The float32 of a bfloat16."""
    return as_f32((bits & 0xFFFF) << 16)


@_inline
def max_number(a: Any, b: Any) -> Any:
    """The larger; what is no NaN wins, and +0 is above -0."""
    if a != a:
        return b
    if b != b:
        return a
    if a == b:
        return b if np.copysign(1.0, np.float64(a)) < 0.0 else a
    return a if a > b else b


@_inline
def min_number(a: Any, b: Any) -> Any:
    """The smaller; what is no NaN wins, and -0 is below +0."""
    return -max_number(-a, -b)


@_inline
def maximum(a: Any, b: Any) -> Any:
    """The larger one; NaN where one is NaN."""
    return a if a != a else b if b != b else max_number(a, b)


@_inline
def minimum(a: Any, b: Any) -> Any:
    """The smaller one; NaN where one is NaN."""
    return a if a != a else b if b != b else min_number(a, b)


@_inline
def med3(a: Any, b: Any, c: Any) -> Any:
    """The middle one of three numbers; the smallest where one is NaN."""
    if a != a or b != b or c != c:
        return min_number(min_number(a, b), c)
    return max(min(a, b), min(max(a, b), c))


@_inline
def to_integer(value: float, low: float, high: float) -> int:
    """Cut towards zero and held to `low` and `high`; NaN is 0."""
    if value != value:
        return 0
    return int(min(max(np.float64(value), low), high))


@_inline
def exponent_of(bits: int, num_exponent: int, num_fraction: int) -> int:
    """The exponent's field."""
    return (bits >> num_fraction) & ((1 << num_exponent) - 1)


@_inline
def scale(value: float, by: int) -> float:
    """value * 2^by in float64, for any `by`."""
    by = min(max(by, -4400), 4400)
    while by > 1000:
        value, by = value * 2.0**1000, by - 1000
    # One step at most may round: what is small already is made smaller last.
    while by < -1000:
        value, by = value * 2.0**-1000, by + 1000
    return value * as_f64((by + 1023) << 52)


@_inline
def class_bit(bits: int, num_exponent: int, num_fraction: int) -> int:
    """Which class a number is of, 0 to 9, as V_CMP_CLASS counts them."""
    negative = (bits >> (num_exponent + num_fraction)) & 1
    exponent = (bits >> num_fraction) & ((1 << num_exponent) - 1)
    fraction = bits & ((1 << num_fraction) - 1)
    if exponent == (1 << num_exponent) - 1:
        if fraction:
            return int(fraction >> (num_fraction - 1))
        return 2 if negative else 9
    if exponent:
        return 3 if negative else 8
    if fraction:
        return 4 if negative else 7
    return 5 if negative else 6


@_inline
def permute(high: int, low: int, selectors: int) -> int:
    """V_PERM_B32: four bytes, each chosen by a byte of `selectors`."""
    result = 0
    for place in range(4):
        chosen = (selectors >> (8 * place)) & 255
        if chosen >= 13:
            byte = 255
        elif chosen == 12:
            byte = 0
        elif chosen >= 8:
            word = high if chosen >= 10 else low
            byte = 255 * ((word >> (31 if chosen & 1 else 15)) & 1)
        else:
            byte = ((high if chosen >= 4 else low) >> (8 * (chosen & 3))) & 255
        result |= byte << (8 * place)
    return result


@_inline
def byte_distances(a: int, b: int) -> int:
    """The sum of the distances of four bytes without sign."""
    total = 0
    for place in range(0, 32, 8):
        total += abs(((a >> place) & 255) - ((b >> place) & 255))
    return total


@_inline
def dot_bytes(a: int, b: int, a_has_sign: bool, b_has_sign: bool) -> int:
    """The sum of the products of four bytes each."""
    total = 0
    for place in range(0, 32, 8):
        x, y = (a >> place) & 255, (b >> place) & 255
        x = sign_extend(x, 8) if a_has_sign else x
        y = sign_extend(y, 8) if b_has_sign else y
        total += x * y
    return total


@_inline
def dot_parts(a: int, b: int, width: int, a_has_sign: bool, b_has_sign: bool) -> int:
    """The sum of the products of all parts of `width` bits of two registers."""
    total = 0
    for place in range(0, 32, width):
        x, y = field(a, place, width), field(b, place, width)
        total += (sign_extend(x, width) if a_has_sign else x) * (
            sign_extend(y, width) if b_has_sign else y
        )
    return total


@_inline
def bit_field(value: int, shift: int, num_bits: int, width: int) -> int:
    """`num_bits` of a word of `width` bits from `shift` on, with their sign."""
    if num_bits == 0:
        return 0
    return sign_extend(sign_extend(value, width) >> shift, min(num_bits, width))


@_inline
def power_of(value: float) -> int:
    """The power of two above a number's magnitude; 0 for 0, infinity and NaN."""
    if value == 0.0 or value - value != 0.0:
        return 0
    return math.frexp(value)[1]


@_inline
def mantissa_of(value: float) -> float:
    """The number over 2^power_of: 0.5 to 1."""
    return value if value - value != 0.0 else math.frexp(value)[0]


@_inline
def as_fp8(bits: int, form: int) -> float:
    """The number of 8 bits: form 0 E4M3, 1 E5M2 (OCP), 2 and 3 the same without -0 (FNUZ)."""
    num_fraction = 3 if form % 2 == 0 else 2
    sign = -1.0 if bits & 0x80 else 1.0
    exponent, fraction = (bits & 0x7F) >> num_fraction, bits & ((1 << num_fraction) - 1)
    bias = (7 if form % 2 == 0 else 15) + form // 2
    if form >= 2 and bits == 0x80:
        return np.nan
    if form == 0 and bits & 0x7F == 0x7F:
        return np.nan
    if form == 1 and exponent == 31:
        return sign * np.inf if fraction == 0 else np.nan
    if exponent == 0:
        return sign * scale(float(fraction), 1 - bias - num_fraction)
    return sign * scale(float(fraction + (1 << num_fraction)), exponent - bias - num_fraction)


@_inline
def bits_fp8(value: float, form: int) -> int:
    """The nearest number of 8 bits, ties to even; forms are those of `as_fp8`.

    What is too large becomes infinite, or NaN where the format has no infinity.
    """
    num_fraction = 3 if form % 2 == 0 else 2
    bias = (7 if form % 2 == 0 else 15) + form // 2
    sign = 0x80 if math.copysign(1.0, value) < 0.0 else 0
    no_number = 0x80 if form >= 2 else 0x7F | sign
    if value != value:
        return no_number
    beyond = 0x7C | sign if form == 1 else no_number
    size = abs(value)
    if size > 1e6:
        return beyond
    power = 1 - bias if size == 0.0 else max(power_of(size) - 1, 1 - bias)
    code = int(np.rint(scale(size, num_fraction - power))) + ((power + bias - 1) << num_fraction)
    if code > (0x7F if form >= 2 else 0x7B if form == 1 else 0x7E):
        return beyond
    if form >= 2 and code == 0:
        return 0
    return code | sign


@_inline
def as_fp4(bits: int) -> float:
    """The number of the lowest 4 bits, as E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign."""
    exponent, fraction = (bits >> 1) & 3, bits & 1
    size = 0.5 * fraction if exponent == 0 else scale(1.0 + 0.5 * fraction, exponent - 1)
    return -size if bits & 8 else size


@_inline
def hold(value: Any, largest: float) -> float:
    """A number that stops at the largest one of its format; what is infinite stays so."""
    number = np.float64(value)
    if abs(number) <= largest or number - number != 0.0:
        return number
    return math.copysign(largest, number)


@_inline
def e8m0(bits: int) -> float:
    """The power of two in a float32's exponent; 255 is no number."""
    exponent = (bits >> 23) & 255
    return np.nan if exponent == 255 else scale(1.0, exponent - 127)


@_inline
def by_truth(a: int, b: int, c: int, table: int) -> int:
    """V_BITOP3: each bit is the table's bit number 4a + 2b + c."""
    result = 0
    for number in range(8):
        if (table >> number) & 1:
            x = a if number & 4 else ~a
            y = b if number & 2 else ~b
            result |= x & y & (c if number & 1 else ~c)
    return result
