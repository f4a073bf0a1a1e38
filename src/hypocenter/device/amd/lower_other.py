"""Rows for what moves values between lanes, and for matrix instructions."""

from __future__ import annotations

import re

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.decode import Instruction, NotModelled
from hypocenter.device.amd.kernel_places import KernelPlaces
from hypocenter.device.amd.routes import swizzle_table

#: The number of CDNA's; RDNA's is one more.
M0 = 124
_WORKS = {
    "V_READLANE_B32": r.READ_LANE,
    "V_READFIRSTLANE_B32": r.READ_FIRST,
    "V_WRITELANE_B32": r.WRITE_LANE,
    "V_PERMLANE16_B32": r.PERMLANE,
    "V_PERMLANEX16_B32": r.PERMLANE_ACROSS,
    "V_PERMLANE16_SWAP_B32": r.SWAP_ROWS,
    "V_PERMLANE32_SWAP_B32": r.SWAP_ROWS,
    "V_SWAP_B32": r.SWAP,
    "V_MOVRELS_B32": r.MOVE_FROM,
    "V_MOVRELD_B32": r.MOVE_TO,
}


def lower_lanes(lowering: KernelPlaces, each: Instruction, row: Array) -> None:
    """V_READLANE and its kind, and moves between registers of which M0 chooses one."""
    if each.name not in _WORKS or not each.format.startswith(("VOP1", "VOP2", "VOP3")):
        raise NotModelled(each.name)
    if each.format.endswith(("DPP8", "DPP16", "SDWA")):
        raise NotModelled(f"{each.name} ({each.format})")
    work = _WORKS[each.name]
    row[r.KIND], row[r.LANE_WORK] = r.LANES_OP, work
    source, dest = each.get("src0"), each.get("vdst")
    row[r.LANE_SOURCE_KIND], row[r.LANE_SOURCE] = lowering.place(source, "u32", each)
    row[r.LANE_DEST] = dest - 256 if dest >= 256 else dest
    if lowering.is_rdna and dest == 124:
        row[r.LANE_DEST] = -1
    if work == r.SWAP_ROWS:
        row[r.LANE_OFFSET] = 16 if "16" in each.name else 32
        return
    if work in (r.MOVE_FROM, r.MOVE_TO):
        row[r.LANE_SELECT_KIND], row[r.LANE_SELECT] = r.SGPR, M0 + lowering.is_rdna
        return
    if work not in (r.READ_FIRST, r.SWAP):
        select = each.get("src1") if "src1" in each.fields else each.get("vsrc1")
        row[r.LANE_SELECT_KIND], row[r.LANE_SELECT] = lowering.place(select, "u32", each)
    if work in (r.PERMLANE, r.PERMLANE_ACROSS):
        place = lowering.place(each.get("src2"), "u32", each)
        row[r.LANE_OTHER_KIND], row[r.LANE_OTHER] = place
        # What an inactive lane gives: its value (1), else zero (2), else nothing is written.
        row[r.LANE_OFFSET] = each.get("opsel") & 3


def lower_lds_lanes(lowering: KernelPlaces, each: Instruction, row: Array) -> None:
    """DS_PERMUTE, DS_BPERMUTE and DS_SWIZZLE, which touch no LDS."""
    row[r.KIND], row[r.LANE_DEST] = r.LANES_OP, each.get("vdst") - 256
    offset = each.get("offset0") | each.get("offset1") << 8
    row[r.LANE_SOURCE_KIND], row[r.LANE_SELECT] = r.VGPR, each.get("addr") - 256
    row[r.LANE_OFFSET] = offset
    if each.name.startswith("DS_SWIZZLE"):
        table = swizzle_table(offset)
        if table is None:
            raise NotModelled(f"{each.name} with offset {offset:#x}")
        row[r.LANE_WORK], row[r.DPP_TABLE] = r.SWIZZLE, lowering.table(table)
        row[r.LANE_SOURCE] = each.get("addr") - 256
        return
    row[r.LANE_WORK] = r.BACK_PERMUTE if "BPERMUTE" in each.name else r.PERMUTE
    row[r.LANE_SOURCE] = each.get("data0") - 256


_MATRIX = re.compile(
    r"V_(MFMA|WMMA)_(F64|F32|F16|BF16|I32)_(\d+)X\d+X(\d+)(?:_(\d+)B)?_"
    r"(F64|XF32|F32|F16|BF16|I8|IU8|FP8|BF8)(?:_(FP8|BF8))?"
)
#: D = A * B + D, where A holds two of each four numbers.
_SPARSE = re.compile(r"V_SMFMAC_(F32|I32)_(\d+)X\d+X(\d+)_(F16|BF16|I8|FP8|BF8)(?:_(FP8|BF8))?")
_SMALL = re.compile(r"V_MFMA_(SCALE_)?F32_(\d+)X\d+X(\d+)_F8F6F4")
#: What CBSZ says of A and BLGP of B.
_SMALL_TYPES = (r.E4M3, r.E5M2, r.E2M3, r.E3M2, r.E2M1)
_TYPES = {
    "F64": r.F64,
    "F32": r.F32,
    "XF32": r.XF32,
    "F16": r.F16,
    "BF16": r.BF16,
    "I32": r.I8,
    "I8": r.I8,
}


def lower_matrix(lowering: KernelPlaces, each: Instruction, row: Array) -> None:
    """MFMA, WMMA and SMFMAC."""
    if found := _SPARSE.fullmatch(each.name):
        _lower_sparse(lowering, each, row, found)
        return
    if found := _SMALL.fullmatch(each.name):
        _lower_small(lowering, each, row, found)
        return
    found = _MATRIX.fullmatch(each.name)
    if found is None or each.get("cbsz") or each.get("abid") or each.get("blgp"):
        raise NotModelled(f"{each.name}, or a broadcast of its blocks")
    size, depth, blocks = int(found[3]), int(found[4]), int(found[5] or 1)
    is_mfma = found[1] == "MFMA"
    layout = r.MFMA if is_mfma else r.WMMA_12 if lowering.family == "rdna4" else r.WMMA_11
    row[r.KIND], row[r.MAT_LAYOUT] = r.MATRIX, layout
    row[r.MAT_M], row[r.MAT_K], row[r.MAT_BLOCKS] = size, depth, blocks
    row[r.MAT_TYPE_A] = _type(lowering, found[6], each, 0)
    row[r.MAT_TYPE_B] = _type(lowering, found[7] or found[6], each, 1)
    row[r.MAT_RESULT] = _TYPES[found[2]]
    if is_mfma:
        row[r.MAT_PER_LANE] = size * depth * blocks // 64
    else:
        _check_wmma(lowering, each, found[2])
        row[r.MAT_PER_LANE] = depth if layout == r.WMMA_11 else depth // 2
    _places(each, row)
    high = 256 if each.get("acc_cd") else 0
    kind = "f64" if found[2] == "F64" else "u32" if found[2] == "I32" else "f32"
    place = lowering.place(each.get("src2"), kind, each)
    row[r.MAT_C_KIND], row[r.MAT_C] = place[0], place[1] + (high if place[0] == r.VGPR else 0)


def _places(each: Instruction, row: Array) -> None:
    """Registers of A, B and D, accumulators from 256 on."""
    acc = each.get("acc")
    row[r.MAT_A] = each.get("src0") - 256 + 256 * (acc & 1)
    row[r.MAT_B] = each.get("src1") - 256 + 256 * (acc >> 1 & 1)
    row[r.MAT_D] = each.get("vdst") - 256 + (256 if each.get("acc_cd") else 0)


def _lower_sparse(
    lowering: KernelPlaces, each: Instruction, row: Array, found: re.Match[str]
) -> None:
    """Two bits for each number of A say which of its four columns it stands in; ABID, which part of
    the register of these bits is meant."""
    if each.get("cbsz") or each.get("blgp"):
        raise NotModelled(f"{each.name} with CBSZ {each.get('cbsz')}")
    size, depth = int(found[2]), int(found[3])
    row[r.KIND], row[r.MAT_LAYOUT], row[r.MAT_SPARSE] = r.MATRIX, r.MFMA, 1
    row[r.MAT_M], row[r.MAT_K], row[r.MAT_BLOCKS] = size, depth, 1
    row[r.MAT_PER_LANE] = size * depth // 64
    row[r.MAT_TYPE_A] = _type(lowering, found[4], each, 0)
    row[r.MAT_TYPE_B] = _type(lowering, found[5] or found[4], each, 1)
    row[r.MAT_RESULT] = _TYPES[found[1]]
    _places(each, row)
    row[r.MAT_C_KIND], row[r.MAT_C] = r.VGPR, row[r.MAT_D]
    # Each number of A, of which a lane has half as many as of B, takes two bits.
    num_bits = int(row[r.MAT_PER_LANE])
    row[r.MAT_INDEX], row[r.MAT_INDEX_SHIFT] = each.get("src2") - 256, num_bits * each.get("abid")
    if row[r.MAT_INDEX_SHIFT] + num_bits > 32:
        raise NotModelled(f"{each.name} with ABID {each.get('abid')}")


def _lower_small(
    lowering: KernelPlaces, each: Instruction, row: Array, found: re.Match[str]
) -> None:
    """Operands of 8, 6 or 4 bits. Each 32 columns of A and rows of B may have a power of two as
    their scale, a byte of a register of the lane that is the block's in order.

    A lane has 32 columns in a row, of 8 bits twice 16: so Triton's compiler places them. Where
    those of 6 bits lie is not known here; among each other that does not count.
    """
    types = each.get("cbsz"), each.get("blgp")
    sixes = [kind in (2, 3) for kind in types]
    if max(types) >= len(_SMALL_TYPES) or (any(sixes) and (found[1] or not all(sixes))):
        how = "scaled, " if found[1] else ""
        raise NotModelled(f"{each.name}, {how}with operands of formats {types[0]} and {types[1]}")
    row[r.KIND], row[r.MAT_LAYOUT] = r.MATRIX, r.MFMA
    row[r.MAT_M], row[r.MAT_K], row[r.MAT_BLOCKS] = int(found[2]), int(found[3]), 1
    row[r.MAT_PER_LANE], row[r.MAT_RESULT] = 32, r.F32
    row[r.MAT_TYPE_A], row[r.MAT_TYPE_B] = (_SMALL_TYPES[kind] for kind in types)
    row[r.MAT_HALVES], row[r.MAT_HALVES_B] = (int(kind < 2) for kind in types)
    _places(each, row)
    place = lowering.place(each.get("src2"), "f32", each)
    high = 256 if each.get("acc_cd") and place[0] == r.VGPR else 0
    row[r.MAT_C_KIND], row[r.MAT_C] = place[0], place[1] + high
    if not found[1]:
        return
    row[r.MAT_SCALED] = 1
    for which, name in enumerate(("scale_src0", "scale_src1")):
        place = lowering.place(each.get(name), "u32", each)
        row[r.MAT_SCALE_A_KIND + which], row[r.MAT_SCALE_A + which] = place
        byte = each.get("opsel") >> which & 1 | (each.get("opsel_hi") >> which & 1) << 1
        row[r.MAT_SCALE_A_SHIFT + which] = 8 * byte


def _check_wmma(lowering: KernelPlaces, each: Instruction, result: str) -> None:
    if lowering.num_lanes != 32:
        raise NotModelled(f"{each.name} in a wave of 64")
    plain = each.get("opsel") == 0 and not each.get("neg_hi") and not each.get("clmp")
    if not plain or (each.get("neg") and "IU8" not in each.name):
        raise NotModelled(f"{each.name} with modifiers")
    if result in ("F16", "BF16") and lowering.family == "rdna3":
        raise NotModelled(f"{each.name}, whose result fills half of its registers")


def _type(lowering: KernelPlaces, name: str, each: Instruction, which: int) -> int:
    if name == "IU8":
        return r.I8 if each.get("neg") >> which & 1 else r.U8
    if name in ("FP8", "BF8"):
        is_fnuz = lowering.arch == "gfx942"
        kind = r.E4M3 if name == "FP8" else r.E5M2
        return kind + 2 if is_fnuz else kind
    return _TYPES[name]
