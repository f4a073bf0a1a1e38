"""AMD's machine code as instructions: names, fields, sizes, whole or not at all.

The bit layouts come from the package `tinygrad` (MIT), which made them from AMD's machine-readable
ISA; formats that its list leaves out are added. `amd` is the extra that installs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypocenter.base.errors import HypoError, MissingPackage

#: Architectures that are executed, and whose tables describe them.
FAMILIES = {"gfx942": "cdna", "gfx950": "cdna", "gfx1100": "rdna3", "gfx1201": "rdna4"}
_ROUTED = tuple(
    f"{encoding}_{kind}"
    for kind, encodings in (
        ("DPP8", ("VOP1", "VOP2", "VOPC", "VOP3", "VOP3SD", "VOP3P")),
        ("DPP16", ("VOP3", "VOP3SD", "VOP3P")),
    )
    for encoding in encodings
)
_ADDED = {
    "cdna": ("MTBUF",),
    "rdna3": (*_ROUTED, "MUBUF", "MTBUF", "LDSDIR", "EXP"),
    "rdna4": (*_ROUTED, "VBUFFER", "VDSDIR", "VEXPORT"),
}
#: What stands for the first operand where lanes are routed to others. DPP8_ANY is DPP8 with the
#: values of lanes that are not active.
DPP8_ANY = 234
_ROUTED_OPERANDS = {"DPP8": (233, DPP8_ANY), "DPP16": (250,)}
#: No instruction is longer.
MAX_BYTES = 20
_MODULE = "tinygrad.runtime.autogen.amd.{}.ins"


class Undecodable(HypoError):
    """Bytes that are no instruction of the architecture; `pc` counts from the code's begin."""

    def __init__(self, arch: str, pc: int, data: bytes) -> None:
        self.arch, self.pc, self.data = arch, pc, data
        super().__init__(
            f"machine code at +{pc:#x} is no instruction of {arch}: {data[:8].hex(' ', 4)}; "
            "the object is damaged, or made for another GPU"
        )


class NotModelled(Exception):
    """An instruction, or a modifier of it, that the machine has no row for; says which."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `name` is AMD's without its encoding, `format` the encoding's name.

    `fields` are numbers; a register's is its place in AMD's operand space, where a vector register
    is 256 and more.
    """

    pc: int
    name: str
    format: str
    fields: Mapping[str, int]
    num_bytes: int
    data: bytes

    def get(self, field: str) -> int:
        """A field's value; 0 for one that the encoding does not have."""
        return self.fields.get(field, 0)


def family_of(arch: str) -> str:
    """Whose tables describe `arch`. Raises HypoError for one that is not executed."""
    try:
        return FAMILIES[arch]
    except KeyError:
        known = ", ".join(FAMILIES)
        raise HypoError(f"code for {arch} is not executed here; compile for {known}") from None


@cache
def _formats(family: str) -> tuple[Any, ...]:
    """The encodings of a family, the more specific first. Raises MissingPackage."""
    try:
        renderer = importlib.import_module("tinygrad.renderer.amd")
        table = importlib.import_module(_MODULE.format(family))
    except ImportError as error:
        raise MissingPackage("executing AMD's machine code", "tinygrad") from error
    known = list(renderer._load_formats()[family])
    added = [getattr(table, name) for name in _ADDED[family] if hasattr(table, name)]
    return (*(each for each in added if each not in known), *known)


def decode(code: bytes, arch: str, first_pc: int = 0) -> list[Instruction]:
    """The instructions of `code`, one after the other, until its end.

    Raises Undecodable.
    """
    family, found, place = family_of(arch), [], 0
    while place < len(code):
        data = code[place : place + MAX_BYTES]
        read = _read(family, data)
        if read is None:
            raise Undecodable(arch, first_pc + place, data)
        name, encoding, fields, size = read
        found.append(Instruction(first_pc + place, name, encoding, fields, size, data[:size]))
        place += size
    return found


_Read = tuple[str, str, dict[str, int], int]
_READ: dict[tuple[str, bytes], _Read] = {}


def _read(family: str, data: bytes) -> _Read | None:
    """Name, format, fields and size of the instruction that `data` begins with."""
    for size in (4, 8, 12, 16):
        if (known := _READ.get((family, data[:size]))) and known[3] == size:
            return known
    _formats(family)
    inst = _match(family, data)
    if inst is None:
        return None
    encoding, size = type(inst).__name__, inst.size()
    if size > len(data):
        return None
    read = (_name(inst), encoding, _fields(inst), size)
    _READ[family, data[:size]] = read
    return read


def _match(family: str, data: bytes) -> Any:
    matches = importlib.import_module("tinygrad.renderer.amd")._matches
    for each in _formats(family):
        if matches(data, each) and _is_routed_so(data, each):
            try:
                return each.from_bytes(data)
            except (ValueError, KeyError):  # a number that names no opcode
                return None
    return None


def _is_routed_so(data: bytes, encoding: Any) -> bool:
    """Whether the first operand is what an encoding of routed lanes has there; true of others."""
    name: str = encoding.__name__
    if name not in _ROUTED:
        return True
    at = 4 if name.startswith("VOP3") else 0
    first = int.from_bytes(data[at : at + 4], "little") & 0x1FF
    return first in _ROUTED_OPERANDS[name.rpartition("_")[2]]


def _name(inst: Any) -> str:
    if hasattr(inst, "op"):
        return str(inst.op.name).removesuffix("_E32").removesuffix("_E64")
    if hasattr(inst, "opx"):
        return f"{inst.opx.name}::{inst.opy.name}"
    return type(inst).__name__  # an export has one form


def _fields(inst: Any) -> dict[str, int]:
    values = {}
    for name, _ in inst._fields:
        if name in ("encoding", "op", "opx", "opy", "seg", "x2encoding"):
            continue
        value = getattr(inst, name)
        values[name] = int(getattr(value, "offset", value) or 0)
    return values
