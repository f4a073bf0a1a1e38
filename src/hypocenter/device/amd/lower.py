"""Decoded instructions into the rows that the machine runs; nothing is decided later than here.

What has no meaning here, or a modifier that is not modelled, becomes a row that stops the machine
when it is reached: it is never skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.constants import FLOAT_CONSTANTS, HALVES, WIDE
from hypocenter.device.amd.decode import DPP8_ANY, Instruction, NotModelled
from hypocenter.device.amd.float_mode import hold_halves, is_pole, settle
from hypocenter.device.amd.kernel_places import SIMM, KernelPlaces
from hypocenter.device.amd.lower_memory import lower_local, lower_memory, lower_scalar_load
from hypocenter.device.amd.lower_other import M0, lower_lanes, lower_matrix
from hypocenter.device.amd.routes import dpp8_table, dpp_table
from hypocenter.device.amd.small_numbers import small_number_meaning
from hypocenter.device.amd.target_opcodes import lacking
from hypocenter.device.amd.values.handlers import address_of_meaning
from hypocenter.device.amd.values.meanings import Meaning, meanings

VCC, EXEC = 106, 126
_NUMBERS = {"f16": 16, "f32": 32, "f64": 64}
_ROW_NEWBCAST = 0x15
#: Bits of S_SET_GPR_IDX_ON.
_SOURCE, _DEST = 1, 8
_BRANCHES = {
    "S_BRANCH": (0, 0),
    "S_CBRANCH_SCC0": (1, 1),
    "S_CBRANCH_SCC1": (1, 0),
    "S_CBRANCH_VCCZ": (2, 1),
    "S_CBRANCH_VCCNZ": (2, 0),
    "S_CBRANCH_EXECZ": (3, 1),
    "S_CBRANCH_EXECNZ": (3, 0),
}
#: They order and hint; with memory that is immediate none of them changes a value.
_NOTHING = frozenset(
    {
        "S_NOP",
        "S_WAITCNT",
        "S_SETPRIO",
        "S_CLAUSE",
        "S_DELAY_ALU",
        "S_WAITCNT_DEPCTR",
        "S_WAIT_ALU",
        "S_WAIT_IDLE",
        "S_WAIT_LOADCNT",
        "S_WAIT_STORECNT",
        "S_WAIT_DSCNT",
        "S_WAIT_KMCNT",
        "S_WAIT_EXPCNT",
        "S_WAIT_SAMPLECNT",
        "S_WAIT_BVHCNT",
        "S_WAIT_LOADCNT_DSCNT",
        "S_WAIT_STORECNT_DSCNT",
        "S_WAIT_EVENT",
        "S_SLEEP",
        "S_SENDMSG",
        "S_WAKEUP",
        "S_SET_INST_PREFETCH_DISTANCE",
        "S_ICACHE_INV",
        "S_INCPERFLEVEL",
        "S_DECPERFLEVEL",
        "S_WAITCNT_VSCNT",
        "S_WAITCNT_VMCNT",
        "S_WAITCNT_EXPCNT",
        "S_WAITCNT_LGKMCNT",
        "S_DCACHE_INV",
        "S_DCACHE_WB",
        "S_GL1_INV",
        "S_BARRIER_SIGNAL",
        "S_PREFETCH_INST",
        "S_PREFETCH_DATA",
        "S_SLEEP_VAR",
        "V_NOP",
        "BUFFER_INV",
        "BUFFER_WBL2",
        "BUFFER_GL0_INV",
        "BUFFER_GL1_INV",
        "GLOBAL_INV",
        "GLOBAL_WB",
        "GLOBAL_WBINV",
        "S_TTRACEDATA",
        "S_PREFETCH_INST_PC_REL",
        "S_SET_GPR_IDX_OFF",
        "S_VERSION",
        "DS_NOP",
    }
)
_SAVE_EXEC = {
    "AND": "a & b",
    "OR": "a | b",
    "XOR": "a ^ b",
    "NAND": "~(a & b)",
    "NOR": "~(a | b)",
    "XNOR": "~(a ^ b)",
    "ANDN2": "a & ~b",
    "AND_NOT1": "a & ~b",
    "ANDN1": "~a & b",
    "AND_NOT0": "~a & b",
    "ORN2": "a | ~b",
    "OR_NOT1": "a | ~b",
    "ORN1": "~a | b",
    "OR_NOT0": "~a | b",
}
#: What CLAMP makes of sums and differences: the nearest number that there is.
_RANGES = {
    "u32": (0, 0xFFFFFFFF),
    "i32": (-0x80000000, 0x7FFFFFFF),
    "u16": (0, 0xFFFF),
    "i16": (-0x8000, 0x7FFF),
}
_SUMS = {"ADD": "a + b", "SUB": "a - b", "SUBREV": "b - a"}
SATURATED = {
    name: Meaning((kind, kind), f"u{kind[1:]}", f"min(max({text}, {low}), {high})")
    for kind, (low, high) in _RANGES.items()
    for word, text in _SUMS.items()
    for name in (f"V_{form}_{kind.upper()}" for form in (word, f"{word}_NC", f"PK_{word}"))
    if name in meanings()
}
#: The sub-word that SDWA chooses: shift and width.
_PARTS = ((0, 8), (8, 8), (16, 8), (24, 8), (0, 16), (16, 16), (0, 32))


@dataclass(slots=True)
class Lowered:
    """Rows of a kernel: int64[rows, NUM_COLUMNS]; `instruction_of` is each row's instruction.

    `problems` says of a row that stops the machine why it does.
    """

    instructions: Sequence[Instruction]
    code: Array
    tables: Array
    instruction_of: list[int]
    problems: dict[int, str] = field(default_factory=dict)


class Lowering(KernelPlaces):
    """The rows of one kernel while they are made; `clamps` is FP16_OVFL of its descriptor."""

    def __init__(self, arch: str, num_lanes: int, *, clamps: bool = False) -> None:
        super().__init__(arch, num_lanes)
        self._clamps = clamps
        self._settled: frozenset[int] = frozenset()
        #: Which operand of CDNA's vector instructions M0 chooses now: _SOURCE, _DEST or none.
        self._chosen = 0

    def lower(self, instructions: Sequence[Instruction]) -> Lowered:
        """All rows, with branches resolved to rows."""
        self._clamps, self._settled = settle(instructions, clamps=self._clamps)
        rows: list[Array] = []
        owners: list[int] = []
        problems: dict[int, str] = {}
        for number, each in enumerate(instructions):
            try:
                made = self._rows(each)
            except NotModelled as error:
                problems[len(rows)] = str(error)
                made = [self._blank(r.UNKNOWN)]
            made[0][r.PARTS] = len(made)
            for row in made:
                row[r.PC] = each.pc
            rows += made
            owners += [number] * len(made)
        code = np.stack(rows) if rows else np.zeros((0, r.NUM_COLUMNS), np.int64)
        tables = np.array(self.tables or [(0,) * 64], np.int64)
        lowered = Lowered(instructions, code, tables, owners, problems)
        _resolve(lowered)
        return lowered

    def _blank(self, kind: int) -> Array:
        row = np.zeros(r.NUM_COLUMNS, np.int64)
        row[r.KIND], row[r.PARTS], row[r.DPP_TABLE] = kind, 1, -1
        return row

    def _rows(self, each: Instruction) -> list[Array]:
        row = self._blank(r.NOTHING)
        name = each.name
        if missing := lacking(self.arch, each):
            raise NotModelled(f"{missing}, which {self.arch} does not have")
        if self._chosen:
            each = self._by_number(each)
            name = each.name
        if "::" in name:
            return self._dual(each)
        if name in _NOTHING or name.startswith("S_WAITCNT_") or each.pc in self._settled:
            return [row]
        if name == "S_SET_GPR_IDX_ON":
            self._choose(each, row)
            return [row]
        if each.format == "SOPP" or name in (
            "S_BARRIER_WAIT",
            "S_GETPC_B64",
            "S_SETPC_B64",
            "S_SWAPPC_B64",
        ):
            return [self._control(each, row)]
        if each.format.startswith(("SMEM",)):
            lower_scalar_load(self, each, row)
        elif each.format in (
            "GLOBAL",
            "FLAT",
            "SCRATCH",
            "MUBUF",
            "MTBUF",
            "VGLOBAL",
            "VFLAT",
            "VSCRATCH",
            "VBUFFER",
        ):
            lower_memory(self, each, row)
        elif each.format == "DS":
            lower_local(self, each, row)
        elif "MFMA" in name or "WMMA" in name or "SMFMAC" in name:
            lower_matrix(self, each, row)
        elif name.startswith(("V_READ", "V_WRITELANE", "V_PERMLANE", "V_MOVREL", "V_SWAP")):
            lower_lanes(self, each, row)
        elif name.startswith("S_"):
            self._scalar(each, row)
        else:
            return self._vector(each)
        return [row]

    # -- registers that M0 chooses --------------------------------------------------------------

    def _choose(self, each: Instruction, row: Array) -> None:
        """S_SET_GPR_IDX_ON: until it is switched off, M0 counts from one of the operands on."""
        chosen = each.get("ssrc1") & 15
        if chosen not in (0, _SOURCE, _DEST):
            raise NotModelled(f"{each.name} with operands {chosen:#x}")
        self._chosen, row[r.KIND] = chosen, r.SCALAR
        text = f"d & 0xFFFF0F00 | a & 255 | {chosen << 12}"
        row[r.HANDLER] = address_of_meaning(Meaning(("u32",), "u32", text))
        self.operand(row, 0, each.get("ssrc0"), "u32", each)
        self._scalar_dest(row, M0, "u32")
        row[r.READS_DEST] = 1

    def _by_number(self, each: Instruction) -> Instruction:
        """An instruction while M0 chooses: compilers write moves here, and no branches."""
        if each.name == "S_SET_GPR_IDX_OFF":
            self._chosen = 0
            return replace(each, name="S_NOP")
        if each.name == "V_MOV_B32" and each.format == "VOP1":
            is_source = self._chosen == _SOURCE
            return replace(each, name="V_MOVRELS_B32" if is_source else "V_MOVRELD_B32")
        if each.name == "S_NOP":
            return each
        raise NotModelled(f"{each.name} where S_SET_GPR_IDX_ON chooses registers")

    # -- control --------------------------------------------------------------------------------

    def _control(self, each: Instruction, row: Array) -> Array:
        name = each.name
        if name in _BRANCHES:
            on, must_be_zero = _BRANCHES[name]
            row[r.KIND] = r.BRANCH
            row[r.OPERANDS + r.INDEX], row[r.OPERANDS + r.WORDS] = on, must_be_zero
            offset = each.get("simm16")
            row[r.TARGET] = each.pc + 4 + 4 * (offset - (offset & 0x8000) * 2)
        elif name in ("S_ENDPGM", "S_ENDPGM_SAVED"):
            row[r.KIND] = r.END
        elif name in ("S_BARRIER", "S_BARRIER_WAIT"):
            row[r.KIND] = r.BARRIER
        elif name == "S_TRAP":
            row[r.KIND] = r.TRAP
        elif name in ("S_GETPC_B64", "S_SETPC_B64", "S_SWAPPC_B64"):
            row[r.KIND], row[r.TARGET] = r.JUMP, each.pc + each.num_bytes
            row[r.OPERANDS + r.INDEX] = -1 if "GETPC" in name else each.get("ssrc0")
            row[r.DEST_INDEX] = -1 if "SETPC" in name else each.get("sdst")
        else:
            raise NotModelled(name)
        return row

    # -- scalar instructions ------------------------------------------------------------------

    def _scalar(self, each: Instruction, row: Array) -> None:
        name, row[r.KIND] = each.name, r.SCALAR
        if "SAVEEXEC" in name or "WREXEC" in name:
            self._save_exec(each, row)
            return
        meaning = self._meaning(name)
        given = _scalar_operands(each, meaning)
        for i, (number, kind) in enumerate(zip(given, meaning.types, strict=False)):
            self.operand(row, i, number, kind, each)
        row[r.HANDLER] = address_of_meaning(meaning)
        if meaning.result_type != "none":
            self._scalar_dest(row, each.get("sdst"), meaning.result_type)
        row[r.READS_DEST] = int(meaning.uses("d"))
        row[r.FLAG] = r.SCC if meaning.flag else r.NONE

    def _scalar_dest(self, row: Array, place: int, kind: str) -> None:
        is_null = self.is_rdna and place == 124
        row[r.DEST] = r.NONE if is_null else r.SGPR
        row[r.DEST_INDEX], row[r.DEST_WORDS] = place, 2 if kind in WIDE else 1

    def _save_exec(self, each: Instruction, row: Array) -> None:
        word = "SAVEEXEC" if "SAVEEXEC" in each.name else "WREXEC"
        stem = each.name.removeprefix("S_").split(f"_{word}")[0]
        if stem not in _SAVE_EXEC:
            raise NotModelled(each.name)
        kind = "u64" if each.name.endswith("B64") else "u32"
        row[r.HANDLER] = address_of_meaning(Meaning((kind, kind), kind, _SAVE_EXEC[stem]))
        self.operand(row, 0, each.get("ssrc0"), kind, each)
        self.operand(row, 1, EXEC, kind, each)
        self._scalar_dest(row, each.get("sdst"), kind)
        row[r.SAVES_EXEC] = 1 if word == "SAVEEXEC" else 2

    def _meaning(self, name: str) -> Meaning:
        meaning = meanings().get(name)
        if meaning is None or (self._clamps and is_pole(name)):
            raise NotModelled(f"{name} in the mode FP16_OVFL" if meaning else name)
        return hold_halves(meaning) if self._clamps else meaning

    # -- operands -------------------------------------------------------------------------------

    def operand(self, row: Array, i: int, number: int, kind: str, each: Instruction) -> int:
        """Operand i of a value's row; returns the column at which it begins."""
        at = r.OPERANDS + r.OPERAND_COLUMNS * i
        source, index = self.place(number, kind, each)
        row[at + r.SOURCE], row[at + r.INDEX] = source, index
        row[at + r.WORDS], row[at + r.PLAIN] = 2 if kind in WIDE else 1, 1
        row[at + r.WIDTH] = 64
        return at

    # -- vector instructions ------------------------------------------------------------------

    def _vector(self, each: Instruction) -> list[Array]:
        name = each.name
        if name.startswith("V_BITOP3_"):
            each, meaning = _bit_operation(each)
        elif small := small_number_meaning(each, self.arch, clamps=self._clamps):
            each, meaning = small
        elif each.get("clmp") and name in SATURATED:
            each, meaning = _without(each, "clmp"), SATURATED[name]
        else:
            meaning = self._meaning(name)
        if each.format.startswith("VOP3P") and name.startswith("V_PK_"):
            return self._pack(each, meaning)
        row = self._blank(r.VECTOR)
        row[r.HANDLER] = address_of_meaning(meaning)
        if name.startswith(("V_FMA_MIX", "V_MAD_MIX")):
            self._mix(row, each)
        else:
            self._plain(row, each, meaning)
        _refuse_wide_routes(each, meaning, is_rdna=self.is_rdna)
        if "dpp" in each.fields:
            self._dpp(row, each)
        elif "lane_sel_0" in each.fields:
            row[r.DPP_TABLE] = self.table(dpp8_table([each.get(f"lane_sel_{i}") for i in range(8)]))
            row[r.DPP_ROWS], row[r.DPP_ZERO] = -1, 1
            row[r.DPP_ANY] = int(each.get("src0") == DPP8_ANY)
        self._dest(row, each, meaning)
        self._masks(row, each, meaning)
        return [row]

    def _plain(self, row: Array, each: Instruction, meaning: Meaning) -> None:
        if each.name == "V_DOT2_BF16_BF16":
            _refuse_forms_of_pairs(each)
        for i, (number, kind) in enumerate(
            zip(_vector_operands(each), meaning.types, strict=False)
        ):
            at = self.operand(row, i, number, kind, each)
            self._modifiers(row, at, i, kind, each)

    def _modifiers(self, row: Array, at: int, i: int, kind: str, each: Instruction) -> None:
        shift, width = 0, {True: 64, False: 32}[kind in WIDE]
        spread = False
        bits = 64 if kind in WIDE else 16 if kind in HALVES else 32
        negates = (each.get("neg") >> i) & 1 or each.get(f"src{i}_neg")
        clears = (each.get("abs") >> i) & 1 or each.get(f"src{i}_abs")
        if f"src{i}_sel" in each.fields:
            shift, width = _PARTS[each.get(f"src{i}_sel")]
            spread = bool(each.get(f"src{i}_sext"))
        elif kind in HALVES and row[at] == r.VGPR:
            shift, width = 16 * self._is_high(row, at, i, each), 16
        elif kind in HALVES and (each.get("opsel") >> i) & 1:
            shift, width = 16, 16
        if each.format.startswith("VOP3P") and (negates or each.get("neg_hi")):
            raise NotModelled(f"{each.name} with a sign flipped")
        # A handler takes the low bits of what is wider than its type.
        if shift == 0 and width >= min(bits, 32) and not (negates or clears or spread):
            return
        sign = 1 << (bits - 1) if bits < 64 else -(1 << 63)
        row[at + r.PLAIN], row[at + r.SHIFT] = 0, shift
        row[at + r.WIDTH] = -width if spread else width
        row[at + r.CLEAR] = sign if clears else 0
        row[at + r.FLIP] = sign if negates else 0

    def _is_high(self, row: Array, at: int, i: int, each: Instruction) -> int:
        """Whether a 16-bit operand is the upper half of its register."""
        if each.format.startswith("VOP3"):
            return (each.get("opsel") >> i) & 1
        # RDNA's short encodings have 128 registers, and the half in the number's top bit.
        if self.is_rdna and row[at + r.INDEX] >= 128:
            row[at + r.INDEX] -= 128
            return 1
        return 0

    def _mix(self, row: Array, each: Instruction) -> None:
        """Operands that are a half, by OPSEL_HI, or a whole number; NEG_HI is their ABS."""
        is_half = each.get("opsel_hi") | each.get("opsel_hi2") << 2
        meaning = self._meaning("V_FMA_MIX_F32" if each.name.endswith("F32") else "V_FMA_MIXLO_F16")
        kinds = tuple("f16" if (is_half >> i) & 1 else "f32" for i in range(3))
        row[r.HANDLER] = address_of_meaning(replace(meaning, types=kinds))
        for i, number in enumerate(_vector_operands(each)):
            at = self.operand(row, i, number, kinds[i], each)
            width = 16 if kinds[i] == "f16" else 32
            high = (each.get("opsel") >> i) & 1 and width == 16
            sign = 1 << (width - 1)
            row[at + r.PLAIN], row[at + r.WIDTH] = 0, width
            row[at + r.SHIFT] = 16 if high else 0
            row[at + r.CLEAR] = sign if (each.get("neg_hi") >> i) & 1 else 0
            row[at + r.FLIP] = sign if (each.get("neg") >> i) & 1 else 0

    def _dpp(self, row: Array, each: Instruction) -> None:
        control = each.get("dpp")
        sources = dpp_table(control, self.num_lanes, is_rdna=self.is_rdna)
        if sources is None:
            raise NotModelled(f"{each.name} with DPP control {control:#x}")
        row[r.DPP_TABLE], row[r.DPP_ANY] = self.table(sources), each.get("fi")
        row[r.DPP_ZERO] = each.get("bc")
        rows, banks = each.get("row_mask"), each.get("bank_mask")
        bits = sum(
            1 << lane
            for lane in range(64)
            if (rows >> (lane // 16)) & 1 and (banks >> (lane % 16 // 4)) & 1
        )
        row[r.DPP_ROWS] = bits - (1 << 64) if bits >> 63 else bits

    def _dest(self, row: Array, each: Instruction, meaning: Meaning) -> None:
        kind, name = meaning.result_type, each.name
        if kind == "none":
            return
        place = each.get("vdst")
        row[r.READS_DEST] = int(meaning.uses("d"))
        if place < 256:
            if self.is_rdna and place == 124:
                return
            row[r.DEST], row[r.DEST_INDEX], row[r.DEST_WORDS] = r.SGPR, place, 1
            return
        row[r.DEST], row[r.DEST_INDEX] = r.VGPR, place - 256
        row[r.DEST_WORDS], row[r.DEST_WIDTH] = 2 if kind in WIDE else 1, 32
        if name.startswith(("V_ACCVGPR_WRITE", "V_ACCVGPR_MOV")):
            row[r.DEST_INDEX] += 256
        if "dst_sel" in each.fields:
            self._sdwa_dest(row, each)
        elif kind in HALVES:
            self._half_dest(row, each)
        self._limits(row, each, kind)

    def _sdwa_dest(self, row: Array, each: Instruction) -> None:
        shift, width = _PARTS[each.get("dst_sel")]
        unused = each.get("dst_unused")
        if width == 32:
            return
        row[r.DEST_SHIFT] = shift
        if unused == 2:
            row[r.DEST_WIDTH] = width
        elif unused == 1:
            raise NotModelled(f"{each.name} with a sign spread over its destination")

    def _half_dest(self, row: Array, each: Instruction) -> None:
        """Which half is written. CDNA's older instructions clear the other one."""
        high = 0
        if each.format.startswith("VOP3"):
            high = (each.get("opsel") >> 3) & 1
        elif self.is_rdna and row[r.DEST_INDEX] >= 128:
            row[r.DEST_INDEX] -= 128
            high = 1
        if "MIXHI" in each.name:
            high = 1
        keeps = self.is_rdna or high or each.name.startswith(("V_MAD_MIX", "V_FMA_F16", "V_MAD_"))
        keeps = keeps or "DIV_FIXUP" in each.name or each.name.endswith(("P8_F32", "F8_F32"))
        row[r.DEST_SHIFT] = 16 * high
        row[r.DEST_WIDTH] = 16 if keeps else 32

    def _limits(self, row: Array, each: Instruction, kind: str) -> None:
        clamp, scale = each.get("clmp"), each.get("omod")
        if not clamp and not scale:
            return
        bits = _NUMBERS.get(kind)
        if bits is None:
            raise NotModelled(f"{each.name} with CLAMP on integers")
        if self._clamps and bits == 16 and scale:
            raise NotModelled(f"{each.name} with OMOD in the mode FP16_OVFL")
        row[r.CLAMP] = bits if clamp else 0
        row[r.SCALE] = bits << 2 | scale if scale else 0

    def _masks(self, row: Array, each: Instruction, meaning: Meaning) -> None:
        """Where a flag goes, and where a condition comes from."""
        name = each.name
        if meaning.uses("k"):
            is_third = each.format.startswith("VOP3") and "DIV_FMAS" not in name
            row[r.CONDITION] = r.MASK
            row[r.CONDITION_INDEX] = each.get("src2") if is_third else VCC
        if not meaning.flag:
            return
        place = VCC
        if each.format.startswith("VOP3SD"):
            place = each.get("sdst")
        elif each.format.startswith("VOP3"):
            place = each.get("vdst")
        elif each.get("sd"):
            place = each.get("sdst")
        is_cmpx = name.startswith("V_CMPX_")
        row[r.FLAG], row[r.FLAG_INDEX] = r.MASK, place
        row[r.FLAG_TO_EXEC] = int(is_cmpx)
        if self.is_rdna and (place == 124 or is_cmpx):
            row[r.FLAG] = r.SCC  # neither a mask nor none: only EXEC, or nobody, gets it

    def _pack(self, each: Instruction, meaning: Meaning) -> list[Array]:
        """The low half and the high one; each chooses the halves of its operands."""
        halves = []
        is_wide = each.name.endswith(("F32", "MOV_B32"))
        highs = each.get("opsel_hi") | each.get("opsel_hi2") << 2
        for half in (0, 1):
            row = self._blank(r.VECTOR)
            row[r.HANDLER] = address_of_meaning(meaning)
            chosen = highs if half else each.get("opsel")
            negated = each.get("neg_hi") if half else each.get("neg")
            numbers = _vector_operands(each)
            if each.name == "V_PK_MOV_B32":
                # One operand for each half of the result, each with its own bit.
                numbers, chosen = [numbers[half]], (each.get("opsel") >> half) & 1
            for i, (number, kind) in enumerate(zip(numbers, meaning.types, strict=False)):
                high = (chosen >> i) & 1
                is_register = number >= 256 or number < 124
                place = number + high if is_wide and is_register else number
                at = self.operand(row, i, place, kind, each)
                bits = 32 if is_wide else 16
                row[at + r.PLAIN], row[at + r.WIDTH] = 0, bits
                row[at + r.SHIFT] = 16 * high if not is_wide and is_register else 0
                row[at + r.FLIP] = 1 << (bits - 1) if (negated >> i) & 1 else 0
            row[r.DEST], row[r.DEST_INDEX] = r.VGPR, each.get("vdst") - 256
            row[r.DEST_WORDS], row[r.DEST_WIDTH] = 1, 32
            if is_wide:
                row[r.DEST_INDEX] += half
            else:
                row[r.DEST_SHIFT], row[r.DEST_WIDTH] = 16 * half, 16
            self._limits(row, each, meaning.result_type)
            halves.append(row)
        return halves

    def _dual(self, each: Instruction) -> list[Array]:
        """VOPD: two instructions of one lane each."""
        made = []
        for name, letter in zip(each.name.split("::"), "xy", strict=True):
            meaning = self._meaning(name)
            row = self._blank(r.VECTOR)
            row[r.HANDLER] = address_of_meaning(meaning)
            numbers = [each.get(f"src{letter}0"), each.get(f"vsrc{letter}1")]
            numbers.append(255)  # the constant of V_DUAL_FMAMK and V_DUAL_FMAAK
            for i, (number, kind) in enumerate(zip(numbers, meaning.types, strict=False)):
                self.operand(row, i, number, kind, each)
            row[r.DEST], row[r.DEST_INDEX] = r.VGPR, each.get(f"vdst{letter}") - 256
            row[r.DEST_WORDS], row[r.DEST_WIDTH] = 1, 32
            row[r.READS_DEST] = int(meaning.uses("d"))
            if meaning.uses("k"):
                row[r.CONDITION], row[r.CONDITION_INDEX] = r.MASK, VCC
            made.append(row)
        return made


def _bit_operation(each: Instruction) -> tuple[Instruction, Meaning]:
    """V_BITOP3 without its table of truth, which stands where others have modifiers; and with it
    as a meaning."""
    table = each.get("omod") << 6 | each.get("abs") << 3 | each.get("neg")
    kind = "u16" if each.name.endswith("B16") else "u32"
    plain = _without(each, "omod", "abs", "neg")
    return plain, Meaning((kind,) * 3, kind, f"by_truth(a, b, c, {table})")


def _without(each: Instruction, *names: str) -> Instruction:
    """An instruction whose modifiers are in its meaning already."""
    return replace(each, fields={k: v for k, v in each.fields.items() if k not in names})


def _scalar_operands(each: Instruction, meaning: Meaning) -> list[int]:
    """Numbers of operands; SOPK's constant and the destination that it works on are two of them."""
    if each.format.startswith("SOPK"):
        if len(meaning.types) == 1:
            return [SIMM]
        return [each.get("sdst"), SIMM]
    given = [each.get("ssrc0"), each.get("ssrc1")]
    if len(meaning.types) == 3:
        given = [given[0], given[1], 255]
    if each.format.startswith("VOP3"):
        given = [each.get("src0"), each.get("src1")]
    return given


def _refuse_wide_routes(each: Instruction, meaning: Meaning, *, is_rdna: bool) -> None:
    """Numbers of 64 bits come from one lane of a row (CDNA's ROW_NEWBCAST), or from no other."""
    if not WIDE.intersection(meaning.types) and meaning.result_type != "f64":
        return
    has_parts = "src0_sel" in each.fields or "lane_sel_0" in each.fields
    control = each.get("dpp")
    if has_parts or ("dpp" in each.fields and (is_rdna or control >> 4 != _ROW_NEWBCAST)):
        raise NotModelled(f"{each.name} ({each.format}) with operands of 64 bits")


def _refuse_forms_of_pairs(each: Instruction) -> None:
    """Pairs whose signs are changed, or that are a number of the encoding's own."""
    if each.get("neg") or each.get("abs"):
        raise NotModelled(f"{each.name} with a sign changed")
    if any(number in FLOAT_CONSTANTS for number in _vector_operands(each)):
        raise NotModelled(f"{each.name} with a constant")


def _vector_operands(each: Instruction) -> list[int]:
    """Numbers of operands a, b and c."""
    fields = each.fields
    first = each.get("vsrc0") if "vsrc0" in fields else each.get("src0")
    if "vsrc0" in fields and each.get("s0"):  # SDWA with a scalar register
        first -= 256
    second = each.get("src1") if "src1" in fields else each.get("vsrc1")
    if each.get("s1"):
        second -= 256
    if each.name.startswith(("V_ACCVGPR_READ", "V_ACCVGPR_MOV")):
        first += 256
    if "src2" in fields:
        return [first, second, each.get("src2")]
    if each.name.startswith(("V_FMAMK", "V_FMAAK", "V_MADMK", "V_MADAK")):
        # The constant stands between the two or after them; so do `b` and `c`.
        return [first, second, 255]
    return [first, second]


def _resolve(lowered: Lowered) -> None:
    """Branches go to rows instead of places; -1 where no instruction begins."""
    first_row: dict[int, int] = {}
    for row, number in enumerate(lowered.instruction_of):
        first_row.setdefault(lowered.instructions[number].pc, row)
    for row in np.flatnonzero(lowered.code[:, r.KIND] == r.BRANCH).tolist():
        lowered.code[row, r.TARGET] = first_row.get(int(lowered.code[row, r.TARGET]), -1)
