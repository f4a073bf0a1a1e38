"""Writes the GPU core dump that ROCm's runtime would have written of a fault of the emulator's.

For what reads such dumps (`coredump/amd_dump.py`), whose sources say where each field lies. One
wave is in it, the one at fault. Of a real GPU nothing is known here.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.coredump.amd_dump import (
    DEVICE,
    HEAD,
    LDS_BYTES,
    MEMORY_BIT,
    NOTE_VERSION,
    NUM_HARDWARE,
    NUM_TRAP,
    PACKET,
    PAD_BYTES,
    QUEUE,
    SAVE_AREA,
    STATE_NOTE,
)
from hypocenter.device.amd.access import FRESH, PAGE_BITS, UNMAPPED
from hypocenter.device.amd.fault import MachineFault

#: Where the queue's ring and its save area lie: apart from code, arguments and what is allocated.
_RING, _AREA = 0x7F30_0000_0000, 0x7F40_0000_0000
_STACK_AT, _AREA_BYTES, _QUEUE_BYTES, _DEVICE_BYTES = 4096, 1 << 18, 64, 120
_GPU, _NUM_SCALARS = 0x5A17, 112
_MEMORY_STATUS, _STOPPED, _IS_SET_UP = 1 << 4, 1 << 30, 1 << 31
_ET_CORE, _EM_AMDGPU, _HSA = 4, 224, 64
_TARGETS = {"gfx90a": 90010, "gfx942": 90402, "gfx950": 90500}


@dataclass(frozen=True, slots=True)
class DumpedLaunch:
    """What ran: target, sizes, where its descriptor lies and its kernarg, and the kernel's LDS."""

    arch: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    descriptor: int
    kernarg: int
    code_base: int
    num_vectors: int
    num_accumulators: int


def dump_path(pattern: str) -> Path:
    """The file that ROCm's runtime makes of the pattern that is given."""
    return Path(pattern.replace("%p", str(os.getpid())).replace("%%", "%"))


def write_core_dump(path: Path, launch: DumpedLaunch, fault: MachineFault, regions: Array) -> bool:
    """Write it, with the memory in `regions` (as the machine has them); False for a target whose
    waves nobody here reads, of which none is written. Raises FileExistsError."""
    target = _TARGETS.get(launch.arch)
    if target not in LDS_BYTES:
        return False
    area = _save_area(launch, fault)
    sizes = (g * b for g, b in zip(launch.grid, launch.block, strict=True))
    pointers = launch.descriptor, launch.kernarg
    ring = PACKET.pack(0, 3, *launch.block, 0, *sizes, 0, 0, *pointers).ljust(64, b"\0")
    parts: list[tuple[int, bytes | None, int]] = [(_RING, ring, 64), (_AREA, area, len(area))]
    for region in regions:
        parts += _mapped_parts(region)
    with path.open("xb") as file:
        _write(file.fileno(), _note(target), parts)
    return True


def _mapped_parts(region: Array) -> Iterator[tuple[int, bytes | None, int]]:
    """What is mapped of a region: address, bytes (None where nobody touched it), how many."""
    first, end, host, _, table = (int(value) for value in region[:5])
    if not table:
        yield first, ctypes.string_at(host, end - first), end - first
        return
    page_bytes = 1 << PAGE_BITS
    states = np.ctypeslib.as_array(
        (ctypes.c_uint8 * (-(-(end - first) // page_bytes))).from_address(table)
    )
    for number in np.flatnonzero(states != UNMAPPED).tolist():
        at = number * page_bytes
        size = min(page_bytes, end - first - at)
        held = None if states[number] == FRESH else ctypes.string_at(host + at, size)
        yield first + at, held, size


def _note(target: int) -> bytes:
    device = DEVICE.pack(_GPU, target, 1).ljust(_DEVICE_BYTES, b"\0")
    queue = QUEUE.pack(_MEMORY_STATUS, _RING, 0, 0, _AREA, 1, _GPU, 64, 2, _AREA_BYTES)
    runtime = bytes(16)
    head = HEAD.pack(NOTE_VERSION, 1, 18, len(runtime), 1, _DEVICE_BYTES, 1, _QUEUE_BYTES)
    body = head + runtime + device + queue.ljust(_QUEUE_BYTES, b"\0")
    return struct.pack("<III", 7, len(body), STATE_NOTE) + b"AMDGPU\0\0" + body


def _save_area(launch: DumpedLaunch, fault: MachineFault) -> bytes:
    """The wave as the driver's trap handler saves it, and the words that would start it again."""
    state = fault.state
    num_vectors = launch.num_vectors + 7 & ~7
    num_accumulators = launch.num_accumulators + 7 & ~7
    hardware = np.zeros(NUM_HARDWARE, np.uint32)
    pc = launch.code_base + fault.pc + fault.instruction.num_bytes
    hardware[1:3] = pc & 0xFFFFFFFF, pc >> 32
    hardware[3:5] = state.sgpr[126:128]
    hardware[6] = 1 << MEMORY_BIT
    trap = hardware[NUM_HARDWARE - NUM_TRAP :]
    trap[6], trap[8:11] = _STOPPED, fault.workgroup
    trap[11] = _IS_SET_UP | fault.wave
    vectors = _registers(state.vgpr, 0, num_vectors) + _registers(state.vgpr, 256, num_accumulators)
    saved = vectors + state.sgpr[:_NUM_SCALARS].astype("<u4").tobytes()
    saved += hardware.tobytes() + bytes(PAD_BYTES)
    size = (num_vectors + num_accumulators) // 8 - 1 | (_NUM_SCALARS // 16) << 6
    words = [0, 0, 1 << 31 | size | (num_vectors // 4 - 1) << 24, 1 << 16 | 1 << 17]
    stack = struct.pack(f"<{len(words)}I", *words)
    end = _STACK_AT + len(stack) + len(saved)
    head = SAVE_AREA.pack(_STACK_AT, len(stack), end, len(saved))
    return head.ljust(_STACK_AT, b"\0") + stack + saved


def _registers(vgpr: Array, first: int, number: int) -> bytes:
    held = np.zeros((number, 64), "<u4")
    have = vgpr[first : first + number]
    held[: len(have), : have.shape[1]] = have
    return held.tobytes()


def _write(file: int, note: bytes, parts: Sequence[tuple[int, bytes | None, int]]) -> None:
    offset = 64 + 56 * (len(parts) + 1)
    headers = [struct.pack("<IIQQQQQQ", 4, 0, offset, 0, 0, len(note), len(note), 2)]
    os.pwrite(file, note, offset)
    offset += len(note)
    for address, held, size in parts:
        headers.append(struct.pack("<IIQQQQQQ", 1, 7, offset, address, 0, size, size, 4))
        if held is not None:
            os.pwrite(file, held, offset)
        offset += size
    os.ftruncate(file, offset)
    ident = b"\x7fELF\x02\x01\x01" + bytes([_HSA]) + bytes(8)
    fields = (_ET_CORE, _EM_AMDGPU, 1, 0, 64, 0, 0, 64, 56, len(headers), 0, 0, 0)
    os.pwrite(file, ident + struct.pack("<HHIQQQIHHHHHH", *fields) + b"".join(headers), 0)
