"""One wave that runs a few lines of AMD's assembly with registers, LDS and memory of a test's own.

LLVM's assembler, which Triton brings, makes the machine code; what it makes is decoded, lowered and
run as a kernel's is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from triton.backends.amd.compiler import assemble_amdgcn

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.decode import FAMILIES, Instruction, decode
from hypocenter.device.amd.evidence.unset import NUM_MASKS, USE_COLUMNS
from hypocenter.device.amd.executor import ArrayMemory
from hypocenter.device.amd.lower import Lowering
from hypocenter.device.amd.machine import run_workgroup
from hypocenter.device.amd.values.handlers import NUM_ROWS

EXEC = 126


def num_lanes_of(arch: str) -> int:
    """Lanes of a wave as our kernels are compiled."""
    return 64 if FAMILIES[arch] == "cdna" else 32


def section_of(text: str, arch: str, name: str) -> bytes:
    """A section of what LLVM's assembler makes of a text."""
    made: bytes = assemble_amdgcn(text + "\n", arch, "")
    (table,) = struct.unpack_from("<Q", made, 0x28)
    size, count, names = struct.unpack_from("<HHH", made, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", made, table + size * i) for i in range(count)]
    first = rows[names][4]
    for at, _, _, _, offset, num_bytes in rows:
        if made[first + at :].startswith(name.encode() + b"\0"):
            return made[offset : offset + num_bytes]
    raise AssertionError(f"the assembler made no {name}")


@cache
def assembled(text: str, arch: str) -> list[Instruction]:
    """The instructions of some lines of assembly."""
    return decode(section_of(f".text\n{text}\ns_endpgm\n", arch, ".text"), arch)


@dataclass(slots=True)
class Wave:
    """What a wave has: vgpr uint32[512, 64] with accumulators from 256 on, sgpr int64[128], LDS and
    scratch as bytes, memory. `run` changes them in place, and leaves in `out` what the machine says
    of its stop. `pages` are states of pages, the first of which is that of the first region. `log`
    has a row for each access, as in `access.py`; without rows none is kept."""

    arch: str
    vgpr: Array = field(default_factory=lambda: np.zeros((512, 64), np.uint32))
    sgpr: Array = field(default_factory=lambda: np.zeros(128, np.int64))
    lds: Array = field(default_factory=lambda: np.zeros(4096, np.uint8))
    scratch: Array = field(default_factory=lambda: np.zeros((64, 256), np.uint8))
    memory: ArrayMemory = field(default_factory=ArrayMemory)
    scc: int = 0
    active: int = -1
    out: Array = field(default_factory=lambda: np.zeros(16, np.int64))
    pages: Array | None = None
    log: Array = field(default_factory=lambda: np.zeros((0, 10), np.int64))

    @property
    def num_lanes(self) -> int:
        return num_lanes_of(self.arch)

    def run(self, text: str) -> int:
        """Run the lines to their end; returns why it stopped, as in `instruction_rows.py`."""
        machine = self.machine(text)
        why = int(run_workgroup(machine))
        self.scc, self.out = int(machine.wave[0, r.SCC_BIT]), machine.out
        return why

    def machine(self, text: str) -> r.Machine:
        """The machine before the first of the lines; it shares what the wave has."""
        lowered = Lowering(self.arch, self.num_lanes).lower(assembled(text, self.arch))
        assert not lowered.problems, lowered.problems
        mask = self.active & ((1 << self.num_lanes) - 1)
        self.sgpr[EXEC], self.sgpr[EXEC + 1] = mask & 0xFFFFFFFF, mask >> 32
        wave = np.zeros((1, 8), np.int64)
        wave[0, r.SCC_BIT] = self.scc
        is_rdna = FAMILIES[self.arch] != "cdna"
        regions = self.memory.regions()
        if self.pages is not None:
            regions[0, 4] = self.pages.ctypes.data
        machine = r.Machine(
            code=lowered.code,
            tables=lowered.tables,
            regions=regions,
            sgpr=self.sgpr[None],
            vgpr=self.vgpr[None],
            wave=wave,
            lds=self.lds,
            scratch=self.scratch[None],
            rows=np.zeros(NUM_ROWS * 64, np.int64),
            unset=np.zeros((0, NUM_MASKS), np.int64),
            uses=np.zeros((0, USE_COLUMNS), np.int64),
            out=np.zeros(16, np.int64),
            log=self.log,
            facts=np.array([self.num_lanes, 1 << 20, is_rdna, 0], np.int64),
        )
        machine.out[r.LOCAL_OUTSIDE_ROW] = -1
        return machine

    def put(self, register: int, values: Array) -> None:
        """Fill registers from `register` on: values[lanes, ...], a lane's bytes in a row."""
        words = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint32)
        self.vgpr[register : register + words.shape[1], : len(words)] = words.T

    def get(self, register: int, dtype: str, num_words: int = 1) -> Array:
        """The other way: [lanes, n] numbers of `dtype`."""
        words = self.vgpr[register : register + num_words, : self.num_lanes].T
        return np.ascontiguousarray(words).view(dtype)
