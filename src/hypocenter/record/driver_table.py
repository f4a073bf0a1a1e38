"""The table in which machine code leaves what a process asks of its driver: layout, and reading.

A file of one size that the process has mapped, so that what was written outlives it: a head, then
kernels, memory and the last launches, each in slots of one size. `header_text` gives the same
layout to the C compiler.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from hypocenter.record.driver_run import (
    MAX_PARAMETER_BYTES,
    MAX_PARAMETERS,
    NO_ANSWER,
    DriverKernel,
    DriverLaunch,
    DriverMemory,
)

NAME = "driver-table"
NUM_KERNELS, NUM_MEMORY, NUM_LAUNCHES = 512, 4096, 1024
_SYMBOL_BYTES = 512
#: Events and launches so far, launches of graphs, kernels, memory, memory without a slot.
_HEAD = struct.Struct("<QQQIII")
#: A name, how many parameters there are, and of each offset and bytes.
_KERNEL = struct.Struct(f"<{_SYMBOL_BYTES}sI")
_PARAMETER = struct.Struct("<HH")
#: Address, bytes, when it was made and freed, by which call, lines of both.
_MEMORY = struct.Struct("<QQQQIII4x")
#: Number, stream, kernel, line, answer, grid and block and shared bytes, bytes of parameters.
_LAUNCH = struct.Struct("<QQIIi7II4x")
_HEAD_BYTES = 64
_KERNEL_BYTES = _KERNEL.size + MAX_PARAMETERS * _PARAMETER.size
_LAUNCH_BYTES = _LAUNCH.size + MAX_PARAMETER_BYTES
_KERNELS_AT = _HEAD_BYTES
_MEMORY_AT = _KERNELS_AT + -(-NUM_KERNELS * _KERNEL_BYTES // 64) * 64
_LAUNCHES_AT = _MEMORY_AT + NUM_MEMORY * _MEMORY.size
NUM_BYTES = _LAUNCHES_AT + NUM_LAUNCHES * _LAUNCH_BYTES

#: Functions of the driver by CUPTI's numbers (`cupti_driver_cbid.h` of CUDA 13.0), which are never
#: given anew. An argument list that changes gets another name (_v2) and another number.
CALLS = {
    "LAUNCH": 307,
    "LAUNCH_PTSZ": 442,
    "COOPERATIVE": 477,
    "COOPERATIVE_PTSZ": 478,
    "EXTENDED": 652,
    "EXTENDED_PTSZ": 653,
    "ALLOC": 243,
    "PITCH": 244,
    "FREE": 245,
    "MANAGED": 371,
    "MAP": 551,
    "UNMAP": 552,
    "ASYNC": 598,
    "ASYNC_PTSZ": 599,
    "FREE_ASYNC": 600,
    "FREE_ASYNC_PTSZ": 601,
    "POOL": 611,
    "POOL_PTSZ": 612,
    "GRAPH": 514,
    "GRAPH_PTSZ": 515,
    "MODULE_UNLOAD": 22,
    "LIBRARY_UNLOAD": 680,
}
#: How those are called that give memory.
_MAKERS = {
    CALLS[name]: call
    for call, names in {
        "cuMemAlloc": ("ALLOC",),
        "cuMemAllocPitch": ("PITCH",),
        "cuMemAllocManaged": ("MANAGED",),
        "cuMemMap": ("MAP",),
        "cuMemAllocAsync": ("ASYNC", "ASYNC_PTSZ"),
        "cuMemAllocFromPoolAsync": ("POOL", "POOL_PTSZ"),
    }.items()
    for name in names
}


def header_text() -> str:
    """The layout as C has it."""
    numbers = {
        "NUM_KERNELS": NUM_KERNELS,
        "NUM_PARAMETERS": MAX_PARAMETERS,
        "NUM_MEMORY": NUM_MEMORY,
        "NUM_LAUNCHES": NUM_LAUNCHES,
        "NUM_MET": 4 * NUM_KERNELS,
        "DATA_BYTES": MAX_PARAMETER_BYTES,
        "NO_ANSWER": NO_ANSWER,
        "KERNELS_AT": _KERNELS_AT,
        "MEMORY_AT": _MEMORY_AT,
        "LAUNCHES_AT": _LAUNCHES_AT,
        **{f"CALL_{name}": number for name, number in CALLS.items()},
    }
    defined = "\n".join(f"#define {name} {number}" for name, number in numbers.items())
    sizes = {
        "head": _HEAD.size + 4,
        "kernel": _KERNEL_BYTES,
        "memory": _MEMORY.size,
        "launch": _LAUNCH_BYTES,
    }
    checks = "\n".join(
        f'_Static_assert(sizeof(struct {name}) == {size}, "{name}");'
        for name, size in sizes.items()
    )
    return f"""{defined}
struct head {{ uint64_t num_events, num_launches, num_graphs;
              uint32_t num_kernels, num_memory, num_memory_lost, unused; }};
struct kernel {{ char symbol[{_SYMBOL_BYTES}]; uint32_t num_parameters;
                struct {{ uint16_t offset, num_bytes; }} parameters[NUM_PARAMETERS]; }};
struct memory {{ uint64_t address, num_bytes, seq, freed_seq;
                uint32_t call, site, freed_site, unused; }};
struct launch {{ uint64_t seq, stream; uint32_t kernel, site; int32_t code; uint32_t sizes[7];
                uint32_t num_bytes, unused; char data[DATA_BYTES]; }};
{checks}
"""


def make(folder: Path) -> mmap.mmap:
    """A new table in a run folder, mapped; raises OSError."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(folder / NAME, flags, 0o600)
    try:
        # Room is taken now: a page that cannot be had later would end the process.
        os.posix_fallocate(file, 0, NUM_BYTES)
        return mmap.mmap(file, NUM_BYTES)
    finally:
        os.close(file)


def place(table: mmap.mmap, at: int) -> int:
    """The number of the launch whose slot begins at byte `at`."""
    return int(_LAUNCH.unpack_from(table, at)[0])


class Table:
    """A table as a process left it; raises ValueError for what is none."""

    def __init__(self, data: bytes, sites: Mapping[int, str]) -> None:
        if len(data) != NUM_BYTES:
            raise ValueError(f"has {len(data)} bytes, but a table has {NUM_BYTES}")
        self._data, self._sites = data, sites
        counts = _HEAD.unpack_from(data)
        _, self.num_launches, self.num_graphs, kernels, memory, self.num_memory_lost = counts
        self._num_kernels = min(kernels, NUM_KERNELS - 1)
        self._num_memory = min(memory, NUM_MEMORY)

    def kernels(self) -> Iterator[DriverKernel]:
        """Those that were launched; they count from 1."""
        for number in range(1, self._num_kernels + 1):
            at = _KERNELS_AT + number * _KERNEL_BYTES
            symbol, count = _KERNEL.unpack_from(self._data, at)
            first = at + _KERNEL.size
            places = range(min(count, MAX_PARAMETERS))
            yield DriverKernel(
                id=number,
                symbol=symbol.split(b"\0", 1)[0].decode(errors="replace"),
                parameters=tuple(
                    _PARAMETER.unpack_from(self._data, first + at * _PARAMETER.size)
                    for at in places
                ),
            )

    def memory(self) -> Iterator[DriverMemory]:
        """What the driver gave, in the order of slots."""
        for number in range(self._num_memory):
            row = _MEMORY.unpack_from(self._data, _MEMORY_AT + number * _MEMORY.size)
            address, num_bytes, seq, freed_seq, call, site, freed_site = row
            if not seq:
                continue
            yield DriverMemory(
                address=address,
                num_bytes=num_bytes,
                call=_MAKERS.get(call, f"call {call}"),
                seq=seq,
                site=self._sites.get(site, ""),
                freed_seq=freed_seq,
                freed_site=self._sites.get(freed_site, "") if freed_seq else "",
            )

    def launches(self) -> Iterator[DriverLaunch]:
        """The last ones, in the order of slots; what was being written is left out."""
        for number in range(NUM_LAUNCHES):
            at = _LAUNCHES_AT + number * _LAUNCH_BYTES
            seq, stream, kernel, site, code, *sizes, num_bytes = _LAUNCH.unpack_from(self._data, at)
            if not seq:
                continue
            gx, gy, gz, bx, by, bz, shared = sizes
            first = at + _LAUNCH.size
            yield DriverLaunch(
                seq=seq,
                kernel=kernel,
                grid=(gx, gy, gz),
                block=(bx, by, bz),
                shared_bytes=shared,
                stream=stream,
                data=self._data[first : first + min(num_bytes, MAX_PARAMETER_BYTES)],
                site=self._sites.get(site, ""),
                code=code,
            )
