"""Source lines of an instruction, from the line table of a GPU's code (DWARF 2 to 4).

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
_VERSIONS = range(2, 5)
#: Extended opcodes: the end of a sequence, an address, NVIDIA's inlined call (context, name).
_END, _SET_ADDRESS, _INLINED = 1, 2, 0x90
#: Standard opcodes.
_COPY, _ADVANCE_PC, _ADVANCE_LINE, _SET_FILE, _CONST_ADD_PC, _FIXED_ADVANCE_PC = 1, 2, 3, 4, 8, 9


@dataclass(frozen=True, slots=True)
class _Row:
    """`call` is the number of the row that calls this one's code, from 1 in its sequence, or 0."""

    address: int
    file: int
    line: int
    call: int
    name: int


class _Bytes:
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
    section = image.section_of_name(".debug_line")
    if section is None or not section.num_bytes:
        return ()
    data, filled = image.data(section, MAX_TABLE_BYTES), image.filled_words(section)
    strings = image.section_of_name(".debug_str")
    names = image.data(strings) if strings is not None else b""
    at = 0
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        unit = _Bytes(data, at + 4, at + 4 + length, image.name)
        if length >= 0xFFFFFFF0 or unit.end < at + 4 + length:
            raise BadCoreDump(image.name, "has a line table that is cut off")
        if found := _Unit(unit, filled, function.first).frames(pc, names):
            return found
        at = unit.end
    return ()


class _Unit:
    """One table: its header, and its rows as the line program makes them."""

    def __init__(self, source: _Bytes, filled: dict[int, int], first: int) -> None:
        self._source, self._filled, self._first = source, filled, first
        self._files: list[str] = []
        self._is_known = source.number(2) in _VERSIONS
        if self._is_known:
            self._read_header()

    def frames(self, pc: int, names: bytes) -> tuple[GpuFrame, ...]:
        if not self._is_known:
            return ()
        rows: list[_Row] = []
        for number, (row, is_end) in enumerate(self._rows()):
            if number >= MAX_ROWS:
                raise BadCoreDump(self._source.name, f"has more than {MAX_ROWS} rows of lines")
            if rows and rows[-1].address <= pc < row.address:
                return tuple(self._chain(rows, names))
            rows.append(row)
            if is_end:  # a call names its row within the sequence
                rows.clear()
        return ()

    def _chain(self, rows: list[_Row], names: bytes) -> Iterator[GpuFrame]:
        """From the last row outwards; the row of a call never stands behind that of its code."""
        number = len(rows)
        for _ in range(MAX_FRAMES):
            row = rows[number - 1]
            file = self._files[row.file - 1] if 0 < row.file <= len(self._files) else ""
            yield GpuFrame(file, row.line, string_at(names, row.name) if row.call else "")
            if not 0 < row.call < number:
                return
            number = row.call

    def _read_header(self) -> None:
        source = self._source
        program = source.number(4) + source.at
        self._step = source.number(1)
        self._default, self._base = source.number(1), source.number(1, is_signed=True)
        self._range, self._opcode_base = source.number(1), source.number(1)
        if not self._range or not self._opcode_base:
            raise BadCoreDump(source.name, "has a line table whose header makes no sense")
        self._lengths = [source.number(1) for _ in range(self._opcode_base - 1)]
        folders: list[str] = []
        while folder := source.text():
            folders.append(folder)
        while name := source.text():
            at, _, _ = source.leb(), source.leb(), source.leb()
            folder = folders[at - 1] if 0 < at <= len(folders) else ""
            self._files.append(f"{folder}/{name}" if folder and name[0] != "/" else name)
            if max(len(self._files), len(folders)) > MAX_FILES:
                raise BadCoreDump(source.name, f"has a line table of more than {MAX_FILES} files")
        source.at = program

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
