"""ELF files of 64 bits, little-endian, by sections and segments, with bounds for foreign files.

Reads with `pread` what is asked for and no more. Knows nothing of debuggers or lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import BadCoreDump

#: Headers of sections: a GPU that is full has some 850,000.
MAX_SECTIONS = 1 << 21
#: The largest section that is read as a whole, and the largest table of names.
MAX_SECTION_BYTES = 64 << 20
MAX_NAME_BYTES = 4096

_HEADER_BYTES = 64
_FIELDS = (
    ("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"),
    ("size", "<u8"), ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8"),
)  # fmt: skip
_SECTION = np.dtype([*_FIELDS])
_SYMBOL = np.dtype(
    [
        *(("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2")),
        *(("value", "<u8"), ("size", "<u8")),
    ]
)
_RELOCATION = np.dtype([("offset", "<u8"), ("info", "<u8"), ("addend", "<i8")])
_SEGMENT = np.dtype(
    [
        *(("type", "<u4"), ("flags", "<u4"), ("offset", "<u8"), ("address", "<u8")),
        *(("physical", "<u8"), ("size", "<u8"), ("memory", "<u8"), ("align", "<u8")),
    ]
)

_PROGBITS, SYMTAB, STRTAB, RELA, DYNSYM = 1, 2, 3, 4, 11
_FUNCTION = 2
#: Segments that are loaded, and that hold notes; what a segment may be.
LOAD, NOTE = 1, 4
EXECUTE = 1
MAX_SEGMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Section:
    """One header: `number` is its place in the table, `start` the offset in the file."""

    number: int
    type: int
    start: int
    num_bytes: int
    link: int
    info: int
    entry_bytes: int


@dataclass(frozen=True, slots=True)
class ElfSegment:
    """One program header: what lies at an address when the file is loaded or was written."""

    type: int
    flags: int
    start: int
    address: int
    num_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name of an image: its address, or its offset, and how many bytes it names."""

    name: str
    value: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Function:
    """A function of an image: its symbol, and its addresses from `first` to before `past`."""

    symbol: str
    first: int
    past: int


class Elf:
    """The ELF file in `num_bytes` at `start` of an open file; raises BadCoreDump for no such.

    `file` is a descriptor, or the bytes themselves; `name` is what messages call it. A dump of a
    process has no sections: with `by_segments` none is asked for.
    """

    def __init__(
        self, file: int | bytes, start: int, num_bytes: int, name: str, *, by_segments: bool = False
    ) -> None:
        self._file, self._start, self._num_bytes, self.name = file, start, num_bytes, name
        header = self.read(0, _HEADER_BYTES)
        if header[:6] != b"\x7fELF\x02\x01":
            raise BadCoreDump(name, "is no ELF file of 64 bits, little-endian")
        self.header = header
        self.type = int.from_bytes(header[16:18], "little")
        self.machine = int.from_bytes(header[18:20], "little")
        self._symbol_table: tuple[Any, bytes] | None = None
        self._table = np.zeros(0, _SECTION)
        if not by_segments:
            self._read_sections(header)

    def _read_sections(self, header: bytes) -> None:
        name = self.name
        table = int.from_bytes(header[40:48], "little")
        row_bytes, number, names = (
            int.from_bytes(header[i : i + 2], "little") for i in (58, 60, 62)
        )
        if row_bytes != _SECTION.itemsize or not table:
            raise BadCoreDump(
                name, "is cut off, or was never finished: it has no table of sections"
            )
        first = np.frombuffer(self.read(table, row_bytes), _SECTION)[0]
        number, names = (
            number or int(first["size"]),
            int(first["link"]) if names == 0xFFFF else names,
        )
        if not 0 < number <= MAX_SECTIONS:
            raise BadCoreDump(name, f"has {number} sections, limit {MAX_SECTIONS}")
        self._table = np.frombuffer(self.read(table, number * row_bytes), _SECTION)
        self._names = self.section(names)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """So many bytes of the image; raises BadCoreDump where it has fewer."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self._num_bytes:
            past = f"bytes {offset} to {offset + num_bytes} of {self._num_bytes}"
            raise BadCoreDump(self.name, f"is cut off or damaged: it refers to {past}")
        if num_bytes > MAX_SECTIONS * _SECTION.itemsize:
            raise BadCoreDump(self.name, f"has a part of {num_bytes} bytes, too large to read")
        first = self._start + offset
        if isinstance(self._file, bytes):
            data = self._file[first : first + num_bytes]
        else:
            data = os.pread(self._file, num_bytes, first)
        if len(data) != num_bytes:
            raise BadCoreDump(self.name, "became shorter while it was read")
        return data

    # -- segments -------------------------------------------------------------------------------

    def segments(self, kind: int) -> tuple[ElfSegment, ...]:
        """The program headers of a type, in order."""
        table = int.from_bytes(self.header[32:40], "little")
        row_bytes, number = (int.from_bytes(self.header[i : i + 2], "little") for i in (54, 56))
        if not number:
            return ()
        if row_bytes != _SEGMENT.itemsize or number >= MAX_SEGMENTS:
            raise BadCoreDump(
                self.name, f"has {number} segments of {row_bytes} bytes a header, which is no ELF64"
            )
        rows = np.frombuffer(self.read(table, number * row_bytes), _SEGMENT)
        keys = ("type", "flags", "offset", "address", "size", "memory")
        return tuple(
            ElfSegment(*(int(row[key]) for key in keys)) for row in rows[rows["type"] == kind]
        )

    def notes(
        self, segment: ElfSegment, limit: int = MAX_SECTION_BYTES
    ) -> Iterator[tuple[str, int, bytes]]:
        """Owner, type and bytes of each note of a segment; raises BadCoreDump where one is cut."""
        if segment.num_bytes > limit:
            raise BadCoreDump(self.name, f"has {segment.num_bytes} bytes of notes, limit {limit}")
        data, at = self.read(segment.start, segment.num_bytes), 0
        while at + 12 <= len(data):
            owner_bytes, note_bytes, kind = (
                int.from_bytes(data[at + i : at + i + 4], "little") for i in (0, 4, 8)
            )
            first = at + 12 + (owner_bytes + 3 & ~3)
            if first + note_bytes > len(data):
                raise BadCoreDump(self.name, f"has a note of {note_bytes} bytes that is cut off")
            owner = data[at + 12 : at + 12 + owner_bytes].rstrip(b"\0").decode(errors="replace")
            yield owner, kind, data[first : first + note_bytes]
            at = first + (note_bytes + 3 & ~3)

    # -- sections -------------------------------------------------------------------------------

    def section(self, number: int) -> Section:
        if not 0 <= number < len(self._table):
            raise BadCoreDump(self.name, f"refers to section {number} of {len(self._table)}")
        row = self._table[number]
        fields = (int(row[key]) for key in ("type", "offset", "size", "link", "info", "entry"))
        return Section(number, *fields)

    def of_type(self, kind: int, link: int | None = None) -> Iterator[Section]:
        """Sections of a type, in order; with `link` those that hang below that section."""
        wanted = self._table["type"] == kind
        if link is not None:
            wanted &= self._table["link"] == link
        for number in np.flatnonzero(wanted):
            yield self.section(int(number))

    def by_parent(self, kind: int) -> dict[tuple[int, int], int]:
        """The number of each section of a type, by the section and the row that it hangs below."""
        rows = self._table[self._table["type"] == kind]
        numbers = np.flatnonzero(self._table["type"] == kind)
        parents = zip(rows["link"].tolist(), rows["info"].tolist(), strict=True)
        return dict(zip(parents, numbers.tolist(), strict=True))

    def section_of_name(self, name: str) -> Section | None:
        """The first section of that name."""
        wanted = name.encode() + b"\0"
        held = self.data(self._names)
        for number, at in enumerate(self._table["name"]):
            if held[int(at) : int(at) + len(wanted)] == wanted:
                return self.section(number)
        return None

    def name_of(self, section: Section) -> str:
        return _text(self.data(self._names), int(self._table["name"][section.number]))

    def data(self, section: Section, limit: int = MAX_SECTION_BYTES) -> bytes:
        """The bytes of a section; raises BadCoreDump above `limit`."""
        if section.num_bytes > limit:
            raise BadCoreDump(
                self.name, f"has a section of {section.num_bytes} bytes, limit {limit}"
            )
        return self.read(section.start, section.num_bytes)

    def rows(self, section: Section, limit: int) -> list[bytes]:
        """The rows of a table, whose length the section itself says; at most `limit`."""
        size = section.entry_bytes or section.num_bytes
        if not size:
            return []
        number = min(section.num_bytes // size, limit)
        data = self.read(section.start, number * size)
        return [data[at * size : (at + 1) * size] for at in range(number)]

    def image(self, section: Section, name: str) -> Elf:
        """The ELF file that a section holds."""
        if section.start + section.num_bytes > self._num_bytes:
            raise BadCoreDump(self.name, f"is cut off: {name} lies past its end")
        return Elf(self._file, self._start + section.start, section.num_bytes, name)

    # -- symbols --------------------------------------------------------------------------------

    def function_at(self, address: int) -> Function | None:
        """The function that holds an address."""
        symbols, names = self._symbols()
        if symbols is None or not 0 <= address < 1 << 64:
            return None
        values, sizes = symbols["value"], symbols["size"]
        at = np.uint64(address)
        # Unsigned, so that an address before the first wraps and is no hit.
        inside = (symbols["info"] & 15 == _FUNCTION) & (values <= at) & (at - values < sizes)
        found = np.flatnonzero(inside)
        if not found.size:
            return None
        symbol = symbols[int(found[0])]
        first = int(symbol["value"])
        return Function(_text(names, int(symbol["name"])), first, first + int(symbol["size"]))

    def symbol(self, name: str) -> Symbol | None:
        """The first symbol of that name."""
        symbols, names = self._symbols()
        wanted = name.encode() + b"\0"
        if symbols is None or len(wanted) > MAX_NAME_BYTES:
            return None
        for row in symbols:
            at = int(row["name"])
            if names[at : at + len(wanted)] == wanted:
                return Symbol(name, int(row["value"]), int(row["size"]))
        return None

    def relocations(self) -> Iterator[tuple[int, int, int]]:
        """Of each word that loading fills: its address, the type, and symbol value plus addend."""
        for table in self.of_type(RELA):
            symbols = self.section(table.link)
            if symbols.type != DYNSYM:
                continue
            values = np.frombuffer(self._whole_rows(symbols, _SYMBOL), _SYMBOL)["value"]
            for row in np.frombuffer(self._whole_rows(table, _RELOCATION), _RELOCATION):
                number, kind = divmod(int(row["info"]), 1 << 32)
                if number >= len(values):
                    raise BadCoreDump(self.name, f"refers to symbol {number} of {len(values)}")
                filled = int(values[number]) + int(row["addend"])
                yield int(row["offset"]), kind, filled % (1 << 64)

    def _whole_rows(self, section: Section, row: np.dtype[Any]) -> bytes:
        return self.data(section)[: section.num_bytes // row.itemsize * row.itemsize]

    def code(self, address: int, num_bytes: int) -> bytes:
        """Bytes of a section that is loaded at addresses; fewer where the section ends."""
        first, sizes = self._table["address"], self._table["size"]
        at = np.uint64(address)
        holds = (first != 0) & (first <= at) & (at - first < sizes)
        for number in np.flatnonzero(holds & (self._table["type"] == _PROGBITS)):
            section = self.section(int(number))
            skipped = address - int(first[number])
            return self.read(section.start + skipped, min(num_bytes, section.num_bytes - skipped))
        return b""

    def filled_words(self, section: Section) -> dict[int, int]:
        """Of the words of a section that a relocation fills: offset to value."""
        symbols, _ = self._symbols()
        found: dict[int, int] = {}
        for table in self.of_type(RELA):
            if symbols is None or table.info != section.number:
                continue
            whole = table.num_bytes // _RELOCATION.itemsize * _RELOCATION.itemsize
            rows = np.frombuffer(self.read(table.start, min(whole, MAX_SECTION_BYTES)), _RELOCATION)
            for row in rows:
                symbol = int(row["info"]) >> 32
                if symbol < len(symbols):
                    value = int(symbols["value"][symbol]) + int(row["addend"])
                    found[int(row["offset"])] = value % (1 << 64)
        return found

    def _symbols(self) -> tuple[Any, bytes]:
        """The table of symbols, None without one, and their names."""
        if self._symbol_table is None:
            self._symbol_table = self._read_symbols()
        return self._symbol_table

    def _read_symbols(self) -> tuple[Any, bytes]:
        table = next(self.of_type(SYMTAB), None) or next(self.of_type(DYNSYM), None)
        if table is None:
            return None, b""
        whole = table.num_bytes // _SYMBOL.itemsize * _SYMBOL.itemsize
        if whole > MAX_SECTION_BYTES:
            raise BadCoreDump(self.name, f"has {whole} bytes of symbols, limit {MAX_SECTION_BYTES}")
        symbols: Array = np.frombuffer(self.read(table.start, whole), _SYMBOL)
        return symbols, self.data(self.section(table.link))


def _text(names: bytes, at: int) -> str:
    end = names.find(b"\0", at, at + MAX_NAME_BYTES)
    return names[at : end if end >= 0 else at + MAX_NAME_BYTES].decode(errors="replace")


def string_at(data: bytes, at: int) -> str:
    """The text at an offset of a table of names, cut at MAX_NAME_BYTES."""
    return _text(data, at) if 0 <= at < len(data) else ""
