"""Which registers the rows of an instruction read and write, as bits of one whole number.

Bit n is scalar register n, bit VECTORS + n vector register n; accumulators are those from 256 on.
EXEC and SCC, which no load writes, are left out where they are not named.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.evidence.unset import VECTORS

_VCC = 106


@dataclass(frozen=True, slots=True)
class RegisterUses:
    """What one instruction reads and writes."""

    reads: int
    writes: int


def uses_of(rows: Array, num_lanes: int) -> RegisterUses:
    """Of one instruction's rows: int64[parts, NUM_COLUMNS]."""
    reads = writes = 0
    for row in rows.tolist():
        more = _OF_KIND.get(row[r.KIND], _nothing)(row, num_lanes)
        reads, writes = reads | more.reads, writes | more.writes
    return RegisterUses(reads, writes)


def _span(first: int, num: int) -> int:
    return ((1 << num) - 1) << first if num > 0 else 0


def _scalar(index: int, num: int = 1) -> int:
    return _span(index, num) if 0 <= index < VECTORS else 0


def _vector(index: int, num: int = 1) -> int:
    return _span(VECTORS + index, num)


def _mask(index: int, num_lanes: int) -> int:
    return _scalar(index, num_lanes // 32)


def _place(source: int, index: int, words: int, num_lanes: int) -> int:
    """The registers of an operand."""
    if source == r.VGPR:
        return _vector(index, words)
    if source == r.SGPR:
        return _scalar(index, words)
    if source == r.MASK:
        return _mask(index, num_lanes)
    return _mask(_VCC, num_lanes) if source == r.VCCZ else 0


def _nothing(row: list[int], num_lanes: int) -> RegisterUses:
    return RegisterUses(0, 0)


def _value(row: list[int], num_lanes: int) -> RegisterUses:
    """VECTOR and SCALAR."""
    reads = writes = 0
    for i in range(3):
        at = r.OPERANDS + r.OPERAND_COLUMNS * i
        reads |= _place(row[at + r.SOURCE], row[at + r.INDEX], row[at + r.WORDS], num_lanes)
    dest = _place(row[r.DEST], row[r.DEST_INDEX], row[r.DEST_WORDS], num_lanes)
    if row[r.READS_DEST]:
        reads |= dest
    if row[r.CONDITION] == r.MASK:
        reads |= _mask(row[r.CONDITION_INDEX], num_lanes)
    writes |= dest
    if row[r.FLAG] == r.MASK:
        writes |= _mask(row[r.FLAG_INDEX], num_lanes)
    return RegisterUses(reads, writes)


def _branch(row: list[int], num_lanes: int) -> RegisterUses:
    return RegisterUses(_mask(_VCC, num_lanes) if row[r.OPERANDS + r.INDEX] == 2 else 0, 0)


def _scalar_load(row: list[int], num_lanes: int) -> RegisterUses:
    reads = _scalar(row[r.BASE], 4 if row[r.BOUNDS] else 2)
    reads |= _place(row[r.SCALAR_OFFSET_KIND], row[r.SCALAR_OFFSET], 1, num_lanes)
    return RegisterUses(reads, _scalar(row[r.RESULT], _words(row)))


def _words(row: list[int]) -> int:
    return (row[r.NUM_BYTES] + 3) // 4


def _words_moved(row: list[int]) -> tuple[int, int]:
    """What a store or an atomic takes, and what comes back of it or of a load, in words."""
    words, action = _words(row), row[r.ACTION]
    if action in (r.LOAD, r.TO_LOCAL):
        return 0, words if action == r.LOAD else 0
    return words, words if row[r.RETURNS] else 0


def _memory(row: list[int], num_lanes: int) -> RegisterUses:
    given, taken = _words_moved(row)
    if row[r.ACTION] == r.COMPARE_SWAP:
        given *= 2
    reads = _vector(row[r.DATA], given)
    is_buffer = row[r.SPACE] == r.BUFFER
    reads |= _vector(row[r.ADDRESS], row[r.HAS_OFFSET] + (row[r.HAS_INDEX] if is_buffer else 0))
    if is_buffer:
        reads |= _scalar(row[r.BASE], 4)
        reads |= _place(row[r.SCALAR_OFFSET_KIND], row[r.SCALAR_OFFSET], 1, num_lanes)
    else:
        reads |= _scalar(row[r.BASE], 1 if row[r.SPACE] == r.SCRATCH else 2)
    if row[r.ACTION] == r.TO_LOCAL:
        reads |= _scalar(row[r.RESULT])
    return RegisterUses(reads, _vector(row[r.RESULT], taken))


def _local(row: list[int], num_lanes: int) -> RegisterUses:
    given, taken = _words_moved(row)
    both = 2 if row[r.TWO] else 1
    reads = _vector(row[r.ADDRESS]) | _vector(row[r.DATA], given)
    if row[r.ACTION] == r.COMPARE_SWAP or (given and row[r.TWO]):
        reads |= _vector(row[r.SECOND_DATA], given)
    return RegisterUses(reads, _vector(row[r.RESULT], taken * both))


def _lanes(row: list[int], num_lanes: int) -> RegisterUses:
    work = row[r.LANE_WORK]
    source = _place(row[r.LANE_SOURCE_KIND], row[r.LANE_SOURCE], 1, num_lanes)
    if work in (r.READ_LANE, r.READ_FIRST):
        select = _place(row[r.LANE_SELECT_KIND], row[r.LANE_SELECT], 1, num_lanes)
        return RegisterUses(source | select, _scalar(row[r.LANE_DEST]))
    dest = _vector(row[r.LANE_DEST])
    if work in (r.SWAP_ROWS, r.SWAP):
        return RegisterUses(source | dest, source | dest)
    if work in (r.PERMUTE, r.BACK_PERMUTE):
        return RegisterUses(source | _vector(row[r.LANE_SELECT]), dest)
    if work == r.SWIZZLE:
        return RegisterUses(source, dest)
    source |= _place(row[r.LANE_SELECT_KIND], row[r.LANE_SELECT], 1, num_lanes)
    source |= _place(row[r.LANE_OTHER_KIND], row[r.LANE_OTHER], 1, num_lanes)
    return RegisterUses(source, dest)


def _matrix(row: list[int], num_lanes: int) -> RegisterUses:
    size, kind = row[r.MAT_M], row[r.MAT_RESULT]
    result_bits = 32 if kind == r.I8 else r.MATRIX_BITS[kind]
    result = size * size * row[r.MAT_BLOCKS] // num_lanes * result_bits // 32
    reads = _vector(row[r.MAT_INDEX]) if row[r.MAT_SPARSE] else 0
    for which in range(2):
        bits = row[r.MAT_PER_LANE] * r.MATRIX_BITS[row[r.MAT_TYPE_A + which]]
        bits //= 2 if which == 0 and row[r.MAT_SPARSE] else 1
        reads |= _vector(row[r.MAT_A + which], max(bits // 32, 1))
        if row[r.MAT_SCALED]:
            at = row[r.MAT_SCALE_A_KIND + which], row[r.MAT_SCALE_A + which]
            reads |= _place(*at, 1, num_lanes)
    if row[r.MAT_C_KIND] == r.VGPR:
        reads |= _vector(row[r.MAT_C], result)
    else:
        reads |= _place(row[r.MAT_C_KIND], row[r.MAT_C], 1, num_lanes)
    return RegisterUses(reads, _vector(row[r.MAT_D], result))


def _jump(row: list[int], num_lanes: int) -> RegisterUses:
    return RegisterUses(_scalar(row[r.OPERANDS + r.INDEX], 2), _scalar(row[r.DEST_INDEX], 2))


_OF_KIND = {
    r.VECTOR: _value,
    r.SCALAR: _value,
    r.BRANCH: _branch,
    r.SCALAR_LOAD: _scalar_load,
    r.MEMORY: _memory,
    r.LOCAL: _local,
    r.LANES_OP: _lanes,
    r.MATRIX: _matrix,
    r.JUMP: _jump,
}
