"""Which parameters of a kernel an address was made of, by the machine code before the access.

Walks back from the access over what wrote its registers, to constant bank 0, where parameters lie.
Behind the first branch the order is not followed: whatever writes such a register anywhere in the
function counts. So a parameter may be told that had no part in it, and none is left out. What was
loaded from memory is not followed: that is an index, or another address.

Fields of instructions as `nvdisasm` shows them for sm_80, sm_90 and sm_100; tests hold them to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypocenter.coredump.sass import INSTRUCTION_BYTES, MemoryInstruction

#: Functions that are longer are not looked at.
MAX_CODE_BYTES = 1 << 20
#: Where parameters begin in constant bank 0, from which architecture on.
_PARAMETERS_AT = ((100, 0x380), (90, 0x210), (70, 0x160))
_NONE, _UNIFORM_NONE, _ALWAYS = 255, 63, 7
_WIDTHS = (1, 1, 2, 2, 4, 8, 16, 16)

#: Opcodes: loads from constant memory to registers and to uniform ones, a newer form of it.
_LDC, _ULDC, _LDCU = 0x182, 0x0B9, 0x1AC
#: Loads from elsewhere, and atomics with a result: what they give is not followed.
_LOADED = {0x180, 0x181, 0x183, 0x184, 0x18A, 0x1A8, 0x1A9}
#: What has no source among registers: S2R, CS2R, S2UR, votes.
_OF_NOTHING = {0x119, 0x005, 0x1C3, 0x006, 0x086}
#: MOV and UMOV have one source, whatever stands in the fields of the others.
_MOVES = {0x002, 0x082}
#: To a uniform register from another one.
_R2UR, _S2UR = 0x1C2, 0x1C3
#: Branches, calls, returns and what joins again: there a block of code ends.
_BRANCHES = {0x147, 0x149, 0x14A, 0x14C, 0x143, 0x144, 0x150, 0x151, 0x141, 0x142, 0x145, 0x118}
#: Write two registers: products whose last operand has 64 bits, and all that has 64 bits alone.
_PRODUCTS, _OF_64 = {0x025, 0x0A5}, {0x028, 0x029, 0x02B}
#: The uniform unit's own instructions.
_UNIFORM = range(0x080, 0x0C0)

#: A register: whether it is a uniform one, and its number.
_Register = tuple[bool, int]


@dataclass(frozen=True, slots=True)
class Sources:
    """Offsets in the parameters that may have gone into an address, and whether something of 8
    bytes from memory may have: an address itself, or an index."""

    parameters: tuple[int, ...] = ()
    is_loaded: bool = False


@dataclass(frozen=True, slots=True)
class _Instruction:
    """What one writes (`targets`), and reads: registers, and offsets in constant bank 0.

    `is_load`: it gives 8 bytes or more of memory.
    """

    targets: frozenset[_Register]
    registers: frozenset[_Register]
    constants: frozenset[int]
    is_guarded: bool
    is_branch: bool
    is_load: bool


def parameter_sources(
    code: bytes, at: int, access: MemoryInstruction, architecture: int
) -> Sources:
    """Of what the address of the access at byte `at` may be made.

    `code` is the kernel's, whole; `architecture` 90 for sm_90. Nothing where that is not known.
    """
    base = next((first for sm, first in _PARAMETERS_AT if architecture >= sm), None)
    if base is None or len(code) > MAX_CODE_BYTES or not 0 <= at < len(code):
        return Sources()
    instructions = [
        _decode(code[start : start + INSTRUCTION_BYTES])
        for start in range(0, len(code) - INSTRUCTION_BYTES + 1, INSTRUCTION_BYTES)
    ]
    targets = set(_branch_targets(code, architecture))
    wanted: set[_Register] = {(False, access.register), (False, access.register + 1)}
    found: set[int] = set()
    is_loaded = False
    number = at // INSTRUCTION_BYTES
    while number > 0 and number not in targets:
        number -= 1
        instruction = instructions[number]
        if instruction.is_branch:
            break
        if written := instruction.targets & wanted:
            wanted -= set() if instruction.is_guarded else written
            wanted |= instruction.registers
            found |= instruction.constants
            is_loaded |= instruction.is_load
    if number > 0:
        more, is_more_loaded = _anywhere(instructions, wanted)
        is_loaded |= is_more_loaded
        if is_loaded and more - found:
            # An address that was loaded may be all there is; these may belong to other code.
            return Sources(is_loaded=True)
        found |= more
    return Sources(tuple(sorted(offset - base for offset in found if offset >= base)), is_loaded)


def _anywhere(instructions: list[_Instruction], wanted: set[_Register]) -> tuple[set[int], bool]:
    """Constants that what writes these registers reads, wherever it stands; whether it loads."""
    found: set[int] = set()
    is_loaded = False
    seen: set[_Register] = set()
    while new := wanted - seen:
        seen |= new
        wanted = set()
        for instruction in instructions:
            if instruction.targets & new:
                wanted |= instruction.registers
                found |= instruction.constants
                is_loaded |= instruction.is_load
    return found, is_loaded


def _branch_targets(code: bytes, architecture: int) -> Iterator[int]:
    """Numbers of the instructions to which branches of the function go."""
    is_long = architecture >= 100
    for start in range(0, len(code) - INSTRUCTION_BYTES + 1, INSTRUCTION_BYTES):
        low, high = (int.from_bytes(code[start + n : start + n + 8], "little") for n in (0, 8))
        if low & 0x1FF in _BRANCHES:
            # A distance in units of 4 bytes, from the instruction behind.
            distance, bits = (high & 0x3FFFF) << 30 | low >> 34, 48
            if is_long:
                distance, bits = distance << 8 | low >> 16 & 0xFF, 56
            distance -= (distance >> bits - 1) << bits
            yield start // INSTRUCTION_BYTES + 1 + distance * 4 // INSTRUCTION_BYTES


def _decode(text: bytes) -> _Instruction:
    low, high = (int.from_bytes(text[at : at + 8], "little") for at in (0, 8))
    opcode, form = low & 0x1FF, low >> 9 & 7
    is_guarded = low >> 12 & 7 != _ALWAYS or bool(low >> 15 & 1)
    is_branch = opcode in _BRANCHES
    registers, constants = _sources(low, high, opcode, form)
    is_load = opcode in _LOADED and _WIDTHS[high >> 9 & 7] >= 8
    targets = frozenset(_targets(low, high, opcode))
    return _Instruction(targets, registers, constants, is_guarded, is_branch, is_load)


def _targets(low: int, high: int, opcode: int) -> Iterator[_Register]:
    is_uniform = opcode in _UNIFORM or opcode in (_LDCU, _R2UR, _S2UR)
    target = low >> 16 & 0xFF
    if target == _NONE or (is_uniform and target >= _UNIFORM_NONE):
        return
    number = 2 if opcode in _PRODUCTS | _OF_64 else 1
    if opcode in _LOADED | {_LDC, _ULDC, _LDCU}:
        number = max(1, _WIDTHS[high >> 9 & 7] // 4)
    for at in range(number):
        yield is_uniform, target + at


def _sources(
    low: int, high: int, opcode: int, form: int
) -> tuple[frozenset[_Register], frozenset[int]]:
    """Registers and constants that are read; more where a field that means nothing has a number."""
    if opcode in _LOADED | _OF_NOTHING:
        return frozenset(), frozenset()
    constant = (low >> 40 & 0x3FFF) * 4
    if opcode == _LDCU:
        return frozenset(), frozenset({low >> 37 & 0xFFFF} if not low >> 53 & 0x1F else ())
    if opcode in (_LDC, _ULDC):
        return frozenset(), frozenset({constant} if not low >> 54 & 0x1F else ())
    is_uniform = opcode in _UNIFORM
    first, second, third = low >> 24 & 0xFF, low >> 32 & 0xFF, high & 0xFF
    plain = [] if opcode in _MOVES else [first] if opcode == _R2UR else [first, third]
    registers: set[_Register] = {(is_uniform, number) for number in plain}
    constants: set[int] = set()
    if form == 1:
        registers.add((is_uniform, second))
    elif form in (3, 5) and not low >> 54 & 0x1F:
        constants.add(constant)
    elif form in (6, 7):
        registers.add((True, low >> 32 & 0x3F))
    none = {(False, _NONE), (True, _NONE), (True, _UNIFORM_NONE)}
    # The upper half of a pair comes along.
    wide = registers - none if opcode in _OF_64 else set()
    if opcode in _PRODUCTS:
        wide = {(True, low >> 32 & 0x3F)} if form == 7 else {(is_uniform, third)}
    pairs = {(kind, number + 1) for kind, number in wide - none}
    return frozenset((registers | pairs) - none), frozenset(constants)
