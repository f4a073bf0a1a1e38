"""What stopped a wave, as data: kind, address, lane, registers; words are made elsewhere."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.decode import Instruction
from hypocenter.device.amd.evidence.rounds import Round
from hypocenter.device.amd.lower import Lowered


class FaultKind(enum.StrEnum):
    """Why the machine stopped."""

    MEMORY = "memory access outside every mapped page"
    NOT_MODELLED = "an instruction that is not executed here"
    TRAP = "a trap"
    ENDLESS = "a wave that does not end"
    JUMP = "a jump to where no instruction begins"


_KINDS = {
    r.BAD_ADDRESS: FaultKind.MEMORY,
    r.NOT_MODELLED: FaultKind.NOT_MODELLED,
    r.TRAPPED: FaultKind.TRAP,
    r.OVER_BUDGET: FaultKind.ENDLESS,
    r.BAD_JUMP: FaultKind.JUMP,
}
_SPACES = {r.GLOBAL: "global", r.FLAT: "flat", r.SCRATCH: "scratch", r.BUFFER: "buffer"}


@dataclass(frozen=True, slots=True, eq=False)
class WaveState:
    """A wave's registers: sgpr uint32[128] (VCC at 106, M0, EXEC at 126), vgpr uint32[512, lanes]
    with accumulators from 256 on."""

    num_lanes: int
    sgpr: Array
    vgpr: Array
    scc: int

    def mask(self, register: int) -> int:
        """The bits of all lanes in a scalar register or a pair."""
        low = int(self.sgpr[register])
        return low | int(self.sgpr[register + 1]) << 32 if self.num_lanes == 64 else low

    @property
    def exec(self) -> int:
        return self.mask(126)

    @property
    def vcc(self) -> int:
        return self.mask(106)


@dataclass(frozen=True, slots=True, eq=False)
class MachineFault:
    """The first thing that stopped a launch.

    `pc` is the instruction's address in the code object; `register` the operand that held the
    address, as AMD's assembler writes it, empty where there is none. For MEMORY: `address` and
    `num_bytes` of the lane's access, and which memory. `what` names what is not modelled. `round`
    is that of a wave which goes round, where it was looked for.
    """

    kind: FaultKind
    workgroup: tuple[int, int, int]
    wave: int
    lane: int
    instruction: Instruction
    state: WaveState
    address: int = 0
    num_bytes: int = 0
    is_write: bool = False
    space: str = ""
    register: str = ""
    what: str = ""
    round: Round | None = None

    @property
    def pc(self) -> int:
        return self.instruction.pc


def fault_of(
    machine: r.Machine, why: int, lowered: Lowered, block: tuple[int, int, int], num_lanes: int
) -> MachineFault:
    """The fault that a stopped machine tells of."""
    out = machine.out
    wave, row = int(out[r.WAVE]), min(max(int(out[r.ROW]), 0), len(lowered.code) - 1)
    kind, code = _KINDS[why], lowered.code[row]
    is_memory = kind is FaultKind.MEMORY
    return MachineFault(
        kind=kind,
        workgroup=block,
        wave=wave,
        lane=int(out[r.LANE]) if is_memory else 0,
        instruction=lowered.instructions[lowered.instruction_of[row]],
        state=WaveState(
            num_lanes,
            machine.sgpr[wave].astype(np.uint32),
            machine.vgpr[wave, :, :num_lanes].copy(),
            int(machine.wave[wave, r.SCC_BIT]),
        ),
        address=int(out[r.AT]) % (1 << 64) if is_memory else 0,
        num_bytes=int(out[r.SIZE]) if is_memory else 0,
        is_write=bool(out[r.WRITES]) if is_memory else False,
        space=_space(code) if is_memory else "",
        register=_register(code) if is_memory else "",
        what=lowered.problems.get(row, ""),
    )


def _space(code: Array) -> str:
    return "scalar" if code[r.KIND] == r.SCALAR_LOAD else _SPACES[int(code[r.SPACE])]


def _register(code: Array) -> str:
    """The registers that the address came from."""
    base, at = int(code[r.BASE]), int(code[r.ADDRESS])
    if code[r.KIND] == r.SCALAR_LOAD:
        return f"s[{base}:{base + 1}]"
    parts = []
    if code[r.HAS_OFFSET] or code[r.HAS_INDEX]:
        parts.append(f"v[{at}:{at + 1}]" if code[r.HAS_OFFSET] == 2 else f"v{at}")
    if code[r.SPACE] == r.BUFFER:
        parts.append(f"s[{base}:{base + 3}]")
    elif base >= 0:
        parts.append(f"s[{base}:{base + 1}]" if code[r.SPACE] != r.SCRATCH else f"s{base}")
    return ", ".join(parts)
