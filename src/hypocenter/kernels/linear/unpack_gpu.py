"""Codes of block types as f16, in the registers that feed the matrix units of a GPU.

A weight is code times scale, plus minimum, rounded to f16 once. NVIDIA's GPUs do it for two codes
by one instruction.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.weights.gpu_layout import CODE_LANES

#: Words of a unit of eight rows.
UNIT_WORDS = tl.constexpr(16 * CODE_LANES)
_LANES = tl.constexpr(CODE_LANES)
#: Which halves of a word an f16 is taken from, twice: "prmt" of the PTX ISA.
LOW, HIGH = tl.constexpr(0x1010), tl.constexpr(0x3232)


@triton.jit
def nibbles(
    word,
    scale,
    low,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
):
    """Eight codes of a word as four pairs of f16: 1024 + a code, or 16 of them, is its bits.

    FIRST and LAST say which half of `scale` (and `low`) the first and the last four take.
    """
    if HAS_MINIMA:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, s, m; prmt.b32 s, $5, 0, $7; prmt.b32 m, $6, 0, $7; shr.u32 t, $4, 8;"
            "lop3.b32 $0, $4, 0x000F000F, $9, 0xEA;"
            "lop3.b32 $1, $4, 0x00F000F0, $9, 0xEA;"
            "lop3.b32 $2, t, 0x000F000F, $9, 0xEA;"
            "lop3.b32 $3, t, 0x00F000F0, $9, 0xEA;"
            "sub.f16x2 $0, $0, $9; fma.rn.f16x2 $1, $1, $10, $11;"
            "sub.f16x2 $2, $2, $9; fma.rn.f16x2 $3, $3, $10, $11;"
            "fma.rn.f16x2 $0, $0, s, m; fma.rn.f16x2 $1, $1, s, m;"
            "prmt.b32 s, $5, 0, $8; prmt.b32 m, $6, 0, $8;"
            "fma.rn.f16x2 $2, $2, s, m; fma.rn.f16x2 $3, $3, s, m; }",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
            [word, scale, low, FIRST, LAST, 0x64006400, 0x2C002C00, -0x2BFF2C00],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, s; prmt.b32 s, $5, 0, $6; shr.u32 t, $4, 8;"
            "lop3.b32 $0, $4, 0x000F000F, $11, 0xEA;"
            "lop3.b32 $1, $4, 0x00F000F0, $11, 0xEA;"
            "lop3.b32 $2, t, 0x000F000F, $11, 0xEA;"
            "lop3.b32 $3, t, 0x00F000F0, $11, 0xEA;"
            "sub.f16x2 $0, $0, $8; fma.rn.f16x2 $1, $1, $9, $10;"
            "sub.f16x2 $2, $2, $8; fma.rn.f16x2 $3, $3, $9, $10;"
            "mul.f16x2 $0, $0, s; mul.f16x2 $1, $1, s; prmt.b32 s, $5, 0, $7;"
            "mul.f16x2 $2, $2, s; mul.f16x2 $3, $3, s; }",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
            [
                word,
                scale,
                FIRST,
                LAST,
                0x64006400 + 0x10001 * ZERO,
                0x2C002C00,
                -0x2BFF2C00 + 0x100010 * ZERO,
                0x64006400,
            ],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def four_bytes(word, scale, low, WHICH: tl.constexpr, HAS_MINIMA: tl.constexpr):
    """Four signed codes of a word as two pairs of f16; WHICH half of `scale` they take."""
    if HAS_MINIMA:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, s, m; prmt.b32 s, $3, 0, $5; prmt.b32 m, $4, 0, $5;"
            "xor.b32 t, $2, 0x80808080;"
            "prmt.b32 $0, t, 0x64646464, 0x4140; prmt.b32 $1, t, 0x64646464, 0x4342;"
            "sub.f16x2 $0, $0, $6; sub.f16x2 $1, $1, $6;"
            "fma.rn.f16x2 $0, $0, s, m; fma.rn.f16x2 $1, $1, s, m; }",
            "=&r,=&r,r,r,r,r,r",
            [word, scale, low, WHICH, 0x64806480],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, s; prmt.b32 s, $3, 0, $4; xor.b32 t, $2, 0x80808080;"
            "prmt.b32 $0, t, 0x64646464, 0x4140; prmt.b32 $1, t, 0x64646464, 0x4342;"
            "sub.f16x2 $0, $0, $5; sub.f16x2 $1, $1, $5;"
            "mul.f16x2 $0, $0, s; mul.f16x2 $1, $1, s; }",
            "=&r,=&r,r,r,r,r",
            [word, scale, WHICH, 0x64806480],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _both(pair):
    """The two f16 of a word."""
    even, odd = tl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [pair],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )
    return tl.join(even, odd)


@triton.jit
def _number(code, scale, low, HIGH: tl.constexpr, HAS_MINIMA: tl.constexpr):
    """code times an f16 of `scale`, plus that of `low`, as f16."""
    shift: tl.constexpr = 16 if HIGH else 0
    value = code.to(tl.float32) * _half(scale >> shift)
    if HAS_MINIMA:
        value += _half(low >> shift)
    return value.to(tl.float16)


@triton.jit
def _half(word):
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _weights(words, scale, low, PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
             HAS_MINIMA: tl.constexpr, ON_NVIDIA: tl.constexpr, NUM: tl.constexpr):  # fmt: skip
    """Words and scales i32 [NUM, 8, 4, 4] as f16 [NUM * 8, columns of a unit].

    A thread's words hold what it feeds to a matrix unit, in place: nothing is moved.
    """
    SHORT: tl.constexpr = GROUP == 16
    if PER_WORD == 8:
        if ON_NVIDIA:
            p0, p1, p2, p3 = nibbles(
                words, scale, low, LOW, HIGH if SHORT else LOW, ZERO, HAS_MINIMA
            )
            a, b, c, d = _both(p0), _both(p1), _both(p2), _both(p3)
        else:
            a = tl.join(
                _number((words & 15) - ZERO, scale, low, False, HAS_MINIMA),
                _number(((words >> 16) & 15) - ZERO, scale, low, False, HAS_MINIMA),
            )
            b = tl.join(
                _number(((words >> 4) & 15) - ZERO, scale, low, False, HAS_MINIMA),
                _number(((words >> 20) & 15) - ZERO, scale, low, False, HAS_MINIMA),
            )
            c = tl.join(
                _number(((words >> 8) & 15) - ZERO, scale, low, SHORT, HAS_MINIMA),
                _number(((words >> 24) & 15) - ZERO, scale, low, SHORT, HAS_MINIMA),
            )
            d = tl.join(
                _number(((words >> 12) & 15) - ZERO, scale, low, SHORT, HAS_MINIMA),
                _number(((words >> 28) & 15) - ZERO, scale, low, SHORT, HAS_MINIMA),
            )
        # [NUM, row, t, word, even and odd, pair, chunk]
        numbers = tl.join(tl.join(a, b), tl.join(c, d))
        return tl.reshape(tl.permute(numbers, (0, 1, 3, 6, 5, 2, 4)), (NUM * 8, 128))
    else:
        if ON_NVIDIA:
            p0, p1 = four_bytes(words, scale, low, LOW, HAS_MINIMA)
            a, b = _both(p0), _both(p1)
        else:
            a = tl.join(
                _number((words << 24) >> 24, scale, low, False, HAS_MINIMA),
                _number((words << 16) >> 24, scale, low, False, HAS_MINIMA),
            )
            b = tl.join(
                _number((words << 8) >> 24, scale, low, False, HAS_MINIMA),
                _number(words >> 24, scale, low, False, HAS_MINIMA),
            )
        return tl.reshape(tl.permute(tl.join(a, b), (0, 1, 3, 5, 2, 4)), (NUM * 8, 64))


@triton.jit
def _scales(at, inside, PER_WORD: tl.constexpr, GROUP: tl.constexpr, NUM: tl.constexpr):
    """What words [NUM, 8, 4, 4] of units are scaled by, i32: an f16 in the lower half, or two."""
    if GROUP == 32 and PER_WORD == 4:
        # A scale for two words: two scales are read at once.
        at = at.to(tl.pointer_type(tl.int32), bitcast=True)
        pair = tl.load(at[:, None] + tl.arange(0, 8)[None, :], mask=inside[:, None], other=0)
        both = tl.join(pair & 0xFFFF, (pair >> 16) & 0xFFFF)
        both = tl.broadcast_to(tl.reshape(both, (NUM, 8, 1, 2, 1)), (NUM, 8, 4, 2, 2))
        return tl.reshape(both, (NUM, 8, 4, 4))
    else:
        if GROUP == 16 and PER_WORD == 8:
            at = at.to(tl.pointer_type(tl.int32), bitcast=True)
        else:
            at = at.to(tl.pointer_type(tl.int16), bitcast=True)
        own = tl.load(at[:, None] + tl.arange(0, 32)[None, :], mask=inside[:, None], other=0)
        own = tl.reshape(own.to(tl.int32), (NUM, 8, 1, 4))
        return tl.broadcast_to(own, (NUM, 8, 4, 4))


@triton.jit
def unit_weights(
    words_ptr, scales_ptr, minima_ptr, unit, inside, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, ON_NVIDIA: tl.constexpr,
    NUM: tl.constexpr,
):  # fmt: skip
    """f16 [NUM * 8, columns]: the units [NUM] of eight rows each, where `inside`, else 0."""
    at = words_ptr + (unit * UNIT_WORDS)[:, None] + tl.arange(0, UNIT_WORDS)[None, :]
    words = tl.reshape(tl.load(at, mask=inside[:, None], other=0), (NUM, 8, 4, 4))
    # In elements of f16, or in words where one holds what a word is scaled by.
    PER_UNIT: tl.constexpr = 16 * _LANES * PER_WORD // GROUP
    scale = _scales(scales_ptr + unit * PER_UNIT, inside, PER_WORD, GROUP, NUM)
    low = scale
    if HAS_MINIMA:
        low = _scales(minima_ptr + unit * PER_UNIT, inside, PER_WORD, GROUP, NUM)
    return _weights(words, scale, low, PER_WORD, GROUP, ZERO, HAS_MINIMA, ON_NVIDIA, NUM)
