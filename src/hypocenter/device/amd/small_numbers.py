"""Conversions between numbers of 32 or 16 bits and those of 8 or 4, and products of bytes whose
signs the instruction chooses: opcodes whose meaning depends on the target or on modifiers.

Source: AMD's ISA manuals of CDNA3, CDNA4 and RDNA4. gfx942 has the formats without -0 (FNUZ), the
others those of OCP. Stochastic rounding is not here: the manuals' pseudocode lets a fraction wrap
round without its exponent, and then rounds to nearest, which no purpose of it needs.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hypocenter.device.amd.decode import Instruction, NotModelled
from hypocenter.device.amd.values.meanings import Meaning

_CONVERSION = re.compile(
    r"V_CVT_(?P<scaled>SCALEF32_)?"
    r"(?:(?P<two>PK_)?(?P<wide>F32|F16|BF16)_(?P<source>FP8|BF8|FP4)"
    r"|PK_(?P<dest>FP8|BF8)_(?P<given>F32|F16|BF16))"
)
_LARGEST_HALF = 65504.0
#: Products whose signs NEG chooses, by the bits of a number.
_PRODUCTS = {"V_DOT4_I32_IU8": 8, "V_DOT8_I32_IU4": 4}
#: The largest finite numbers of the forms of `as_fp8`.
_LARGEST = (448.0, 57344.0, 240.0, 57344.0)


def small_number_meaning(
    each: Instruction, arch: str, *, clamps: bool = False
) -> tuple[Instruction, Meaning] | None:
    """The instruction without the modifiers that its meaning holds, and that meaning; `clamps` is
    the mode FP16_OVFL.

    None for one that is no conversion of 8 bits and no product of bytes.
    """
    if each.name in _PRODUCTS:
        signs, width = each.get("neg"), _PRODUCTS[each.name]
        text = f"dot_parts(a, b, {width}, {bool(signs & 1)}, {bool(signs & 2)}) + c"
        return _with(each, neg=signs & 4), Meaning(("u32",) * 3, "u32", text)
    found = _CONVERSION.fullmatch(each.name)
    if found is None:
        return None
    kind = found["source"] or found["dest"]
    form = (0 if kind == "FP8" else 1) + (2 if arch == "gfx942" else 0)
    is_scaled = bool(found["scaled"])
    if found["given"] == "F32":
        return each, _to_bytes(form, is_scaled=is_scaled, clamps=clamps)
    if found["dest"]:
        return _halves_to_bytes(each, form, found["given"], clamps=clamps)
    chosen, plain = each.get("opsel"), _with(each, opsel=0)
    form = _FP4 if kind == "FP4" else form
    if found["two"]:
        shift = 8 * (chosen & 3) if form == _FP4 else 16 * (chosen & 1)
        return plain, _from_codes(form, shift, found["wide"], is_scaled=is_scaled, clamps=clamps)
    if not is_scaled:
        chosen = (chosen & 1) << 1 | (chosen >> 1) & 1  # RDNA4 has these two bits in reverse
    number = _number(form, 8 * (chosen & 3), is_scaled=is_scaled)
    kinds = ("u32", "u32") if is_scaled else ("u32",)
    if found["wide"] == "F32":
        return plain, Meaning(kinds, "f32", f"np.float32({number})")
    return plain, Meaning(kinds, "u32", _into_half(chosen >> 3, _bits("F16", number, clamps)))


_FP4 = 4


def _to_bytes(form: int, *, is_scaled: bool, clamps: bool) -> Meaning:
    """Two numbers into a half of the destination."""
    numbers = [f"np.float64({name})" + (" / e8m0(c)" if is_scaled else "") for name in "ab"]
    kinds = ("f32", "f32", "u32") if is_scaled else ("f32", "f32")
    return Meaning(kinds, "u16", _pair_of_codes(numbers, form, clamps))


def _halves_to_bytes(
    each: Instruction, form: int, kind: str, *, clamps: bool
) -> tuple[Instruction, Meaning]:
    """The two halves of a register, over a scale, into a half of the destination."""
    if each.get("neg") & 1 or each.get("abs") & 1:
        raise NotModelled(f"{each.name} with a sign changed")
    read = f"as_{kind.lower()}"
    numbers = [f"np.float64({read}({word} & 0xFFFF)) / e8m0(b)" for word in ("a", "(a >> 16)")]
    codes = _pair_of_codes(numbers, form, clamps)
    text = _into_half(each.get("opsel") >> 3, codes)
    return _with(each, opsel=0), Meaning(("u32", "u32"), "u32", text)


def _pair_of_codes(numbers: list[str], form: int, clamps: bool) -> str:
    if clamps:
        numbers = [f"hold({number}, {_LARGEST[form]})" for number in numbers]
    first, second = (f"bits_fp8({number}, {form})" for number in numbers)
    return f"{first} | {second} << 8"


def _from_codes(form: int, shift: int, kind: str, *, is_scaled: bool, clamps: bool) -> Meaning:
    """Two numbers from `shift` on: a register of halves, or two registers of float32."""
    step = 4 if form == _FP4 else 8
    numbers = [_number(form, shift + step * i, is_scaled=is_scaled) for i in (0, 1)]
    first, second = (_bits(kind, number, clamps) for number in numbers)
    width, result = (32, "u64") if kind == "F32" else (16, "u32")
    kinds = ("u32", "u32") if is_scaled else ("u32",)
    return Meaning(kinds, result, f"{first} | {second} << {width}")


def _number(form: int, shift: int, *, is_scaled: bool) -> str:
    code = f"as_fp4(a >> {shift})" if form == _FP4 else f"as_fp8((a >> {shift}) & 255, {form})"
    return f"{code} * e8m0(b)" if is_scaled else code


def _bits(kind: str, number: str, clamps: bool) -> str:
    if kind == "F32":
        return f"bits32(np.float32({number}))"
    if kind == "BF16":
        return f"bits_bf16({number})"
    return f"bits16(hold({number}, {_LARGEST_HALF}))" if clamps else f"bits16({number})"


def _into_half(which: int, bits: str) -> str:
    """The destination with one of its halves anew."""
    return f"d & 0xFFFF | ({bits}) << 16" if which & 1 else f"d & 0xFFFF0000 | {bits}"


def _with(each: Instruction, **fields: int) -> Instruction:
    return replace(each, fields={**each.fields, **fields})
