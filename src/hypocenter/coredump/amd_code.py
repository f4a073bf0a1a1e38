"""Code of AMD's GPUs as it lies in a dump: kernels of a loaded object, and accesses before a place.

Source: LLVM's user guide of the AMDGPU backend ("Code Object"), and the chapter "Microcode Formats"
of the CDNA3 manual, which is all that is read here. Executes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hypocenter.base.errors import BadCoreDump
from hypocenter.coredump.elf import NOTE, Elf, string_at

MAX_IMAGE_BYTES = 64 << 20
#: Instructions that are decoded of a kernel, and accesses that are looked at before a place.
MAX_INSTRUCTIONS, MAX_BEHIND = 1 << 16, 8
_PAGE_BYTES, _EM_AMDGPU, _METADATA = 4096, 224, 32
_DYNAMIC, _HASH, _STRTAB, _SYMTAB, _STRSZ = 2, 4, 5, 6, 10
_SYMBOL_BYTES, _MAX_SYMBOLS = 24, 1 << 16
#: Bytes of the opcodes from 16 on: loads, and from 24 on stores.
_WIDTHS = dict(enumerate((1, 1, 2, 2, 4, 8, 12, 16, 1, 1, 2, 2, 4, 8, 12, 16), 16))
_FIRST_STORE, _LAST_STORE, _FIRST_ATOMIC = 24, 31, 64

ReadMemory = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel of an object in memory: addresses are those on the GPU.

    `layout` has offset and bytes of each parameter that the program passes.
    """

    name: str
    descriptor: int
    entry: int
    kernarg_bytes: int
    layout: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CodeAccess:
    """A memory instruction at an address; `registers` is what its lanes' addresses are made of."""

    pc: int
    operation: str
    width_bytes: int
    word: int

    @property
    def is_scalar(self) -> bool:
        return self.word >> 26 & 0x3F == 0x30


def image_base(read: ReadMemory, pc: int) -> int | None:
    """Where the object that holds the instruction at `pc` begins: at the nearest ELF header."""
    base = pc & ~(_PAGE_BYTES - 1)
    for _ in range(MAX_IMAGE_BYTES // _PAGE_BYTES):
        head = read(base, 20)
        if not head:
            return None
        if head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") == _EM_AMDGPU:
            return base
        base -= _PAGE_BYTES
    return None


def loaded_kernels(read: ReadMemory, base: int, name: str) -> tuple[LoadedKernel, ...]:
    """The kernels of the object at `base`; raises BadCoreDump for one that makes no sense."""
    head = read(base, _PAGE_BYTES)
    elf = Elf(head, 0, len(head), name, by_segments=True)
    symbols = dict(_symbols(read, base, elf))
    found = []
    for facts in _metadata(read, base, elf, name):
        value = symbols.get(str(facts.get(".symbol")))
        if value is None:
            continue
        descriptor = base + value
        entry = descriptor + int.from_bytes(read(descriptor + 16, 8), "little", signed=True)
        layout = tuple(
            (int(part[".offset"]), int(part[".size"]))
            for part in facts.get(".args", ())
            if not str(part.get(".value_kind", "")).startswith("hidden_")
        )
        kernarg_bytes = int(facts.get(".kernarg_segment_size", 0))
        found.append(
            LoadedKernel(str(facts.get(".name")), descriptor, entry, kernarg_bytes, layout)
        )
    return tuple(found)


def _metadata(read: ReadMemory, base: int, elf: Elf, name: str) -> Sequence[Mapping[str, Any]]:
    for segment in elf.segments(NOTE):
        data = read(base + segment.address, min(segment.num_bytes, MAX_IMAGE_BYTES))
        at = 0
        while at + 12 <= len(data):
            owner, size, kind = (
                int.from_bytes(data[at + i : at + i + 4], "little") for i in (0, 4, 8)
            )
            first = at + 12 + (owner + 3 & ~3)
            if kind == _METADATA and data[at + 12 : at + 18] == b"AMDGPU":
                try:
                    decoded = msgspec.msgpack.decode(data[first : first + size])
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    raise BadCoreDump(name, f"has metadata that is no msgpack: {error}") from error
                kernels = decoded.get("amdhsa.kernels") if isinstance(decoded, dict) else None
                if isinstance(kernels, list):
                    return [kernel for kernel in kernels if isinstance(kernel, dict)]
            at = first + (size + 3 & ~3)
    return ()


def _symbols(read: ReadMemory, base: int, elf: Elf) -> Iterator[tuple[str, int]]:
    """Names and values of the dynamic symbols."""
    tables: dict[int, int] = {}
    for segment in elf.segments(_DYNAMIC):
        data = read(base + segment.address, min(segment.num_bytes, 1 << 16))
        for at in range(0, len(data) - 15, 16):
            tag = int.from_bytes(data[at : at + 8], "little")
            tables[tag] = int.from_bytes(data[at + 8 : at + 16], "little")
    if not {_HASH, _STRTAB, _SYMTAB, _STRSZ} <= tables.keys():
        return
    number = int.from_bytes(read(base + tables[_HASH] + 4, 4), "little")
    strings = read(base + tables[_STRTAB], min(tables[_STRSZ], MAX_IMAGE_BYTES))
    rows = read(base + tables[_SYMTAB], min(number, _MAX_SYMBOLS) * _SYMBOL_BYTES)
    for at in range(0, len(rows) - _SYMBOL_BYTES + 1, _SYMBOL_BYTES):
        value = int.from_bytes(rows[at + 8 : at + 16], "little")
        yield string_at(strings, int.from_bytes(rows[at : at + 4], "little")), value


# -- instructions of CDNA -------------------------------------------------------------------------


def instruction_bytes(word: int) -> int:
    """How many bytes an instruction of CDNA3 has, by its first four."""
    if not word >> 31:
        is_wide = word & 0x1FF in (249, 250, 255) or word >> 25 & 0x3F in (23, 24, 36, 37)
        return 8 if is_wide else 4
    if word >> 30 == 2:
        family = word >> 23
        if family == 0x17F:
            return 4
        if family == 0x17D:
            return 8 if word & 0xFF == 255 else 4
        if family != 0x17E and word >> 28 == 0xB:
            return 8 if word >> 23 & 0x1F == 20 else 4
        return 8 if 255 in (word & 0xFF, word >> 8 & 0xFF) else 4
    return 4 if word >> 26 == 0x35 else 8


def accesses_before(code: bytes, entry: int, pc: int) -> list[CodeAccess]:
    """Memory instructions between `entry` and `pc`, the nearest first."""
    found: list[CodeAccess] = []
    at = 0
    for _ in range(MAX_INSTRUCTIONS):
        if entry + at >= pc or at + 4 > len(code):
            break
        word = int.from_bytes(code[at : at + 4], "little")
        size = instruction_bytes(word)
        if size == 8 and (made := _access(entry + at, int.from_bytes(code[at : at + 8], "little"))):
            found.append(made)
        at += size
    return found[: -MAX_BEHIND - 1 : -1]


def _access(pc: int, word: int) -> CodeAccess | None:
    family, opcode = word >> 26 & 0x3F, word >> 18 & 0x7F
    if family == 0x30 and word >> 18 & 0xFF < 5:
        return CodeAccess(pc, "load", 4 << (word >> 18 & 0xFF), word)
    if family == 0x37 and word >> 14 & 3 != 1:
        return _vector_access(pc, word, opcode)
    if family == 0x38 and not word >> 16 & 1:
        return _vector_access(pc, word, opcode)
    return None


def _vector_access(pc: int, word: int, opcode: int) -> CodeAccess | None:
    if opcode >= _FIRST_ATOMIC:
        return CodeAccess(pc, "atomic", 8 if opcode >= 96 else 4, word)
    width = _WIDTHS.get(opcode, 2 if 32 <= opcode < 38 else 0)
    kind = "store" if _FIRST_STORE <= opcode <= _LAST_STORE else "load"
    return CodeAccess(pc, kind, width, word) if width else None


def lane_addresses(
    access: CodeAccess, scalars: Sequence[int], vectors: Sequence[Sequence[int]], active: int
) -> dict[int, int]:
    """The address that each active lane asks for, by the registers as they are now.

    `vectors` has a register's lanes at its number. Empty where a register is not known.
    """
    word = access.word
    family = word >> 26 & 0x3F
    lanes = [lane for lane in range(64) if active >> lane & 1]
    try:
        if family == 0x30:
            base = (word & 0x3F) * 2
            address = scalars[base] | scalars[base + 1] << 32
            if word >> 17 & 1:
                address += signed_number(word >> 32 & 0x1FFFFF, 21)
            if word >> 14 & 1:
                address += scalars[word >> 57 & 0x7F]
            return {lanes[0]: address & (1 << 64) - 1} if lanes else {}
        at = word >> 32 & 0xFF
        if family == 0x37:
            offset, base = signed_number(word & 0x1FFF, 13), word >> 48 & 0x7F
            if base != 0x7F and word >> 14 & 3 == 2:
                offset += scalars[base] | scalars[base + 1] << 32
                return {lane: vectors[at][lane] + offset for lane in lanes}
            return {
                lane: (vectors[at][lane] | vectors[at + 1][lane] << 32) + offset for lane in lanes
            }
        return _buffer_addresses(word, scalars, vectors, lanes)
    except IndexError:
        return {}


def _buffer_addresses(
    word: int, scalars: Sequence[int], vectors: Sequence[Sequence[int]], lanes: Sequence[int]
) -> dict[int, int]:
    """Those that are inside the buffer's own bounds; the others touch nothing."""
    at, first = word >> 32 & 0xFF, (word >> 48 & 0x1F) * 4
    low, high, records = scalars[first], scalars[first + 1], scalars[first + 2]
    base, stride, given = low | (high & 0xFFFF) << 32, high >> 16 & 0x3FFF, word >> 56 & 0xFF
    extra = given - 128 if 128 <= given <= 192 else scalars[given]
    has_index, has_offset = word >> 13 & 1, word >> 12 & 1
    found = {}
    for lane in lanes:
        index = vectors[at][lane] if has_index else 0
        offset = (word & 0xFFF) + (vectors[at + has_index][lane] if has_offset else 0)
        is_inside = offset + index * stride < records if not stride else index < records
        if is_inside:
            found[lane] = base + extra + index * stride + offset
    return found


def signed_number(value: int, num_bits: int) -> int:
    return value - (value >> num_bits - 1 << num_bits)
