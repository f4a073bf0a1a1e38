"""Rows for loads, stores and atomics, by the words that AMD's names are made of."""

from __future__ import annotations

import re

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.decode import Instruction, NotModelled
from hypocenter.device.amd.kernel_places import KernelPlaces
from hypocenter.device.amd.lower_other import lower_lds_lanes
from hypocenter.device.amd.values.handlers import address_of_meaning
from hypocenter.device.amd.values.meanings import Meaning

_SPACES = {"GLOBAL": r.GLOBAL, "FLAT": r.FLAT, "SCRATCH": r.SCRATCH, "BUFFER": r.BUFFER}
#: Bytes, and whether the sign is spread.
_WIDTHS = {
    "UBYTE": (1, 0),
    "SBYTE": (1, 1),
    "USHORT": (2, 0),
    "SSHORT": (2, 1),
    "BYTE": (1, 0),
    "SHORT": (2, 0),
    "DWORD": (4, 0),
    "DWORDX2": (8, 0),
    "DWORDX3": (12, 0),
    "DWORDX4": (16, 0),
    "U8": (1, 0),
    "I8": (1, 1),
    "U16": (2, 0),
    "I16": (2, 1),
    "B8": (1, 0),
    "B16": (2, 0),
    "B32": (4, 0),
    "B64": (8, 0),
    "B96": (12, 0),
    "B128": (16, 0),
    "DWORDX8": (32, 0),
    "DWORDX16": (64, 0),
    "B256": (32, 0),
    "B512": (64, 0),
}
#: An atomic's words to an expression of what memory held (a) and the operand (b).
_ATOMICS = {
    "ADD": "a + b",
    "SUB": "a - b",
    "RSUB": "b - a",
    "MIN": "min(a, b)",
    "MAX": "max(a, b)",
    "AND": "a & b",
    "OR": "a | b",
    "XOR": "a ^ b",
    "INC": "0 if a >= b else a + 1",
    "DEC": "b if a == 0 or a > b else a - 1",
}
#: Those of 64 bits without a sign, which numba would compare with one.
_WIDE = {
    "MIN": "a if below(a, b) else b",
    "MAX": "b if below(a, b) else a",
    "INC": "a + 1 if below(a, b) else 0",
    "DEC": "b if a == 0 or below(b, a) else a - 1",
}
#: The same of floats.
_OF_NUMBERS = {"ADD": "a + b", "MIN": "min_number(a, b)", "MAX": "max_number(a, b)"}
#: Two halves at once.
_PACKED = {
    "F16": "bits16(as_f16(a & 0xFFFF) + as_f16(b & 0xFFFF))"
    " | bits16(as_f16(a >> 16) + as_f16(b >> 16)) << 16",
    "BF16": "bits_bf16(as_bf16(a) + as_bf16(b))"
    " | bits_bf16(as_bf16(a >> 16) + as_bf16(b >> 16)) << 16",
}
_EXCHANGES = ("SWAP", "WRXCHG", "STOREXCHG")
_COMPARES = ("CMPSWAP", "CMPST", "CMPSTORE")
_TYPED = re.compile(r"_(U32|I32|U64|I64|B32|B64|F32|F64|F16|BF16)$")


def signed_field(value: int, num_bits: int) -> int:
    """A field of two's complement."""
    return value - ((value >> (num_bits - 1)) << num_bits)


def lower_scalar_load(lowering: KernelPlaces, each: Instruction, row: Array) -> None:
    """S_LOAD and S_BUFFER_LOAD."""
    words = each.name.split("_")
    if "LOAD" not in words or words[-1] not in _WIDTHS:
        raise NotModelled(each.name)
    row[r.KIND] = r.SCALAR_LOAD
    row[r.NUM_BYTES], row[r.IS_SIGNED] = _WIDTHS[words[-1]]
    row[r.BASE], row[r.RESULT] = each.get("sbase"), each.get("sdata")
    row[r.BOUNDS] = int("BUFFER" in words)
    is_cdna = lowering.family == "cdna"
    if lowering.family == "rdna4":
        row[r.OFFSET] = signed_field(each.get("ioffset"), 24)
    elif not is_cdna or each.get("imm"):
        row[r.OFFSET] = signed_field(each.get("offset"), 21)
    row[r.SCALAR_OFFSET_KIND], row[r.SCALAR_OFFSET] = r.CONSTANT, 0
    has_register = each.get("soffset_en") if is_cdna else each.get("soffset") != 124
    if is_cdna and not each.get("imm") and not has_register:
        # CDNA's older way: the offset's field names the register.
        row[r.SCALAR_OFFSET_KIND] = r.SGPR
        row[r.SCALAR_OFFSET] = each.get("offset") & 0x7F
    elif has_register:
        place = lowering.place(each.get("soffset"), "u32", each)
        row[r.SCALAR_OFFSET_KIND], row[r.SCALAR_OFFSET] = place


def lower_memory(lowering: KernelPlaces, each: Instruction, row: Array) -> None:
    """Vector instructions on memory."""
    words = each.name.split("_")
    if words[0] not in _SPACES or "FORMAT" in words or each.get("tfe"):
        raise NotModelled(each.name)
    row[r.KIND], row[r.SPACE] = r.MEMORY, _SPACES[words[0]]
    accumulators = 256 if each.get("acc") else 0
    data = next(each.get(name) for name in ("data", "vsrc", "vdata") if name in each.fields)
    dest = each.get("vdst") or data
    row[r.DATA], row[r.RESULT] = data - 256 + accumulators, dest - 256 + accumulators
    _address(lowering, each, row)
    if "ATOMIC" in words:
        _atomic(row, each.name.split("ATOMIC_")[1], each)
        row[r.RETURNS] = each.get("sc0") or each.get("glc") or each.get("th") & 1
        return
    if "LDS" in words or each.get("lds"):
        words = [word for word in words if word != "LDS"]
        row[r.ACTION], row[r.RESULT] = r.TO_LOCAL, 124
        row[r.SECOND_OFFSET] = row[r.OFFSET]
    else:
        row[r.ACTION] = r.LOAD if "LOAD" in words else r.STORE
    _width(row, words, each)


def _width(row: Array, words: list[str], each: Instruction) -> None:
    kinds = [word for word in words if word in _WIDTHS]
    if len(kinds) != 1:
        raise NotModelled(each.name)
    row[r.NUM_BYTES], row[r.IS_SIGNED] = _WIDTHS[kinds[0]]
    if "D16" in words:
        row[r.HALF] = r.HIGH_KEPT if "HI" in words else r.LOW_KEPT


def _address(lowering: KernelPlaces, each: Instruction, row: Array) -> None:
    """Where an access goes: registers, offset, and what a buffer adds."""
    address = each.get("addr") or each.get("vaddr")
    row[r.ADDRESS] = max(address - 256, 0)
    # Of a buffer, and of CDNA's flat addresses, the field has 12 bits and no sign.
    offset = signed_field(each.get("offset"), 13)
    if lowering.family == "rdna4":
        offset = signed_field(each.get("ioffset"), 24)
    row[r.OFFSET] = offset
    if row[r.SPACE] == r.BUFFER:
        row[r.BASE] = each.get("rsrc") if "rsrc" in each.fields else each.get("srsrc")
        row[r.HAS_OFFSET], row[r.HAS_INDEX] = each.get("offen"), each.get("idxen")
        place = lowering.place(each.get("soffset"), "u32", each)
        row[r.SCALAR_OFFSET_KIND], row[r.SCALAR_OFFSET] = place
        return
    scalar = each.get("saddr")
    has_scalar = scalar != (124 if lowering.is_rdna else 127)
    if each.format == "FLAT":
        has_scalar = False
    row[r.BASE] = scalar if has_scalar else -1
    if row[r.SPACE] == r.SCRATCH:
        row[r.HAS_OFFSET] = 1 if each.get("sve") else 0
    else:
        row[r.HAS_OFFSET] = 1 if has_scalar else 2


def _atomic(row: Array, words: str, each: Instruction) -> None:
    """An atomic's action, width, and the machine code of what it computes."""
    num_bytes = 8 if words.endswith(("_X2", "64")) else 4
    row[r.NUM_BYTES] = num_bytes
    stem = words.removesuffix("_X2")
    kind = ""
    if found := _TYPED.search(stem):
        kind, stem = found[1], stem[: found.start()]
    if stem in _EXCHANGES or stem in _COMPARES:
        row[r.ACTION] = r.SWAP if stem in _EXCHANGES else r.COMPARE_SWAP
        if kind.startswith("F") and stem in _COMPARES:
            raise NotModelled(each.name)
        return
    row[r.ACTION] = r.ATOMIC
    row[r.HANDLER] = address_of_meaning(_meaning_of(stem, kind, num_bytes, each))


def _meaning_of(stem: str, kind: str, num_bytes: int, each: Instruction) -> Meaning:
    bits = 8 * num_bytes
    stem = stem.replace("_NUM", "")
    sign = "i" if kind.startswith("I") or stem in ("SMIN", "SMAX") else "u"
    if stem == "PK_ADD":
        return Meaning(("u32", "u32"), "u32", _PACKED[kind])
    if kind in ("F32", "F64"):
        if stem not in _OF_NUMBERS:
            raise NotModelled(each.name)
        number = f"f{bits}"
        return Meaning((number, number), number, _OF_NUMBERS[stem])
    stem = {"SMIN": "MIN", "UMIN": "MIN", "SMAX": "MAX", "UMAX": "MAX"}.get(stem, stem)
    if stem not in _ATOMICS:
        raise NotModelled(each.name)
    text = _ATOMICS[stem]
    if bits == 64 and sign == "u":
        text = _WIDE.get(stem, text)
    return Meaning((f"{sign}{bits}",) * 2, f"u{bits}", text)


def lower_local(lowering: KernelPlaces, each: Instruction, row: Array) -> None:
    """DS instructions."""
    name = each.name
    if name.startswith(("DS_BPERMUTE", "DS_PERMUTE", "DS_SWIZZLE")):
        lower_lds_lanes(lowering, each, row)
        return
    row[r.KIND] = r.LOCAL
    accumulators = 256 if each.get("acc") else 0
    row[r.ADDRESS] = each.get("addr") - 256
    row[r.DATA] = each.get("data0") - 256 + accumulators
    row[r.SECOND_DATA] = each.get("data1") - 256 + accumulators
    row[r.RESULT] = each.get("vdst") - 256 + accumulators
    row[r.OFFSET] = each.get("offset0") | each.get("offset1") << 8
    spelled = name.replace("READ2", "READ_2ADDR").replace("WRITE2", "WRITE_2ADDR")
    words = spelled.replace("2ADDRST64", "2ADDR_STRIDE64").removeprefix("DS_").split("_")
    if "TR" in words:
        if words[1] != "B64" or words[-1] not in ("B8", "B16"):
            raise NotModelled(name)
        row[r.TRANSPOSES], words = int(words[-1][1:]), words[:2]
    if words[0] not in ("READ", "LOAD", "WRITE", "STORE") or "ADDTID" in words:
        _local_atomic(lowering, each, row)
        return
    row[r.ACTION] = r.LOAD if words[0] in ("READ", "LOAD") else r.STORE
    _width(row, words, each)
    if "2ADDR" in words:
        step = row[r.NUM_BYTES] * (64 if "STRIDE64" in words else 1)
        row[r.TWO] = 1
        row[r.OFFSET] = each.get("offset0") * step
        row[r.SECOND_OFFSET] = each.get("offset1") * step


def _local_atomic(lowering: KernelPlaces, each: Instruction, row: Array) -> None:
    words = each.name.removeprefix("DS_")
    row[r.RETURNS] = int("_RTN" in words)
    words = words.replace("_RTN", "")
    if not re.fullmatch(r"[A-Z_]+_[A-Z]+(?:32|64|16)", words):
        raise NotModelled(each.name)
    _atomic(row, words, each)
    if lowering.is_rdna:
        # There the new value comes first, in CDNA the one to compare with.
        row[r.DATA], row[r.SECOND_DATA] = row[r.SECOND_DATA], row[r.DATA]
        if row[r.ACTION] != r.COMPARE_SWAP:
            row[r.DATA] = row[r.SECOND_DATA]
