"""Conversions between float32 and the two formats of 8 bits, and products of bytes whose signs the
instruction chooses: opcodes whose meaning depends on the target or on modifiers.

Source: AMD's ISA manuals of CDNA3, CDNA4 and RDNA4. gfx942 has the formats without -0 (FNUZ), the
others those of OCP. Stochastic rounding is not here: the manuals' pseudocode lets a fraction wrap
round without its exponent, and then rounds to nearest, which no purpose of it needs.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hypocenter.device.amd.decode import Instruction
from hypocenter.device.amd.values.meanings import Meaning

_CONVERSION = re.compile(
    r"V_CVT_(?P<scaled>SCALEF32_)?(?:(?P<two>PK_)?F32_(?P<source>FP8|BF8)|PK_(?P<dest>FP8|BF8)_F32)"
)


def small_number_meaning(each: Instruction, arch: str) -> tuple[Instruction, Meaning] | None:
    """The instruction without the modifiers that its meaning holds, and that meaning.

    None for one that is no conversion of 8 bits and no product of bytes.
    """
    if each.name == "V_DOT4_I32_IU8":
        signs = each.get("neg")
        text = f"dot_bytes(a, b, {bool(signs & 1)}, {bool(signs & 2)}) + c"
        return _with(each, neg=signs & 4), Meaning(("u32",) * 3, "u32", text)
    found = _CONVERSION.fullmatch(each.name)
    if found is None:
        return None
    kind = found["source"] or found["dest"]
    form = (0 if kind == "FP8" else 1) + (2 if arch == "gfx942" else 0)
    if found["dest"]:
        return each, _to_bytes(form, is_scaled=bool(found["scaled"]))
    chosen = each.get("opsel")
    if found["two"]:
        byte = 2 * (chosen & 1)
    elif found["scaled"]:
        byte = chosen & 3
    else:
        byte = (chosen & 1) << 1 | (chosen >> 1) & 1  # RDNA4 has these two bits in reverse
    plain = _with(each, opsel=0)
    return plain, _from_bytes(form, byte, 2 if found["two"] else 1, is_scaled=bool(found["scaled"]))


def _to_bytes(form: int, *, is_scaled: bool) -> Meaning:
    """Two numbers into a half of the destination."""
    over = " / e8m0(c)" if is_scaled else ""
    first, second = (f"bits_fp8(np.float64({name}){over}, {form})" for name in "ab")
    kinds = ("f32", "f32", "u32") if is_scaled else ("f32", "f32")
    return Meaning(kinds, "u16", f"{first} | {second} << 8")


def _from_bytes(form: int, byte: int, count: int, *, is_scaled: bool) -> Meaning:
    """One number, or two in a pair of registers, from `byte` on."""
    times = " * e8m0(b)" if is_scaled else ""
    numbers = [
        f"np.float32(as_fp8((a >> {8 * (byte + i)}) & 255, {form}){times})" for i in range(count)
    ]
    kinds = ("u32", "u32") if is_scaled else ("u32",)
    if count == 1:
        return Meaning(kinds, "f32", numbers[0])
    return Meaning(kinds, "u64", f"bits32({numbers[0]}) | bits32({numbers[1]}) << 32")


def _with(each: Instruction, **fields: int) -> Instruction:
    return replace(each, fields={**each.fields, **fields})
