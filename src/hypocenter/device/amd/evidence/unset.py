"""Which registers nobody has written yet, and where one is used so that it shows.

Only where a launch asks for it. A value made of unset ones is unset as well. Told are its uses as
an address, as data of a store to global memory, and to choose a way. What only may be unset counts
as set: halves and words of memory are not followed, nor what comes from other lanes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.compiled import compile_call
from hypocenter.device.amd.descriptor import KernelDescriptor
from hypocenter.device.amd.instruction_rows import Machine
from hypocenter.device.amd.lanes import chosen_register, exec_of

#: Of a wave: the lanes in which each scalar register (all or none), each vector register and SCC
#: are unset.
VECTORS, SCC_AT = 128, 128 + 512
NUM_MASKS = SCC_AT + 1
#: What is noted of a use: row, wave, lane (-1: scalar), register as in VECTORS, and as what.
USE_COLUMNS, MAX_USES = 5, 256
AS_ADDRESS, AS_DATA, AS_CHOICE = range(3)
_VCC, _EXEC, _NUM_SCALARS = 106, 126, 106
#: Scalar registers behind the ones of the user that a launch may fill as well.
_SYSTEM_SGPRS = 8
#: Whose result may hang on some of the operands alone.
_MIXES = re.compile(
    r"CNDMASK|CSELECT|_(N?AND|X?N?OR|ANDN|ORN|OR3|BFI|BFM|PERM|BITOP|ALIGN|PACK|PK|LSHL_OR|MIN|MAX"
    r"|MED|MUL|BITSET|DIV|MIX|DOT|SAD)"
)


def note_mixing(code: Array, names: Sequence[str]) -> None:
    """Mark the rows whose result is set where any operand is; `names` are those of the rows."""
    code[:, r.MIXES] = [_MIXES.search(name) is not None for name in names]


def fill_unset(unset: Array, descriptor: KernelDescriptor) -> None:
    """As a wave begins: user and system registers, EXEC and the thread's number are set."""
    unset[:] = 0
    unset[:, descriptor.num_user_sgprs + _SYSTEM_SGPRS : _NUM_SCALARS + 2] = -1
    unset[:, VECTORS + 1 : SCC_AT] = -1
    unset[:, SCC_AT] = -1


@compile_call
def follow_unset(m: Machine, w: int, row: int) -> None:
    """Before an instruction: note what it uses unset, and what its results are."""
    kind = m.code[row, r.KIND]
    if kind == r.VECTOR:
        _vector(m, w, row)
    elif kind == r.SCALAR:
        _scalar(m, w, row)
    elif kind == r.BRANCH:
        _branch(m, w, row)
    elif kind == r.MEMORY or kind == r.LOCAL:
        _memory(m, w, row)
    elif kind == r.SCALAR_LOAD:
        _scalar_load(m, w, row)
    elif kind == r.LANES_OP:
        _lanes(m, w, row)
    elif kind == r.MATRIX:
        words = 2 if m.code[row, r.MAT_RESULT] == r.F64 else 1
        size = m.code[row, r.MAT_M] ** 2 * m.code[row, r.MAT_BLOCKS] // m.facts[r.NUM_LANES]
        first = VECTORS + m.code[row, r.MAT_D]
        m.unset[w, first : first + size * words] = 0
    elif kind == r.JUMP and m.code[row, r.DEST_INDEX] >= 0:
        m.unset[w, m.code[row, r.DEST_INDEX]] = 0
        m.unset[w, m.code[row, r.DEST_INDEX] + 1] = 0


@compile_call
def _note(m: Machine, w: int, row: int, register: int, lanes: int, how: int) -> None:
    """One use, where some of the lanes have it unset."""
    number = m.out[r.NUM_UNSET_USES]
    if lanes == 0 or number >= m.uses.shape[0]:
        return
    for known in range(number):
        if m.uses[known, 0] == row and m.uses[known, 3] == register:
            return
    lane = -1
    if register >= VECTORS and register < SCC_AT:
        lane = 0
        while not (lanes >> lane) & 1:
            lane += 1
    use = m.uses[number]
    use[0], use[1], use[2], use[3], use[4] = row, w, lane, register, how
    m.out[r.NUM_UNSET_USES] = number + 1


@compile_call
def _operand(m: Machine, w: int, row: int, i: int) -> int:
    """The lanes in which an operand is unset."""
    code, at = m.code[row], r.OPERANDS + r.OPERAND_COLUMNS * i
    source, index = code[at + r.SOURCE], code[at + r.INDEX]
    if source == r.VGPR and (i > 0 or code[r.DPP_TABLE] < 0 or code[r.KIND] != r.VECTOR):
        index += VECTORS
    elif source == r.SCC:
        return m.unset[w, SCC_AT]
    elif source != r.SGPR or index >= VECTORS:
        return 0
    found = m.unset[w, index]
    return found & m.unset[w, index + 1] if code[at + r.WORDS] == 2 else found


@compile_call
def _result(m: Machine, w: int, row: int) -> int:
    """The lanes in which the result of a vector or scalar instruction is unset."""
    code = m.code[row]
    some, every = np.int64(0), np.int64(-1)
    num = 0
    for i in range(3):
        if code[r.OPERANDS + r.OPERAND_COLUMNS * i] != r.NONE:
            lanes = _operand(m, w, row, i)
            some, every, num = some | lanes, every & lanes, num + 1
    if code[r.READS_DEST]:
        lanes = np.int64(0)
        if code[r.DEST] == r.VGPR:
            lanes = m.unset[w, VECTORS + code[r.DEST_INDEX]]
        elif code[r.DEST] == r.SGPR:
            lanes = m.unset[w, code[r.DEST_INDEX]]
        some, every, num = some | lanes, every & lanes, num + 1
    found = np.int64(0)
    if num > 0:
        found = every if code[r.MIXES] else some
    if code[r.CONDITION] == r.MASK:
        found |= m.unset[w, code[r.CONDITION_INDEX]]
    return int(found)


@compile_call
def _vector(m: Machine, w: int, row: int) -> None:
    num_parts = m.code[row, r.PARTS]
    first = _result(m, w, row)
    second = _result(m, w, row + 1) if num_parts > 1 else np.int64(0)
    _put_vector(m, w, row, first)
    if num_parts > 1:
        _put_vector(m, w, row + 1, second)


@compile_call
def _put_vector(m: Machine, w: int, row: int, lanes: int) -> None:
    code, enabled = m.code[row], exec_of(m, w)
    bad = lanes & enabled
    if code[r.DEST] == r.VGPR:
        for word in range(code[r.DEST_WORDS]):
            at = VECTORS + code[r.DEST_INDEX] + word
            # A half that is written makes the register count as set.
            kept = m.unset[w, at] & ~enabled
            m.unset[w, at] = kept if code[r.DEST_WIDTH] < 32 else kept | bad
    elif code[r.DEST] == r.SGPR:
        m.unset[w, code[r.DEST_INDEX]] = -1 if bad else 0
    if code[r.FLAG] == r.MASK:
        m.unset[w, code[r.FLAG_INDEX]] = -1 if bad else 0
        if m.facts[r.NUM_LANES] == 64:
            m.unset[w, code[r.FLAG_INDEX] + 1] = -1 if bad else 0
    if code[r.FLAG_TO_EXEC] and bad:
        for i in range(3):
            at = r.OPERANDS + r.OPERAND_COLUMNS * i
            if code[at] == r.VGPR:
                of_operand = _operand(m, w, row, i) & enabled
                _note(m, w, row, VECTORS + code[at + r.INDEX], of_operand, AS_CHOICE)


@compile_call
def _scalar(m: Machine, w: int, row: int) -> None:
    code, found = m.code[row], _result(m, w, row)
    if code[r.SAVES_EXEC]:
        _note(m, w, row, code[r.OPERANDS + r.INDEX], _operand(m, w, row, 0), AS_CHOICE)
        found = np.int64(0)
    if code[r.DEST] == r.SGPR and code[r.DEST_INDEX] < VECTORS:
        if code[r.DEST_INDEX] == _EXEC and found:
            at = r.OPERANDS + r.OPERAND_COLUMNS * (0 if _operand(m, w, row, 0) else 1)
            _note(m, w, row, code[at + r.INDEX], found, AS_CHOICE)
            found = np.int64(0)
        for word in range(code[r.DEST_WORDS]):
            m.unset[w, code[r.DEST_INDEX] + word] = found
    if code[r.FLAG] == r.SCC:
        m.unset[w, SCC_AT] = found


@compile_call
def _branch(m: Machine, w: int, row: int) -> None:
    on = m.code[row, r.OPERANDS + r.INDEX]
    if on == 1:
        _note(m, w, row, SCC_AT, m.unset[w, SCC_AT], AS_CHOICE)
    elif on == 2:
        _note(m, w, row, _VCC, m.unset[w, _VCC], AS_CHOICE)


@compile_call
def _scalar_load(m: Machine, w: int, row: int) -> None:
    code = m.code[row]
    for word in range(2):
        base = code[r.BASE] + word
        if base < VECTORS:
            _note(m, w, row, base, m.unset[w, base], AS_ADDRESS)
    for word in range((code[r.NUM_BYTES] + 3) // 4):
        if code[r.RESULT] + word < VECTORS:
            m.unset[w, code[r.RESULT] + word] = 0


@compile_call
def _memory(m: Machine, w: int, row: int) -> None:
    """Loads, stores and atomics of memory and of LDS."""
    code, active = m.code[row], exec_of(m, w)
    is_local, space = code[r.KIND] == r.LOCAL, code[r.SPACE]
    if active == 0:
        return
    num_address = 1 if is_local else code[r.HAS_OFFSET]
    if not is_local and space == r.BUFFER:
        num_address = code[r.HAS_OFFSET] + code[r.HAS_INDEX]
    for word in range(num_address):
        at = VECTORS + code[r.ADDRESS] + word
        _note(m, w, row, at, m.unset[w, at] & active, AS_ADDRESS)
    if not is_local and code[r.BASE] >= 0 and space != r.SCRATCH:
        for word in range(2):
            at = code[r.BASE] + word
            _note(m, w, row, at, m.unset[w, at], AS_ADDRESS)
    words = (code[r.NUM_BYTES] + 3) // 4
    if code[r.ACTION] == r.LOAD or code[r.RETURNS]:
        num = 2 * words if is_local and code[r.TWO] else words
        for word in range(num):
            m.unset[w, VECTORS + code[r.RESULT] + word] &= ~active
    elif code[r.ACTION] == r.STORE and not is_local and space != r.SCRATCH:
        every = np.int64(active)
        for word in range(words):
            every &= m.unset[w, VECTORS + code[r.DATA] + word]
        _note(m, w, row, VECTORS + code[r.DATA], every, AS_DATA)


@compile_call
def _lanes(m: Machine, w: int, row: int) -> None:
    code = m.code[row]
    work = code[r.LANE_WORK]
    if work == r.READ_LANE or work == r.READ_FIRST:
        if code[r.LANE_DEST] >= 0:
            m.unset[w, code[r.LANE_DEST]] = 0
        return
    dest = code[r.LANE_DEST]
    if work == r.MOVE_TO:
        dest = chosen_register(m, w, row, dest)
    m.unset[w, VECTORS + dest] = 0
    if work == r.SWAP_ROWS or work == r.SWAP:
        m.unset[w, VECTORS + code[r.LANE_SOURCE]] = 0


def register_name(register: int) -> str:
    """As AMD's assembler writes it."""
    if register == SCC_AT:
        return "scc"
    if register in (_VCC, _VCC + 1):
        return "vcc"
    if register < VECTORS:
        return f"s{register}"
    number = register - VECTORS
    return f"v{number}" if number < 256 else f"a{number - 256}"
