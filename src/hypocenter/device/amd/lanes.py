"""Scalar registers, masks of lanes, and what moves values between lanes."""

from __future__ import annotations

from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.compiled import compile_call
from hypocenter.device.amd.instruction_rows import Machine

EXEC = 126


@compile_call
def mask_of(m: Machine, w: int, index: int) -> int:
    """The bits of all lanes, from a scalar register or a pair."""
    low = m.sgpr[w, index]
    return low | m.sgpr[w, index + 1] << 32 if m.facts[r.NUM_LANES] == 64 else low


@compile_call
def put_mask(m: Machine, w: int, index: int, bits: int) -> None:
    """The other way; a wave of 32 leaves the next register alone."""
    m.sgpr[w, index] = bits & 0xFFFFFFFF
    if m.facts[r.NUM_LANES] == 64:
        m.sgpr[w, index + 1] = (bits >> 32) & 0xFFFFFFFF


@compile_call
def exec_of(m: Machine, w: int) -> int:
    """Which lanes are active."""
    return mask_of(m, w, EXEC)


@compile_call
def scalar_value(m: Machine, w: int, source: int, index: int, words: int) -> int:
    """An operand of one or two words that is no vector register."""
    if source == r.SGPR:
        low = m.sgpr[w, index]
        return low | m.sgpr[w, index + 1] << 32 if words == 2 else low
    if source == r.CONSTANT:
        return index
    if source == r.SCC:
        return m.wave[w, r.SCC_BIT]
    if source == r.VCCZ:
        return int(mask_of(m, w, 106) == 0)
    return int(exec_of(m, w) == 0) if source == r.EXECZ else 0


@compile_call
def lane_operation(m: Machine, w: int, row: int) -> None:
    """What reads one lane's value in another lane."""
    code = m.code[row]
    work = code[r.LANE_WORK]
    if work == r.READ_LANE or work == r.READ_FIRST:
        _read_lane(m, w, row)
    elif work == r.WRITE_LANE:
        lane = _select(m, w, row) & (m.facts[r.NUM_LANES] - 1)
        value = scalar_value(m, w, code[r.LANE_SOURCE_KIND], code[r.LANE_SOURCE], 1)
        m.vgpr[w, code[r.LANE_DEST], lane] = value
    elif work == r.SWAP_ROWS:
        _swap_rows(m, w, row)
    elif work >= r.SWAP:
        _move_registers(m, w, row)
    else:
        _move(m, w, row)


@compile_call
def _select(m: Machine, w: int, row: int) -> int:
    code = m.code[row]
    return scalar_value(m, w, code[r.LANE_SELECT_KIND], code[r.LANE_SELECT], 1)


@compile_call
def _read_lane(m: Machine, w: int, row: int) -> None:
    code, lane, active = m.code[row], 0, exec_of(m, w)
    if code[r.LANE_WORK] == r.READ_LANE:
        lane = _select(m, w, row) & (m.facts[r.NUM_LANES] - 1)
    elif active != 0:
        while not (active >> lane) & 1:
            lane += 1
    if code[r.LANE_SOURCE_KIND] == r.VGPR:
        value = m.vgpr[w, code[r.LANE_SOURCE], lane]
    else:
        value = scalar_value(m, w, code[r.LANE_SOURCE_KIND], code[r.LANE_SOURCE], 1)
    if code[r.LANE_DEST] >= 0:
        m.sgpr[w, code[r.LANE_DEST]] = value


@compile_call
def _move(m: Machine, w: int, row: int) -> None:
    """Each active lane takes the value of a lane that the operation chooses."""
    code, active = m.code[row], exec_of(m, w)
    source, dest = m.vgpr[w, code[r.LANE_SOURCE]].copy(), m.vgpr[w, code[r.LANE_DEST]]
    work, num_lanes = code[r.LANE_WORK], m.facts[r.NUM_LANES]
    if work == r.PERMUTE:
        _permute(m, w, row, active)
        return
    for lane in range(num_lanes):
        if (active >> lane) & 1:
            chosen = _choose(m, w, row, lane)
            is_active = (active >> chosen) & 1 == 1
            # LDS's crossbar gives zero for a lane that is not active; V_PERMLANE says what it does.
            how = code[r.LANE_OFFSET] if work < r.PERMUTE else 2
            if is_active or how & 1:
                dest[lane] = source[chosen]
            elif how & 2:
                dest[lane] = 0


@compile_call
def _choose(m: Machine, w: int, row: int, lane: int) -> int:
    code = m.code[row]
    work, num_lanes = code[r.LANE_WORK], m.facts[r.NUM_LANES]
    if work == r.BACK_PERMUTE:
        return ((m.vgpr[w, code[r.LANE_SELECT], lane] + code[r.LANE_OFFSET]) // 4) % num_lanes
    if work == r.SWIZZLE:
        return m.tables[code[r.DPP_TABLE], lane]
    low = _select(m, w, row)
    high = scalar_value(m, w, code[r.LANE_OTHER_KIND], code[r.LANE_OTHER], 1)
    place = lane % 16
    chosen = ((low if place < 8 else high) >> (4 * (place % 8))) & 15
    row_of = lane // 16 if work == r.PERMLANE else (lane // 16) ^ 1
    return row_of * 16 + chosen


@compile_call
def _permute(m: Machine, w: int, row: int, active: int) -> None:
    """DS_PERMUTE: each active lane pushes its value to another; the highest lane wins."""
    code, num_lanes = m.code[row], m.facts[r.NUM_LANES]
    taken = m.vgpr[w, code[r.LANE_SOURCE]].copy()
    taken[:] = 0
    for lane in range(num_lanes):
        if (active >> lane) & 1:
            address = m.vgpr[w, code[r.LANE_SELECT], lane] + code[r.LANE_OFFSET]
            taken[(address // 4) % num_lanes] = m.vgpr[w, code[r.LANE_SOURCE], lane]
    for lane in range(num_lanes):
        if (active >> lane) & 1:
            m.vgpr[w, code[r.LANE_DEST], lane] = taken[lane]


@compile_call
def _swap_rows(m: Machine, w: int, row: int) -> None:
    """V_PERMLANE16_SWAP and V_PERMLANE32_SWAP: the odd rows of one register and the even ones of
    the other change places; LANE_OFFSET is a row's lanes. EXEC counts for neither."""
    code = m.code[row]
    first, second = m.vgpr[w, code[r.LANE_DEST]], m.vgpr[w, code[r.LANE_SOURCE]]
    size = code[r.LANE_OFFSET]
    for lane in range(m.facts[r.NUM_LANES] - size):
        if (lane // size) % 2 == 0:
            first[lane + size], second[lane] = second[lane], first[lane + size]


@compile_call
def _move_registers(m: Machine, w: int, row: int) -> None:
    """V_SWAP, V_MOVRELS and V_MOVRELD: the lanes that are active, of registers by number."""
    code, active = m.code[row], exec_of(m, w)
    work, source, dest = code[r.LANE_WORK], code[r.LANE_SOURCE], code[r.LANE_DEST]
    if work == r.MOVE_FROM:
        source = chosen_register(m, w, row, source)
    elif work == r.MOVE_TO:
        dest = chosen_register(m, w, row, dest)
    is_scalar = code[r.LANE_SOURCE_KIND] != r.VGPR
    scalar = scalar_value(m, w, code[r.LANE_SOURCE_KIND], source, 1) if is_scalar else 0
    for lane in range(m.facts[r.NUM_LANES]):
        if (active >> lane) & 1:
            old = m.vgpr[w, dest, lane]
            m.vgpr[w, dest, lane] = scalar if is_scalar else m.vgpr[w, source, lane]
            if work == r.SWAP:
                m.vgpr[w, source, lane] = old


@compile_call
def chosen_register(m: Machine, w: int, row: int, first: int) -> int:
    """The register that M0 chooses, counted from `first`; the first of all where there is none."""
    place = first + (_select(m, w, row) & 255)
    return place if place < 256 else 0
