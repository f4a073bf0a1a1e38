"""Findings of a launch of machine code: argument, element, lane, register, pc and source line."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from hypocenter.base.errors import HypoError
from hypocenter.check.machine.accesses import Oddity
from hypocenter.check.machine.memory import ArgumentMemory, ArrayRegion, is_null
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.decode import Instruction
from hypocenter.device.amd.evidence.unset import AS_ADDRESS, AS_CHOICE, AS_DATA, register_name
from hypocenter.device.amd.evidence.waits import Lack
from hypocenter.device.amd.executor import MachineProgram
from hypocenter.device.amd.fault import FaultKind, MachineFault
from hypocenter.replay.findings import Finding, FindingKind, Site

BlockNumber = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _At:
    """Where something was seen: block (None: in all of them) and lane, and the byte `place` of an
    array."""

    block: BlockNumber | None
    lane: int | None = None
    region: ArrayRegion | None = None
    place: int = 0
    width_bytes: int | None = None


@dataclass(slots=True)
class _Seen:
    finding: Finding
    blocks: set[BlockNumber | None]


#: What a register is used for; the numbers of `unset.py`.
_USED_AS = {
    AS_ADDRESS: "is used as an address",
    AS_DATA: "is stored",
    AS_CHOICE: "decides which way is gone",
}
#: What is done too early, of a register.
_TOO_EARLY = {
    Lack.READ: "is used before it has arrived",
    Lack.WRITE: "is written before what was loaded into it has arrived",
}
_OPERATIONS = {Lack.BARRIER: "barrier", Lack.LOCAL: "load"}
#: A wave that makes more is taken to have no end; our emulator needs a minute for as many.
MAX_INSTRUCTIONS = 1 << 24


class MachineFindings:
    """What was found in the blocks so far; one place of code is one finding."""

    def __init__(self, program: MachineProgram, memory: ArgumentMemory, local_bytes: int) -> None:
        self._program, self._memory, self._local_bytes = program, memory, local_bytes
        self._seen: dict[tuple[object, ...], _Seen] = {}

    def every(self) -> tuple[Finding, ...]:
        return tuple(
            msgspec.structs.replace(seen.finding, num_programs=len(seen.blocks - {None}))
            for seen in self._seen.values()
        )

    def forget_reads(self, rows: Iterable[int]) -> None:
        """Reads of what nobody wrote, by these rows of code, are no findings."""
        pcs = {self._instruction(row).pc for row in rows}
        for key in [*self._seen]:
            kind, operation, pc = key[:3]
            is_read = kind is FindingKind.UNINITIALISED_READ and operation != "register"
            if is_read and pc in pcs:
                del self._seen[key]

    def note_fault(self, fault: MachineFault) -> None:
        """A block that stopped. Raises HypoError where the emulator itself could not go on."""
        where = self._code_text(fault.instruction)
        at = _At(fault.workgroup, fault.lane)
        if fault.kind is FaultKind.MEMORY:
            self._note_access(fault)
        elif fault.kind is FaultKind.TRAP:
            told = f"a trap ended wave {fault.wave}; {where}"
            self._note(FindingKind.ASSERTION, "trap", fault.instruction, at, told)
        elif fault.kind is FaultKind.ENDLESS:
            self._note_endless(fault)
        else:
            what = f": {fault.what}" if fault.what else ""
            encoding = fault.instruction.data.hex()
            raise HypoError(
                f"{self._program.kernel.name}: {fault.kind}{what}; {where}, encoding {encoding}"
            )

    def _note_endless(self, fault: MachineFault) -> None:
        """A wave that goes round, which is proven to have no end, or one that takes too long."""
        found, where = fault.round, self._code_text(fault.instruction)
        at = _At(fault.workgroup)
        if found is None:
            told = (
                f"wave {fault.wave} has not ended after {MAX_INSTRUCTIONS} instructions, and "
                f"nothing that was run before it ends its wait; {where}"
            )
            self._note(FindingKind.WAITS_FOR_EVER, "launch", fault.instruction, at, told)
            return
        regions = {
            region.address: (region, address - region.address)
            for address in found.addresses
            if (region := self._memory.region_of(address)) is not None
        }
        who = "no other wave can end it: it reads no memory"
        if len(regions) == 1 and not found.reads_local:
            ((region, place),) = regions.values()
            at = _At(fault.workgroup, None, region, place)
            who = f"only a write to element {_element_text(region, place)}, which it reads, ends it"
        elif found.addresses or found.reads_local:
            who = "only a write to what it reads ends it"
        told = (
            f"wave {fault.wave} goes round: after {found.num_instructions} more instructions all "
            f"its registers are as they were, and {who}; {where}"
        )
        self._note(FindingKind.WAITS_FOR_EVER, "launch", fault.instruction, at, told)

    def _note_access(self, fault: MachineFault) -> None:
        region = self._memory.region_of(fault.address)
        operation = "store" if fault.is_write else "load"
        via = f"{fault.register}, " if fault.register else ""
        of_wave = f"wave {fault.wave} lane {fault.lane}"
        code = f"{of_wave}: {via}{self._code_text(fault.instruction)}"
        if region is None:
            kind = FindingKind.NULL_POINTER if is_null(fault.address) else FindingKind.WILD_POINTER
            detail = f"address 0x{fault.address:x} belongs to no argument; {code}"
            at = _At(fault.workgroup, fault.lane)
            self._note(kind, operation, fault.instruction, at, detail)
            return
        place = fault.address - region.address
        at = _At(fault.workgroup, fault.lane, region, place, fault.num_bytes)
        kind, detail = FindingKind.OUT_OF_BOUNDS, _distance_text(region, place, fault.num_bytes)
        if region.is_freed:
            kind = FindingKind.FREED_MEMORY
            element = place // region.array.itemsize
            detail = f"element {element} of memory that was freed before this launch"
        self._note(kind, operation, fault.instruction, at, f"{detail}; {code}")

    def note_local(self, machine: r.Machine, block: BlockNumber) -> None:
        """An access to LDS beyond what the block has."""
        row = int(machine.out[r.LOCAL_OUTSIDE_ROW])
        if row < 0:
            return
        instruction, at = self._instruction(row), int(machine.out[r.LOCAL_OUTSIDE_AT])
        operation = (
            "store" if "WRITE" in instruction.name or "STORE" in instruction.name else "load"
        )
        detail = (
            f"byte {at} of shared memory, of which the block has {self._local_bytes}; "
            f"{self._code_text(instruction)}"
        )
        self._note(FindingKind.OUT_OF_BOUNDS, operation, instruction, _At(block), detail)

    def note_unset(self, machine: r.Machine, block: BlockNumber) -> None:
        """Registers that nobody wrote and that an address, a store or a choice was made of."""
        for row, wave, lane, register, how in machine.uses[: machine.out[r.NUM_UNSET_USES]]:
            instruction = self._instruction(int(row))
            of_lane = f" lane {lane}" if lane >= 0 else ""
            name = register_name(int(register))
            detail = (
                f"{name} holds what nobody wrote, and {_USED_AS[int(how)]}; "
                f"wave {wave}{of_lane}: {self._code_text(instruction)}"
            )
            at = _At(block, int(lane) if lane >= 0 else None)
            self._note(FindingKind.UNINITIALISED_READ, "register", instruction, at, detail)

    def note_waits(self, num_waves: int) -> None:
        """Waits that the code lacks, on some way through it: found by reading, not by running."""
        for found in self._program.missing_waits:
            if found.lack is Lack.BARRIER and num_waves < 2:
                continue
            what = "a write to shared memory is still under way at the barrier"
            if found.lack is Lack.LOCAL:
                what = "shared memory is read before words of memory have arrived in it"
            elif found.lack is not Lack.BARRIER:
                what = f"{found.register} {_TOO_EARLY[found.lack]}"
            detail = (
                f"{what}: {self._code_text(found.issued)}, and no wait of "
                f"{' or '.join(found.counters)} before {self._code_text(found.at)}. Read from the "
                "code: on one way through it"
            )
            operation = _OPERATIONS.get(found.lack, "register")
            self._note(FindingKind.MISSING_WAIT, operation, found.at, _At(None), detail)

    def note_oddity(
        self, oddity: Oddity, block: BlockNumber, block_of: Callable[[int], BlockNumber]
    ) -> None:
        """A race, or a read of what nobody wrote."""
        instruction = self._instruction(oddity.row)
        operation = "store" if oddity.is_write else "load"
        code = f"wave {oddity.wave} lane {oddity.lane}: {self._code_text(instruction)}"
        if oddity.region is None:
            place = f"byte {oddity.at} of shared memory"
        else:
            place = f"element {_element_text(oddity.region, oddity.at)}"
        if oddity.kind is FindingKind.UNINITIALISED_READ:
            detail = f"{place} was written by nobody; {code}"
        elif oddity.other_block is not None:
            other = block_of(oddity.other_block)
            detail = f"{place} is used by block {other} as well, and nothing orders the two; {code}"
        else:
            writer = self._instruction(oddity.other_row or 0)
            also = "too, " if oddity.is_write else ""
            detail = (
                f"{place} is written by wave {oddity.other_wave} {also}with no barrier between "
                f"({self._code_text(writer)}); {code}"
            )
        at = _At(block, oddity.lane, oddity.region, oddity.at)
        self._note(oddity.kind, operation, instruction, at, detail)

    def _note(
        self, kind: FindingKind, operation: str, instruction: Instruction, at: _At, detail: str
    ) -> None:
        sites = self._sites(instruction)
        region, place = at.region, at.place
        key: tuple[object, ...] = (kind, operation, instruction.pc)
        if kind is FindingKind.RACE and sites:  # seen at a load and again at the store behind it
            key = (kind, region.name if region is not None else "", sites[0].line)
        if key in self._seen:
            self._seen[key].blocks.add(at.block)
            return
        finding = Finding(
            kind=kind,
            kernel=self._program.kernel.name,
            operation=operation,
            detail=detail,
            argument=region.name if region is not None else None,
            element=_element(region, place) if region is not None else None,
            number=place // region.array.itemsize if region is not None else None,
            program=at.block,
            lane=(at.lane,) if at.lane is not None else None,
            sites=sites,
            width_bytes=at.width_bytes,
        )
        self._seen[key] = _Seen(finding, {at.block})

    def _sites(self, instruction: Instruction) -> tuple[Site, ...]:
        frame = self._program.code_object.frame_at(instruction.pc)
        if frame is None:
            return ()
        text = linecache.getline(frame.file, frame.line).strip()
        return (Site(_short(frame.file), frame.line, self._program.kernel.name, text),)

    def _instruction(self, row: int) -> Instruction:
        lowered = self._program.lowered
        return lowered.instructions[lowered.instruction_of[row]]

    def _code_text(self, instruction: Instruction) -> str:
        entry = self._program.kernel.entry
        return f"{instruction.name.lower()} at pc +0x{instruction.pc - entry:x}"


def _element(region: ArrayRegion, at: int) -> tuple[int, ...] | None:
    number = at // region.array.itemsize
    if not 0 <= number < region.array.size:
        return None
    return tuple(int(index) for index in np.unravel_index(number, region.array.shape))


def _element_text(region: ArrayRegion, at: int) -> str:
    element = _element(region, at)
    return f"[{', '.join(map(str, element or ()))}] of {region.name}"


def _distance_text(region: ArrayRegion, place: int, num_bytes: int) -> str:
    """How far from the array an access is, in elements of the array."""
    array, itemsize = region.array, region.array.itemsize
    number = place // itemsize
    if place < 0:
        how = f"{-place} bytes before its first"
    else:
        how = f"{place + num_bytes - array.nbytes} bytes past its end"
    held = f"{region.name} has {array.size} elements of {array.dtype}"
    return f"{num_bytes} bytes at element {number}, {how}; {held}"


def _short(file: str) -> str:
    """A path below the current folder, from there: clang writes whole ones."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
