"""Whether a wave that does not end goes round: at the same place again, with nothing changed.

Where a launch runs alone, as in a check, that is a proof: what follows is what was. On a GPU only
another wave can end it then, by a write to what the round reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.instruction_rows import Machine

#: A round of more instructions is not looked for.
MAX_ROUND = 4096
_ADDRESS, _SPACE, _LOCAL = 3, 6, -1
_LOG_ENTRIES = 1 << 14


@dataclass(frozen=True, slots=True)
class Round:
    """One round: its instructions, the row where it begins, the addresses of memory that it reads,
    and whether it reads LDS."""

    num_instructions: int
    first_row: int
    addresses: tuple[int, ...]
    reads_local: bool


def round_of(machine: Machine, wave: int, run: Callable[[Machine], int]) -> Round | None:
    """Go on with a wave, instruction by instruction, until its state is what it is now.

    None where that does not come, or where the wave changes memory meanwhile. `run` is
    `run_workgroup`; the machine may go on from where this leaves it.
    """
    budget, own_log = int(machine.facts[r.BUDGET]), machine.log
    if not len(own_log):
        machine.out[r.LOGGED] = 0
        machine = machine._replace(log=np.zeros((_LOG_ENTRIES, r.LOG_COLUMNS), np.int64))
    try:
        return _round_of(machine, wave, run, int(machine.out[r.LOGGED]))
    finally:
        machine.facts[r.BUDGET] = budget
        if not len(own_log):
            machine.out[r.LOGGED] = 0


def _round_of(
    machine: Machine, wave: int, run: Callable[[Machine], int], first_entry: int
) -> Round | None:
    state, first = machine.wave[wave], int(machine.wave[wave, r.NEXT])
    before = _state_of(machine, wave)
    for number in range(1, MAX_ROUND + 1):
        if not 0 <= state[r.NEXT] < len(machine.code):
            return None
        code = machine.code[state[r.NEXT]]
        if code[r.KIND] == r.MEMORY and code[r.ACTION] != r.LOAD:
            return None
        machine.facts[r.BUDGET] = state[r.COUNT]
        if run(machine) != r.OVER_BUDGET or machine.out[r.WAVE] != wave:
            return None
        if state[r.NEXT] == first and _are_same(before, _state_of(machine, wave)):
            read = machine.log[first_entry : machine.out[r.LOGGED]]
            is_local = read[:, _SPACE] == _LOCAL
            addresses = tuple(np.unique(read[~is_local, _ADDRESS]).tolist())
            return Round(number, first, addresses, bool(is_local.any()))
    return None


def _state_of(machine: Machine, wave: int) -> tuple[Array, ...]:
    """All that the next instructions of a wave may depend on, but memory."""
    scc = machine.wave[wave, r.SCC_BIT : r.SCC_BIT + 1]
    parts = machine.sgpr[wave], machine.vgpr[wave], scc, machine.lds, machine.scratch[wave]
    return tuple(part.copy() for part in parts)


def _are_same(before: tuple[Array, ...], now: tuple[Array, ...]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(before, now, strict=True))
