"""Launches of AMD's machine code, executed by our emulator of it; not hardware.

`prepare` makes a kernel ready once, `launch` runs it, `Execution` runs single blocks of a launch.
Nothing here is timed, cached or reordered as on a GPU: see `machine.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError, UsageError
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.code_object import CodeObject, Kernel
from hypocenter.device.amd.decode import Instruction, decode, family_of
from hypocenter.device.amd.descriptor import USER_SGPRS
from hypocenter.device.amd.evidence.core_dump import DumpedLaunch
from hypocenter.device.amd.evidence.rounds import Round, round_of
from hypocenter.device.amd.evidence.unset import (
    MAX_USES,
    NUM_MASKS,
    USE_COLUMNS,
    fill_unset,
    note_mixing,
)
from hypocenter.device.amd.evidence.waits import MissingWait, missing_waits
from hypocenter.device.amd.fault import FaultKind, MachineFault, WaveState, fault_of
from hypocenter.device.amd.float_mode import PLAIN_FLOATS
from hypocenter.device.amd.lower import Lowered, Lowering
from hypocenter.device.amd.machine import run_workgroup
from hypocenter.device.amd.values.handlers import NUM_ROWS

#: Instructions that a wave may take: then it is taken for one that never ends.
MAX_INSTRUCTIONS = 1 << 27
#: After so many a wave is first looked at for going round, and then after each time as many.
_FIRST_LOOK, _NEXT_LOOK = 1 << 16, 8
MAX_BLOCK_THREADS, MAX_SHARED_BYTES, MAX_SCRATCH_BYTES = 1024, 160 << 10, 1 << 17
#: Where code and arguments lie on the device, far from what memory gives out.
CODE_BASE, ARGUMENTS_BASE = 0x7F10_0000_0000, 0x7F20_0000_0000
#: Bytes of code before the body of a kernel whose arguments are preloaded.
_PRELOAD_BYTES = 256
_TTMP7, _TTMP8, _TTMP9, _EXEC = 115, 116, 117, 126
_PACKET_BYTES = 64


class MachineMemory(Protocol):
    """The device's memory as the machine sees it."""

    def regions(self) -> Array:
        """int64[n, 5], sorted and apart: see `records.Machine`."""
        ...

    def make_ready(self, address: int) -> None:
        """Fill the page around an address that nobody has touched."""
        ...


class ArrayMemory:
    """Memory made of numpy arrays, each at an address of its own with unmapped pages around it."""

    def __init__(self, base: int = 1 << 44) -> None:
        self._next = base
        self._arrays: dict[int, tuple[Array, bool]] = {}

    def add(self, array: Array, *, is_writable: bool = True) -> int:
        """The address at which a kernel finds the array's bytes; the array stays shared."""
        if not array.flags.c_contiguous:
            raise UsageError("an array for a kernel has gaps; pass np.ascontiguousarray(...) of it")
        address = self._next
        self._arrays[address] = array, is_writable
        self._next += (max(array.nbytes, 1) + 0x1FFF & ~0xFFF) + 0x1000
        return address

    def remove(self, address: int) -> None:
        """An access there faults from now on."""
        del self._arrays[address]

    def regions(self) -> Array:
        rows = [
            (address, address + array.nbytes, array.ctypes.data, int(is_writable), 0)
            for address, (array, is_writable) in sorted(self._arrays.items())
        ]
        return np.array(rows, np.int64).reshape(-1, 5)

    def make_ready(self, address: int) -> None:
        """All of it is there."""


@dataclass(frozen=True, slots=True)
class MachineLaunch:
    """Blocks of a launch, threads of a block, the kernarg's bytes, LDS beside the kernel's own."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    kernarg: bytes
    shared_bytes: int = 0
    max_instructions: int = MAX_INSTRUCTIONS

    @property
    def num_threads(self) -> int:
        x, y, z = self.block
        return x * y * z


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended: with no fault, or at the first one; wave instructions that ran.

    `local_outside` is an access to LDS beyond what the block has, which reads 0 and writes nothing:
    its instruction and its byte, or None.
    """

    fault: MachineFault | None
    num_instructions: int
    local_outside: tuple[Instruction, int] | None = None


class MachineProgram:
    """A kernel of a code object, decoded and lowered; shared by all its launches."""

    def __init__(self, code_object: CodeObject, kernel: Kernel) -> None:
        self.code_object, self.kernel = code_object, kernel
        self.arch = code_object.target.arch
        self.family = family_of(self.arch)
        mode = kernel.descriptor.float_mode
        if mode != PLAIN_FLOATS:
            raise HypoError(
                f"{kernel.name}: float mode {mode:#x} is not executed here, only "
                f"{PLAIN_FLOATS:#x}; compile without flags that flush denormals"
            )
        self.image = np.frombuffer(code_object.memory_image(CODE_BASE), np.uint8)

    @cached_property
    def lowered(self) -> Lowered:
        """The rows that the machine runs. Raises Undecodable."""
        kernel = self.kernel
        code = self.image[kernel.entry : kernel.entry + kernel.code_bytes].tobytes()
        instructions = decode(code, self.arch, kernel.entry)
        descriptor = kernel.descriptor
        lowering = Lowering(self.arch, descriptor.wavefront, clamps=descriptor.clamps_overflow)
        lowered = lowering.lower(instructions)
        note_mixing(lowered.code, [instructions[i].name for i in lowered.instruction_of])
        return lowered

    @cached_property
    def first_row(self) -> int:
        """Where a wave begins: behind the prologue where arguments are preloaded."""
        descriptor = self.kernel.descriptor
        pc = self.kernel.entry + (_PRELOAD_BYTES if descriptor.preload_words else 0)
        return int(np.flatnonzero(self.lowered.code[:, r.PC] == pc)[0])

    @cached_property
    def missing_waits(self) -> list[MissingWait]:
        """What the code uses before it has arrived; no run shows it here."""
        entries = (0, self.lowered.instruction_of[self.first_row])
        return missing_waits(self.lowered, self.arch, self.kernel.descriptor.wavefront, entries)


def prepare(code_object: CodeObject, kernel_name: str | None = None) -> MachineProgram:
    """A kernel, made ready. Raises BadCodeObject, Undecodable and MissingPackage."""
    program = MachineProgram(code_object, code_object.kernel(kernel_name))
    _ = program.first_row
    return program


def launch(program: MachineProgram, given: MachineLaunch, memory: MachineMemory) -> Outcome:
    """Run all blocks of a launch, in order, until one faults."""
    return Execution(program, given, memory).run(_all_blocks(given.grid))


def _all_blocks(grid: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    for z, y, x in itertools.product(*(range(size) for size in reversed(grid))):
        yield x, y, z


class Execution:
    """One launch. `max_log` is how many accesses are kept of each block; 0 keeps none.

    With `watches_registers` uses of registers that nobody wrote are noted: see `unset.py`. Where
    the launch `is_alone`, nothing else changes its memory: a wave that goes round ends it at once.
    A block begins with `local` in its LDS, uint8[bytes], or with zeros.
    """

    def __init__(
        self,
        program: MachineProgram,
        given: MachineLaunch,
        memory: MachineMemory,
        max_log: int = 0,
        *,
        watches_registers: bool = False,
        is_alone: bool = False,
        local: Array | None = None,
    ) -> None:
        _check(program, given)
        self._local = local
        self.program, self.given, self._memory = program, given, memory
        descriptor = program.kernel.descriptor
        self._lanes = descriptor.wavefront
        self._num_waves = -(-given.num_threads // self._lanes)
        self._arguments = np.frombuffer(self._argument_bytes(), np.uint8)
        self._log = np.zeros((max_log, r.LOG_COLUMNS), np.int64)
        self._watches_registers, self._is_alone = watches_registers, is_alone
        scratch = descriptor.private_bytes if descriptor.has_scratch else 0
        if descriptor.uses_dynamic_stack:
            scratch = max(scratch, 1 << 14)
        self._scratch_bytes = scratch
        self._num_vgprs = min(descriptor.num_vgprs, 256)

    def run(self, blocks: Iterable[tuple[int, int, int]]) -> Outcome:
        """Run these blocks, one after the other, until one faults."""
        num_instructions, outside = 0, None
        for block in blocks:
            machine, fault = self.run_block(block)
            num_instructions += int(machine.wave[:, r.COUNT].sum())
            row = int(machine.out[r.LOCAL_OUTSIDE_ROW])
            if row >= 0 and outside is None:
                outside = self._instruction(row), int(machine.out[r.LOCAL_OUTSIDE_AT])
            if fault is not None:
                return Outcome(fault, num_instructions, outside)
        return Outcome(None, num_instructions, outside)

    def run_block(self, block: tuple[int, int, int]) -> tuple[r.Machine, MachineFault | None]:
        """One block, to its end or its fault; the machine is as it stopped.

        Where a block makes more accesses than are kept, none is: its log is empty.
        """
        machine = self._machine(block)
        most = self.given.max_instructions
        machine.facts[r.BUDGET] = min(_FIRST_LOOK, most) if self._is_alone else most
        while True:
            why = int(run_workgroup(machine))
            if why == r.ALL_ENDED:
                return machine, None
            if why == r.FRESH_PAGE:
                address, size = int(machine.out[r.AT]), int(machine.out[r.SIZE])
                self._memory.make_ready(address)
                self._memory.make_ready(address + max(size, 1) - 1)
            elif why == r.LOG_FULL:
                machine = machine._replace(log=self._log[:0])
            elif why == r.OVER_BUDGET and self._is_alone:
                wave = int(machine.out[r.WAVE])
                found = round_of(machine, wave, run_workgroup)
                if found is not None or machine.facts[r.BUDGET] >= most:
                    return machine, self._fault(machine, why, block, found)
                machine.facts[r.BUDGET] = min(int(machine.facts[r.BUDGET]) * _NEXT_LOOK, most)
            else:
                return machine, self._fault(machine, why, block)

    def _fault(
        self,
        machine: r.Machine,
        why: int,
        block: tuple[int, int, int],
        found: Round | None = None,
    ) -> MachineFault:
        fault = fault_of(machine, why, self.program.lowered, block, self._lanes)
        return replace(fault, round=found)

    def launch_to_dump(self) -> DumpedLaunch:
        """The launch as a core dump tells of it."""
        kernel, given = self.program.kernel, self.given
        return DumpedLaunch(
            self.program.arch,
            given.grid,
            given.block,
            CODE_BASE + kernel.descriptor_address,
            ARGUMENTS_BASE,
            CODE_BASE,
            self._num_vgprs,
            kernel.accumulators,
        )

    def _instruction(self, row: int) -> Instruction:
        lowered = self.program.lowered
        return lowered.instructions[lowered.instruction_of[row]]

    # -- how a block begins -----------------------------------------------------------------------

    def _machine(self, block: tuple[int, int, int]) -> r.Machine:
        """The machine at the begin of a block; its arrays serve all blocks."""
        machine = self._state
        for state in (machine.sgpr, machine.wave, machine.lds, machine.scratch, machine.out):
            state.fill(0)
        if self._local is not None:
            machine.lds[:] = self._local
        machine.vgpr[:, : self._num_vgprs].fill(0)
        machine.vgpr[:, 256:].fill(0)
        machine.out[r.LOCAL_OUTSIDE_ROW] = -1
        machine.wave[:, r.NEXT] = self.program.first_row
        if self._watches_registers:
            fill_unset(machine.unset, self.program.kernel.descriptor)
        for wave in range(self._num_waves):
            self._begin(machine, wave, block)
        return machine

    @cached_property
    def _state(self) -> r.Machine:
        lowered, waves = self.program.lowered, self._num_waves
        kernel = self.program.kernel
        is_cdna = kernel.descriptor.is_cdna
        facts = [self._lanes, self.given.max_instructions, not is_cdna, CODE_BASE]
        return r.Machine(
            code=lowered.code,
            tables=lowered.tables,
            regions=self.all_regions(),
            sgpr=np.zeros((waves, 128), np.int64),
            vgpr=np.zeros((waves, 512 if kernel.accumulators else 256, 64), np.uint32),
            wave=np.zeros((waves, 8), np.int64),
            lds=np.zeros(self._shared_bytes(), np.uint8),
            scratch=np.zeros((waves, 64, self._scratch_bytes), np.uint8),
            rows=np.zeros(NUM_ROWS * 64, np.int64),
            out=np.zeros(16, np.int64),
            log=self._log,
            facts=np.array(facts, np.int64),
            unset=np.zeros((waves if self._watches_registers else 0, NUM_MASKS), np.int64),
            uses=np.zeros((MAX_USES if self._watches_registers else 0, USE_COLUMNS), np.int64),
        )

    def _shared_bytes(self) -> int:
        return self.program.kernel.descriptor.group_bytes + self.given.shared_bytes

    def all_regions(self) -> Array:
        """Memory, code and arguments, as the machine has them."""
        rows = self._memory.regions()
        image, given = self.program.image, self._arguments
        own = [
            (CODE_BASE, CODE_BASE + image.size, image.ctypes.data, 1, 0),
            (ARGUMENTS_BASE, ARGUMENTS_BASE + given.size, given.ctypes.data, 0, 0),
        ]
        both = np.concatenate([rows.reshape(-1, 5), np.array(own, np.int64)])
        return both[np.argsort(both[:, 0], kind="stable")]

    def _begin(self, machine: r.Machine, wave: int, block: tuple[int, int, int]) -> None:
        """Registers as the packet processor sets them up (LLVM's guide, "Initial Kernel Execution
        State")."""
        descriptor = self.program.kernel.descriptor
        sgpr, place = machine.sgpr[wave], 0
        values = self._pointers()
        for name, words in USER_SGPRS:
            if name in descriptor.user_sgprs:
                for word in range(words):
                    sgpr[place + word] = values.get(name, 0) >> (32 * word) & 0xFFFFFFFF
                place += words
        first = descriptor.preload_first
        preloaded = np.frombuffer(
            self.given.kernarg.ljust(4 * (first + descriptor.preload_words), b"\0"),
            "<u4",
            first + descriptor.preload_words,
        )
        sgpr[place : place + descriptor.preload_words] = preloaded[first:]
        place = descriptor.num_user_sgprs
        if self.program.family == "rdna4":
            sgpr[_TTMP8], sgpr[_TTMP9] = wave << 25, block[0]
            sgpr[_TTMP7] = block[1] | block[2] << 16
        else:
            for number, is_there in zip(block, descriptor.workgroup_ids, strict=True):
                if is_there:
                    sgpr[place] = number
                    place += 1
        self._begin_lanes(machine, wave)

    def _begin_lanes(self, machine: r.Machine, wave: int) -> None:
        threads = wave * self._lanes + np.arange(64)
        x, y, _ = self.given.block
        packed = threads % x | threads // x % y << 10 | threads // (x * y) << 20
        active = threads[: self._lanes] < self.given.num_threads
        machine.vgpr[wave, 0] = np.where(np.arange(64) < self._lanes, packed, 0)
        bits = sum(1 << lane for lane in range(self._lanes) if active[lane])
        machine.sgpr[wave, _EXEC] = bits & 0xFFFFFFFF
        machine.sgpr[wave, _EXEC + 1] = bits >> 32

    def _pointers(self) -> dict[str, int]:
        return {
            "kernarg_segment_ptr": ARGUMENTS_BASE,
            "dispatch_ptr": ARGUMENTS_BASE + self._arguments.size - _PACKET_BYTES,
            "private_segment_size": self._scratch_bytes,
        }

    def _argument_bytes(self) -> bytearray:
        """The kernarg, and behind it the packet that a queue would hold."""
        given = self.given
        kernarg = bytearray(given.kernarg)
        kernarg += bytes(-len(kernarg) % 64)
        packet = bytearray(_PACKET_BYTES)
        numbers = np.array([0, 0, *given.block, 0], "<u2").tobytes()
        sizes = np.array([g * b for g, b in zip(given.grid, given.block, strict=True)], "<u4")
        packet[: len(numbers)] = numbers
        packet[12:24] = sizes.tobytes()
        packet[24:32] = np.array(
            [self.program.kernel.descriptor.private_bytes, self._shared_bytes()], "<u4"
        ).tobytes()
        packet[40:48] = ARGUMENTS_BASE.to_bytes(8, "little")
        return kernarg + packet


def _check(program: MachineProgram, given: MachineLaunch) -> None:
    """What a runtime refuses before a launch; one line each."""
    name, descriptor = program.kernel.name, program.kernel.descriptor
    if min(*given.grid, *given.block) < 1 or given.num_threads > MAX_BLOCK_THREADS:
        raise UsageError(
            f"{name}: a grid of {given.grid} blocks of {given.block} threads, but a block has 1 to "
            f"{MAX_BLOCK_THREADS} threads and a grid a block"
        )
    shared = descriptor.group_bytes + given.shared_bytes
    if not 0 <= shared <= MAX_SHARED_BYTES:
        raise UsageError(f"{name}: {shared} bytes of LDS a block, limit {MAX_SHARED_BYTES}")
    if descriptor.private_bytes > MAX_SCRATCH_BYTES:
        has = f"{descriptor.private_bytes} bytes of scratch a lane"
        raise UsageError(f"{name}: {has}, limit {MAX_SCRATCH_BYTES}")
    if len(given.kernarg) < descriptor.kernarg_bytes:
        has = f"{len(given.kernarg)} bytes of arguments"
        raise UsageError(f"{name}: {has}, but it reads {descriptor.kernarg_bytes}")


__all__ = [
    "ArrayMemory",
    "Execution",
    "FaultKind",
    "MachineFault",
    "MachineLaunch",
    "MachineMemory",
    "MachineProgram",
    "Outcome",
    "WaveState",
    "launch",
    "prepare",
]
