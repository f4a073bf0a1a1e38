"""What instructions write to the register MODE, as far as it is known before a kernel runs.

FP16_OVFL makes of a finite number that is too large for 16 or 8 bits the largest one there is.
Triton sets it at the begin of each kernel that converts to 8 bits. One mode holds for a whole
kernel here: where code depends on it before it is set, or a branch goes past that, the instruction
stops the machine. Source: "MODE Register" in AMD's manuals; that infinite numbers stay what they
are was seen on RDNA4 by Mesa's compiler, against the manual's word for 8 bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hypocenter.device.amd.decode import Instruction
from hypocenter.device.amd.values.meanings import Meaning

#: The register's number; first bit and number of bits of FP16_OVFL.
_MODE, _OVERFLOW = 1, (23, 1)
#: Round to nearest, denormals kept: what compilers ask for, in the lowest bits.
PLAIN_FLOATS, _NUM_FLOAT_BITS = 0xF0, 8
_DEPENDS = re.compile(r"F16|FP8|BF8|MFMA|WMMA|SMFMAC")
_LARGEST_HALF = 65504.0
#: Their infinite results of finite operands are no overflow by the manual, and one as measured.
_POLES = re.compile(r"V_(S_)?(RCP|RSQ|LOG|DIV_FIXUP)_F16")


def settle(instructions: Sequence[Instruction], *, clamps: bool) -> tuple[bool, frozenset[int]]:
    """Whether FP16_OVFL holds for a kernel that begins with it as `clamps`, and the pcs of
    instructions that then change nothing."""
    written = {each.pc: found for each in instructions if (found := _write_of(each)) is not None}
    same = {pc for pc, (at, size, value) in written.items() if _is_plain(at, size, value)}
    bits = {pc: value for pc, (at, size, value) in written.items() if (at, size) == _OVERFLOW}
    if not bits or set(bits.values()) == {int(clamps)}:
        return clamps, frozenset(same | set(bits))
    first = min(bits)
    before = [each for each in instructions if each.pc < first]
    is_late = any(_DEPENDS.search(each.name) or _goes_past(each, first) for each in before)
    if is_late or len(set(bits.values())) > 1:
        return clamps, frozenset(same)
    return not clamps, frozenset(same | set(bits))


def _write_of(each: Instruction) -> tuple[int, int, int] | None:
    """First bit, number of bits and value of a constant that goes to MODE."""
    if each.name != "S_SETREG_IMM32_B32" or each.get("simm16") & 63 != _MODE:
        return None
    size = (each.get("simm16") >> 11) + 1
    return each.get("simm16") >> 6 & 31, size, each.get("literal") & ((1 << size) - 1)


def _is_plain(at: int, size: int, value: int) -> bool:
    return at + size <= _NUM_FLOAT_BITS and value == PLAIN_FLOATS >> at & ((1 << size) - 1)


def _goes_past(each: Instruction, pc: int) -> bool:
    """Whether a branch goes behind a place, or may."""
    if each.name in ("S_SETPC_B64", "S_SWAPPC_B64"):
        return True
    offset = each.get("simm16") - (each.get("simm16") & 0x8000) * 2
    is_branch = each.name.startswith(("S_BRANCH", "S_CBRANCH"))
    return is_branch and each.pc + 4 + 4 * offset > pc


def is_pole(name: str) -> bool:
    """Whether an opcode has a pole, of which is not known what the mode makes."""
    return _POLES.fullmatch(name) is not None


def hold_halves(meaning: Meaning) -> Meaning:
    """The meaning of an opcode in the mode: halves stop at the largest one."""
    if meaning.result_type == "f16":
        return replace(meaning, result=f"hold({meaning.result}, {_LARGEST_HALF})")
    text = re.sub(r"\bbits16\((\w+)\)", rf"bits16(hold(\1, {_LARGEST_HALF}))", meaning.result)
    return replace(meaning, result=text)
