"""Source lines of an instruction, from the line table of a GPU's code (DWARF 2 to 5).

NVIDIA's assembler adds an opcode of its own to a table: a row that stands for inlined code names
the row of its call, so a chain of rows is a stack of frames. pyelftools knows neither that opcode
nor a table without `.debug_info`, which is all that Triton's kernels have, and bounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypocenter.base.errors import BadCoreDump
from hypocenter.coredump.elf import Elf, Function, string_at
from hypocenter.record.gpu_stop import MAX_FRAMES, GpuFrame

MAX_TABLE_BYTES = 16 << 20
MAX_ROWS, MAX_FILES = 1 << 20, 1 << 14
_MAX_PATH_CHARS = 1000
_VERSIONS = range(2, 6)
#: Extended opcodes: the end of a sequence, an address, NVIDIA's inlined call (context, name).
_END, _SET_ADDRESS, _INLINED = 1, 2, 0x90
#: Standard opcodes.
_COPY, _ADVANCE_PC, _ADVANCE_LINE, _SET_FILE, _CONST_ADD_PC, _FIXED_ADVANCE_PC = 1, 2, 3, 4, 8, 9


#: Of an entry in a table of DWARF 5: what it holds, and how.
_PATH, _FOLDER = 1, 2
_STRING, _LINE_STRP, _STRP, _UDATA, _DATA16 = 0x08, 0x1F, 0x0E, 0x0F, 0x1E
_FIXED = {0x0B: 1, 0x05: 2, 0x06: 4, 0x07: 8, _DATA16: 16}


@dataclass(frozen=True, slots=True)
class _Strings:
    """Sections of texts that tables refer to."""

    names: bytes
    lines: bytes


@dataclass(frozen=True, slots=True)
class _Row:
    """`call` is the number of the row that calls this one's code, from 1 in its sequence, or 0."""

    address: int
    file: int
    line: int
    call: int
    name: int


class ByteReader:
    """A part of a table, read from its beginning; raises BadCoreDump past its end."""

    def __init__(self, data: bytes, at: int, end: int, name: str) -> None:
        self._data, self.at, self.end, self.name = data, at, min(end, len(data)), name

    def number(self, num_bytes: int, *, is_signed: bool = False) -> int:
        if self.at + num_bytes > self.end:
            raise BadCoreDump(self.name, "has a line table that is cut off")
        found = self._data[self.at : self.at + num_bytes]
        self.at += num_bytes
        return int.from_bytes(found, "little", signed=is_signed)

    def leb(self, *, is_signed: bool = False) -> int:
        """A number of 7 bits a byte, at most 10 bytes long."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.number(1)
            value |= (byte & 0x7F) << shift
            if not byte & 0x80:
                is_negative = is_signed and byte & 0x40
                return value - (1 << shift + 7) if is_negative else value
        raise BadCoreDump(self.name, "has a line table with a number of more than 64 bits")

    def skip_to(self, at: int) -> None:
        if at < self.at:
            raise BadCoreDump(self.name, "has a line table that makes no sense")
        self.at = at

    def text(self) -> str:
        stop = self._data.find(b"\0", self.at, self.end)
        if stop < 0:
            raise BadCoreDump(self.name, "has a line table that is cut off")
        found = self._data[self.at : stop].decode(errors="replace")
        self.at = stop + 1
        return found[:_MAX_PATH_CHARS]


def frames_at(image: Elf, function: Function, pc: int) -> tuple[GpuFrame, ...]:
    """The lines of the instruction at `pc` of `function`, the innermost first.

    Empty where the image has no line table. Raises BadCoreDump for one that makes no sense.
    """
    for unit in _units(image, function.first):
        if found := unit.frames(pc):
            return found
    return ()


def line_rows(image: Elf) -> list[tuple[int, GpuFrame | None]]:
    """By address, the line that instructions from there on belong to; None where none does.

    For code that is linked. Raises BadCoreDump for a table that makes no sense.
    """
    found: dict[int, GpuFrame | None] = {}
    for unit in _units(image, 0):
        unit.fill(found)
    return sorted(found.items(), key=lambda row: row[0])


def _units(image: Elf, first: int) -> Iterator[_Unit]:
    section = image.section_of_name(".debug_line")
    if section is None or not section.num_bytes:
        return
    data, filled = image.data(section, MAX_TABLE_BYTES), image.filled_words(section)
    strings = _Strings(*(_section_data(image, name) for name in (".debug_str", ".debug_line_str")))
    at = 0
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        unit = ByteReader(data, at + 4, at + 4 + length, image.name)
        if length >= 0xFFFFFFF0 or unit.end < at + 4 + length:
            raise BadCoreDump(image.name, "has a line table that is cut off")
        yield _Unit(unit, filled, first, strings)
        at = unit.end


def _section_data(image: Elf, name: str) -> bytes:
    section = image.section_of_name(name)
    return image.data(section) if section is not None else b""


class _Unit:
    """One table: its header, and its rows as the line program makes them."""

    def __init__(
        self, source: ByteReader, filled: dict[int, int], first: int, strings: _Strings
    ) -> None:
        self._source, self._filled, self._first = source, filled, first
        self._strings = strings
        #: Files by their number: from 1, from 0 since version 5.
        self._files: dict[int, str] = {}
        self._version = source.number(2)
        if self._version in _VERSIONS:
            self._read_header()

    def frames(self, pc: int) -> tuple[GpuFrame, ...]:
        rows: list[_Row] = []
        for row, is_end in self._bounded_rows():
            if rows and rows[-1].address <= pc < row.address:
                return tuple(self._chain(rows))
            rows.append(row)
            if is_end:  # a call names its row within the sequence
                rows.clear()
        return ()

    def fill(self, found: dict[int, GpuFrame | None]) -> None:
        """Each row's line by its address; the last row of an address counts."""
        for row, is_end in self._bounded_rows():
            has_line = row.line > 0 and not is_end
            found[row.address] = self._frame(row) if has_line else None

    def _bounded_rows(self) -> Iterator[tuple[_Row, bool]]:
        if self._version not in _VERSIONS:
            return
        for number, found in enumerate(self._rows()):
            if number >= MAX_ROWS:
                raise BadCoreDump(self._source.name, f"has more than {MAX_ROWS} rows of lines")
            yield found

    def _frame(self, row: _Row) -> GpuFrame:
        name = string_at(self._strings.names, row.name) if row.call else ""
        return GpuFrame(self._files.get(row.file, ""), row.line, name)

    def _chain(self, rows: list[_Row]) -> Iterator[GpuFrame]:
        """From the last row outwards; the row of a call never stands behind that of its code."""
        number = len(rows)
        for _ in range(MAX_FRAMES):
            row = rows[number - 1]
            yield self._frame(row)
            if not 0 < row.call < number:
                return
            number = row.call

    def _read_header(self) -> None:
        source = self._source
        if self._version >= 5:
            source.number(2)  # bytes of an address, of a segment's selector
        program = source.number(4) + source.at
        self._step = source.number(1)
        if self._version >= 4:
            source.number(1)  # operations in an instruction: one, but for VLIW machines
        self._default, self._base = source.number(1), source.number(1, is_signed=True)
        self._range, self._opcode_base = source.number(1), source.number(1)
        if not self._range or not self._opcode_base:
            raise BadCoreDump(source.name, "has a line table whose header makes no sense")
        self._lengths = [source.number(1) for _ in range(self._opcode_base - 1)]
        read = self._read_entries if self._version >= 5 else self._read_names
        folders, files = read()
        for number, (name, at) in files.items():
            folder = folders.get(at, "")
            self._files[number] = f"{folder}/{name}" if folder and name[:1] != "/" else name
        source.at = program

    def _read_names(self) -> tuple[dict[int, str], dict[int, tuple[str, int]]]:
        """Folders and files of a table before version 5; each counts from 1."""
        source = self._source
        folders: dict[int, str] = {}
        files: dict[int, tuple[str, int]] = {}
        while folder := source.text():
            folders[len(folders) + 1] = folder
            self._bound(len(folders))
        while name := source.text():
            at, _, _ = source.leb(), source.leb(), source.leb()
            files[len(files) + 1] = name, at
            self._bound(len(files))
        return folders, files

    def _read_entries(self) -> tuple[dict[int, str], dict[int, tuple[str, int]]]:
        """The same of version 5, which counts from 0 and says itself how an entry looks."""
        folders = {number: path for number, (path, _) in enumerate(self._entries())}
        # The folder of the compilation is number 0, and the others may lie below it.
        root = folders.get(0, "")
        for number, path in folders.items():
            folders[number] = f"{root}/{path}" if number and path[:1] != "/" else path
        return folders, dict(enumerate(self._entries()))

    def _entries(self) -> list[tuple[str, int]]:
        """Path and number of the folder of each entry of the table that follows."""
        source = self._source
        forms = [(source.leb(), source.leb()) for _ in range(source.number(1))]
        number = source.leb()
        self._bound(number)
        found: list[tuple[str, int]] = []
        for _ in range(number):
            path, folder = "", 0
            for content, form in forms:
                value = self._value(form)
                if content == _PATH and isinstance(value, str):
                    path = value
                elif content == _FOLDER and isinstance(value, int):
                    folder = value
            found.append((path, folder))
        return found

    def _value(self, form: int) -> str | int:
        source = self._source
        if form == _STRING:
            return source.text()
        if form in (_LINE_STRP, _STRP):
            held = self._strings.lines if form == _LINE_STRP else self._strings.names
            return string_at(held, source.number(4))[:_MAX_PATH_CHARS]
        if form == _UDATA:
            return source.leb()
        if form in _FIXED:
            return source.number(_FIXED[form])
        raise BadCoreDump(source.name, f"has a line table with form 0x{form:x}, not known here")

    def _bound(self, number: int) -> None:
        if number > MAX_FILES:
            raise BadCoreDump(self._source.name, f"has a line table of more than {MAX_FILES} files")

    def _rows(self) -> Iterator[tuple[_Row, bool]]:
        """Each row, and whether it ends a sequence."""
        source = self._source
        address, file, line, call, name = 0, 1, 1, 0, 0
        while source.at < source.end:
            code, is_row, is_end = source.number(1), False, False
            if code >= self._opcode_base:
                advance, by = divmod(code - self._opcode_base, self._range)
                address += advance * self._step
                line += self._base + by
                is_row = True
            elif code == 0:
                stop = source.leb() + source.at
                kind = source.number(1)
                if kind == _SET_ADDRESS:
                    address = self._address(source.at, source.number(8))
                elif kind == _INLINED:
                    call, name = source.leb(), source.leb()
                is_row = is_end = kind == _END
                source.skip_to(stop)
            elif code == _COPY:
                is_row = True
            elif code == _ADVANCE_PC:
                address += source.leb() * self._step
            elif code == _ADVANCE_LINE:
                line += source.leb(is_signed=True)
            elif code == _SET_FILE:
                file = source.leb()
            elif code == _CONST_ADD_PC:
                address += (255 - self._opcode_base) // self._range * self._step
            elif code == _FIXED_ADVANCE_PC:
                address += source.number(2)
            else:
                for _ in range(self._lengths[code - 1]):
                    source.leb()
            if is_row:
                yield _Row(address, file, line, call, name), is_end
            if is_end:
                address, file, line, call, name = 0, 1, 1, 0, 0

    def _address(self, at: int, given: int) -> int:
        """The operand at offset `at`, as a relocation fills it; one of 0 is the function's own."""
        return self._filled.get(at, given) or self._first
