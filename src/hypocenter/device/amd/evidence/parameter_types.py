"""Types of a kernel's parameters, by what the compiler wrote for debuggers (DWARF 4 and 5).

Code objects say of a number only how many bytes it has. What is not known here gives no types: an
unknown form, a kernel without such a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hypocenter.base.errors import BadCoreDump
from hypocenter.coredump.elf import Elf, string_at
from hypocenter.coredump.lines import ByteReader

MAX_ENTRIES = 1 << 18
# Source of all numbers: the DWARF 5 standard, chapter 7.
_SUBPROGRAM, _PARAMETER, _BASE_TYPE = 0x2E, 0x05, 0x24
#: Tags that stand for the type behind them: const, volatile, restrict, typedef, atomic.
_SAME = frozenset({0x26, 0x35, 0x37, 0x16, 0x47})
_NAME, _ENCODING, _TYPE, _LINKAGE = 0x03, 0x3E, 0x49, 0x6E
_STR_OFFSETS_BASE = 0x72
_FLOAT = 0x04
_WHOLE = frozenset({0x05, 0x06, 0x07, 0x08, 0x10})
#: Bytes of forms that have always as many.
_SIZES = {
    form: size
    for size, forms in (
        (0, (0x19,)),
        (1, (0x0B, 0x0C, 0x11, 0x25, 0x29)),
        (2, (0x05, 0x12, 0x26, 0x2A)),
        (3, (0x27, 0x2B)),
        (4, (0x06, 0x0E, 0x10, 0x13, 0x17, 0x1F, 0x28, 0x2C)),
        (8, (0x01, 0x07, 0x14, 0x20)),
        (16, (0x1E,)),
    )
    for form in forms
}
#: Those in LEB128, and blocks by the bytes of their length, 0 for LEB128.
_LEB = frozenset({0x0D, 0x0F, 0x15, 0x1A, 0x1B, 0x22, 0x23})
_BLOCKS = {0x09: 0, 0x18: 0, 0x0A: 1, 0x03: 2, 0x04: 4}
#: References to another entry of the unit.
_REFERENCES = frozenset({0x11, 0x12, 0x13, 0x14, 0x15})
_STRING, _STRP, _LINE_STRP, _STRX = 0x08, 0x0E, 0x1F, frozenset({0x1A, 0x25, 0x26, 0x27, 0x28})
_IMPLICIT, _SDATA = 0x21, 0x0D


class NumberType(StrEnum):
    """What a parameter's number is."""

    FLOAT = "float"
    INTEGER = "integer"
    OTHER = "other"


@dataclass(slots=True)
class _Entry:
    """One entry: its attributes, and the entries right below it."""

    tag: int
    attributes: dict[int, int | str]
    parameters: list[_Entry] = field(default_factory=list)


def parameter_types(image: Elf) -> Mapping[str, tuple[NumberType, ...]]:
    """The types of the parameters of each function, by its name and by that of its symbol."""
    try:
        return dict(_functions(image))
    except (BadCoreDump, KeyError, IndexError):
        return {}


def _functions(image: Elf) -> Iterator[tuple[str, tuple[NumberType, ...]]]:
    sections = {
        name: image.data(found) if (found := image.section_of_name(f".debug_{name}")) else b""
        for name in ("info", "abbrev", "str", "line_str", "str_offsets")
    }
    data, at = sections["info"], 0
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        unit = _Unit(image.name, sections, at, at + 4 + length)
        at += 4 + length
        entries = unit.read()
        for entry in entries.values():
            if entry.tag != _SUBPROGRAM or not entry.parameters:
                continue
            types = tuple(_type(entries, parameter) for parameter in entry.parameters)
            for key in (_LINKAGE, _NAME):
                if isinstance(name := entry.attributes.get(key), str):
                    yield name, types


def _type(entries: Mapping[int, _Entry], parameter: _Entry) -> NumberType:
    at = parameter.attributes.get(_TYPE)
    for _ in range(16):
        entry = entries.get(at) if isinstance(at, int) else None
        if entry is None:
            return NumberType.OTHER
        if entry.tag == _BASE_TYPE:
            encoding = entry.attributes.get(_ENCODING)
            if encoding == _FLOAT:
                return NumberType.FLOAT
            return NumberType.INTEGER if encoding in _WHOLE else NumberType.OTHER
        if entry.tag not in _SAME:
            return NumberType.OTHER
        at = entry.attributes.get(_TYPE)
    return NumberType.OTHER


class _Unit:
    """One unit of `.debug_info`."""

    def __init__(self, name: str, sections: Mapping[str, bytes], start: int, end: int) -> None:
        self._sections, self._start = sections, start
        self._source = ByteReader(sections["info"], start + 4, end, name)
        self._strings = 8
        self._name = name

    def read(self) -> dict[int, _Entry]:
        """Every entry by its place in the section."""
        source = self._source
        found: dict[int, _Entry] = {}
        version = source.number(2)
        if version == 5:
            source.number(2)
            abbreviations = source.number(4)
        elif version == 4:
            abbreviations = source.number(4)
            source.number(1)
        else:
            return {}
        table = self._abbreviations(abbreviations)
        open_entries: list[_Entry] = []
        while source.at < source.end and len(found) < MAX_ENTRIES:
            place = source.at
            code = source.leb()
            if code == 0:
                if open_entries:
                    open_entries.pop()
                continue
            tag, has_children, forms = table[code]
            entry = _Entry(tag, {name: self._value(form, fixed) for name, form, fixed in forms})
            if isinstance(base := entry.attributes.get(_STR_OFFSETS_BASE), int):
                self._strings = base
            found[place] = entry
            if tag == _PARAMETER and open_entries and open_entries[-1].tag == _SUBPROGRAM:
                open_entries[-1].parameters.append(entry)
            if has_children:
                open_entries.append(entry)
        return found

    def _abbreviations(self, at: int) -> dict[int, tuple[int, bool, list[tuple[int, int, int]]]]:
        data = self._sections["abbrev"]
        source = ByteReader(data, at, len(data), self._name)
        table: dict[int, tuple[int, bool, list[tuple[int, int, int]]]] = {}
        while code := source.leb():
            tag, has_children = source.leb(), bool(source.number(1))
            forms = []
            while True:
                name, form = source.leb(), source.leb()
                fixed = source.leb(is_signed=True) if form == _IMPLICIT else 0
                if not name and not form:
                    break
                forms.append((name, form, fixed))
            table[code] = tag, has_children, forms
        return table

    def _value(self, form: int, fixed: int) -> int | str:
        source = self._source
        if form == _IMPLICIT:
            return fixed
        if form == _STRING:
            return source.text()
        if form in _BLOCKS:
            num_bytes = _BLOCKS[form]
            length = source.number(num_bytes) if num_bytes else source.leb()
            source.skip_to(source.at + length)
            return 0
        is_signed = form == _SDATA
        value = source.leb(is_signed=is_signed) if form in _LEB else source.number(_SIZES[form])
        if form in _REFERENCES:
            return value + self._start
        if form == _STRP:
            return string_at(self._sections["str"], value)
        if form == _LINE_STRP:
            return string_at(self._sections["line_str"], value)
        if form in _STRX:
            at = self._strings + 4 * value
            held = self._sections["str_offsets"][at : at + 4]
            return string_at(self._sections["str"], int.from_bytes(held, "little"))
        return value
