"""What each opcode computes, written once: an expression of Python for one lane or one scalar.

A line is `names ; types of a, b, c > type of the result ; the result ; the flag`. Names are AMD's
without the encoding; those of several generations stand together where they mean the same. `a`, `b`
and `c` are the operands, `d` is what the destination held, `k` the condition or carry that comes in
(VCC, SCC or a mask's bit), `lane` the lane's number. The flag is SCC of a scalar instruction, and
the bit of a mask of a vector one. `r` in a flag is the result, held to its width.

Source: AMD's ISA manuals of CDNA3, CDNA4, RDNA3 and RDNA4, chapter "Instructions". Where our
arithmetic is not the hardware's: transcendental functions are the nearest float32 of a float64's,
and a NaN that comes out carries no payload. Denormals are kept, as compilers ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

_SCALAR = """
S_MOV_B32, S_MOVK_I32 ; u32 > u32 ; a
S_MOV_B64 ; u64 > u64 ; a
S_CMOV_B32, S_CMOVK_I32 ; u32 > u32 ; a if k else d
S_CMOV_B64 ; u64 > u64 ; a if k else d
S_NOT_B32 ; u32 > u32 ; ~a ; r != 0
S_NOT_B64 ; u64 > u64 ; ~a ; r != 0
S_BREV_B32 ; u32 > u32 ; shift_right(reverse_bits(a), 32)
S_BREV_B64 ; u64 > u64 ; reverse_bits(a)
S_BCNT0_I32_B32 ; u32 > u32 ; 32 - popcount(a) ; r != 0
S_BCNT1_I32_B32 ; u32 > u32 ; popcount(a) ; r != 0
S_BCNT1_I32_B64 ; u64 > u32 ; popcount(a) ; r != 0
S_FF1_I32_B32, S_CTZ_I32_B32 ; u32 > u32 ; ctz(a) if a else -1
S_FF1_I32_B64, S_CTZ_I32_B64 ; u64 > u32 ; ctz(a) if a else -1
S_FLBIT_I32_B32, S_CLZ_I32_U32 ; u32 > u32 ; clz(a) - 32 if a else -1
S_FLBIT_I32_B64, S_CLZ_I32_U64 ; u64 > u32 ; clz(a) if a else -1
S_FLBIT_I32, S_CLS_I32 ; i32 > u32 ; clz(a ^ (a >> 63)) - 32 if a != 0 and a != -1 else -1
S_SEXT_I32_I8 ; u32 > u32 ; sign_extend(a, 8)
S_SEXT_I32_I16 ; u32 > u32 ; sign_extend(a, 16)
S_BITSET0_B32 ; u32 > u32 ; d & ~(1 << (a & 31))
S_BITSET1_B32 ; u32 > u32 ; d | 1 << (a & 31)
S_ABS_I32 ; i32 > u32 ; abs(a) ; r != 0
S_ADD_U32, S_ADD_CO_U32 ; u32 u32 > u32 ; a + b ; a + b > 0xFFFFFFFF
S_SUB_U32, S_SUB_CO_U32 ; u32 u32 > u32 ; a - b ; b > a
S_ADD_I32, S_ADD_CO_I32, S_ADDK_I32, S_ADDK_CO_I32 ; i32 i32 > u32 ; a + b ; a + b != sign_extend(r, 32)
S_SUB_I32, S_SUB_CO_I32 ; i32 i32 > u32 ; a - b ; a - b != sign_extend(r, 32)
S_ADDC_U32, S_ADD_CO_CI_U32 ; u32 u32 > u32 ; a + b + k ; a + b + k > 0xFFFFFFFF
S_SUBB_U32, S_SUB_CO_CI_U32 ; u32 u32 > u32 ; a - b - k ; b + k > a
S_ADD_NC_U64, S_ADD_U64 ; u64 u64 > u64 ; a + b
S_SUB_NC_U64, S_SUB_U64 ; u64 u64 > u64 ; a - b
S_MUL_U64 ; u64 u64 > u64 ; a * b
S_MIN_I32 ; i32 i32 > u32 ; min(a, b) ; a < b
S_MIN_U32 ; u32 u32 > u32 ; min(a, b) ; a < b
S_MAX_I32 ; i32 i32 > u32 ; max(a, b) ; a >= b
S_MAX_U32 ; u32 u32 > u32 ; max(a, b) ; a >= b
S_CSELECT_B32 ; u32 u32 > u32 ; a if k else b
S_CSELECT_B64 ; u64 u64 > u64 ; a if k else b
S_AND_B32 ; u32 u32 > u32 ; a & b ; r != 0
S_AND_B64 ; u64 u64 > u64 ; a & b ; r != 0
S_OR_B32 ; u32 u32 > u32 ; a | b ; r != 0
S_OR_B64 ; u64 u64 > u64 ; a | b ; r != 0
S_XOR_B32 ; u32 u32 > u32 ; a ^ b ; r != 0
S_XOR_B64 ; u64 u64 > u64 ; a ^ b ; r != 0
S_ANDN2_B32, S_AND_NOT1_B32 ; u32 u32 > u32 ; a & ~b ; r != 0
S_ANDN2_B64, S_AND_NOT1_B64 ; u64 u64 > u64 ; a & ~b ; r != 0
S_ORN2_B32, S_OR_NOT1_B32 ; u32 u32 > u32 ; a | ~b ; r != 0
S_ORN2_B64, S_OR_NOT1_B64 ; u64 u64 > u64 ; a | ~b ; r != 0
S_NAND_B32 ; u32 u32 > u32 ; ~(a & b) ; r != 0
S_NAND_B64 ; u64 u64 > u64 ; ~(a & b) ; r != 0
S_NOR_B32 ; u32 u32 > u32 ; ~(a | b) ; r != 0
S_NOR_B64 ; u64 u64 > u64 ; ~(a | b) ; r != 0
S_XNOR_B32 ; u32 u32 > u32 ; ~(a ^ b) ; r != 0
S_XNOR_B64 ; u64 u64 > u64 ; ~(a ^ b) ; r != 0
S_LSHL_B32 ; u32 u32 > u32 ; a << (b & 31) ; r != 0
S_LSHL_B64 ; u64 u32 > u64 ; a << (b & 63) ; r != 0
S_LSHR_B32 ; u32 u32 > u32 ; a >> (b & 31) ; r != 0
S_LSHR_B64 ; u64 u32 > u64 ; shift_right(a, b & 63) ; r != 0
S_ASHR_I32 ; i32 u32 > u32 ; a >> (b & 31) ; r != 0
S_ASHR_I64 ; i64 u32 > u64 ; a >> (b & 63) ; r != 0
S_BFM_B32 ; u32 u32 > u32 ; ((1 << (a & 31)) - 1) << (b & 31)
S_BFM_B64 ; u32 u32 > u64 ; ((1 << (a & 63)) - 1) << (b & 63)
S_MUL_I32, S_MULK_I32 ; i32 i32 > u32 ; a * b
S_MUL_HI_U32 ; u32 u32 > u32 ; shift_right(a * b, 32)
S_MUL_HI_I32 ; i32 i32 > u32 ; a * b >> 32
S_BFE_U32 ; u32 u32 > u32 ; (a >> (b & 31)) & ((1 << min((b >> 16) & 127, 32)) - 1) ; r != 0
S_BFE_I32 ; u32 u32 > u32 ; bit_field(a, b & 31, (b >> 16) & 127, 32) ; r != 0
S_BFE_U64 ; u64 u32 > u64 ; field(a, b & 63, min((b >> 16) & 127, 63)) ; r != 0
S_LSHL1_ADD_U32 ; u32 u32 > u32 ; (a << 1) + b ; (a << 1) + b > 0xFFFFFFFF
S_LSHL2_ADD_U32 ; u32 u32 > u32 ; (a << 2) + b ; (a << 2) + b > 0xFFFFFFFF
S_LSHL3_ADD_U32 ; u32 u32 > u32 ; (a << 3) + b ; (a << 3) + b > 0xFFFFFFFF
S_LSHL4_ADD_U32 ; u32 u32 > u32 ; (a << 4) + b ; (a << 4) + b > 0xFFFFFFFF
S_PACK_LL_B32_B16 ; u32 u32 > u32 ; a & 0xFFFF | (b & 0xFFFF) << 16
S_PACK_LH_B32_B16 ; u32 u32 > u32 ; a & 0xFFFF | b & 0xFFFF0000
S_PACK_HL_B32_B16 ; u32 u32 > u32 ; a >> 16 | (b & 0xFFFF) << 16
S_PACK_HH_B32_B16 ; u32 u32 > u32 ; a >> 16 | b & 0xFFFF0000
S_ABSDIFF_I32 ; i32 i32 > u32 ; abs(a - b) ; r != 0
S_BITCMP0_B32 ; u32 u32 > none ; 0 ; (a >> (b & 31)) & 1 == 0
S_BITCMP0_B64 ; u64 u32 > none ; 0 ; (a >> (b & 63)) & 1 == 0
S_BITCMP1_B64 ; u64 u32 > none ; 0 ; (a >> (b & 63)) & 1 == 1
S_BITSET0_B64 ; u32 > u64 ; d & ~(1 << (a & 63))
S_BITSET1_B64 ; u32 > u64 ; d | 1 << (a & 63)
S_BCNT0_I32_B64 ; u64 > u32 ; 64 - popcount(a) ; r != 0
S_BITCMP1_B32 ; u32 u32 > none ; 0 ; (a >> (b & 31)) & 1 == 1
S_ADD_F32 ; f32 f32 > f32 ; a + b
S_SUB_F32 ; f32 f32 > f32 ; a - b
S_MUL_F32 ; f32 f32 > f32 ; a * b
S_FMAC_F32 ; f32 f32 > f32 ; fma32(a, b, d)
S_FMAMK_F32 ; f32 f32 f32 > f32 ; fma32(a, c, b)
S_FMAAK_F32 ; f32 f32 f32 > f32 ; fma32(a, b, c)
S_MAX_NUM_F32, S_MAX_F32 ; f32 f32 > f32 ; max_number(a, b)
S_MIN_NUM_F32, S_MIN_F32 ; f32 f32 > f32 ; min_number(a, b)
S_CEIL_F32 ; f32 > f32 ; np.ceil(a)
S_FLOOR_F32 ; f32 > f32 ; np.floor(a)
S_TRUNC_F32 ; f32 > f32 ; np.trunc(a)
S_RNDNE_F32 ; f32 > f32 ; np.rint(a)
S_CVT_F32_I32 ; i32 > f32 ; np.float32(a)
S_CVT_F32_U32 ; u32 > f32 ; np.float32(a)
S_CVT_I32_F32 ; f32 > u32 ; to_integer(a, -2147483648.0, 2147483647.0)
S_CVT_U32_F32 ; f32 > u32 ; to_integer(a, 0.0, 4294967295.0)
S_CVT_F16_F32 ; f32 > u32 ; bits16(a)
S_CVT_F32_F16 ; f16 > f32 ; a
S_CVT_HI_F32_F16 ; u32 > f32 ; as_f16(a >> 16)
S_CVT_PK_RTZ_F16_F32 ; f32 f32 > u32 ; bits16_cut(a) | bits16_cut(b) << 16
S_ADD_F16 ; f16 f16 > f16 ; a + b
S_SUB_F16 ; f16 f16 > f16 ; a - b
S_MUL_F16 ; f16 f16 > f16 ; a * b
S_FMAC_F16 ; f16 f16 > f16 ; fma64(np.float64(a), np.float64(b), np.float64(d))
S_MAX_NUM_F16 ; f16 f16 > f16 ; max_number(a, b)
S_MIN_NUM_F16 ; f16 f16 > f16 ; min_number(a, b)
S_MAXIMUM_F16 ; f16 f16 > f16 ; maximum(a, b)
S_MINIMUM_F16 ; f16 f16 > f16 ; minimum(a, b)
S_CEIL_F16 ; f16 > f16 ; np.ceil(a)
S_FLOOR_F16 ; f16 > f16 ; np.floor(a)
S_TRUNC_F16 ; f16 > f16 ; np.trunc(a)
S_RNDNE_F16 ; f16 > f16 ; np.rint(a)
"""

_INTEGERS = """
V_MOV_B32, V_DUAL_MOV_B32, V_ACCVGPR_READ, V_ACCVGPR_WRITE, V_ACCVGPR_MOV_B32 ; u32 > u32 ; a
V_MOV_B16 ; u16 > u16 ; a
V_MOV_B64 ; u64 > u64 ; a
V_NOT_B32 ; u32 > u32 ; ~a
V_NOT_B16 ; u16 > u16 ; ~a
V_BFREV_B32 ; u32 > u32 ; shift_right(reverse_bits(a), 32)
V_FFBH_U32, V_CLZ_I32_U32 ; u32 > u32 ; clz(a) - 32 if a else -1
V_FFBL_B32, V_CTZ_I32_B32 ; u32 > u32 ; ctz(a) if a else -1
V_FFBH_I32, V_CLS_I32 ; i32 > u32 ; clz(a ^ (a >> 63)) - 32 if a != 0 and a != -1 else -1
V_BCNT_U32_B32 ; u32 u32 > u32 ; popcount(a) + b
V_ADD_U32, V_ADD_NC_U32, V_DUAL_ADD_NC_U32, V_ADD_NC_I32, V_ADD_I32 ; u32 u32 > u32 ; a + b
V_SUB_U32, V_SUB_NC_U32, V_SUB_NC_I32, V_SUB_I32 ; u32 u32 > u32 ; a - b
V_SUBREV_U32, V_SUBREV_NC_U32 ; u32 u32 > u32 ; b - a
V_ADD_U16, V_ADD_NC_U16, V_ADD_NC_I16, V_ADD_I16 ; u16 u16 > u16 ; a + b
V_SUB_U16, V_SUB_NC_U16, V_SUB_NC_I16, V_SUB_I16 ; u16 u16 > u16 ; a - b
V_SUBREV_U16 ; u16 u16 > u16 ; b - a
V_MUL_LO_U16 ; u16 u16 > u16 ; a * b
V_MAD_U16, V_MAD_LEGACY_U16, V_MAD_I16, V_MAD_LEGACY_I16 ; u16 u16 u16 > u16 ; a * b + c
V_AND_B16 ; u16 u16 > u16 ; a & b
V_OR_B16 ; u16 u16 > u16 ; a | b
V_XOR_B16 ; u16 u16 > u16 ; a ^ b
V_LSHLREV_B16 ; u16 u16 > u16 ; b << (a & 15)
V_LSHRREV_B16 ; u16 u16 > u16 ; b >> (a & 15)
V_ASHRREV_I16 ; u16 i16 > u16 ; b >> (a & 15)
V_MIN_U16 ; u16 u16 > u16 ; min(a, b)
V_MAX_U16 ; u16 u16 > u16 ; max(a, b)
V_MIN_I16 ; i16 i16 > u16 ; min(a, b)
V_MAX_I16 ; i16 i16 > u16 ; max(a, b)
V_AND_B32, V_DUAL_AND_B32 ; u32 u32 > u32 ; a & b
V_OR_B32 ; u32 u32 > u32 ; a | b
V_XOR_B32 ; u32 u32 > u32 ; a ^ b
V_XNOR_B32 ; u32 u32 > u32 ; ~(a ^ b)
V_LSHLREV_B32, V_DUAL_LSHLREV_B32 ; u32 u32 > u32 ; b << (a & 31)
V_LSHRREV_B32 ; u32 u32 > u32 ; b >> (a & 31)
V_ASHRREV_I32 ; u32 i32 > u32 ; b >> (a & 31)
V_LSHLREV_B64 ; u32 u64 > u64 ; b << (a & 63)
V_LSHRREV_B64 ; u32 u64 > u64 ; shift_right(b, a & 63)
V_ASHRREV_I64 ; u32 i64 > u64 ; b >> (a & 63)
V_MIN_I32 ; i32 i32 > u32 ; min(a, b)
V_MAX_I32 ; i32 i32 > u32 ; max(a, b)
V_MIN_U32 ; u32 u32 > u32 ; min(a, b)
V_MAX_U32 ; u32 u32 > u32 ; max(a, b)
V_MIN3_I16 ; i16 i16 i16 > u16 ; min(min(a, b), c)
V_MAX3_I16 ; i16 i16 i16 > u16 ; max(max(a, b), c)
V_MIN3_U16 ; u16 u16 u16 > u16 ; min(min(a, b), c)
V_MAX3_U16 ; u16 u16 u16 > u16 ; max(max(a, b), c)
V_MED3_I16 ; i16 i16 i16 > u16 ; max(min(a, b), min(max(a, b), c))
V_MED3_U16 ; u16 u16 u16 > u16 ; max(min(a, b), min(max(a, b), c))
V_MIN3_I32 ; i32 i32 i32 > u32 ; min(min(a, b), c)
V_MAX3_I32 ; i32 i32 i32 > u32 ; max(max(a, b), c)
V_MIN3_U32 ; u32 u32 u32 > u32 ; min(min(a, b), c)
V_MAX3_U32 ; u32 u32 u32 > u32 ; max(max(a, b), c)
V_MED3_I32 ; i32 i32 i32 > u32 ; max(min(a, b), min(max(a, b), c))
V_MED3_U32 ; u32 u32 u32 > u32 ; max(min(a, b), min(max(a, b), c))
V_MINMAX_I32 ; i32 i32 i32 > u32 ; max(min(a, b), c)
V_MAXMIN_I32 ; i32 i32 i32 > u32 ; min(max(a, b), c)
V_MINMAX_U32 ; u32 u32 u32 > u32 ; max(min(a, b), c)
V_MAXMIN_U32 ; u32 u32 u32 > u32 ; min(max(a, b), c)
V_MUL_LO_U32 ; u32 u32 > u32 ; a * b
V_MUL_HI_U32 ; u32 u32 > u32 ; shift_right(a * b, 32)
V_MUL_HI_I32 ; i32 i32 > u32 ; a * b >> 32
V_MUL_U32_U24 ; u32 u32 > u32 ; (a & 0xFFFFFF) * (b & 0xFFFFFF)
V_MUL_I32_I24 ; u32 u32 > u32 ; sign_extend(a, 24) * sign_extend(b, 24)
V_MUL_HI_U32_U24 ; u32 u32 > u32 ; (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32
V_MAD_U32_U24 ; u32 u32 u32 > u32 ; (a & 0xFFFFFF) * (b & 0xFFFFFF) + c
V_MAD_I32_I24 ; u32 u32 u32 > u32 ; sign_extend(a, 24) * sign_extend(b, 24) + c
V_MAD_U32_U16 ; u16 u16 u32 > u32 ; a * b + c
V_MAD_I32_I16 ; i16 i16 u32 > u32 ; a * b + c
V_MAD_U64_U32, V_MAD_CO_U64_U32 ; u32 u32 u64 > u64 ; a * b + c ; below(r, c)
V_MAD_I64_I32, V_MAD_CO_I64_I32 ; i32 i32 i64 > u64 ; a * b + c ; (~(a * b ^ c) & (c ^ r)) < 0
V_ADD_CO_U32 ; u32 u32 > u32 ; a + b ; a + b > 0xFFFFFFFF
V_SUB_CO_U32 ; u32 u32 > u32 ; a - b ; b > a
V_SUBREV_CO_U32 ; u32 u32 > u32 ; b - a ; a > b
V_ADDC_CO_U32, V_ADD_CO_CI_U32 ; u32 u32 > u32 ; a + b + k ; a + b + k > 0xFFFFFFFF
V_SUBB_CO_U32, V_SUB_CO_CI_U32 ; u32 u32 > u32 ; a - b - k ; b + k > a
V_SUBBREV_CO_U32, V_SUBREV_CO_CI_U32 ; u32 u32 > u32 ; b - a - k ; a + k > b
V_CNDMASK_B32, V_DUAL_CNDMASK_B32 ; u32 u32 > u32 ; b if k else a
V_CNDMASK_B16 ; u16 u16 > u16 ; b if k else a
V_ADD3_U32 ; u32 u32 u32 > u32 ; a + b + c
V_ADD_LSHL_U32 ; u32 u32 u32 > u32 ; ((a + b) & 0xFFFFFFFF) << (c & 31)
V_LSHL_ADD_U32 ; u32 u32 u32 > u32 ; (a << (b & 31)) + c
V_LSHL_OR_B32 ; u32 u32 u32 > u32 ; a << (b & 31) | c
V_AND_OR_B32 ; u32 u32 u32 > u32 ; a & b | c
V_OR3_B32 ; u32 u32 u32 > u32 ; a | b | c
V_XOR3_B32 ; u32 u32 u32 > u32 ; a ^ b ^ c
V_XAD_U32 ; u32 u32 u32 > u32 ; (a ^ b) + c
V_LSHL_ADD_U64 ; u64 u32 u64 > u64 ; (a << (b & 7)) + c
V_BFE_U32 ; u32 u32 u32 > u32 ; (a >> (b & 31)) & ((1 << (c & 31)) - 1)
V_BFE_I32 ; u32 u32 u32 > u32 ; bit_field(a, b & 31, c & 31, 32)
V_BFI_B32 ; u32 u32 u32 > u32 ; a & b | ~a & c
V_BFM_B32 ; u32 u32 > u32 ; ((1 << (a & 31)) - 1) << (b & 31)
V_ALIGNBIT_B32 ; u32 u32 u32 > u32 ; shift_right(a << 32 | b, c & 31)
V_ALIGNBYTE_B32 ; u32 u32 u32 > u32 ; shift_right(a << 32 | b, 8 * (c & 3))
V_PERM_B32 ; u32 u32 u32 > u32 ; permute(a, b, c)
V_PACK_B32_F16 ; u16 u16 > u32 ; a | b << 16
V_SAD_U8 ; u32 u32 u32 > u32 ; byte_distances(a, b) + c
V_SAD_U32 ; u32 u32 u32 > u32 ; abs(a - b) + c
V_MBCNT_LO_U32_B32 ; u32 u32 > u32 ; popcount(a & ((1 << min(lane, 32)) - 1)) + b
V_MBCNT_HI_U32_B32 ; u32 u32 > u32 ; popcount(a & ((1 << max(lane - 32, 0)) - 1)) + b
V_DOT4_I32_I8 ; u32 u32 u32 > u32 ; dot_bytes(a, b, True, True) + c
V_DOT4C_I32_I8 ; u32 u32 > u32 ; dot_bytes(a, b, True, True) + d
V_DOT4_U32_U8 ; u32 u32 u32 > u32 ; dot_bytes(a, b, False, False) + c
V_DOT8_I32_I4 ; u32 u32 u32 > u32 ; dot_parts(a, b, 4, True, True) + c
V_DOT8C_I32_I4 ; u32 u32 > u32 ; dot_parts(a, b, 4, True, True) + d
V_DOT8_U32_U4 ; u32 u32 u32 > u32 ; dot_parts(a, b, 4, False, False) + c
V_DOT2_I32_I16 ; u32 u32 u32 > u32 ; dot_parts(a, b, 16, True, True) + c
V_DOT2C_I32_I16 ; u32 u32 > u32 ; dot_parts(a, b, 16, True, True) + d
V_DOT2_U32_U16 ; u32 u32 u32 > u32 ; dot_parts(a, b, 16, False, False) + c
V_PK_ADD_U16, V_PK_ADD_I16 ; u16 u16 > u16 ; a + b
V_PK_SUB_U16, V_PK_SUB_I16 ; u16 u16 > u16 ; a - b
V_PK_MUL_LO_U16 ; u16 u16 > u16 ; a * b
V_PK_MAD_U16, V_PK_MAD_I16 ; u16 u16 u16 > u16 ; a * b + c
V_PK_LSHLREV_B16 ; u16 u16 > u16 ; b << (a & 15)
V_PK_LSHRREV_B16 ; u16 u16 > u16 ; b >> (a & 15)
V_PK_ASHRREV_I16 ; u16 i16 > u16 ; b >> (a & 15)
V_PK_MIN_U16 ; u16 u16 > u16 ; min(a, b)
V_PK_MAX_U16 ; u16 u16 > u16 ; max(a, b)
V_PK_MIN_I16 ; i16 i16 > u16 ; min(a, b)
V_PK_MAX_I16 ; i16 i16 > u16 ; max(a, b)
V_PK_MOV_B32 ; u32 u32 > u32 ; a
"""

#: Conditions of comparisons, for numbers and for integers; those with U and O see NaN.
_CONDITIONS = {
    "F": "False",
    "LT": "a < b",
    "EQ": "a == b",
    "LE": "a <= b",
    "GT": "a > b",
    "LG": "a < b or a > b",
    "NE": "a != b",
    "GE": "a >= b",
    "O": "a == a and b == b",
    "U": "a != a or b != b",
    "NGE": "not (a >= b)",
    "NLG": "not (a < b or a > b)",
    "NGT": "not (a > b)",
    "NLE": "not (a <= b)",
    "NEQ": "not (a == b)",
    "NLT": "not (a < b)",
    "T": "True",
    "TRU": "True",
}
_CONDITIONS_U64 = {
    "LT": "below(a, b)",
    "LE": "not below(b, a)",
    "GT": "below(b, a)",
    "GE": "not below(a, b)",
    "LG": "a != b",
}
_COMPARED = ("f16", "f32", "f64", "i16", "u16", "i32", "u32", "i64", "u64")
_CLASSES = {"f16": (5, 10, "u16"), "f32": (8, 23, "u32"), "f64": (11, 52, "u64")}


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an opcode computes: types of its operands and its result, expressions as text.

    `result_type` is `none` where only a flag comes out; `flag` is empty where none does.
    """

    types: tuple[str, ...]
    result_type: str
    result: str
    flag: str = ""

    def uses(self, name: str) -> bool:
        """Whether an expression reads `d`, `k` or `lane`."""
        words = f"{self.result} {self.flag}".replace("(", " ").replace(")", " ").replace(",", " ")
        return name in words.split()


def _comparisons() -> dict[str, Meaning]:
    found = {}
    for kind in _COMPARED:
        given = _CONDITIONS | (_CONDITIONS_U64 if kind == "u64" else {})
        for name, condition in given.items():
            # S_CMP has LG for integers, V_CMP has NE; for numbers it is LG and NEQ.
            meaning = Meaning((kind, kind), "none", "0", condition)
            for prefix in ("V_CMP_", "V_CMPX_", "S_CMP_", "S_CMPK_"):
                found[f"{prefix}{name}_{kind.upper()}"] = meaning
    found |= {f"S_CMP_{name}_U64": found[f"V_CMP_{name}_U64"] for name in ("EQ", "LG")}
    for kind, (num_exponent, num_fraction, bits) in _CLASSES.items():
        flag = f"(b >> class_bit(a, {num_exponent}, {num_fraction})) & 1 == 1"
        for prefix in ("V_CMP_CLASS_", "V_CMPX_CLASS_"):
            found[f"{prefix}{kind.upper()}"] = Meaning((bits, "u32"), "none", "0", flag)
    return found


@cache
def meanings() -> dict[str, Meaning]:
    """Opcode to what it means, for every opcode that computes a value."""
    from hypocenter.device.amd.values.meanings_float import FLOATS

    found = _comparisons()
    for line in filter(None, (_SCALAR + _INTEGERS + FLOATS).splitlines()):
        names, kinds, *expressions = line.split(" ; ")
        operands, result_type = kinds.split(" > ")
        meaning = Meaning(tuple(operands.split()), result_type, *expressions)
        for name in names.split(", "):
            assert name not in found, name
            found[name] = meaning
    return found
