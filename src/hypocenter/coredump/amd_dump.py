"""The GPU core dump of ROCm as facts: no ROCm, no driver, no debugger.

An ELF file whose note AMDGPU 33 has snapshots of the runtime, the GPUs and their queues, and whose
segments hold the memory of the GPU. In that memory the driver has saved the waves of each queue.
Sources: `amd_core_dump.cpp` of the ROCr runtime, `kfd_ioctl.h` of Linux (`kfd_queue_snapshot_entry`
and its neighbours), the driver's `cwsr_trap_handler_gfx9.asm`. Waves of CDNA (gfx90a to gfx950) are
read. Never seen from hardware here: tests read what `device/amd/evidence/core_dump.py` writes.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypocenter.base.errors import BadCoreDump
from hypocenter.coredump.amd_code import (
    MAX_IMAGE_BYTES,
    LoadedKernel,
    accesses_before,
    image_base,
    lane_addresses,
    loaded_kernels,
)
from hypocenter.coredump.elf import LOAD, NOTE, Elf, ElfSegment
from hypocenter.coredump.lines import frames_at
from hypocenter.coredump.names import source_name
from hypocenter.record.gpu_stop import (
    MAX_DEEP_WARPS,
    MAX_GRIDS,
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

SOURCE = "ROCm core dump"
#: Where a dump goes: newer runtimes read the first variable, older ones the second.
PATTERNS = ("HSA_COREDUMP_PATTERN", "HSA_COREDUMP_FILE")
#: Of the addresses that the runtime names, 4096 bytes each.
PAGE_BITS = 12
#: A dump holds all memory of the GPU; it is read by pieces.
MAX_DUMP_BYTES = 4 << 40
STATE_NOTE, NOTE_VERSION = 33, 1
_MAX_QUEUES, _MAX_STACK_BYTES, _MAX_WAVES, _MAX_XCC = 4096, 1 << 22, 1 << 15, 16
_ET_CORE, _EM_AMDGPU = 4, 224
HEAD = struct.Struct("<QIIQIIII")
#: Of an entry of a GPU: its number, its target as 90402, its parts with waves of their own.
DEVICE = struct.Struct("<56xI28xI16xI")
QUEUE = struct.Struct("<QQQQQIIIII")
SAVE_AREA = struct.Struct("<IIII")
PACKET = struct.Struct("<HHHHHHIIIIIQQ")
#: Targets whose waves are read, and the bytes in which their LDS is given out.
LDS_BYTES = {90010: 512, 90400: 512, 90401: 512, 90402: 512, 90500: 1280}
#: What the driver saves behind a wave, words of hardware registers, and of those the last sixteen.
PAD_BYTES, NUM_HARDWARE, NUM_TRAP = 64, 32, 16
#: Bits of TRAPSTS, and what they mean.
_ILLEGAL_BIT, MEMORY_BIT = 11, 8
_QUEUE_MEMORY_BIT = 4
_TRAPS = {1: "breakpoint", 2: "assert", 3: "trap"}
_MEMORY = "illegal address"
#: What reading comes to where a dump makes no sense.
_SENSELESS = (
    struct.error,
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    IndexError,
    MemoryError,
    OSError,
)


def is_amd_dump(path: Path) -> bool:
    """Whether a file begins as an ELF file of AMD's does; False for one that cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(20)
        return head[:4] == b"\x7fELF" and head[18:20] == _EM_AMDGPU.to_bytes(2, "little")
    return False


def _no_objects(kernel: str) -> Sequence[Path]:
    return ()


def read_amd_dump(
    path: Path,
    objects: Callable[[str], Sequence[Path]] = _no_objects,
    page: int | None = None,
) -> GpuStop:
    """What a core dump of ROCm says; raises BadCoreDump for none, and where it makes no sense.

    A dump holds code without its lines. They are taken of the first of the files of code that
    `objects` gives for a kernel's name and that has the same code in it. `page` is where the
    runtime said that the fault was: an access elsewhere is not told then.
    """
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
        elf = Elf(file, 0, num_bytes, name, by_segments=True)
        return _Dump(elf, objects, page).stop(int(found[0][:9]) if found else 0)
    except _SENSELESS as error:
        raise BadCoreDump(name, f"makes no sense: {type(error).__name__}: {error}") from error
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class _Queue:
    status: int
    ring: int
    ring_bytes: int
    save_area: int
    save_area_bytes: int
    target: int
    num_parts: int


@dataclass(frozen=True, slots=True)
class _Wave:
    queue: _Queue
    pc: int
    active: int
    status: int
    trap: int
    block: Block
    number: int
    packet: int
    scalars: tuple[int, ...]
    vectors_at: int
    num_vectors: int

    @property
    def exception(self) -> str:
        if self.status >> MEMORY_BIT & 1:
            return _MEMORY
        if self.status >> _ILLEGAL_BIT & 1:
            return "illegal instruction"
        return _TRAPS.get(self.trap, "")


class _Dump:
    def __init__(
        self, elf: Elf, objects: Callable[[str], Sequence[Path]], page: int | None
    ) -> None:
        self._elf, self._objects, self._page = elf, objects, page
        note = next(
            (
                data
                for segment in elf.segments(NOTE)
                for owner, kind, data in elf.notes(segment)
                if owner == "AMDGPU" and kind == STATE_NOTE
            ),
            None,
        )
        if elf.type != _ET_CORE or note is None:
            raise BadCoreDump(elf.name, "is no core dump of an AMD GPU")
        self._segments = sorted(elf.segments(LOAD), key=lambda one: one.address)
        self._queues = list(self._read_note(note))
        self._kernels: dict[int, tuple[LoadedKernel, ...]] = {}
        self._grids: dict[tuple[int, int], int] = {}
        self._grid_rows: list[GpuGrid] = []

    # -- memory of the GPU ----------------------------------------------------------------------

    def _segment_of(self, address: int) -> ElfSegment | None:
        for segment in self._segments:
            if segment.address <= address < segment.address + segment.num_bytes:
                return segment
        return None

    def _read(self, address: int, num_bytes: int) -> bytes:
        """As much as the dump has there; empty where it has nothing."""
        segment = self._segment_of(address)
        if segment is None or num_bytes <= 0:
            return b""
        at = address - segment.address
        return self._elf.read(segment.start + at, min(num_bytes, segment.num_bytes - at))

    def _words(self, address: int, number: int) -> tuple[int, ...]:
        data = self._read(address, 4 * number)
        return struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4])

    # -- queues and waves -------------------------------------------------------------------------

    def _read_note(self, note: bytes) -> Iterator[_Queue]:
        head = HEAD.unpack_from(note)
        version, _, _, runtime, num_devices, device_bytes, num_queues, queue_bytes = head
        if version != NOTE_VERSION:
            raise BadCoreDump(self._elf.name, f"has a note of version {version}, known is 1")
        if num_queues > _MAX_QUEUES or num_devices > _MAX_QUEUES:
            raise BadCoreDump(self._elf.name, f"tells of {num_queues} queues, limit {_MAX_QUEUES}")
        if (num_queues and queue_bytes < QUEUE.size) or (
            num_devices and device_bytes < DEVICE.size
        ):
            raise BadCoreDump(self._elf.name, f"has queues of {queue_bytes} bytes an entry")
        at = HEAD.size + (runtime + 7 & ~7)
        devices = {}
        for number in range(num_devices):
            gpu, target, num_parts = DEVICE.unpack_from(note, at + number * device_bytes)
            devices[gpu] = target, min(max(num_parts, 1), _MAX_XCC)
        at += num_devices * device_bytes + 7 & ~7
        for number in range(num_queues):
            row = QUEUE.unpack_from(note, at + number * queue_bytes)
            status, ring, _, _, area, _, gpu, ring_bytes, _, area_bytes = row
            target, num_parts = devices.get(gpu, (0, 1))
            yield _Queue(status, ring, ring_bytes, area, area_bytes, target, num_parts)

    def _waves(self) -> Iterator[_Wave]:
        for queue in self._queues:
            for part in range(queue.num_parts):
                base = queue.save_area + part * queue.save_area_bytes
                head = self._read(base, SAVE_AREA.size)
                if len(head) == SAVE_AREA.size:
                    yield from self._waves_of(queue, base, *SAVE_AREA.unpack(head))

    def _waves_of(
        self, queue: _Queue, base: int, stack_at: int, stack_bytes: int, end: int, area_bytes: int
    ) -> Iterator[_Wave]:
        """By the words with which the hardware would start the waves again."""
        if not stack_bytes:
            return
        if queue.target not in LDS_BYTES:
            target = f"gfx{queue.target // 10000}{queue.target // 100 % 100}{queue.target % 100:x}"
            raise BadCoreDump(self._elf.name, f"is of {target}, whose saved waves are not read yet")
        if stack_bytes > _MAX_STACK_BYTES:
            raise BadCoreDump(self._elf.name, f"has a control stack of {stack_bytes} bytes")
        state, at = 0, base + end
        for word in self._words(base + stack_at, stack_bytes // 4)[2:]:
            if word >> 30 & 1:
                continue
            if word >> 31:
                state = word
                continue
            wave, at = self._wave(queue, state, word, at)
            if at < base + end - area_bytes:
                raise BadCoreDump(self._elf.name, "has waves that reach past their save area")
            yield wave

    def _wave(self, queue: _Queue, state: int, word: int, end: int) -> tuple[_Wave, int]:
        """The wave that lies below `end`, and where it begins."""
        num_scalars = (state >> 6 & 7) * 16
        num_vectors = ((state >> 24 & 0x3F) + 1) * 4
        num_accumulators = ((state & 0x3F) + 1) * 8 - num_vectors
        local = (state >> 9 & 0x1FF) * LDS_BYTES[queue.target] if word >> 17 & 1 else 0
        hardware_at = end - PAD_BYTES - local - 4 * NUM_HARDWARE
        scalars_at = hardware_at - 4 * num_scalars
        first = scalars_at - 256 * (max(num_accumulators, 0) + num_vectors)
        hardware = self._words(hardware_at, NUM_HARDWARE)
        if len(hardware) < NUM_HARDWARE:
            raise BadCoreDump(self._elf.name, "has waves whose registers it does not hold")
        trap = hardware[NUM_HARDWARE - NUM_TRAP :]
        wave = _Wave(
            queue=queue,
            pc=hardware[1] | (hardware[2] & 0xFFFF) << 32,
            active=hardware[3] | hardware[4] << 32,
            status=hardware[6],
            trap=trap[6] >> 25 & 0xF,
            block=(trap[8], trap[9], trap[10]),
            number=trap[11] & 0x3F,
            packet=trap[11] >> 6 & 0x1FFFFFF,
            scalars=self._words(scalars_at, num_scalars),
            vectors_at=first,
            num_vectors=num_vectors,
        )
        return wave, first

    # -- what is told -----------------------------------------------------------------------------

    def stop(self, pid: int) -> GpuStop:
        waves: list[_Wave] = []
        for wave in self._waves():
            if len(waves) >= _MAX_WAVES:
                break
            waves.append(wave)
        waves.sort(key=lambda wave: not wave.exception)
        warps = [
            self._warp(wave, is_deep=number < MAX_DEEP_WARPS)
            for number, wave in enumerate(waves[:MAX_WARPS])
        ]
        is_of_memory = any(queue.status >> _QUEUE_MEMORY_BIT & 1 for queue in self._queues)
        exception = next((warp.exception for warp in warps if warp.exception), "")
        exception = exception or (_MEMORY if is_of_memory else "")
        counted = collections.Counter(self._name_of(wave) for wave in waves)
        target = next((queue.target for queue in self._queues), 0)
        return GpuStop(
            source=SOURCE,
            pid=pid,
            device=f"gfx{target // 10000}{target // 100 % 100}{target % 100:x}" if target else "",
            exception=exception,
            is_on_request=not exception,
            grids=tuple(self._grid_rows),
            warps=tuple(warps),
            standing=tuple(
                GpuStanding(kernel=kernel, file="", line=0, num_warps=number)
                for kernel, number in counted.most_common(MAX_STANDINGS)
            ),
            num_warps=len(waves),
        )

    def _warp(self, wave: _Wave, *, is_deep: bool) -> GpuWarp:
        kernel = self._kernel_of(wave)
        grid = self._grid_of(wave, kernel)
        block = self._grid_rows[grid].block if grid >= 0 else (0, 0, 0)
        vectors = self._vectors(wave) if is_deep else []
        has_memory = grid >= 0 and bool(self._grid_rows[grid].words)
        found = self._access(wave, kernel, vectors) if is_deep and has_memory else None
        num_kept = min(wave.num_vectors, MAX_REGISTERS)
        pc = found[0] if found else wave.pc
        return GpuWarp(
            grid=grid,
            block=wave.block,
            warp=wave.number,
            kernel=source_name(kernel.name) if kernel else "",
            symbol=kernel.name if kernel else "",
            pc=pc,
            offset=pc - kernel.entry if kernel else 0,
            is_error=found is not None,
            exception=wave.exception,
            frames=self._frames(kernel, pc) if kernel and is_deep else (),
            access=found[1] if found else None,
            lanes=tuple(
                GpuLane(
                    lane=lane,
                    thread=_thread(wave.number * 64 + lane, block),
                    pc=wave.pc,
                    registers=tuple(vectors[number][lane] for number in range(num_kept)),
                )
                for lane in range(64)
                if vectors and wave.active >> lane & 1
            ),
            uniform=wave.scalars[:MAX_REGISTERS],
        )

    def _name_of(self, wave: _Wave) -> str:
        kernel = self._kernel_of(wave)
        return source_name(kernel.name) if kernel else ""

    def _kernel_of(self, wave: _Wave) -> LoadedKernel | None:
        """The kernel that begins last before the wave's place, in the object that holds it."""
        page = wave.pc >> 12
        if page not in self._kernels:
            base = image_base(self._read, wave.pc)
            known = loaded_kernels(self._read, base, self._elf.name) if base is not None else ()
            self._kernels[page] = known
        before = [kernel for kernel in self._kernels[page] if kernel.entry <= wave.pc]
        return max(before, key=lambda one: one.entry, default=None)

    def _grid_of(self, wave: _Wave, kernel: LoadedKernel | None) -> int:
        """The launch by the packet in its queue's ring, where the dump holds both; else -1."""
        queue, key = wave.queue, (wave.queue.ring, wave.packet)
        if key in self._grids:
            return self._grids[key]
        number = -1
        num_slots = queue.ring_bytes // 64
        data = self._read(queue.ring + wave.packet % num_slots * 64, 64) if num_slots else b""
        if kernel is not None and len(data) == 64 and len(self._grid_rows) < MAX_GRIDS:
            _, _, x, y, z, _, *sizes, _, _, descriptor, kernarg = PACKET.unpack_from(data)
            if descriptor == kernel.descriptor and x and y and z:
                words = self._words(kernarg, min(kernel.kernarg_bytes // 4, MAX_WORDS))
                blocks = [-(-size // own) for size, own in zip(sizes, (x, y, z), strict=True)]
                self._grid_rows.append(
                    GpuGrid(
                        kernel=source_name(kernel.name),
                        symbol=kernel.name,
                        grid=(blocks[0], blocks[1], blocks[2]),
                        block=(x, y, z),
                        words=words,
                        layout=kernel.layout if words else (),
                    )
                )
                number = len(self._grid_rows) - 1
        self._grids[key] = number
        return number

    def _vectors(self, wave: _Wave) -> list[tuple[int, ...]]:
        """Each vector register's lanes."""
        words = self._words(wave.vectors_at, 64 * wave.num_vectors)
        whole = len(words) // 64
        return [words[64 * number : 64 * number + 64] for number in range(whole)]

    def _access(
        self, wave: _Wave, kernel: LoadedKernel | None, vectors: Sequence[Sequence[int]]
    ) -> tuple[int, GpuAccess] | None:
        """The nearest access before the wave's place of which a lane asks for memory that is not
        there, and its place. A wave runs on for a while before it is stopped.

        Asked only of dumps that hold the launch's own memory, its packet and its parameters: a
        light one (HSA_ENABLE_LIGHTWEIGHT_COREDUMP) has code and registers, and lacks the rest. Nor
        is memory in one that the host has and registered, so the page that the runtime named counts
        where it is known.
        """
        if kernel is None or wave.exception != _MEMORY:
            return None
        num_bytes = min(wave.pc - kernel.entry, MAX_IMAGE_BYTES)
        for access in accesses_before(self._read(kernel.entry, num_bytes), kernel.entry, wave.pc):
            asked = lane_addresses(access, wave.scalars, vectors, wave.active)
            outside = {
                lane: address
                for lane, address in asked.items()
                if self._segment_of(address) is None
                or self._segment_of(address + access.width_bytes - 1) is None
            }
            if outside and self._is_of_page(outside.values(), access.width_bytes):
                made = GpuAccess(
                    operation=access.operation,
                    width_bytes=access.width_bytes,
                    addresses=outside,
                    known_bits=(1 << 64) - 1,
                )
                return access.pc, made
        return None

    def _is_of_page(self, addresses: Iterable[int], width_bytes: int) -> bool:
        """Whether one of the accesses touches the page of the fault, where that is known."""
        if self._page is None:
            return True
        page = self._page >> PAGE_BITS
        return any(page in (at >> PAGE_BITS, at + width_bytes - 1 >> PAGE_BITS) for at in addresses)

    def _frames(self, kernel: LoadedKernel, pc: int) -> tuple[GpuFrame, ...]:
        """The lines of an instruction, by a file that has the code up to it."""
        code = self._read(kernel.entry, min(pc - kernel.entry + 4, MAX_IMAGE_BYTES))
        for path in self._objects(kernel.name):
            try:
                if path.stat().st_size > MAX_IMAGE_BYTES:
                    continue
                data = path.read_bytes()
                image = Elf(data, 0, len(data), path.name)
                symbol = image.symbol(kernel.name)
                function = image.function_at(symbol.value) if symbol is not None else None
                if function is not None and image.code(function.first, len(code)) == code:
                    return frames_at(image, function, function.first + pc - kernel.entry)
            except (BadCoreDump, OSError):  # no file of code, or it has gone
                continue
        return ()


def _thread(number: int, block: Block) -> Block | None:
    x, y, z = block
    if not x or number >= x * y * z:
        return None
    return number % x, number // x % y, number // (x * y)
