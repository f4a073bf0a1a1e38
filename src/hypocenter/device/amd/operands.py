"""Operands of a vector instruction into rows of int64, and its results back into registers."""

from __future__ import annotations

import numpy as np

from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.compiled import compile_call
from hypocenter.device.amd.instruction_rows import Machine
from hypocenter.device.amd.lanes import exec_of, mask_of, put_mask, scalar_value
from hypocenter.device.amd.values.arithmetic import as_f16, as_f32, as_f64, bits16, bits32, bits64

EXEC = 126


@compile_call
def read_operands(m: Machine, w: int, row: int, num_lanes: int) -> int:
    """Fill the rows of a, b, c, d and k; returns the lanes that may be written."""
    code, enabled = m.code[row], exec_of(m, w)
    if code[r.DPP_TABLE] >= 0:
        enabled = _gather(m, w, row, enabled)
    for i in range(3):
        at = r.OPERANDS + r.OPERAND_COLUMNS * i
        if code[at] == r.NONE:
            continue
        if i != 0 or code[r.DPP_TABLE] < 0:
            _fetch(m, w, row, at, 64 * i)
        if code[at + r.PLAIN] == 0:
            _modify(m, row, at, 64 * i)
    if code[r.READS_DEST]:
        _read_dest(m, w, row)
    if code[r.CONDITION] == r.MASK:
        bits = mask_of(m, w, code[r.CONDITION_INDEX])
        for lane in range(num_lanes):
            m.rows[256 + lane] = (bits >> lane) & 1
    return enabled


@compile_call
def _fetch(m: Machine, w: int, row: int, at: int, to: int) -> None:
    code, rows = m.code[row], m.rows
    if code[at] == r.VGPR:
        low = m.vgpr[w, code[at + 1]]
        if code[at + 2] == 2:
            high = m.vgpr[w, code[at + 1] + 1]
            for lane in range(64):
                rows[to + lane] = np.int64(low[lane]) | np.int64(high[lane]) << 32
            return
        for lane in range(64):
            rows[to + lane] = np.int64(low[lane])
        return
    rows[to : to + 64] = scalar_value(m, w, code[at], code[at + 1], code[at + 2])


@compile_call
def _modify(m: Machine, row: int, at: int, to: int) -> None:
    """Take a part, spread its sign, clear and flip the sign of a number."""
    code, rows = m.code[row], m.rows
    shift, width = code[at + r.SHIFT], abs(code[at + r.WIDTH])
    clear, flip = ~code[at + r.CLEAR], code[at + r.FLIP]
    up = 64 - width
    if code[at + r.WIDTH] < 0:
        for lane in range(64):
            rows[to + lane] = (rows[to + lane] >> shift << up) >> up
    elif width < 64:
        for lane in range(64):
            rows[to + lane] = (rows[to + lane] >> shift) & ((1 << width) - 1)
    for lane in range(64):
        rows[to + lane] = rows[to + lane] & clear ^ flip


@compile_call
def _gather(m: Machine, w: int, row: int, enabled: int) -> int:
    """DPP: the first operand from other lanes; returns the lanes that are written."""
    code, active = m.code[row], enabled
    table, at = m.tables[code[r.DPP_TABLE]], r.OPERANDS
    source, num_words = code[at + 1], code[at + r.WORDS]
    for lane in range(m.facts[r.NUM_LANES]):
        chosen = table[lane]
        is_there = chosen >= 0 and (code[r.DPP_ANY] == 1 or (active >> max(chosen, 0)) & 1 == 1)
        m.rows[lane] = 0
        if is_there:
            for word in range(num_words):
                m.rows[lane] |= np.int64(m.vgpr[w, source + word, chosen]) << (32 * word)
        if not is_there and code[r.DPP_ZERO] == 0:
            enabled &= ~(1 << lane)
    return enabled & code[r.DPP_ROWS]


@compile_call
def _read_dest(m: Machine, w: int, row: int) -> None:
    code, rows = m.code[row], m.rows
    if code[r.DEST] == r.SGPR:
        rows[192:256] = scalar_value(m, w, r.SGPR, code[r.DEST_INDEX], code[r.DEST_WORDS])
        return
    low = m.vgpr[w, code[r.DEST_INDEX]]
    shift = code[r.DEST_SHIFT]
    for lane in range(64):
        rows[192 + lane] = np.int64(low[lane]) >> shift
    if code[r.DEST_WORDS] == 2:
        high = m.vgpr[w, code[r.DEST_INDEX] + 1]
        for lane in range(64):
            rows[192 + lane] |= np.int64(high[lane]) << 32


@compile_call
def store_results(m: Machine, w: int, row: int, enabled: int, num_lanes: int) -> None:
    """The result to its register, the flags to their mask, both for the lanes `enabled`."""
    code = m.code[row]
    if code[r.CLAMP] or code[r.SCALE]:
        _limit(m, row, num_lanes)
    if code[r.DEST] == r.VGPR:
        _store_vector(m, w, row, enabled, num_lanes)
    elif code[r.DEST] == r.SGPR:
        m.sgpr[w, code[r.DEST_INDEX]] = m.rows[320] & 0xFFFFFFFF
    if code[r.FLAG] == r.NONE:
        return
    bits = 0
    for lane in range(num_lanes):
        bits |= m.rows[384 + lane] << lane
    bits &= enabled
    if code[r.FLAG] == r.MASK:
        put_mask(m, w, code[r.FLAG_INDEX], bits)
    if code[r.FLAG_TO_EXEC]:
        put_mask(m, w, EXEC, bits)


@compile_call
def _store_vector(m: Machine, w: int, row: int, enabled: int, num_lanes: int) -> None:
    code, rows = m.code[row], m.rows
    low = m.vgpr[w, code[r.DEST_INDEX]]
    shift, width = code[r.DEST_SHIFT], code[r.DEST_WIDTH]
    if width < 32:
        keep = ~(((1 << width) - 1) << shift)
        for lane in range(num_lanes):
            if (enabled >> lane) & 1:
                part = (rows[320 + lane] & ((1 << width) - 1)) << shift
                low[lane] = np.int64(low[lane]) & keep | part
        return
    for lane in range(num_lanes):
        value = np.int64(low[lane])
        low[lane] = rows[320 + lane] << shift if (enabled >> lane) & 1 else value
    if code[r.DEST_WORDS] == 2:
        high = m.vgpr[w, code[r.DEST_INDEX] + 1]
        for lane in range(num_lanes):
            if (enabled >> lane) & 1:
                high[lane] = (rows[320 + lane] >> 32) & 0xFFFFFFFF


@compile_call
def _limit(m: Machine, row: int, num_lanes: int) -> None:
    """Output modifiers of a number: times 2, 4 or 1/2 first, then held to 0 and 1.

    CLAMP and SCALE hold the number's bits, SCALE times 4 plus which factor.
    """
    code, rows = m.code[row], m.rows
    bits = max(code[r.CLAMP], code[r.SCALE] >> 2)
    which = code[r.SCALE] & 3
    factor = 1.0 if which == 0 else 2.0 if which == 1 else 4.0 if which == 2 else 0.5
    for lane in range(num_lanes):
        value = _number(rows[320 + lane], bits) * factor
        if code[r.CLAMP]:
            value = 0.0 if value != value else min(max(value, 0.0), 1.0)
        rows[320 + lane] = _bits(value, bits)


@compile_call
def _number(value: int, num_bits: int) -> float:
    if num_bits == 64:
        return as_f64(value)
    return np.float64(as_f32(value)) if num_bits == 32 else np.float64(as_f16(value))


@compile_call
def _bits(value: float, num_bits: int) -> int:
    if num_bits == 64:
        return bits64(value)
    return bits32(np.float32(value)) if num_bits == 32 else bits16(value)
