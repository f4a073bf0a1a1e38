"""AMD's side: the text that the ROCm debug agent prints of waves that stopped, as facts.

The form is that of `librocm-debug-agent.so.2`, as its guide and reports of ROCm 6.3 and 7.2 show:
a line for each wave, its registers, the disassembly around its program counter with lines of source
where the code has them. Never seen on hardware here. The agent tells no block and no thread.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass, field

from hypocenter.coredump.names import source_name
from hypocenter.record.gpu_stop import (
    MAX_DEEP_WARPS,
    MAX_LANES,
    MAX_REGISTERS,
    MAX_STANDINGS,
    MAX_WARPS,
    GpuFrame,
    GpuGrid,
    GpuLane,
    GpuStanding,
    GpuStop,
    GpuWarp,
)

SOURCE = "ROCm debug agent"
MAX_TEXT_CHARS = 16 << 20

_WAVE = re.compile(
    r"^\s*wave_(\d{1,9}): pc=0x([0-9a-f]{1,16})"
    r"(?: \(kernel_code_entry=0x[0-9a-f]+(?: <([^>\n]{1,4000})>)?[^)\n]*\))?"
    r"(?: \((\w+)(?:, reason: ([\w|, ]{1,200}))?\))?"
)
_PAGE = re.compile(r"(?:Faulting page: |on address |at virtual address )0x([0-9a-f]{1,16})")
_FUNCTION = re.compile(r"^\s*Disassembly for function (.{1,4000}):$")
_FILE = re.compile(r"^\s*(\S[^\n]{0,1000}):$")
_LINE = re.compile(r"^\s{0,8}(\d{1,7})\s{2,}\S")
_INSTRUCTION = re.compile(r"^\s*(=>)?\s*0x([0-9a-f]{1,16}) <\+(\d{1,9})>:")
_VECTOR = re.compile(r"^\s*v(\d{1,3}): (\[0\] .*)$")
_LANE = re.compile(r"\[(\d{1,2})\] ([0-9a-f]{8})")
_REASONS = {
    "MEMORY_VIOLATION": "illegal address", "ASSERT_TRAP": "assert", "DEBUG_TRAP": "trap",
    "ILLEGAL_INSTRUCTION": "illegal instruction", "APERTURE_VIOLATION": "address out of range",
    "FATAL_HALT": "halt", "TRAP": "trap",
}  # fmt: skip


@dataclass
class _Wave:
    number: int
    pc: int
    kernel: str
    reason: str
    registers: dict[int, dict[int, int]] = field(default_factory=dict)


@dataclass
class _Place:
    """Where an instruction stands: the function, bytes from its start, the line of source."""

    kernel: str
    offset: int
    frames: tuple[GpuFrame, ...]


def read_debug_agent(text: str) -> GpuStop | None:
    """What the agent printed among a program's output; None where it printed nothing."""
    waves: list[_Wave] = []
    places: dict[int, _Place] = {}
    address: int | None = None
    function = file = ""
    line = 0
    for row in text[:MAX_TEXT_CHARS].splitlines():
        if match := _WAVE.match(row):
            waves.append(_Wave(int(match[1]), int(match[2], 16), match[3] or "", match[5] or ""))
            function = file = ""
        elif match := _FUNCTION.match(row):
            function, file, line = match[1], "", 0
        elif function and (match := _INSTRUCTION.match(row)):
            frames = (GpuFrame(file, line),) if file and line else ()
            places[int(match[2], 16)] = _Place(function, int(match[3]), frames)
        elif function and (match := _LINE.match(row)):
            line = int(match[1])
        elif function and (match := _FILE.match(row)):
            file = match[1]
        elif waves and len(waves) <= MAX_DEEP_WARPS and (match := _VECTOR.match(row)):
            if int(match[1]) < MAX_REGISTERS:
                lanes = _LANE.findall(match[2])[:MAX_LANES]
                waves[-1].registers[int(match[1])] = {int(n): int(v, 16) for n, v in lanes}
        elif address is None and (match := _PAGE.search(row)):
            address = int(match[1], 16)
    return _stop(waves, places, address) if waves else None


def _stop(waves: list[_Wave], places: dict[int, _Place], address: int | None) -> GpuStop:
    warps = [_warp(wave, places.get(wave.pc)) for wave in waves]
    warps.sort(key=lambda warp: not warp.exception)
    kernels = dict.fromkeys(warp.kernel for warp in warps if warp.kernel)
    counted: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for warp in warps:
        frame = warp.frames[0] if warp.frames else GpuFrame("", 0)
        counted[warp.kernel, frame.file, frame.line] += 1
    exception = next((warp.exception for warp in warps if warp.exception), "")
    return GpuStop(
        source=SOURCE,
        exception=exception,
        address=address,
        is_on_request=not exception,
        grids=tuple(
            GpuGrid(kernel=kernel, symbol=kernel, grid=(0, 0, 0), block=(0, 0, 0))
            for kernel in kernels
        )[:MAX_WARPS],
        warps=tuple(warps[:MAX_WARPS]),
        standing=tuple(
            GpuStanding(kernel=kernel, file=file, line=line, num_warps=number)
            for (kernel, file, line), number in counted.most_common(MAX_STANDINGS)
        ),
        num_warps=len(warps),
    )


def _warp(wave: _Wave, place: _Place | None) -> GpuWarp:
    kernel = place.kernel if place is not None else wave.kernel
    first = wave.reason.replace("|", ",").split(",")[0].strip()
    exception = _REASONS.get(first, first.lower().replace("_", " "))
    numbers = sorted({lane for values in wave.registers.values() for lane in values})
    width = max(wave.registers, default=-1) + 1
    return GpuWarp(
        grid=-1,
        block=None,
        warp=wave.number,
        kernel=_bare(kernel),
        pc=wave.pc,
        offset=place.offset if place is not None else 0,
        exception=exception,
        frames=place.frames if place is not None else (),
        lanes=tuple(
            GpuLane(
                lane=lane,
                thread=None,
                pc=wave.pc,
                registers=tuple(wave.registers.get(at, {}).get(lane, 0) for at in range(width)),
            )
            for lane in numbers
        ),
    )


def _bare(function: str) -> str:
    """The name of a function without its parameters."""
    return source_name(function.partition("(")[0] if not function.startswith("(") else function)
