"""The memory instruction of NVIDIA's machine code at a fault, and the address that it asked for.

Instructions of 16 bytes, sm_70 and later. The fields are those that `nvdisasm` shows for code of
sm_80, sm_90 and sm_100; tests hold them against it. Everything else is only asked which registers
it overwrites, since lanes go on behind the instruction at fault before they stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INSTRUCTION_BYTES = 16
#: Behind the fault a warp goes on for some instructions; farther off nothing is followed.
MAX_BEHIND = 256
WORD = (1 << 32) - 1
_NONE = 255  # the register that is always zero
_ALWAYS = 7  # the predicate that is always true

_LOADS, _STORES = {0x180, 0x181}, {0x185, 0x186}
#: Atomics with a result, and those without.
_ATOMICS, _REDUCTIONS = {0x18A, 0x1A8, 0x1A9}, {0x18E, 0x1A6}
#: A copy from global to shared memory, whose target is no register that matters here.
_COPY_ASYNC = 0x1AE
_WIDTHS = (1, 1, 2, 2, 4, 8, 16, 16)
#: Opcodes that write several registers whatever their width says, and how many.
_PAIRS = {0x025: 2, 0x005: 2, 0x028: 2, 0x029: 2, 0x02B: 2, 0x03C: 4, 0x037: 4, 0x03F: 4, 0x03B: 4}
#: Loads from constant, shared and local memory, whose width says how many.
_OTHER_LOADS = {0x182, 0x183, 0x184}
#: What writes predicates, memory or uniform registers alone.
_PLAIN_OPCODES = (
    0x187, 0x188, 0x1AE, 0x1AF, 0x11A, 0x118, 0x00B, 0x00C, 0x01C, 0x02A, 0x034, 0x1C2, 0x1C3,
    0x1AC, 0x191, *range(0x080, 0x0C0), *range(0x140, 0x160),
)  # fmt: skip
_WRITE_NO_REGISTER = _STORES | _REDUCTIONS | {*_PLAIN_OPCODES}
#: Matrix and texture instructions write more registers than are followed here.
_WRITE_MANY = {0x1F0, 0x1F1, *range(0x160, 0x180)}


@dataclass(frozen=True, slots=True)
class MemoryInstruction:
    """`register` is the lower half of the address, `offset` is added to it.

    `width_bytes` is 0 where it is not told; `predicate` is the number of the one that guards it,
    7 for none.
    """

    operation: str
    width_bytes: int
    register: int
    offset: int
    predicate: int = _ALWAYS
    is_negated: bool = False

    def runs(self, predicates: Sequence[int]) -> bool:
        """Whether a lane with these predicates runs it, as far as they are known."""
        if self.predicate >= len(predicates):
            return True
        return bool(predicates[self.predicate]) is not self.is_negated

    def address(self, registers: Sequence[int], known: int) -> int:
        """The address of a lane, in the bits of `known`; 0 where it lacks a register."""
        if self.register + 1 >= len(registers):
            return 0
        low, high = registers[self.register], registers[self.register + 1]
        return ((high << 32 | low) + self.offset) & known


def memory_instruction(code: bytes) -> MemoryInstruction | None:
    """The load, store or atomic through a 64-bit address in the first 16 bytes of `code`."""
    if len(code) < INSTRUCTION_BYTES:
        return None
    low, high = (int.from_bytes(code[at : at + 8], "little") for at in (0, 8))
    opcode, width = low & 0x1FF, _WIDTHS[high >> 9 & 7]
    offset = (low >> 40 ^ 0x800000) - 0x800000
    if opcode in _LOADS | {_COPY_ASYNC}:
        operation = "load"
        if opcode == _COPY_ASYNC:  # its width lies elsewhere on each architecture
            offset, width = low >> 32 & 0xFFF, 0
    elif opcode in _STORES:
        operation = "store"
    elif opcode in _ATOMICS | _REDUCTIONS:
        operation, width = "atomic", 4
    else:
        return None
    register = low >> 24 & 0xFF
    is_wide = bool(high >> 8 & 1) or opcode == _COPY_ASYNC
    if register == _NONE or not is_wide:  # an address of 32 bits
        return None
    return MemoryInstruction(operation, width, register, offset, low >> 12 & 7, bool(low >> 15 & 1))


def known_bits(instruction: MemoryInstruction, code: bytes) -> int:
    """Which bits of the address the registers still hold behind `code`, which begins with it.

    Both halves, the lower one, or none: a carry makes the upper half useless by itself.
    """
    gone: set[int] = set()
    for at in range(0, len(code) - INSTRUCTION_BYTES + 1, INSTRUCTION_BYTES):
        gone |= _overwritten(code[at : at + INSTRUCTION_BYTES])
    if instruction.register in gone:
        return 0
    return WORD if instruction.register + 1 in gone else WORD << 32 | WORD


def _overwritten(code: bytes) -> set[int]:
    low, high = (int.from_bytes(code[at : at + 8], "little") for at in (0, 8))
    opcode, target = low & 0x1FF, low >> 16 & 0xFF
    if opcode in _WRITE_MANY:
        return set(range(_NONE))
    if opcode in _WRITE_NO_REGISTER or target == _NONE:
        return set()
    number = _PAIRS.get(opcode, 1)
    if opcode in _LOADS | _OTHER_LOADS:
        number = max(1, _WIDTHS[high >> 9 & 7] // 4)
    return set(range(target, target + number))
