"""Constants of operands: those that have a number of their own, and literals, by type."""

from __future__ import annotations

import struct

#: Types of 64 bits, and of 16.
WIDE = frozenset({"i64", "u64", "f64"})
HALVES = frozenset({"i16", "u16", "f16"})
_FLOATS = {
    240: 0.5,
    241: -0.5,
    242: 1.0,
    243: -1.0,
    244: 2.0,
    245: -2.0,
    246: 4.0,
    247: -4.0,
}
#: Numbers of constants that are floats.
FLOAT_CONSTANTS = frozenset({*_FLOATS, 248})
_INV_2PI = {"f16": 0x3118, "u16": 0x3118, "i16": 0x3118, "f64": 0x3FC45F306DC9C882}


def inline_constant(number: int, kind: str) -> int | None:
    """The value of a constant's number for an operand of a type; None for one that is none."""
    if 128 <= number <= 192:
        return number - 128
    if 193 <= number <= 208:
        return 192 - number
    if number in _FLOATS:
        return _float_bits(_FLOATS[number], kind)
    if number == 248:
        return _INV_2PI.get(kind, 0x3E22F983)
    # Where flat addresses mean LDS and scratch: `access.py` has the same.
    return {235: 1 << 48, 237: 1 << 49}.get(number)


def _float_bits(value: float, kind: str) -> int:
    form = "<e" if kind in HALVES else "<d" if kind in WIDE else "<f"
    return int.from_bytes(struct.pack(form, value), "little", signed=kind in WIDE)


def literal_value(value: int, kind: str) -> int:
    """A literal of 32 bits: of a double the upper half, of a signed word with its sign."""
    if kind == "f64":
        return (value << 32) - ((value >> 31) << 64)
    if kind == "i64":
        return value - ((value >> 31) << 32)
    return value
