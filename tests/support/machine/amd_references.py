"""What AMD's opcodes compute, told a second time: by numpy's arithmetic and Python's integers.

Nothing here is shared with `device/amd/values/meanings.py`; a name stands with the operands a, b,
c, what the destination held (d), the condition (k) and the lane.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
F32, F64 = np.float32, np.float64


def sign(value: int, bits: int) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def clamp(value: Any, low: int, high: int) -> int:
    return 0 if value != value else int(min(max(float(np.trunc(value)), low), high))


def bits_of(value: int, width: int) -> str:
    return format(value % (1 << width), f"0{width}b")


def lowest(value: int, width: int) -> int:
    return bits_of(value, width)[::-1].find("1")


def larger(a: Any, b: Any) -> Any:
    if a == 0 and b == 0:
        return b if np.signbit(a) else a
    return np.fmax(a, b)


def smaller(a: Any, b: Any) -> Any:
    if a == 0 and b == 0:
        return a if np.signbit(a) else b
    return np.fmin(a, b)


def _largest(values: Any) -> Any:
    """NaN where one is; of zeros the one without a sign."""
    if np.isnan(values).any():
        return np.nan
    return max(values, key=lambda value: (value, not np.signbit(value)))


def fixed(a: Any, b: Any, c: Any, smallest: int, limit: int) -> Any:
    """V_DIV_FIXUP: IEEE's quotient where an operand is special, else `a` with the right sign."""
    if not np.isfinite([b, c]).all() or b == 0 or c == 0:
        return c if np.isnan(c) else c / b
    sizes = [max(int(np.frexp(value)[1]), smallest) for value in (c, b)]
    size = np.inf if np.isnan(a) else 0 if sizes[0] - sizes[1] < limit else a
    return type(b)(np.copysign(size, b) * np.copysign(1, c))


#: Which numbers each bit of V_CMP_CLASS asks for, from the lowest.
_CLASSES: tuple[Callable[[Any], bool], ...] = (
    lambda x: np.isnan(x) and not x.view(np.uint32) >> 22 & 1,
    lambda x: np.isnan(x) and bool(x.view(np.uint32) >> 22 & 1),
    lambda x: x == -np.inf,
    lambda x: x <= -np.finfo(F32).tiny and np.isfinite(x),
    lambda x: -np.finfo(F32).tiny < x < 0,
    lambda x: x == 0 and np.signbit(x),
    lambda x: x == 0 and not np.signbit(x),
    lambda x: 0 < x < np.finfo(F32).tiny,
    lambda x: x >= np.finfo(F32).tiny and np.isfinite(x),
    lambda x: x == np.inf,
)


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, exact but for the last step, by way of rationals."""
    if not all(np.isfinite([a, b, c])):
        return F32(F64(a) * F64(b) + F64(c))
    return nearest32(F64(a), F64(b), F64(c))


def nearest32(a: Any, b: Any, c: Any) -> Any:
    from fractions import Fraction

    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return F32(a * b + c)
    guess = F32(float(exact)) if abs(exact) < 2**127 else F32(a * b + c)
    if not np.isfinite(guess):
        return guess
    around = [np.nextafter(guess, F32(-np.inf)), guess, np.nextafter(guess, F32(np.inf))]
    finite = [value for value in around if np.isfinite(value)]
    return min(finite, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1))


def fused64(a: Any, b: Any, c: Any) -> Any:
    from fractions import Fraction

    if not all(np.isfinite([a, b, c])):
        return a * b + c
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    try:
        return F64(float(exact)) if exact else a * b + c
    except OverflowError:
        return F64(math.inf if exact > 0 else -math.inf)


def perm(a: int, b: int, c: int) -> int:
    data = (b % (1 << 32)).to_bytes(4, "little") + (a % (1 << 32)).to_bytes(4, "little")
    out = []
    for selector in c.to_bytes(4, "little"):
        if selector < 8:
            out.append(data[selector])
        elif selector < 12:
            out.append(255 if data[2 * (selector - 8) + 1] >= 128 else 0)
        else:
            out.append(0 if selector == 12 else 255)
    return int.from_bytes(bytes(out), "little")


def half(bits: int) -> Any:
    return F32(np.uint16(bits & 0xFFFF).view(np.float16))


def _cut_dot(a: int, b: int, c: int) -> int:
    """Bits of the sum of c and two products of bfloat16, cut towards zero by whole numbers."""
    low, high, first, second, last = (
        float(np.uint32((bits & 0xFFFF) << 16).view(F32)) for bits in (a, a >> 16, b, b >> 16, c)
    )
    total = last + low * first + high * second
    if math.isnan(total):
        return 0x7FC0
    sign = 0x8000 if math.copysign(1.0, total) < 0 else 0
    if math.isinf(total):
        return sign | 0x7F80
    exponent = max(math.frexp(total)[1], -125) if total else -125
    steps = math.floor(math.ldexp(abs(total), 8 - exponent))
    return sign | min((exponent + 125 << 7) + steps, 0x7F7F)


def _bf16_bits(value: Any) -> int:
    """The nearer of the two bfloat16 around a number; of two as near the even one."""
    bits = int(F32(value).view(np.uint32))
    low, rest = bits >> 16, bits & 0xFFFF
    if math.isnan(value):
        return low | 0x40
    is_up = rest > 0x8000 or (rest == 0x8000 and low % 2 == 1)
    return low + is_up


def _cut_half(value: Any) -> int:
    """The half that is nearest, and not farther from 0 than the number."""
    found = np.float16(value)
    if np.isfinite(value) and abs(F64(found)) > abs(F64(value)):
        found = np.nextafter(found, np.float16(0))
    return int(found.view(np.uint16))


def _dot(a: int, b: int, width: int, form: Any) -> int:
    """By numpy's types: of two numbers of 16 bits, or of eight of 4 in bytes of their own."""
    parts = []
    for bits in (a, b):
        word = np.array([bits % 2**32], np.uint32)
        if width == 4:
            word = np.array([int(digit, 16) << 4 for digit in f"{bits % 2**32:08x}"], np.uint8)
        numbers = word.view(form).astype(object)
        parts.append(numbers // 16 if width == 4 else numbers)
    return int((parts[0] * parts[1]).sum())


def _is_not(compare: Any, a: Any, b: Any) -> bool:
    return not compare(a, b)


_ROUND = {"TRUNC": np.trunc, "CEIL": np.ceil, "FLOOR": np.floor, "RNDNE": np.rint}
_COMPARE: dict[str, Callable[..., Any]] = {
    "EQ": operator.eq,
    "LG": operator.ne,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
#: Floats have comparisons that are true of NaN besides.
_FLOAT_COMPARE: dict[str, Callable[..., Any]] = {
    **{n: c for n, c in _COMPARE.items() if n not in ("NE", "LG")},
    "LG": lambda a, b: bool(np.less(a, b) or np.greater(a, b)),
    "O": lambda a, b: not np.isnan([a, b]).any(),
    "U": lambda a, b: bool(np.isnan([a, b]).any()),
    **{
        f"N{n}": partial(_is_not, c)
        for n, c in _COMPARE.items()
        if n in ("GE", "GT", "LE", "LT", "EQ")
    },
    "NLG": lambda a, b: not (np.less(a, b) or np.greater(a, b)),
}

#: Names without prefix and type, by who has them, to what they compute.
BITS: dict[str, Callable[..., Any]] = {
    "S_MOV_B32 S_MOV_B64 V_MOV_B32 V_MOV_B16 V_MOV_B64 S_MOVK_I32 V_CVT_U32_U16 V_PK_MOV_B32 "
    "V_CVT_I32_I16 V_ACCVGPR_READ": lambda a: a,
    "S_NOT_B32 S_NOT_B64 V_NOT_B32 V_NOT_B16": lambda a: -1 - a,
    "S_AND_B32 S_AND_B64 V_AND_B32 V_AND_B16": lambda a, b: a & b,
    "S_OR_B32 S_OR_B64 V_OR_B32 V_OR_B16": lambda a, b: a | b,
    "S_XOR_B32 S_XOR_B64 V_XOR_B32 V_XOR_B16": lambda a, b: a ^ b,
    "S_XNOR_B32 S_XNOR_B64 V_XNOR_B32": lambda a, b: -1 - (a ^ b),
    "S_NAND_B32 S_NAND_B64": lambda a, b: -1 - (a & b),
    "S_NOR_B32 S_NOR_B64": lambda a, b: -1 - (a | b),
    "S_ANDN2_B32 S_ANDN2_B64": lambda a, b: a - (a & b),
    "S_ORN2_B32": lambda a, b: a | (M32 - b),
    "S_ORN2_B64": lambda a, b: a | (M64 - b % (1 << 64)),
    "S_BREV_B32 V_BFREV_B32": lambda a: int(bits_of(a, 32)[::-1], 2),
    "S_BREV_B64": lambda a: int(bits_of(a, 64)[::-1], 2),
    "S_BCNT0_I32_B32": lambda a: bits_of(a, 32).count("0"),
    "S_BCNT1_I32_B32": lambda a: bits_of(a, 32).count("1"),
    "S_BCNT1_I32_B64": lambda a: bits_of(a, 64).count("1"),
    "V_BCNT_U32_B32": lambda a, b: bits_of(a, 32).count("1") + b,
    "S_FF1_I32_B32 V_FFBL_B32": lambda a: lowest(a, 32),
    "S_FF1_I32_B64": lambda a: lowest(a, 64),
    "S_FLBIT_I32_B32 V_FFBH_U32": lambda a: bits_of(a, 32).find("1"),
    "S_FLBIT_I32_B64": lambda a: bits_of(a, 64).find("1"),
    "S_FLBIT_I32 V_FFBH_I32": lambda a: bits_of(a, 32).find("0" if a < 0 else "1"),
    "S_SEXT_I32_I8": lambda a: sign(a, 8),
    "S_SEXT_I32_I16": lambda a: sign(a, 16),
    "S_BITSET0_B32": lambda a, d: d - (d & 2 ** (a % 32)),
    "S_BITSET1_B32": lambda a, d: d | 2 ** (a % 32),
    "S_CMOV_B32 S_CMOV_B64": lambda a, d, k: (d, a)[k],
    "S_CSELECT_B32 S_CSELECT_B64": lambda a, b, k: (b, a)[k],
    "V_CNDMASK_B32 V_CNDMASK_B16": lambda a, b, k: (a, b)[k],
    "S_LSHL_B32": lambda a, b: a * 2 ** (b % 32),
    "S_LSHL_B64": lambda a, b: a * 2 ** (b % 64),
    "S_LSHR_B32": lambda a, b: a // 2 ** (b % 32),
    "S_LSHR_B64": lambda a, b: (a % 2**64) // 2 ** (b % 64),
    "S_ASHR_I32": lambda a, b: a // 2 ** (b % 32),
    "S_ASHR_I64": lambda a, b: a // 2 ** (b % 64),
    "V_LSHLREV_B32": lambda a, b: b * 2 ** (a % 32),
    "V_LSHRREV_B32": lambda a, b: b // 2 ** (a % 32),
    "V_ASHRREV_I32": lambda a, b: b // 2 ** (a % 32),
    "V_LSHLREV_B64": lambda a, b: b * 2 ** (a % 64),
    "V_LSHRREV_B64": lambda a, b: (b % 2**64) // 2 ** (a % 64),
    "V_ASHRREV_I64": lambda a, b: b // 2 ** (a % 64),
    "V_LSHLREV_B16 V_PK_LSHLREV_B16": lambda a, b: b * 2 ** (a % 16),
    "V_LSHRREV_B16 V_PK_LSHRREV_B16 V_ASHRREV_I16 V_PK_ASHRREV_I16": lambda a, b: (
        b // 2 ** (a % 16)
    ),
    "S_BFM_B32 V_BFM_B32": lambda a, b: (2 ** (a % 32) - 1) * 2 ** (b % 32),
    "S_BFE_U32": lambda a, b: a // 2 ** (b % 32) % 2 ** min(b >> 16 & 127, 32),
    "S_BFE_I32": lambda a, b: (
        sign(sign(a, 32) // 2 ** (b % 32), min(b >> 16 & 127, 32)) if b >> 16 & 127 else 0
    ),
    "V_BFE_U32": lambda a, b, c: a // 2 ** (b % 32) % 2 ** (c % 32),
    "V_BFE_I32": lambda a, b, c: sign(sign(a, 32) // 2 ** (b % 32), c % 32) if c % 32 else 0,
    "V_BFI_B32": lambda a, b, c: (a & b) + (c - (a & c)),
    "V_ALIGNBIT_B32": lambda a, b, c: (a * 2**32 + b) // 2 ** (c % 32),
    "V_ALIGNBYTE_B32": lambda a, b, c: (a * 2**32 + b) // 256 ** (c % 4),
    "V_PERM_B32": perm,
    "V_PACK_B32_F16": lambda a, b: a + 65536 * b,
    "V_MBCNT_LO_U32_B32": lambda a, b, lane: bits_of(a, 32)[::-1][: min(lane, 32)].count("1") + b,
    "V_MBCNT_HI_U32_B32": lambda a, b, lane: (
        bits_of(a, 32)[::-1][: max(lane - 32, 0)].count("1") + b
    ),
    "S_PACK_LL_B32_B16": lambda a, b: a % 65536 + 65536 * (b % 65536),
    "S_PACK_LH_B32_B16": lambda a, b: a % 65536 + 65536 * (b // 65536),
    "S_PACK_HL_B32_B16": lambda a, b: a // 65536 + 65536 * (b % 65536),
    "S_BITSET0_B64": lambda a, d: d - (d & 2 ** (a % 64)),
    "S_BITSET1_B64": lambda a, d: d | 2 ** (a % 64),
    "S_BCNT0_I32_B64": lambda a: bits_of(a, 64).count("0"),
    "S_PACK_HH_B32_B16": lambda a, b: a // 65536 + 65536 * (b // 65536),
    "V_LSHL_OR_B32": lambda a, b, c: (a * 2 ** (b % 32)) % 2**32 | c,
    "V_AND_OR_B32": lambda a, b, c: (a & b) | c,
    "V_OR3_B32": lambda a, b, c: a | b | c,
    "V_XOR3_B32": lambda a, b, c: a ^ b ^ c,
}

WHOLE: dict[str, Callable[..., Any]] = {
    "S_ADD_U32 S_ADD_I32 S_ADD_NC_U64 V_ADD_U32 V_ADD_U16 V_PK_ADD_U16 V_ADD_CO_U32": lambda a, b: (
        a + b
    ),
    "S_SUB_U32 S_SUB_I32 S_SUB_NC_U64 V_SUB_U32 V_SUB_U16 V_PK_SUB_U16 V_SUB_CO_U32": lambda a, b: (
        a - b
    ),
    "V_SUBREV_U32 V_SUBREV_U16 V_SUBREV_CO_U32": lambda a, b: b - a,
    "S_ADDC_U32 V_ADDC_CO_U32": lambda a, b, k: a + b + k,
    "S_SUBB_U32 V_SUBB_CO_U32": lambda a, b, k: a - b - k,
    "V_SUBBREV_CO_U32": lambda a, b, k: b - a - k,
    "S_MUL_I32 S_MUL_U64 V_MUL_LO_U32 V_MUL_LO_U16 V_PK_MUL_LO_U16": lambda a, b: a * b,
    "S_MUL_HI_U32 V_MUL_HI_U32 S_MUL_HI_I32 V_MUL_HI_I32": lambda a, b: a * b // 2**32,
    "V_MUL_U32_U24": lambda a, b: a % 2**24 * (b % 2**24),
    "V_MUL_I32_I24": lambda a, b: sign(a, 24) * sign(b, 24),
    "V_MAD_U32_U24": lambda a, b, c: a % 2**24 * (b % 2**24) + c,
    "V_MAD_I32_I24": lambda a, b, c: sign(a, 24) * sign(b, 24) + c,
    "V_MAD_U64_U32 V_MAD_I64_I32 V_MAD_U16 V_MAD_U32_U16 V_PK_MAD_U16": lambda a, b, c: a * b + c,
    "V_ADD3_U32": lambda a, b, c: a + b + c,
    "V_ADD_LSHL_U32": lambda a, b, c: (a + b) * 2 ** (c % 32),
    "V_LSHL_ADD_U32": lambda a, b, c: a * 2 ** (b % 32) + c,
    "V_LSHL_ADD_U64": lambda a, b, c: a * 2 ** (b % 8) + c,
    "V_XAD_U32": lambda a, b, c: (a ^ b) + c,
    "S_LSHL1_ADD_U32": lambda a, b: 2 * a + b,
    "S_LSHL2_ADD_U32": lambda a, b: 4 * a + b,
    "S_LSHL3_ADD_U32": lambda a, b: 8 * a + b,
    "S_LSHL4_ADD_U32": lambda a, b: 16 * a + b,
    "S_ABS_I32": lambda a: -a if a < 0 else a,
    "S_ABSDIFF_I32": lambda a, b: a - b if a > b else b - a,
    "V_SAD_U32": lambda a, b, c: (a - b if a > b else b - a) + c,
    "V_SAD_U8": lambda a, b, c: (
        sum(abs(x - y) for x, y in zip(a.to_bytes(4, "big"), b.to_bytes(4, "big"), strict=True)) + c
    ),
    "S_MIN_I32 S_MIN_U32 V_MIN_I32 V_MIN_U32 V_MIN_I16 V_MIN_U16 V_PK_MIN_I16": lambda a, b: sorted(
        (a, b)
    )[0],
    "S_MAX_I32 S_MAX_U32 V_MAX_I32 V_MAX_U32 V_MAX_I16 V_MAX_U16 V_PK_MAX_I16": lambda a, b: sorted(
        (a, b)
    )[1],
    "V_MIN3_I32 V_MIN3_U32 V_MIN3_I16 V_MIN3_U16": lambda *v: sorted(v)[0],
    "V_MAX3_I32 V_MAX3_U32 V_MAX3_I16 V_MAX3_U16": lambda *v: sorted(v)[2],
    "V_MED3_I32 V_MED3_U32 V_MED3_I16 V_MED3_U16": lambda *v: sorted(v)[1],
    "V_MINMAX_I32 V_MINMAX_U32": lambda a, b, c: (
        c if (a if a < b else b) < c else a if a < b else b
    ),
    "V_DOT4_I32_I8": lambda a, b, c: (
        sum(sign(a >> s, 8) * sign(b >> s, 8) for s in (0, 8, 16, 24)) + c
    ),
    "V_DOT4C_I32_I8": lambda a, b, d: (
        sum(sign(a >> s, 8) * sign(b >> s, 8) for s in (0, 8, 16, 24)) + d
    ),
    "V_DOT8_I32_I4": lambda a, b, c: c + _dot(a, b, 4, np.int8),
    "V_DOT8C_I32_I4": lambda a, b, d: d + _dot(a, b, 4, np.int8),
    "V_DOT8_U32_U4": lambda a, b, c: c + _dot(a, b, 4, np.uint8),
    "V_DOT2_I32_I16": lambda a, b, c: c + _dot(a, b, 16, np.int16),
    "V_DOT2C_I32_I16": lambda a, b, d: d + _dot(a, b, 16, np.int16),
    "V_DOT2_U32_U16": lambda a, b, c: c + _dot(a, b, 16, np.uint16),
    "V_DOT4_U32_U8": lambda a, b, c: (
        sum((a >> s) % 256 * (b >> s & 255) for s in (0, 8, 16, 24)) + c
    ),
}

NUMBERS: dict[str, Callable[..., Any]] = {
    "S_ADD_F32 S_ADD_F16 V_ADD_F32 V_ADD_F64 V_ADD_F16 V_PK_ADD_F16 V_PK_ADD_F32": np.add,
    "S_SUB_F32 S_SUB_F16 V_SUB_F32 V_SUB_F16": np.subtract,
    "V_SUBREV_F32 V_SUBREV_F16": lambda a, b: np.subtract(b, a),
    "S_MUL_F32 S_MUL_F16 V_MUL_F32 V_MUL_F64 V_MUL_F16 V_PK_MUL_F16 V_PK_MUL_F32": np.multiply,
    "V_MUL_LEGACY_F32": lambda a, b: F32(0) if 0 in (a, b) else np.multiply(a, b),
    "S_MAX_NUM_F32 S_MAX_NUM_F16 V_MAX_F32 V_MAX_F64 V_MAX_F16 V_PK_MAX_F16": larger,
    "S_MIN_NUM_F32 S_MIN_NUM_F16 V_MIN_F32 V_MIN_F64 V_MIN_F16 V_PK_MIN_F16": smaller,
    "V_MAX3_F32 V_MAX3_F16": lambda a, b, c: larger(a, larger(b, c)),
    "V_MIN3_F32 V_MIN3_F16": lambda a, b, c: smaller(a, smaller(b, c)),
    "V_MAXMIN_F16": lambda a, b, c: smaller(larger(a, b), c),
    "V_MINMAX_F16": lambda a, b, c: larger(smaller(a, b), c),
    "V_MAXIMUM_F32 S_MAXIMUM_F16 V_MAXIMUM_F16 V_MAXIMUM_F64": lambda a, b: _largest([a, b]),
    "V_MINIMUM_F32 S_MINIMUM_F16 V_MINIMUM_F16 V_MINIMUM_F64": lambda a, b: -_largest([-a, -b]),
    "V_MAXIMUM3_F32 V_MAXIMUM3_F16": lambda *v: _largest(v),
    "V_MINIMUM3_F32 V_MINIMUM3_F16": lambda *v: -_largest([-x for x in v]),
    "V_MAXIMUMMINIMUM_F32 V_MAXIMUMMINIMUM_F16": lambda a, b, c: -_largest([-_largest([a, b]), -c]),
    "V_MINIMUMMAXIMUM_F32 V_MINIMUMMAXIMUM_F16": lambda a, b, c: _largest([-_largest([-a, -b]), c]),
    "V_MED3_F32 V_MED3_F16": lambda a, b, c: (
        smaller(smaller(a, b), c) if np.isnan([a, b, c]).any() else np.sort([a, b, c])[1]
    ),
    "V_FMA_F32 V_PK_FMA_F32 V_FMA_MIX_F32 V_FMAAK_F32": fused,
    "V_FMAMK_F32": lambda a, b, c: fused(a, c, b),
    "V_FMAC_F32 S_FMAC_F32": lambda a, b, d: fused(a, b, d),
    "V_FMA_F64": fused64,
    "S_FMAC_F16 V_FMAC_F16": lambda a, b, d: fused64(F64(a), F64(b), F64(d)),
    "V_FMA_F16": lambda *v: fused64(*map(F64, v)),
    "S_CVT_HI_F32_F16": lambda a: half(a >> 16),
    "S_CVT_PK_RTZ_F16_F32 V_CVT_PKRTZ_F16_F32": lambda a, b: _cut_half(a) | _cut_half(b) << 16,
    "V_FMAC_F64": lambda a, b, d: fused64(a, b, d),
    "V_FMA_MIXLO_F16": fused,
    "V_DOT2C_F32_F16": lambda a, b, d: fused(
        half(a >> 16), half(b >> 16), fused(half(a), half(b), d)
    ),
    "V_DOT2_F32_F16": lambda a, b, c: fused(
        half(a >> 16), half(b >> 16), fused(half(a), half(b), c)
    ),
    "V_DOT2_BF16_BF16": _cut_dot,
    "V_LDEXP_F32 V_LDEXP_F64": lambda a, b: type(a)(
        np.ldexp(np.longdouble(a), min(max(b, -5000), 5000))
    ),
    "V_EXP_F32": lambda a: F32(2.0 ** F64(a)),
    "V_LOG_F32": lambda a: F32(np.log2(F64(a))),
    "V_RCP_F32": lambda a: F32(1) / a,
    "V_RCP_F64": lambda a: F64(1) / a,
    "V_RSQ_F32": lambda a: F32(F64(1) / F64(a) ** F64(0.5)) if a > 0 else F32(1 / np.sqrt(a)),
    "V_SQRT_F32 V_SQRT_F64": np.sqrt,
    "V_FRACT_F32": lambda a: (
        smaller(a - np.floor(a), np.nextafter(F32(1), F32(0))) if np.isfinite(a) else F32(np.nan)
    ),
    "V_DIV_FIXUP_F32": lambda a, b, c: fixed(a, b, c, -126, -150),
    "V_DIV_FIXUP_F64": lambda a, b, c: fixed(a, b, c, -1022, -1075),
    "V_CVT_F32_I32 V_CVT_F32_U32 S_CVT_F32_I32 S_CVT_F32_U32": lambda a: F32(a),
    "V_CVT_F64_I32 V_CVT_F64_U32 V_CVT_F64_F32": lambda a: F64(a),
    "V_CVT_F32_F64": lambda a: F32(a),
    "V_CVT_F16_F32 V_CVT_F32_F16 V_CVT_F16_I16 V_CVT_F16_U16": lambda a: F32(a),
    "V_CVT_PK_BF16_F32": lambda a, b: _bf16_bits(a) | _bf16_bits(b) << 16,
    "V_CVT_PK_F16_F32": lambda a, b: (
        int(np.float16(a).view(np.uint16)) + 65536 * int(np.float16(b).view(np.uint16))
    ),
    "V_CVT_I32_F32 V_CVT_I32_F64 S_CVT_I32_F32": lambda a: clamp(a, -(2**31), 2**31 - 1),
    "V_CVT_U32_F32 V_CVT_U32_F64 S_CVT_U32_F32": lambda a: clamp(a, 0, 2**32 - 1),
    "V_CVT_I16_F16": lambda a: clamp(a, -(2**15), 2**15 - 1),
    "V_CVT_U16_F16": lambda a: clamp(a, 0, 2**16 - 1),
    "V_CVT_F32_UBYTE0": lambda a: F32(a % 256),
    "V_CVT_F32_UBYTE1": lambda a: F32(a // 256 % 256),
    "V_CVT_F32_UBYTE2": lambda a: F32(a // 65536 % 256),
    "V_CVT_F32_UBYTE3": lambda a: F32(a // 2**24),
    "V_FREXP_MANT_F32 V_FREXP_MANT_F64": lambda a: np.frexp(a)[0],
    "V_FREXP_EXP_I32_F32 V_FREXP_EXP_I32_F64": lambda a: (
        int(np.frexp(a)[1]) if np.isfinite(a) else 0
    ),
    **{
        " ".join(f"{p}_{name}_{t}" for p, t in _TYPED): step
        for name, step in _ROUND.items()
        for _TYPED in [[("V", "F32"), ("V", "F64"), ("V", "F16"), ("S", "F32"), ("S", "F16")]]
    },
}

#: The flag: SCC, or a lane's carry.
FLAGS: dict[str, Callable[..., Any]] = {
    "S_ADD_U32 V_ADD_CO_U32": lambda a, b: a + b >= 2**32,
    "S_SUB_U32 V_SUB_CO_U32": lambda a, b: a - b < 0,
    "V_SUBREV_CO_U32": lambda a, b: b - a < 0,
    "S_ADDC_U32 V_ADDC_CO_U32": lambda a, b, k: a + b + k >= 2**32,
    "S_SUBB_U32 V_SUBB_CO_U32": lambda a, b, k: a - b - k < 0,
    "V_SUBBREV_CO_U32": lambda a, b, k: b - a - k < 0,
    "S_ADD_I32": lambda a, b: not -(2**31) <= a + b < 2**31,
    "S_SUB_I32": lambda a, b: not -(2**31) <= a - b < 2**31,
    "S_MIN_I32 S_MIN_U32": lambda a, b: a < b,
    "S_MAX_I32 S_MAX_U32": lambda a, b: not a < b,
    "V_MAD_U64_U32": lambda a, b, c: a * b + c % 2**64 >= 2**64,
    "V_MAD_I64_I32": lambda a, b, c: not -(2**63) <= a * b + c < 2**63,
    **{f"S_LSHL{n}_ADD_U32": lambda a, b, n=n: a * 2**n + b >= 2**32 for n in (1, 2, 3, 4)},
    "V_CMP_CLASS_F32": lambda a, b: any(
        b >> bit & 1 and is_one(np.uint32(a).view(F32)) for bit, is_one in enumerate(_CLASSES)
    ),
    "S_BITCMP0_B64": lambda a, b: not a // 2 ** (b % 64) % 2,
    "S_BITCMP1_B64": lambda a, b: a // 2 ** (b % 64) % 2 == 1,
    "S_BITCMP0_B32": lambda a, b: not a // 2 ** (b % 32) % 2,
    "S_BITCMP1_B32": lambda a, b: a // 2 ** (b % 32) % 2 == 1,
    **{
        f"V_CMP_{name}_{kind}": compare
        for name, compare in _COMPARE.items()
        for kind in ("I16", "U16", "I32", "U32", "I64", "U64")
    },
    **{
        f"V_CMP_{name}_{kind}": compare
        for kind in ("F16", "F32", "F64")
        for name, compare in _FLOAT_COMPARE.items()
    },
}


def flat(tables: list[dict[str, Callable[..., Any]]]) -> dict[str, Callable[..., Any]]:
    """One entry for each name."""
    return {
        name: step for table in tables for names, step in table.items() for name in names.split()
    }
