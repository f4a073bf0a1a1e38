"""The form in which `machine.py` reads instructions: rows of int64, column by column.

An instruction with two independent halves (VOPD, packed math) is two rows with the same pc; the
second half's sources are read before the first half's result is written.
"""

from __future__ import annotations

from typing import NamedTuple

from hypocenter.base.dtypes import Array

# What kind of work a row is.
(
    VECTOR,
    SCALAR,
    BRANCH,
    NOTHING,
    END,
    BARRIER,
    SCALAR_LOAD,
    MEMORY,
    LOCAL,
    LANES_OP,
    MATRIX,
    TRAP,
    JUMP,
    UNKNOWN,
) = range(14)

# Columns of every row.
KIND, PC, HANDLER, TARGET, PARTS = range(5)

# Columns of VECTOR and SCALAR: three operands of OPERAND_COLUMNS each from OPERANDS on.
OPERANDS, OPERAND_COLUMNS = 8, 8
#: Within an operand: where it is, which one, how many words, whether anything below applies;
#: then right shift, mask after it, bits for the sign to be spread from (0: none), sign bit's mask
#: to be cleared and to be flipped (packed in one column each).
SOURCE, INDEX, WORDS, PLAIN, SHIFT, WIDTH, CLEAR, FLIP = range(8)
# Places of operands. A MASK is the bit of each lane in a scalar register or pair.
NONE, VGPR, SGPR, CONSTANT, SCC, MASK, VCCZ, EXECZ = range(8)
#: A sign is spread from WIDTH where it is negative.

DEST, DEST_INDEX, DEST_WORDS, DEST_SHIFT, DEST_WIDTH, READS_DEST = range(32, 38)
FLAG, FLAG_INDEX, FLAG_TO_EXEC = range(38, 41)
CONDITION, CONDITION_INDEX = 41, 42
DPP_TABLE, DPP_ROWS, DPP_ZERO, DPP_ANY = range(43, 47)
CLAMP, SCALE, SAVES_EXEC, MIXES = 47, 48, 49, 50

# Columns of MEMORY, LOCAL and SCALAR_LOAD.
(
    SPACE,
    ACTION,
    NUM_BYTES,
    IS_SIGNED,
    HALF,
    DATA,
    ADDRESS,
    BASE,
    OFFSET,
    HAS_OFFSET,
    HAS_INDEX,
    SCALAR_OFFSET,
    SCALAR_OFFSET_KIND,
    RESULT,
    RETURNS,
    SECOND_OFFSET,
    TWO,
    SECOND_DATA,
    BOUNDS,
    WRAPS,
    TRANSPOSES,
) = range(8, 29)
GLOBAL, FLAT, SCRATCH, BUFFER = range(4)
LOAD, STORE, ATOMIC, SWAP, COMPARE_SWAP, TO_LOCAL = range(6)
#: Which half of a register a 16-bit load or store means, and whether the other is kept.
WHOLE, LOW_KEPT, HIGH_KEPT = range(3)

# Columns of LANES_OP.
LANE_WORK, LANE_SOURCE, LANE_DEST, LANE_SELECT, LANE_SELECT_KIND, LANE_OTHER, LANE_OTHER_KIND = (
    range(8, 15)
)
LANE_SOURCE_KIND, LANE_OFFSET = 15, 16
(
    READ_LANE,
    READ_FIRST,
    WRITE_LANE,
    PERMLANE,
    PERMLANE_ACROSS,
    PERMUTE,
    BACK_PERMUTE,
    SWIZZLE,
    SWAP_ROWS,
    SWAP,
    MOVE_FROM,
    MOVE_TO,
) = range(12)

# Columns of MATRIX.
(
    MAT_M,
    MAT_K,
    MAT_BLOCKS,
    MAT_PER_LANE,
    MAT_TYPE_A,
    MAT_TYPE_B,
    MAT_RESULT,
    MAT_LAYOUT,
    MAT_A,
    MAT_B,
    MAT_C,
    MAT_C_KIND,
    MAT_D,
    MAT_NEGATE,
    MAT_NEGATE_C,
    MAT_SPARSE,
    MAT_INDEX,
    MAT_INDEX_SHIFT,
    MAT_SCALED,
    MAT_SCALE_A,
    MAT_SCALE_B,
    MAT_SCALE_A_KIND,
    MAT_SCALE_B_KIND,
    MAT_SCALE_A_SHIFT,
    MAT_SCALE_B_SHIFT,
    MAT_HALVES,
    MAT_HALVES_B,
) = range(8, 35)
(
    F16,
    BF16,
    F32,
    F64,
    I8,
    U8,
    E4M3,
    E5M2,
    E4M3_FNUZ,
    E5M2_FNUZ,
    XF32,
    E2M3,
    E3M2,
    E2M1,
) = range(14)
#: Bits of a number of a matrix, by type.
MATRIX_BITS = (16, 16, 32, 64, 8, 8, 8, 8, 8, 8, 32, 6, 6, 4)
MFMA, WMMA_11, WMMA_12 = range(3)

NUM_COLUMNS = 52

# Columns of a wave: next row, SCC, what it does, instructions so far, barriers passed.
NEXT, SCC_BIT, STATE, COUNT, EPOCH = range(5)
RUNNING, AT_BARRIER, ENDED = range(3)

# What the machine stopped for, and the columns of what it leaves in `out`.
(
    GOES_ON,
    ALL_ENDED,
    BAD_ADDRESS,
    FRESH_PAGE,
    NOT_MODELLED,
    TRAPPED,
    OVER_BUDGET,
    BAD_JUMP,
    LOG_FULL,
    MISALIGNED,
    DEADLOCK,
) = range(11)
STOPPED, WAVE, ROW, LANE, AT, SIZE, WRITES, LOGGED, LOCAL_OUTSIDE_ROW, LOCAL_OUTSIDE_AT, VIA = (
    range(11)
)
NUM_UNSET_USES = 11
#: Columns of the log of accesses: the last two hold the bytes that a store or an atomic left.
LOG_COLUMNS = 10


class Machine(NamedTuple):
    """The state of one workgroup, and what it runs; see `machine.py` for who reads what.

    code: int64[rows, NUM_COLUMNS]. tables: int64[n, 64], source lanes of DPP, -1 for none.
    regions: int64[n, 5], sorted: first address, end, address on the host, whether it may be
    written, address of its table of pages (0: all are there). sgpr: int64[waves, 128].
    vgpr: uint32[waves, 256 or 512, 64], accumulators from 256 on. wave: int64[waves, 8]. lds:
    uint8[bytes]. scratch: uint8[waves, 64, bytes]. rows: int64[NUM_ROWS * 64]. out: int64[16].
    log: int64[entries, LOG_COLUMNS], empty where nobody asks for it. unset: int64[waves, NUM_MASKS]
    and uses: int64[n, USE_COLUMNS] of `unset.py`, empty likewise. facts: int64[4]: lanes of a wave,
    instructions allowed, whether buffers are checked as RDNA does.
    """

    code: Array
    tables: Array
    regions: Array
    sgpr: Array
    vgpr: Array
    wave: Array
    lds: Array
    scratch: Array
    rows: Array
    out: Array
    log: Array
    facts: Array
    unset: Array
    uses: Array


#: Of `facts`.
NUM_LANES, BUDGET, IS_RDNA = range(3)
