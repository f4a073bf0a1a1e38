"""Opcodes that the decoder's table of a family has, and one of its targets does not.

A table describes the newest target of its family: `cdna` is that of CDNA4 with what CDNA3 had
before it, `rdna3` that of RDNA3.5. Source: what LLVM's assembler refuses for each target, which a
test asks for every name.
"""

from __future__ import annotations

import re
from functools import cache

from hypocenter.device.amd.decode import Instruction

#: Patterns of names, by target; a star stands for any letters. RDNA4's table is that of gfx1201.
_LACKING = {
    "gfx942": """
        BUFFER_ATOMIC_PK_ADD_BF16 DS_READ_B*_TR_B* GLOBAL_LOAD_LDS_DWORDX3 GLOBAL_LOAD_LDS_DWORDX4
        S_SET_VALU_COEXEC_MODE V_ASHR_PK_* V_BITOP3_* V_CUBE* V_CVT_F32_BF16 V_CVT_PK_BF16_F32
        V_CVT_PK_F16_F32 V_CVT_SCALEF32_* V_CVT_SR_BF16_F32 V_CVT_SR_F16_F32 V_DOT2*_F32_BF16
        V_MAXIMUM3_F32 V_MINIMUM3_F32 V_PK_MAXIMUM3_F16 V_PK_MINIMUM3_F16 V_MFMA_*F8F6F4
        V_MFMA_F32_16X16X32_*F16 V_MFMA_F32_32X32X16_*F16 V_MFMA_I32_16X16X64_I8
        V_MFMA_I32_32X32X32_I8 V_MFMA_LD_SCALE_B32 V_PERMLANE*_SWAP_B32 V_PRNG_B32
        V_SMFMAC_*_16X16X128_* V_SMFMAC_F32_16X16X64_*F16 V_SMFMAC_F32_32X32X32_*F16
        V_SMFMAC_*_32X32X64_*
    """,
    "gfx950": "S_SET_VALU_COEXEC_MODE V_CUBE* V_MFMA_*_XF32",
    "gfx1100": """
        FLAT_ATOMIC_CSUB_U32 *_LOAD_LDS_* S_ADD_F* S_SUB_F* S_MUL_F* S_FMA*_F* S_MAX_F* S_MIN_F*
        S_CEIL_F* S_FLOOR_F* S_RNDNE_F* S_TRUNC_F* S_CMP_*_F* S_CVT_*
    """,
    "gfx1201": "",
}
#: Loads of a buffer that cannot go straight to LDS; RDNA has none that can.
_WIDE_TO_LDS = {
    "gfx942": ("X2", "X3", "X4"),
    "gfx950": ("X2",),
    "gfx1100": ("",),
    "gfx1201": ("",),
}


@cache
def has_opcode(arch: str, name: str) -> bool:
    """Whether a target has an opcode of its family's table; `name` without its encoding."""
    patterns = (each.replace("*", r"\w*") for each in _LACKING[arch].split())
    return not any(re.fullmatch(pattern, name) for pattern in patterns)


def lacking(arch: str, each: Instruction) -> str:
    """What of an instruction the target does not have; empty where it has all of it."""
    for name in each.name.split("::"):
        if not has_opcode(arch, name):
            return name
    if each.get("lds") and each.name.endswith(_WIDE_TO_LDS[arch]):
        return f"{each.name} into LDS"
    return ""
