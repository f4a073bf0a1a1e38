"""NVIDIA's core dump of a GPU as facts; no cuda-gdb, no driver, on any machine.

An ELF file of tables, described by `cudacoredump.h` of the public cuda-gdb sources (rows named
Cudbg*TableEntry), exceptions by `cudadebugger.h` (CUDBGException_t). Later drivers add fields at
the end of a row, so rows are read by the section's entry size. Seen: H100, driver 580, CUDA 13.0.
"""

from __future__ import annotations

import collections
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hypocenter.base.errors import BadCoreDump
from hypocenter.coredump.elf import STRTAB, Elf, Function, Section, string_at
from hypocenter.coredump.lines import frames_at
from hypocenter.coredump.names import source_name
from hypocenter.coredump.parameters import parameters_of
from hypocenter.coredump.sass import (
    INSTRUCTION_BYTES,
    MAX_BEHIND,
    MemoryInstruction,
    known_bits,
    memory_instruction,
)
from hypocenter.coredump.sources import MAX_CODE_BYTES, Sources, parameter_sources
from hypocenter.record.gpu_stop import (
    MAX_DEEP_WARPS,
    MAX_GRIDS,
    MAX_LANES,
    MAX_REGISTERS,
    MAX_STANDINGS,
    MAX_WARPS,
    MAX_WORDS,
    Block,
    GpuAccess,
    GpuFrame,
    GpuGrid,
    GpuLane,
    GpuStanding,
    GpuStop,
    GpuWarp,
)

SOURCE = "NVIDIA core dump"
MAX_DUMP_BYTES = 8 << 30
#: Warps that are counted; a GPU has some 10,000.
_MAX_COUNTED, _MAX_BLOCKS, _MAX_SMS, _MAX_MODULES = 1 << 15, 1 << 15, 1 << 12, 1 << 14
_NOWHERE = Section(-1, 0, 0, 0, 0, 0, 0)

_ET_CORE, _EM_CUDA = 4, 190
#: Types of sections, CUDBG_SHT_* of `cudacoredump.h`.
_REGISTERS, _RELOCATED_IMAGE, _DEVICES = 0x80000005, 0x80000007, 0x80000009
_SMS, _GRIDS, _BLOCKS, _WARPS, _LANES = (0x80000000 + kind for kind in range(11, 16))
_MODULES, _PREDICATES, _PARAMETERS = 0x80000010, 0x80000011, 0x80000012
_UNIFORM, _META = 0x80000013, 0x80000016

_EXCEPTIONS = {
    1: "illegal address in a lane", 2: "stack overflow of a lane",
    3: "hardware stack overflow on the device", 4: "illegal instruction",
    5: "address out of range", 6: "misaligned address", 7: "invalid address space",
    8: "invalid program counter", 9: "hardware stack overflow", 10: "illegal address",
    11: "misaligned address in a lane", 12: "assert", 13: "error of a system call",
    14: "illegal address", 15: "atomic on memory that cannot migrate", 16: "invalid atomic",
    17: "address out of range of the cluster", 18: "block of the cluster is not there",
    19: "stack canary", 20: "access check of tensor memory", 21: "leak of tensor memory",
    22: "call that needs a newer driver",
}  # fmt: skip


def read_core_dump(path: Path) -> GpuStop:
    """What a `.nvcudmp` file says; raises BadCoreDump for none, and for one that makes no sense."""
    name = path.name
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadCoreDump(name, f"cannot be read: {error.strerror}") from error
    try:
        num_bytes = os.fstat(file).st_size
        if num_bytes > MAX_DUMP_BYTES:
            raise BadCoreDump(name, f"has {num_bytes} bytes, limit {MAX_DUMP_BYTES}")
        found = re.search(r"\d+", name)
        return _Dump(Elf(file, 0, num_bytes, name)).stop(int(found[0][:9]) if found else 0)
    except (struct.error, ValueError, OverflowError, IndexError, MemoryError, OSError) as error:
        raise BadCoreDump(name, f"makes no sense: {type(error).__name__}: {error}") from error
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class _Place:
    """An instruction of an image; without line information `frames` is empty."""

    function: Function
    image: Elf
    frames: tuple[GpuFrame, ...]


@dataclass(frozen=True, slots=True)
class _Warp:
    """A row of a table of warps: `section` and `row` are where it stands."""

    section: Section
    row: int
    grid: int
    block: Block | None
    number: int
    pc: int
    is_error: bool
    exception: int


class _Dump:
    def __init__(self, elf: Elf) -> None:
        if elf.type != _ET_CORE or elf.machine != _EM_CUDA:
            raise BadCoreDump(elf.name, "is no core dump of an NVIDIA GPU")
        self._elf = elf
        self._grid_rows = [
            (section, number, row)
            for section in elf.of_type(_GRIDS)
            for number, row in enumerate(elf.rows(section, MAX_GRIDS))
        ][:MAX_GRIDS]
        self._grid_ids = {_u64(row, 0): at for at, (_, _, row) in enumerate(self._grid_rows)}
        self._places: dict[tuple[int, int], _Place | None] = {}
        self._images: dict[int | None, list[Elf]] = {}
        self._lanes = elf.by_parent(_LANES)

    def stop(self, pid: int) -> GpuStop:
        warps = list(self._warps())
        first = [warp for warp in warps if warp.is_error]
        broken = [warp for warp in warps if warp.exception and not warp.is_error]
        rest = [warp for warp in warps if not warp.exception and not warp.is_error]
        kept = [*first, *broken, *rest][:MAX_WARPS]
        told = next((warp.exception for warp in (*first, *broken) if warp.exception), 0)
        return GpuStop(
            source=SOURCE,
            pid=pid,
            device=self._device(),
            driver=self._driver(),
            exception=_exception(told),
            is_on_request=not told,
            grids=tuple(self._grid(*row) for row in self._grid_rows),
            warps=tuple(
                self._warp(warp, is_deep=at < MAX_DEEP_WARPS) for at, warp in enumerate(kept)
            ),
            standing=self._standing(warps),
            num_warps=sum(warp.block is not None for warp in warps),
        )

    # -- what ran -------------------------------------------------------------------------------

    def _device(self) -> str:
        for section in self._elf.of_type(_DEVICES):
            for row in self._elf.rows(section, 1):
                names = [self._elf.data(table) for table in self._elf.of_type(STRTAB)]
                shown = (string_at(data, _u64(row, 0))[:60] for data in names[:1])
                major, minor = struct.unpack_from("<II", row, 56)
                return f"{next(shown, '')} (sm_{major}{minor})".strip()
        return ""

    def _driver(self) -> str:
        for section in self._elf.of_type(_META):
            for row in self._elf.rows(section, 1):
                if len(row) >= 24:
                    driver, minor, major, sub = struct.unpack_from("<4I", row, 8)
                    return f"{driver}.{minor}, CUDA {major}.{sub}"
        return ""

    def _grid(self, section: Section, number: int, row: bytes) -> GpuGrid:
        entry = _u64(row, 24)
        place = self._place(self._grid_ids.get(_u64(row, 0), 0), entry)
        symbol = place.function.symbol if place else ""
        dims = struct.unpack_from("<6I", row, 72)
        words: tuple[int, ...] = ()
        for part in self._elf.of_type(_PARAMETERS, link=section.number):
            if part.info == number:
                words = _words(self._elf.read(part.start, min(part.num_bytes, 4 * MAX_WORDS)))
        return GpuGrid(
            kernel=source_name(symbol),
            symbol=symbol,
            grid=(dims[0], dims[1], dims[2]),
            block=(dims[3], dims[4], dims[5]),
            words=words,
            layout=parameters_of(place.image, symbol) if place else (),
        )

    def _place(self, grid: int, pc: int) -> _Place | None:
        """The function and the lines of an instruction of a grid's module."""
        if (grid, pc) not in self._places:
            self._places[grid, pc] = self._find(grid, pc)
        return self._places[grid, pc]

    def _find(self, grid: int, pc: int) -> _Place | None:
        for image in (*self._modules(grid), *self._modules(None)):
            function = image.function_at(pc)
            if function is not None:
                try:
                    frames = frames_at(image, function, pc)
                except BadCoreDump:  # the kernel's name is worth having without its lines
                    frames = ()
                return _Place(function, image, frames)
        return None

    def _modules(self, grid: int | None) -> list[Elf]:
        """The code of the module that a grid's kernel is of; of all modules for None.

        A module may have a handle that no table of modules has, and a grid may be over.
        """
        if grid not in self._images:
            handle = None
            if grid is not None:
                is_known = 0 <= grid < len(self._grid_rows)
                handle = _u64(self._grid_rows[grid][2], 32) if is_known else -1
            self._images[grid] = list(self._code_of(handle))
        return self._images[grid]

    def _code_of(self, handle: int | None) -> Iterator[Elf]:
        for table in self._elf.of_type(_MODULES):
            rows = self._elf.rows(table, _MAX_MODULES)
            wanted = {at for at, row in enumerate(rows) if handle in (None, _u64(row, 0))}
            for section in self._elf.of_type(_RELOCATED_IMAGE, link=table.number):
                if section.info in wanted and section.num_bytes:
                    yield self._elf.image(section, f"a module of {self._elf.name}")

    # -- where it stood -------------------------------------------------------------------------

    def _warps(self) -> Iterator[_Warp]:
        """Every warp that was on the GPU; where all that failed have left, what their SM says."""
        blocks = self._blocks()
        errors = self._sm_errors()
        num_warps = 0
        for section in self._elf.of_type(_WARPS):
            sm, held = blocks.get(section.link, (-1, []))
            if section.info >= len(held):
                continue
            grid, block = held[section.info]
            for number, row in enumerate(self._elf.rows(section, _MAX_COUNTED - num_warps)):
                warp = self._warp_row(section, number, row, grid, block)
                if warp.is_error or warp.exception:
                    errors.pop(sm, None)
                num_warps += 1
                yield warp
        for sm, (exception, pc) in errors.items():
            grids = (grid for of, held in blocks.values() if of == sm for grid, _ in held)
            grid = next(grids, 0 if len(self._grid_rows) == 1 else -1)
            yield _Warp(_NOWHERE, 0, grid, None, -1, pc, bool(pc), exception)

    def _sm_errors(self) -> dict[int, tuple[int, int]]:
        """By SM: the exception that it had, and the instruction, 0 where that is not known."""
        errors: dict[int, tuple[int, int]] = {}
        for section in self._elf.of_type(_SMS):
            for number, row in enumerate(self._elf.rows(section, _MAX_SMS)):
                if len(row) >= 24 and struct.unpack_from("<I", row, 8)[0]:
                    exception, is_valid, pc = struct.unpack_from("<IIQ", row, 8)
                    errors[_key(section.number, number)] = (exception, pc if is_valid else 0)
        return errors

    def _blocks(self) -> dict[int, tuple[int, list[tuple[int, Block]]]]:
        """By section: its SM, and grid and index of each block that was on it."""
        blocks: dict[int, tuple[int, list[tuple[int, Block]]]] = {}
        room = _MAX_BLOCKS
        for section in self._elf.of_type(_BLOCKS):
            held = []
            for row in self._elf.rows(section, room):
                identity, x, y, z = struct.unpack_from("<Q3I", row)
                held.append((self._grid_ids.get(identity, -1), (x, y, z)))
            room -= len(held)
            blocks[section.number] = (_key(section.link, section.info), held)
        return blocks

    def _warp_row(
        self, section: Section, number: int, row: bytes, grid: int, block: Block
    ) -> _Warp:
        error_pc, warp, _, _, _, is_valid = struct.unpack_from("<Q5I", row)
        lanes = self._lane_rows(section.number, number)
        pc = error_pc if is_valid else _u64(lanes[0], 0) if lanes else 0
        exception = next((e for lane in lanes if (e := struct.unpack_from("<I", lane, 32)[0])), 0)
        return _Warp(section, number, grid, block, warp, pc, bool(is_valid), exception)

    def _lane_rows(self, section: int, number: int) -> list[bytes]:
        table = self._lanes.get((section, number))
        return self._elf.rows(self._elf.section(table), MAX_LANES) if table is not None else []

    def _warp(self, warp: _Warp, *, is_deep: bool) -> GpuWarp:
        place = self._place(warp.grid, warp.pc)
        rows = self._lane_rows(warp.section.number, warp.row)
        tables = self._lanes.get((warp.section.number, warp.row))
        registers: dict[int, tuple[int, ...]] = {}
        predicates: dict[int, tuple[int, ...]] = {}
        uniform: tuple[int, ...] = ()
        if is_deep and tables is not None:
            registers = self._words_below(_REGISTERS, tables)
            predicates = self._words_below(_PREDICATES, tables)
            uniform = self._words_below(_UNIFORM, warp.section.number).get(warp.row, ())
        lanes = []
        for at, row in enumerate(rows):
            pc, _, lane, x, y, z, exception = struct.unpack_from("<QQ5I", row)
            lanes.append(
                GpuLane(
                    lane=lane,
                    thread=(x, y, z),
                    pc=pc,
                    exception=_exception(exception),
                    registers=registers.get(at, ()),
                )
            )
        kept = tuple(lanes) if is_deep else tuple(lanes[:1])
        return GpuWarp(
            grid=warp.grid,
            block=warp.block,
            warp=warp.number,
            kernel=source_name(place.function.symbol) if place else "",
            symbol=place.function.symbol if place else "",
            pc=warp.pc,
            offset=warp.pc - place.function.first if place else 0,
            is_error=warp.is_error,
            exception=_exception(warp.exception),
            frames=place.frames if place else (),
            access=self._access(place, warp, lanes, predicates) if is_deep and place else None,
            lanes=kept,
            uniform=uniform,
        )

    def _access(
        self,
        place: _Place,
        warp: _Warp,
        lanes: list[GpuLane],
        predicates: dict[int, tuple[int, ...]],
    ) -> GpuAccess | None:
        """The memory instruction at the error; its addresses while the registers hold them."""
        until = {lane.pc for lane in lanes}
        code = self._code(place, warp.pc, max(until, default=0) if warp.is_error else 0)
        instruction = memory_instruction(code)
        if instruction is None:
            return None
        # Lanes that stand at several places have taken branches, which is not followed.
        known = 0
        if len(until) == 1 and (at := until.pop() - warp.pc) >= 0:
            known = known_bits(instruction, code[:at]) if len(code) >= at else 0
        addresses = {
            lane.lane: instruction.address(lane.registers, known)
            for number, lane in enumerate(lanes)
            if known and lane.registers and instruction.runs(predicates.get(number, ()))
        }
        return GpuAccess(
            operation=instruction.operation,
            width_bytes=instruction.width_bytes,
            addresses=addresses,
            known_bits=known if addresses else 0,
            parameters=(sources := self._sources(place, warp, instruction)).parameters,
            is_of_loaded=sources.is_loaded,
        )

    def _sources(self, place: _Place, warp: _Warp, instruction: MemoryInstruction) -> Sources:
        """The parameters that the address may have been made of; none in a function that a kernel
        calls, to which others are passed."""
        function = place.function
        # A kernel alone has parameters in constant memory, and a section for them.
        if place.image.section_of_name(f".nv.constant0.{function.symbol}") is None:
            return Sources()
        number = min(function.past - function.first, MAX_CODE_BYTES + 1)
        code = place.image.code(function.first, number)
        sm = re.search(r"sm_(\d{2,4})\)", self._device())
        at = warp.pc - function.first
        return parameter_sources(code, at, instruction, int(sm[1])) if sm else Sources()

    def _code(self, place: _Place, first: int, last: int) -> bytes:
        """The instructions from `first` to before `last`, one at least, of one function."""
        num = max(INSTRUCTION_BYTES, min(last - first, MAX_BEHIND * INSTRUCTION_BYTES))
        num = min(num, place.function.past - first)
        return place.image.code(first, num)

    # -- tables ---------------------------------------------------------------------------------

    def _words_below(self, kind: int, table: int) -> dict[int, tuple[int, ...]]:
        """The words of the sections of a type below a table, by its row."""
        return {
            part.info: _words(self._elf.read(part.start, min(part.num_bytes, 4 * MAX_REGISTERS)))
            for part in self._elf.of_type(kind, link=table)
        }

    def _standing(self, warps: list[_Warp]) -> tuple[GpuStanding, ...]:
        counted: collections.Counter[tuple[str, str, int]] = collections.Counter()
        for warp in warps:
            place = self._place(warp.grid, warp.pc)
            frame = place.frames[0] if place and place.frames else GpuFrame("", 0)
            kernel = source_name(place.function.symbol) if place else ""
            counted[kernel, frame.file, frame.line] += warp.block is not None
        return tuple(
            GpuStanding(kernel=kernel, file=file, line=line, num_warps=number)
            for (kernel, file, line), number in counted.most_common(MAX_STANDINGS)
            if number
        )


def _key(section: int, row: int) -> int:
    return section << 32 | row


def _exception(number: int) -> str:
    return _EXCEPTIONS.get(number, f"exception {number}") if number else ""


def _u64(row: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", row, at)[0])


def _words(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4])
