"""Matrix instructions: MFMA and SMFMAC of CDNA, WMMA of RDNA3 and RDNA4.

Source of the layouts: AMD's matrix instruction calculator and the chapters "Matrix Arithmetic
Instructions" of the CDNA3 manual and "Wave Matrix Multiply Accumulate" of the RDNA3 and RDNA4
manuals. Products and their sum are exact to float64 and rounded once, with C added last: hardware
rounds in an order that no manual tells.
"""

from __future__ import annotations

import numpy as np

from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.compiled import compile_call, compile_inline
from hypocenter.device.amd.instruction_rows import Machine
from hypocenter.device.amd.lanes import scalar_value
from hypocenter.device.amd.values.arithmetic import (
    as_bf16,
    as_f16,
    as_f32,
    as_f64,
    as_fp8,
    bits16,
    bits32,
    bits64,
    bits_bf16,
    sign_extend,
)


@compile_call
def matrix_product(m: Machine, w: int, row: int) -> None:
    """D = A * B + C, of every block. EXEC counts for none of it."""
    code = m.code[row]
    blocks, size = code[r.MAT_BLOCKS], code[r.MAT_M]
    sums = np.zeros((blocks, size, size), np.float64)
    for block in range(blocks):
        a, b = _read(m, w, row, block, 0), _read(m, w, row, block, 1)
        for i in range(size):
            for k in range(a.shape[0]):
                # Column by column side by side; of each the products come in order of k.
                for j in range(size):
                    sums[block, i, j] += a[k, i] * b[k, j]
    # All of C before any of D: their registers may overlap without being the same.
    _add(m, w, row, sums)
    _store(m, w, row, sums)


@compile_inline
def _nearest_xf32(bits: int) -> float:
    """float32 with ten bits behind the point, ties to even. No manual tells how XF32 rounds."""
    if (bits >> 23) & 255 != 255:
        bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return np.float64(as_f32(bits))


@compile_inline
def _element(m: Machine, w: int, register: int, lane: int, place: int, kind: int) -> float:
    """Element `place` of a lane's packed registers."""
    vgpr = m.vgpr[w]
    if kind == r.F64:
        low = np.int64(vgpr[register + 2 * place, lane])
        return as_f64(low | np.int64(vgpr[register + 2 * place + 1, lane]) << 32)
    if kind == r.F32:
        return np.float64(as_f32(np.int64(vgpr[register + place, lane])))
    if kind == r.XF32:
        return _nearest_xf32(np.int64(vgpr[register + place, lane]))
    if kind == r.F16 or kind == r.BF16:
        half = np.int64(vgpr[register + place // 2, lane]) >> (16 * (place % 2)) & 0xFFFF
        return np.float64(as_f16(half) if kind == r.F16 else as_bf16(half))
    if kind >= r.E2M3:
        num_bits = 4 if kind == r.E2M1 else 6
        at = num_bits * place
        held = np.int64(vgpr[register + at // 32, lane])
        if at % 32 + num_bits > 32:
            held |= np.int64(vgpr[register + at // 32 + 1, lane]) << 32
        return _small((held >> (at % 32)) & ((1 << num_bits) - 1), kind)
    byte = np.int64(vgpr[register + place // 4, lane]) >> (8 * (place % 4)) & 0xFF
    if kind == r.I8 or kind == r.U8:
        return np.float64(sign_extend(byte, 8) if kind == r.I8 else byte)
    return as_fp8(byte, kind - r.E4M3)


@compile_call
def _read(m: Machine, w: int, row: int, block: int, which: int) -> np.ndarray:
    """A matrix of one block as [K, M or N] in float64."""
    code = m.code[row]
    size, depth, per_lane = code[r.MAT_M], code[r.MAT_K], code[r.MAT_PER_LANE]
    register = code[r.MAT_A + which]
    kind = code[r.MAT_TYPE_A + which]
    values = np.empty((depth, size), np.float64)
    if which == 0 and code[r.MAT_SPARSE]:
        _read_sparse(m, w, row, values)
        return values
    if kind == r.F16 and code[r.MAT_BLOCKS] == 1:
        _read_halves(m.vgpr[w], register, per_lane, values)
        return values
    is_split = code[r.MAT_HALVES + which]
    for i in range(size):
        for k in range(depth):
            group = block + code[r.MAT_BLOCKS] * (k // per_lane)
            place = k % per_lane
            if is_split:
                group, place = k // 16 % (64 // size), k % 16 + k // (1024 // size) * 16
            values[k, i] = _element(m, w, register, i + size * group, place, kind)
    if code[r.MAT_SCALED]:
        for i in range(size):
            for k in range(depth):
                values[k, i] *= _scale(m, w, row, which, i + size * (k // per_lane))
    return values


@compile_inline
def _scale(m: Machine, w: int, row: int, which: int, lane: int) -> float:
    """E8M0: the exponent of a power of two, biased by 127; 255 is no number."""
    code = m.code[row]
    if code[r.MAT_SCALE_A_KIND + which] == r.VGPR:
        value = np.int64(m.vgpr[w, code[r.MAT_SCALE_A + which], lane])
    else:
        value = scalar_value(m, w, code[r.MAT_SCALE_A_KIND + which], code[r.MAT_SCALE_A + which], 1)
    exponent = (value >> code[r.MAT_SCALE_A_SHIFT + which]) & 255
    return np.nan if exponent == 255 else 2.0 ** (exponent - 127)


@compile_inline
def _read_sparse(m: Machine, w: int, row: int, values: np.ndarray) -> None:
    """A of SMFMAC: of each four columns the two numbers that are there, and zeros."""
    code = m.code[row]
    size, depth, held = code[r.MAT_M], code[r.MAT_K], code[r.MAT_PER_LANE] // 2
    kind = code[r.MAT_TYPE_A]
    values[:] = 0.0
    for lane in range(64):
        bits = np.int64(m.vgpr[w, code[r.MAT_INDEX], lane]) >> code[r.MAT_INDEX_SHIFT]
        first = lane // size * 2 * held
        for place in range(held):
            k = first + place // 2 * 4 + ((bits >> (2 * place)) & 3)
            if k < depth:
                values[k, lane % size] += _element(m, w, code[r.MAT_A], lane, place, kind)


@compile_inline
def _small(bits: int, kind: int) -> float:
    """Numbers of 6 and 4 bits, which have no infinity: E2M3, E3M2 and E2M1."""
    num_fraction = 3 if kind == r.E2M3 else 2 if kind == r.E3M2 else 1
    num_bits = 4 if kind == r.E2M1 else 6
    bias = 3 if kind == r.E3M2 else 1
    exponent = (bits >> num_fraction) & ((1 << (num_bits - 1 - num_fraction)) - 1)
    fraction = np.float64(bits & ((1 << num_fraction) - 1)) / (1 << num_fraction)
    size = (
        fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
    )
    return -size if (bits >> (num_bits - 1)) & 1 else size


@compile_inline
def _read_halves(vgpr: np.ndarray, register: int, per_lane: int, values: np.ndarray) -> None:
    """What `_element` gives of halves, a register's lanes after one another and with no branch."""
    depth, size = values.shape
    for k in range(depth):
        place = k % per_lane
        source, shift, first = vgpr[register + place // 2], 16 * (place % 2), size * (k // per_lane)
        for i in range(size):
            half = np.int64(source[first + i]) >> shift
            bits = (half & 0x7FFF) << 13
            # The exponent's bias is 112 less; infinities and NaN have the largest one of both.
            is_number = bits < 0x0F800000
            number = as_f32(bits | (0 if is_number else 0x7F800000))
            sign = 1.0 - 2.0 * ((half >> 15) & 1)
            values[k, i] = np.float64(number) * sign * (2.0**112 if is_number else 1.0)


@compile_inline
def _step_of(m: Machine, row: int) -> int:
    """How many rows of a block apart the groups of lanes of one register are."""
    layout = m.code[row, r.MAT_LAYOUT]
    return 4 if layout == r.MFMA else 1 if layout == r.WMMA_11 else 8


@compile_inline
def _are_wide_floats(m: Machine, row: int) -> bool:
    """Whether a register holds whole rows of float32, which is done row by row."""
    return m.code[row, r.MAT_RESULT] == r.F32 and m.code[row, r.MAT_M] >= 16


@compile_inline
def _add_floats(m: Machine, w: int, row: int, sums: np.ndarray) -> None:
    """`_add` of float32 where C is of vector registers or one number: row by row of a block."""
    code, num_lanes, vgpr, size = m.code[row], m.facts[r.NUM_LANES], m.vgpr[w], sums.shape[1]
    if code[r.MAT_C_KIND] != r.VGPR:
        sums += _addend(m, w, row, 0, 0)
        return
    for place in range(size * size * code[r.MAT_BLOCKS] // num_lanes):
        block, first, _ = _element_at(m, row, 0, place)
        given = vgpr[code[r.MAT_C] + place]
        for group in range(num_lanes // size):
            line, lane = sums[block, first + _step_of(m, row) * group], group * size
            for j in range(size):
                line[j] += np.float64(as_f32(np.int64(given[lane + j])))


@compile_call
def _add(m: Machine, w: int, row: int, sums: np.ndarray) -> None:
    """Add C."""
    code, num_lanes = m.code[row], m.facts[r.NUM_LANES]
    size, blocks = code[r.MAT_M], code[r.MAT_BLOCKS]
    if _are_wide_floats(m, row):
        _add_floats(m, w, row, sums)
        return
    for place in range(size * size * blocks // num_lanes):
        for lane in range(num_lanes):
            block, i, j = _element_at(m, row, lane, place)
            sums[block, i, j] += _addend(m, w, row, lane, place)


@compile_inline
def _store_floats(m: Machine, w: int, row: int, sums: np.ndarray) -> None:
    """`_store` of float32: row by row of a block."""
    code, num_lanes, vgpr, size = m.code[row], m.facts[r.NUM_LANES], m.vgpr[w], sums.shape[1]
    for place in range(size * size * code[r.MAT_BLOCKS] // num_lanes):
        block, first, _ = _element_at(m, row, 0, place)
        dest = vgpr[code[r.MAT_D] + place]
        for group in range(num_lanes // size):
            line, lane = sums[block, first + _step_of(m, row) * group], group * size
            for j in range(size):
                dest[lane + j] = bits32(np.float32(line[j]))


@compile_call
def _store(m: Machine, w: int, row: int, sums: np.ndarray) -> None:
    """Write D: each lane's numbers, one after the other."""
    code, num_lanes = m.code[row], m.facts[r.NUM_LANES]
    size, blocks = code[r.MAT_M], code[r.MAT_BLOCKS]
    if _are_wide_floats(m, row):
        _store_floats(m, w, row, sums)
        return
    for place in range(size * size * blocks // num_lanes):
        for lane in range(num_lanes):
            block, i, j = _element_at(m, row, lane, place)
            _put(m, w, row, lane, place, sums[block, i, j])


@compile_inline
def _element_at(m: Machine, row: int, lane: int, place: int) -> tuple[int, int, int]:
    """Block, row and column of the result's number `place` of a lane."""
    code = m.code[row]
    layout, size = code[r.MAT_LAYOUT], code[r.MAT_M]
    if layout == r.WMMA_11:
        return 0, 2 * place + lane // 16, lane % 16
    if layout == r.WMMA_12:
        return 0, place + 8 * (lane // 16), lane % 16
    if code[r.MAT_RESULT] == r.F64 and size == 4:
        return lane // 4 % 4, lane // 16, lane % 4
    if size == 4:
        return lane // 4, place, lane % 4
    if code[r.MAT_RESULT] == r.F64:
        return 0, 4 * place + lane // size, lane % size
    per_block, rows = size * size // 64, 64 // size
    block, inside = place // per_block, place % per_block
    return block, inside % 4 + 4 * (lane // size) + inside // 4 * 4 * rows, lane % size


@compile_inline
def _addend(m: Machine, w: int, row: int, lane: int, place: int) -> float:
    code, kind = m.code[row], m.code[row, r.MAT_RESULT]
    if code[r.MAT_C_KIND] == r.VGPR:
        if kind == r.I8:
            return np.float64(sign_extend(np.int64(m.vgpr[w, code[r.MAT_C] + place, lane]), 32))
        if kind == r.F16 or kind == r.BF16:
            half = np.int64(m.vgpr[w, code[r.MAT_C] + place // 2, lane]) >> (16 * (place % 2))
            return np.float64(as_f16(half & 0xFFFF) if kind == r.F16 else as_bf16(half))
        return _element(m, w, code[r.MAT_C], lane, place, kind)
    value = scalar_value(m, w, code[r.MAT_C_KIND], code[r.MAT_C], 2 if kind == r.F64 else 1)
    if kind == r.I8:
        return np.float64(sign_extend(value, 32))
    return as_f64(value) if kind == r.F64 else np.float64(as_f32(value))


@compile_inline
def _put(m: Machine, w: int, row: int, lane: int, place: int, value: float) -> None:
    code, kind = m.code[row], m.code[row, r.MAT_RESULT]
    at = code[r.MAT_D]
    if kind == r.F64:
        bits = bits64(value)
        m.vgpr[w, at + 2 * place, lane] = bits & 0xFFFFFFFF
        m.vgpr[w, at + 2 * place + 1, lane] = (bits >> 32) & 0xFFFFFFFF
    elif kind == r.I8:
        m.vgpr[w, at + place, lane] = np.int64(value) & 0xFFFFFFFF
    elif kind == r.F32:
        m.vgpr[w, at + place, lane] = bits32(np.float32(value))
    else:
        half = bits16(value) if kind == r.F16 else bits_bf16(value)
        shift = 16 * (place % 2)
        old = np.int64(m.vgpr[w, at + place // 2, lane])
        m.vgpr[w, at + place // 2, lane] = old & ~(0xFFFF << shift) | half << shift
