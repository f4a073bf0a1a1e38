"""Loads, stores and atomics of a wave: every lane's address is checked before anything is changed.

Space and bounds are those of AMD's manuals: a buffer instruction that is out of its bounds reads
zero and writes nothing, one outside every region is a fault. LDS beyond what the workgroup has
reads zero and drops writes; the first such access is left in `out`.
"""

from __future__ import annotations

import numpy as np

from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.compiled import (
    call_handler,
    compile_call,
    compile_inline,
    load_bytes,
    load_word,
    store_bytes,
    store_word,
)
from hypocenter.device.amd.instruction_rows import Machine
from hypocenter.device.amd.lanes import exec_of, scalar_value

#: Pages of a region's table, as `sim/memory.py` has them: their bits, and the state of a page that
#: nobody has touched.
PAGE_BITS, UNMAPPED, FRESH = 21, 0, 1
#: Where flat addresses mean LDS and scratch, 4 GiB each.
SHARED_BASE, PRIVATE_BASE = 1 << 48, 1 << 49
#: Bytes of the widest access of a lane.
_WIDEST = 16
#: Rows of the machine that an access keeps addresses, host addresses and what is left out in.
_ADDRESS, _HOST, _SKIP = 0, 448, 512


@compile_inline
def host_of(m: Machine, address: int, num_bytes: int, writes: int) -> int:
    """Where an address lies in this process; -1 in no region, -2 in a page not yet touched."""
    low, high = 0, m.regions.shape[0]
    while low < high:
        middle = (low + high) // 2
        if m.regions[middle, 1] <= address:
            low = middle + 1
        else:
            high = middle
    if low == m.regions.shape[0] or address < m.regions[low, 0]:
        return -1
    region = m.regions[low]
    if address + num_bytes > region[1] or (writes and not region[3]):
        return -1
    if region[4]:
        first = (address - region[0]) >> PAGE_BITS
        last = (address + num_bytes - 1 - region[0]) >> PAGE_BITS
        for page in range(first, last + 1):
            state = load_bytes(region[4] + page, 1)
            if state == UNMAPPED:
                return -1
            if state == FRESH:
                return -2
    return region[2] + address - region[0]


@compile_call
def _refuse(m: Machine, found: int, address: int, lane: int, row: int) -> int:
    """Leave what was wrong in `out`; returns why the machine stops."""
    code = m.code[row]
    m.out[r.LANE], m.out[r.AT], m.out[r.SIZE] = lane, address, code[r.NUM_BYTES]
    m.out[r.WRITES] = int(
        code[r.KIND] != r.SCALAR_LOAD and code[r.ACTION] not in (r.LOAD, r.TO_LOCAL)
    )
    return r.FRESH_PAGE if found == -2 else r.BAD_ADDRESS


@compile_call
def scalar_load(m: Machine, w: int, row: int) -> int:
    """S_LOAD and S_BUFFER_LOAD; NUM_BYTES may be below 4, with a sign or without."""
    code = m.code[row]
    base = m.sgpr[w, code[r.BASE]] | m.sgpr[w, code[r.BASE] + 1] << 32
    offset = code[r.OFFSET] + scalar_value(
        m, w, code[r.SCALAR_OFFSET_KIND], code[r.SCALAR_OFFSET], 1
    )
    if m.log.shape[0] and m.out[r.LOGGED] >= m.log.shape[0]:
        return r.LOG_FULL
    limit = np.int64(0x7FFFFFFFFFFFFFFF)
    if code[r.BOUNDS]:
        base &= 0xFFFFFFFFFFFF
        stride = (m.sgpr[w, code[r.BASE] + 1] >> 16) & 0x3FFF
        limit = m.sgpr[w, code[r.BASE] + 2] * max(stride, 1)
    size = min(code[r.NUM_BYTES], 4)
    align = ~3 if size == 4 else -1
    for i in range((code[r.NUM_BYTES] + 3) // 4):
        value, address = 0, (base + offset & align) + 4 * i
        if offset + 4 * i + size <= limit:
            host = host_of(m, address, size, 0)
            if host < 0:
                return _refuse(m, host, address, 0, row)
            value = load_bytes(host, size)
        if code[r.IS_SIGNED]:
            value = value << (64 - 8 * size) >> (64 - 8 * size)
        m.sgpr[w, code[r.RESULT] + i] = value & 0xFFFFFFFF
    if m.log.shape[0]:
        _note_scalar(m, w, row, base + offset & align, min(limit - offset, code[r.NUM_BYTES]))
    return r.GOES_ON


@compile_call
def _note_scalar(m: Machine, w: int, row: int, address: int, num_bytes: int) -> None:
    """Leave a load of the scalar unit in the log, as one of lane 0."""
    if num_bytes <= 0:
        return
    entry = m.log[m.out[r.LOGGED]]
    entry[0], entry[1], entry[2], entry[3] = w, 0, row, address
    entry[4], entry[5], entry[6] = num_bytes, r.LOAD, r.GLOBAL
    entry[7], entry[8], entry[9] = m.wave[w, r.EPOCH], 0, 0
    m.out[r.LOGGED] += 1


@compile_call
def memory_access(m: Machine, w: int, row: int) -> int:
    """A vector instruction on global memory, a buffer, scratch, or a flat address."""
    code, active = m.code[row], exec_of(m, w)
    if m.log.shape[0] and m.out[r.LOGGED] + 64 > m.log.shape[0]:
        return r.LOG_FULL
    _addresses(m, w, row)
    for lane in range(m.facts[r.NUM_LANES]):
        m.rows[_SKIP + lane] = 0
        if (active >> lane) & 1:
            why = _find(m, w, row, lane)
            if why != r.GOES_ON:
                return why
    _do(m, w, row, active, code[r.RESULT], code[r.DATA])
    if m.log.shape[0]:
        for lane in range(m.facts[r.NUM_LANES]):
            if (active >> lane) & 1 and m.rows[_HOST + lane]:
                _note(m, w, row, lane, m.rows[_ADDRESS + lane])
    return r.GOES_ON


@compile_call
def _addresses(m: Machine, w: int, row: int) -> None:
    code, rows = m.code[row], m.rows
    if code[r.SPACE] == r.BUFFER:
        _buffer_addresses(m, w, row)
        return
    base, at = code[r.OFFSET], code[r.ADDRESS]
    if code[r.BASE] >= 0:
        words = 1 if code[r.SPACE] == r.SCRATCH else 2
        base += scalar_value(m, w, r.SGPR, code[r.BASE], words)
    for lane in range(64):
        address = base
        if code[r.HAS_OFFSET]:
            address += np.int64(m.vgpr[w, at, lane])
            if code[r.HAS_OFFSET] == 2:
                address += np.int64(m.vgpr[w, at + 1, lane]) << 32
        rows[_ADDRESS + lane] = address


@compile_call
def _buffer_addresses(m: Machine, w: int, row: int) -> None:
    """How many bytes are left of the buffer goes to the next row, 0 for what is outside.

    CDNA counts bytes where an instruction has no index or the buffer no stride, else structures. Of
    RDNA the descriptor says what is looked at: the structure, its number, nothing, or bytes. The
    scalar offset is never part of it. Source: "Range Checking" of the RDNA3 manual, and the comment
    on NUM_RECORDS in Mesa's `si_state.c`.
    """
    code, rows = m.code[row], m.rows
    v, at = m.sgpr[w, code[r.BASE] : code[r.BASE] + 4], code[r.ADDRESS]
    base = v[0] | (v[1] & 0xFFFF) << 32
    stride = (v[1] >> 16) & 0x3FFF
    extra = scalar_value(m, w, code[r.SCALAR_OFFSET_KIND], code[r.SCALAR_OFFSET], 1)
    checks = (v[3] >> 28) & 3 if m.facts[r.IS_RDNA] else 0
    is_raw = checks == 3 or (checks == 0 and stride == 0)
    is_raw = is_raw or (m.facts[r.IS_RDNA] == 0 and code[r.HAS_INDEX] == 0)
    for lane in range(64):
        index, offset = 0, code[r.OFFSET]
        if code[r.HAS_INDEX]:
            index = int(np.int64(m.vgpr[w, at, lane]))
        if code[r.HAS_OFFSET]:
            offset += int(np.int64(m.vgpr[w, at + code[r.HAS_INDEX], lane]))
        if is_raw:
            left = v[2] - offset - index * stride
        elif checks == 2:
            left = _WIDEST if v[2] != 0 else 0
        elif index < v[2]:
            left = _WIDEST if checks == 1 else stride - offset
        else:
            left = 0
        rows[_ADDRESS + lane] = base + extra + index * stride + offset
        rows[64 + lane] = max(left, 0)


@compile_inline
def _find(m: Machine, w: int, row: int, lane: int) -> int:
    """Where a lane's access lies; SKIP is how many of its last bytes are out of bounds."""
    code, rows = m.code[row], m.rows
    address, size = rows[_ADDRESS + lane], code[r.NUM_BYTES]
    rows[_HOST + lane] = 0
    if code[r.SPACE] == r.SCRATCH:
        return _find_scratch(m, w, row, lane, address)
    if code[r.SPACE] == r.FLAT and address >> 48 in (1, 2):
        if address >> 48 == 2:
            return _find_scratch(m, w, row, lane, address & 0xFFFFFFFF)
        return _find_local(m, row, lane, address & 0xFFFFFFFF)
    if code[r.SPACE] == r.BUFFER:
        inside = min(rows[64 + lane], size)
        # Each word of a wide access is checked by itself.
        inside = inside if inside == size else inside // 4 * 4
        rows[_SKIP + lane] = size - inside
        size = inside
        if size == 0:
            return r.GOES_ON
    host = host_of(m, address, size, int(code[r.ACTION] not in (r.LOAD, r.TO_LOCAL)))
    if host < 0:
        return _refuse(m, host, address, lane, row)
    rows[_HOST + lane] = host
    return r.GOES_ON


@compile_inline
def _find_scratch(m: Machine, w: int, row: int, lane: int, address: int) -> int:
    size = m.code[row, r.NUM_BYTES]
    if address < 0 or address + size > m.scratch.shape[2]:
        return _refuse(m, -1, address, lane, row)
    m.rows[_HOST + lane] = np.int64(m.scratch[w, lane].ctypes.data) + address
    return r.GOES_ON


@compile_inline
def _find_local(m: Machine, row: int, lane: int, address: int) -> int:
    size = m.code[row, r.NUM_BYTES]
    if address + size > m.lds.shape[0]:
        return _refuse(m, -1, address, lane, row)
    m.rows[_HOST + lane] = np.int64(m.lds.ctypes.data) + address
    return r.GOES_ON


@compile_call
def _do(m: Machine, w: int, row: int, active: int, result: int, data: int) -> None:
    """What all lanes do, at the places that HOST has; 0 there is out of bounds."""
    code = m.code[row]
    action, size = code[r.ACTION], code[r.NUM_BYTES]
    if action == r.LOAD:
        if size < 4:
            _load_part(m, w, row, active, result)
        else:
            for i in range(size // 4):
                _load_word(m, w, active, result + i, size, 4 * i)
    elif action == r.STORE:
        if size < 4:
            _store_part(m, w, row, active, data)
        else:
            for i in range(size // 4):
                _store_word(m, w, active, data + i, size, 4 * i)
    else:
        for lane in range(m.facts[r.NUM_LANES]):
            if (active >> lane) & 1:
                _do_lane(m, w, row, lane)


@compile_call
def _load_word(m: Machine, w: int, active: int, register: int, size: int, far: int) -> None:
    """The word `far` bytes behind the first of an access of `size` bytes."""
    dest, rows = m.vgpr[w, register], m.rows
    for lane in range(m.facts[r.NUM_LANES]):
        if (active >> lane) & 1:
            host = rows[_HOST + lane]
            is_there = host != 0 and rows[_SKIP + lane] < size - far
            dest[lane] = load_word(host + far) if is_there else 0


@compile_call
def _store_word(m: Machine, w: int, active: int, register: int, size: int, far: int) -> None:
    source, rows = m.vgpr[w, register], m.rows
    for lane in range(m.facts[r.NUM_LANES]):
        host = rows[_HOST + lane]
        if (active >> lane) & 1 and host != 0 and rows[_SKIP + lane] < size - far:
            store_word(host + far, np.int64(source[lane]))


@compile_call
def _load_part(m: Machine, w: int, row: int, active: int, register: int) -> None:
    """One byte or two: the whole register, or one half with the other kept."""
    dest, rows, code = m.vgpr[w, register], m.rows, m.code[row]
    size, up, half = code[r.NUM_BYTES], 64 - 8 * code[r.NUM_BYTES], code[r.HALF]
    has_sign = code[r.IS_SIGNED]
    for lane in range(m.facts[r.NUM_LANES]):
        if (active >> lane) & 1:
            host = rows[_HOST + lane]
            value = load_bytes(host, size) if host else 0
            if has_sign:
                value = value << up >> up
            old = np.int64(dest[lane])
            if half == r.LOW_KEPT:
                value = old & 0xFFFF0000 | value & 0xFFFF
            elif half == r.HIGH_KEPT:
                value = old & 0xFFFF | (value & 0xFFFF) << 16
            dest[lane] = value & 0xFFFFFFFF


@compile_call
def _store_part(m: Machine, w: int, row: int, active: int, register: int) -> None:
    source, rows, code = m.vgpr[w, register], m.rows, m.code[row]
    shift = 16 if code[r.HALF] == r.HIGH_KEPT else 0
    for lane in range(m.facts[r.NUM_LANES]):
        host = rows[_HOST + lane]
        if (active >> lane) & 1 and host != 0:
            store_bytes(host, np.int64(source[lane]) >> shift, code[r.NUM_BYTES])


@compile_call
def _do_lane(m: Machine, w: int, row: int, lane: int) -> None:
    """An atomic, or a load straight to LDS."""
    code, host = m.code[row], m.rows[_HOST + lane]
    if code[r.ACTION] == r.TO_LOCAL:
        _to_local(m, w, row, lane)
    elif host:
        old = _atomic(m, w, row, lane, host)
        if code[r.RETURNS]:
            m.vgpr[w, code[r.RESULT], lane] = old & 0xFFFFFFFF
            if code[r.NUM_BYTES] == 8:
                m.vgpr[w, code[r.RESULT] + 1, lane] = (old >> 32) & 0xFFFFFFFF


@compile_call
def _data(m: Machine, w: int, register: int, lane: int, num_bytes: int) -> int:
    low = int(np.int64(m.vgpr[w, register, lane]))
    return low | int(np.int64(m.vgpr[w, register + 1, lane])) << 32 if num_bytes == 8 else low


@compile_call
def _atomic(m: Machine, w: int, row: int, lane: int, host: int) -> int:
    """Change one word or two in memory; returns what was there."""
    code, size = m.code[row], m.code[row, r.NUM_BYTES]
    old, given = load_bytes(host, size), _data(m, w, code[r.DATA], lane, size)
    new = given
    if code[r.ACTION] == r.COMPARE_SWAP:
        # LDS has the value to compare first, memory has it second.
        if code[r.KIND] == r.LOCAL:
            compare, given = given, _data(m, w, code[r.SECOND_DATA], lane, size)
        else:
            compare = _data(m, w, code[r.DATA] + size // 4, lane, size)
        new = given if old == compare else old
    elif code[r.ACTION] == r.ATOMIC:
        new = _combine(m, row, old, given)
    store_bytes(host, new, size)
    return old


@compile_call
def _combine(m: Machine, row: int, old: int, given: int) -> int:
    """What an atomic's meaning makes of both; the row in use, of lane 0's address, is kept."""
    address = m.rows[_ADDRESS]
    m.rows[0], m.rows[64] = old, given
    call_handler(m.code[row, r.HANDLER], m.rows.ctypes.data, 1)
    m.rows[_ADDRESS] = address
    return m.rows[320]


@compile_call
def _to_local(m: Machine, w: int, row: int, lane: int) -> None:
    """A load straight to LDS: M0 and the offset say where lane 0's word goes, the others follow.

    What is narrower than a word fills a word. gfx950 has 160 KiB, which takes 18 bits of M0.
    """
    code, size = m.code[row], m.code[row, r.NUM_BYTES]
    m0 = scalar_value(m, w, r.SGPR, code[r.RESULT], 1)
    at = (m0 & 0x3FFFF) + code[r.SECOND_OFFSET] + lane * max(size, 4)
    host = m.rows[_HOST + lane]
    for i in range(0, size, 4):
        value = 0
        if m.rows[_SKIP + lane] < size - i:
            value = load_bytes(host + i, min(size, 4))
        if code[r.IS_SIGNED]:
            value = value << (64 - 8 * size) >> (64 - 8 * size)
        if at + i + 4 <= m.lds.shape[0]:
            store_bytes(np.int64(m.lds.ctypes.data) + at + i, value, 4)


@compile_call
def _note(m: Machine, w: int, row: int, lane: int, address: int) -> None:
    """Leave an access in the log: wave, lane, row, address, bytes, action, space (-1 for LDS, by
    whichever way), barriers, and what it left in memory."""
    code, entry = m.code[row], m.log[m.out[r.LOGGED]]
    space = -1 if code[r.KIND] == r.LOCAL else code[r.SPACE]
    if space == r.FLAT and address >> 48 in (1, 2):
        space = -1 if address >> 48 == 1 else r.SCRATCH
        address &= 0xFFFFFFFF
    entry[0], entry[1], entry[2], entry[3] = w, lane, row, address
    entry[4], entry[5] = code[r.NUM_BYTES] - m.rows[_SKIP + lane], code[r.ACTION]
    entry[6] = space
    entry[7] = m.wave[w, r.EPOCH]
    if code[r.ACTION] != r.LOAD and code[r.ACTION] != r.TO_LOCAL:
        host, size = m.rows[_HOST + lane], entry[4]
        entry[8] = load_bytes(host, min(size, 8)) if host else 0
        entry[9] = load_bytes(host + 8, size - 8) if host and size > 8 else 0
    m.out[r.LOGGED] += 1


@compile_call
def local_access(m: Machine, w: int, row: int) -> int:
    """A load, a store or an atomic of LDS; two places at once where TWO says so."""
    code, active = m.code[row], exec_of(m, w)
    if m.log.shape[0] and m.out[r.LOGGED] + 128 > m.log.shape[0]:
        return r.LOG_FULL
    # A copy: the first of two loads may overwrite the address.
    address = m.vgpr[w, code[r.ADDRESS]].copy()
    _local_places(m, w, row, active, address, code[r.OFFSET])
    _do(m, w, row, active, code[r.RESULT], code[r.DATA])
    _note_local(m, w, row, active)
    if code[r.TWO]:
        _local_places(m, w, row, active, address, code[r.SECOND_OFFSET])
        _do(m, w, row, active, code[r.RESULT] + code[r.NUM_BYTES] // 4, code[r.SECOND_DATA])
        _note_local(m, w, row, active)
    if code[r.TRANSPOSES]:
        _transpose(m, w, row)
    return r.GOES_ON


@compile_call
def _local_places(
    m: Machine, w: int, row: int, active: int, address: np.ndarray, offset: int
) -> None:
    size, base, rows = m.code[row, r.NUM_BYTES], m.lds.ctypes.data, m.rows
    last = m.lds.shape[0] - size
    for lane in range(m.facts[r.NUM_LANES]):
        at = (np.int64(address[lane]) + offset) & 0xFFFFFFFF
        rows[_ADDRESS + lane], rows[_SKIP + lane] = at, 0
        rows[_HOST + lane] = np.int64(base) + at if at <= last else 0
        if at > last and (active >> lane) & 1 and m.out[r.LOCAL_OUTSIDE_ROW] < 0:
            m.out[r.LOCAL_OUTSIDE_ROW], m.out[r.LOCAL_OUTSIDE_AT] = row, at


@compile_call
def _note_local(m: Machine, w: int, row: int, active: int) -> None:
    if m.log.shape[0]:
        for lane in range(m.facts[r.NUM_LANES]):
            if (active >> lane) & 1:
                _note(m, w, row, lane, m.rows[_ADDRESS + lane])


@compile_call
def _transpose(m: Machine, w: int, row: int) -> None:
    """DS_READ_B64_TR: among sixteen lanes, what they loaded is a matrix of rows of sixteen numbers,
    and each lane gets a column. TRANSPOSES is the bits of a number."""
    register, bits = m.code[row, r.RESULT], m.code[row, r.TRANSPOSES]
    loaded = m.vgpr[w, register : register + 2].copy()
    per_lane = 64 // bits
    per_word = 32 // bits
    for lane in range(m.facts[r.NUM_LANES]):
        column, first = lane % 16, lane // 16 * 16
        for word in range(2):
            value = 0
            for k in range(per_word):
                line = word * per_word + k
                source = first + line * (16 // per_lane) + column // per_lane
                place = column % per_lane
                held = np.int64(loaded[place // per_word, source]) >> (place % per_word * bits)
                value |= (held & ((1 << bits) - 1)) << (k * bits)
            m.vgpr[w, register + word, lane] = value
