"""The machine: waves of one workgroup, instruction by instruction, in numba's machine code.

A wave runs to its next barrier or its end, then the next wave does. Memory is immediate: a load has
its value before the next instruction, so a missing wait changes nothing here. What is not modelled
stops the machine with the row that says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.access import local_access, memory_access, scalar_load
from hypocenter.device.amd.compiled import call_handler, compile_call
from hypocenter.device.amd.evidence.unset import follow_unset
from hypocenter.device.amd.instruction_rows import Machine
from hypocenter.device.amd.lanes import exec_of, lane_operation, put_mask, scalar_value
from hypocenter.device.amd.matrix import matrix_product
from hypocenter.device.amd.operands import read_operands, store_results

VCC, EXEC = 106, 126


@compile_call
def run_workgroup(m: Machine) -> int:
    """Run every wave until all have ended, or one stops; returns why, as in `instruction_rows.py`.

    May be called again after FRESH_PAGE and LOG_FULL: the instruction is done then.
    """
    while True:
        num_ended = 0
        for w in range(m.wave.shape[0]):
            if m.wave[w, r.STATE] == r.RUNNING:
                why = _run_wave(m, w)
                if why != r.GOES_ON:
                    m.out[r.STOPPED], m.out[r.WAVE], m.out[r.ROW] = why, w, m.wave[w, r.NEXT]
                    return why
            num_ended += int(m.wave[w, r.STATE] == r.ENDED)
        if num_ended == m.wave.shape[0]:
            return r.ALL_ENDED
        # Who has ended is not waited for.
        for w in range(m.wave.shape[0]):
            if m.wave[w, r.STATE] == r.AT_BARRIER:
                m.wave[w, r.STATE] = r.RUNNING
                m.wave[w, r.EPOCH] += 1


@compile_call
def _run_wave(m: Machine, w: int) -> int:
    """Until a barrier or the end; returns why it stopped, GOES_ON for these two."""
    wave = m.wave[w]
    while wave[r.STATE] == r.RUNNING:
        row = wave[r.NEXT]
        if row < 0 or row >= m.code.shape[0]:
            return r.BAD_JUMP
        wave[r.NEXT] = row + m.code[row, r.PARTS]
        why = _step(m, w, row)
        if why != r.GOES_ON:
            wave[r.NEXT] = row
            return why
        wave[r.COUNT] += 1
        if wave[r.COUNT] > m.facts[r.BUDGET]:
            return r.OVER_BUDGET
    return r.GOES_ON


@compile_call
def _step(m: Machine, w: int, row: int) -> int:
    kind = m.code[row, r.KIND]
    if m.unset.shape[0]:
        follow_unset(m, w, row)
    if kind == r.VECTOR:
        _vector(m, w, row)
    elif kind == r.SCALAR:
        _scalar(m, w, row)
    elif kind == r.BRANCH:
        _branch(m, w, row)
    elif kind == r.MEMORY:
        return memory_access(m, w, row)
    elif kind == r.LOCAL:
        return local_access(m, w, row)
    elif kind == r.SCALAR_LOAD:
        return scalar_load(m, w, row)
    elif kind != r.NOTHING:
        return _seldom(m, w, row)
    return r.GOES_ON


@compile_call
def _seldom(m: Machine, w: int, row: int) -> int:
    kind = m.code[row, r.KIND]
    if kind == r.LANES_OP:
        lane_operation(m, w, row)
    elif kind == r.MATRIX:
        matrix_product(m, w, row)
    elif kind == r.END:
        m.wave[w, r.STATE] = r.ENDED
    elif kind == r.BARRIER:
        m.wave[w, r.STATE] = r.AT_BARRIER
    elif kind == r.JUMP:
        return _jump(m, w, row)
    else:
        return r.TRAPPED if kind == r.TRAP else r.NOT_MODELLED
    return r.GOES_ON


@compile_call
def _vector(m: Machine, w: int, row: int) -> None:
    """All lanes at once; the second half of an instruction reads before the first one writes."""
    num_parts, num_lanes = m.code[row, r.PARTS], m.facts[r.NUM_LANES]
    enabled = read_operands(m, w, row, num_lanes)
    call_handler(m.code[row, r.HANDLER], m.rows.ctypes.data, num_lanes)
    if num_parts < 2:
        store_results(m, w, row, enabled, num_lanes)
        return
    first = m.rows[320:384].copy()
    read_operands(m, w, row + 1, num_lanes)
    call_handler(m.code[row + 1, r.HANDLER], m.rows.ctypes.data, num_lanes)
    second = m.rows[320:384].copy()
    m.rows[320:384] = first
    store_results(m, w, row, enabled, num_lanes)
    m.rows[320:384] = second
    store_results(m, w, row + 1, enabled, num_lanes)


@compile_call
def _scalar(m: Machine, w: int, row: int) -> None:
    code, rows = m.code[row], m.rows
    for i in range(3):
        at = r.OPERANDS + r.OPERAND_COLUMNS * i
        if code[at] != r.NONE:
            rows[64 * i] = scalar_value(m, w, code[at], code[at + 1], code[at + 2])
    if code[r.READS_DEST]:
        rows[192] = scalar_value(m, w, r.SGPR, code[r.DEST_INDEX], code[r.DEST_WORDS])
    rows[256] = m.wave[w, r.SCC_BIT]
    call_handler(code[r.HANDLER], rows.ctypes.data, 1)
    if code[r.SAVES_EXEC]:
        _save_exec(m, w, row)
        return
    if code[r.DEST] == r.SGPR:
        at = code[r.DEST_INDEX]
        m.sgpr[w, at] = rows[320] & 0xFFFFFFFF
        if code[r.DEST_WORDS] == 2:
            m.sgpr[w, at + 1] = (rows[320] >> 32) & 0xFFFFFFFF
    if code[r.FLAG] == r.SCC:
        m.wave[w, r.SCC_BIT] = rows[384]


@compile_call
def _save_exec(m: Machine, w: int, row: int) -> None:
    """EXEC goes to the destination (1; 2: the result does too) and the result to EXEC."""
    code = m.code[row]
    old = exec_of(m, w)
    put_mask(m, w, EXEC, m.rows[320])
    if code[r.DEST] == r.SGPR:
        put_mask(m, w, code[r.DEST_INDEX], old if code[r.SAVES_EXEC] == 1 else m.rows[320])
    m.wave[w, r.SCC_BIT] = int(exec_of(m, w) != 0)


@compile_call
def _branch(m: Machine, w: int, row: int) -> None:
    """INDEX says on what: 0 always, 1 SCC, 2 VCC, 3 EXEC; WORDS is whether it must be zero."""
    code = m.code[row]
    on, must_be_zero = code[r.OPERANDS + r.INDEX], code[r.OPERANDS + r.WORDS]
    value = 0
    if on == 1:
        value = m.wave[w, r.SCC_BIT]
    elif on == 2:
        value = scalar_value(m, w, r.SGPR, VCC, 2 if m.facts[r.NUM_LANES] == 64 else 1)
    elif on == 3:
        value = exec_of(m, w)
    if on == 0 or (value == 0) == (must_be_zero == 1):
        m.wave[w, r.NEXT] = code[r.TARGET]


@compile_call
def _jump(m: Machine, w: int, row: int) -> int:
    """S_GETPC, S_SETPC, S_SWAPPC, S_CALL: INDEX says which of the three registers take part.

    Addresses are those of the loaded code: `facts[3]` is where pc 0 lies.
    """
    code = m.code[row]
    after = m.code[row, r.TARGET] + m.facts[3]
    source, dest = code[r.OPERANDS + r.INDEX], code[r.DEST_INDEX]
    target = -1
    if source >= 0:
        target = scalar_value(m, w, r.SGPR, source, 2) - m.facts[3]
    if dest >= 0:
        m.sgpr[w, dest], m.sgpr[w, dest + 1] = after & 0xFFFFFFFF, (after >> 32) & 0xFFFFFFFF
    if source >= 0:
        for candidate in range(m.code.shape[0]):
            if m.code[candidate, r.PC] == target:
                m.wave[w, r.NEXT] = candidate
                return r.GOES_ON
        return r.BAD_JUMP
    return r.GOES_ON


def fresh_rows(num_rows: int) -> Any:
    """Rows for operands and results."""
    return np.zeros(num_rows * 64, np.int64)
