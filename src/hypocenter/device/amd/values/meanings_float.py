"""What each opcode on floating-point numbers computes; the form is that of `meanings.py`."""

from __future__ import annotations

FLOATS = """
V_ADD_F32, V_DUAL_ADD_F32 ; f32 f32 > f32 ; a + b
V_SUB_F32, V_DUAL_SUB_F32 ; f32 f32 > f32 ; a - b
V_SUBREV_F32, V_DUAL_SUBREV_F32 ; f32 f32 > f32 ; b - a
V_MUL_F32, V_DUAL_MUL_F32 ; f32 f32 > f32 ; a * b
V_MUL_LEGACY_F32, V_MUL_DX9_ZERO_F32, V_DUAL_MUL_DX9_ZERO_F32 ; f32 f32 > f32 ; np.float32(0) if a == 0 or b == 0 else a * b
V_MAX_F32, V_MAX_NUM_F32, V_DUAL_MAX_F32, V_DUAL_MAX_NUM_F32 ; f32 f32 > f32 ; max_number(a, b)
V_MIN_F32, V_MIN_NUM_F32, V_DUAL_MIN_F32, V_DUAL_MIN_NUM_F32 ; f32 f32 > f32 ; min_number(a, b)
V_MAX3_F32, V_MAX3_NUM_F32 ; f32 f32 f32 > f32 ; max_number(max_number(a, b), c)
V_MIN3_F32, V_MIN3_NUM_F32 ; f32 f32 f32 > f32 ; min_number(min_number(a, b), c)
V_MED3_F32, V_MED3_NUM_F32 ; f32 f32 f32 > f32 ; med3(a, b, c)
V_MAXMIN_F32, V_MAXMIN_NUM_F32 ; f32 f32 f32 > f32 ; min_number(max_number(a, b), c)
V_MINMAX_F32, V_MINMAX_NUM_F32 ; f32 f32 f32 > f32 ; max_number(min_number(a, b), c)
V_MAXIMUM_F32, S_MAXIMUM_F32 ; f32 f32 > f32 ; maximum(a, b)
V_MINIMUM_F32, S_MINIMUM_F32 ; f32 f32 > f32 ; minimum(a, b)
V_MAXIMUM3_F32 ; f32 f32 f32 > f32 ; maximum(maximum(a, b), c)
V_MINIMUM3_F32 ; f32 f32 f32 > f32 ; minimum(minimum(a, b), c)
V_MAXIMUMMINIMUM_F32 ; f32 f32 f32 > f32 ; minimum(maximum(a, b), c)
V_MINIMUMMAXIMUM_F32 ; f32 f32 f32 > f32 ; maximum(minimum(a, b), c)
V_FMA_F32 ; f32 f32 f32 > f32 ; fma32(a, b, c)
V_MAD_F32 ; f32 f32 f32 > f32 ; a * b + c
V_FMAC_F32, V_DUAL_FMAC_F32 ; f32 f32 > f32 ; fma32(a, b, d)
V_FMAMK_F32, V_DUAL_FMAMK_F32 ; f32 f32 f32 > f32 ; fma32(a, c, b)
V_FMAAK_F32, V_DUAL_FMAAK_F32 ; f32 f32 f32 > f32 ; fma32(a, b, c)
V_FMA_MIX_F32, V_MAD_MIX_F32 ; f32 f32 f32 > f32 ; fma32(a, b, c)
V_FMA_MIXLO_F16, V_MAD_MIXLO_F16, V_FMA_MIXHI_F16, V_MAD_MIXHI_F16 ; f32 f32 f32 > f16 ; fma32(a, b, c)
V_DOT2C_F32_F16, V_DOT2ACC_F32_F16, V_DUAL_DOT2ACC_F32_F16, V_DUAL_DOT2C_F32_F16 ; u32 u32 > f32 ; fma32(as_f16(a >> 16), as_f16(b >> 16), fma32(as_f16(a & 0xFFFF), as_f16(b & 0xFFFF), d))
V_DOT2_F32_F16 ; u32 u32 f32 > f32 ; fma32(as_f16(a >> 16), as_f16(b >> 16), fma32(as_f16(a & 0xFFFF), as_f16(b & 0xFFFF), c))
V_DOT2_F32_BF16 ; u32 u32 f32 > f32 ; fma32(as_bf16(a >> 16), as_bf16(b >> 16), fma32(as_bf16(a), as_bf16(b), c))
V_DOT2_BF16_BF16 ; u32 u32 u16 > u16 ; bits_bf16_cut(np.float64(as_bf16(c)) + np.float64(as_bf16(a)) * np.float64(as_bf16(b)) + np.float64(as_bf16(a >> 16)) * np.float64(as_bf16(b >> 16)))
V_LDEXP_F32 ; f32 i32 > f32 ; np.float32(scale(np.float64(a), b))
V_EXP_F32, V_S_EXP_F32 ; f32 > f32 ; np.float32(np.exp2(np.float64(a)))
V_LOG_F32, V_S_LOG_F32 ; f32 > f32 ; np.float32(np.log2(np.float64(a)))
V_RCP_F32, V_RCP_IFLAG_F32, V_S_RCP_F32 ; f32 > f32 ; np.float32(1.0) / a
V_RSQ_F32, V_S_RSQ_F32 ; f32 > f32 ; np.float32(1.0 / np.sqrt(np.float64(a)))
V_SQRT_F32, V_S_SQRT_F32 ; f32 > f32 ; np.sqrt(a)
V_SIN_F32 ; f32 > f32 ; np.float32(np.sin(np.float64(a) * 6.283185307179586))
V_COS_F32 ; f32 > f32 ; np.float32(np.cos(np.float64(a) * 6.283185307179586))
V_FRACT_F32 ; f32 > f32 ; min(a - np.floor(a), as_f32(0x3F7FFFFF))
V_TRUNC_F32 ; f32 > f32 ; np.trunc(a)
V_CEIL_F32 ; f32 > f32 ; np.ceil(a)
V_FLOOR_F32 ; f32 > f32 ; np.floor(a)
V_RNDNE_F32 ; f32 > f32 ; np.rint(a)
V_FREXP_MANT_F32 ; f32 > f32 ; np.float32(mantissa_of(np.float64(a)))
V_FREXP_EXP_I32_F32 ; f32 > u32 ; power_of(np.float64(a))
V_DIV_SCALE_F32 ; f32 f32 f32 > f32 ; scale32(a, b, c) ; scale32_flag(b, c)
V_DIV_FMAS_F32 ; f32 f32 f32 > f32 ; fmas32(a, b, c, k != 0)
V_DIV_FIXUP_F32 ; f32 f32 f32 > f32 ; fixup32(a, b, c)
V_DIV_SCALE_F64 ; f64 f64 f64 > f64 ; scale64(a, b, c) ; scale64_flag(b, c)
V_DIV_FMAS_F64 ; f64 f64 f64 > f64 ; fmas64(a, b, c, k != 0)
V_DIV_FIXUP_F64 ; f64 f64 f64 > f64 ; fixup64(a, b, c)
V_DIV_FIXUP_F16 ; f16 f16 f16 > f16 ; np.float32(fixup(a, b, c, False))
V_ADD_F64 ; f64 f64 > f64 ; a + b
V_MUL_F64 ; f64 f64 > f64 ; a * b
V_FMA_F64 ; f64 f64 f64 > f64 ; fma64(a, b, c)
V_FMAC_F64 ; f64 f64 > f64 ; fma64(a, b, d)
V_MAX_F64, V_MAX_NUM_F64 ; f64 f64 > f64 ; max_number(a, b)
V_MIN_F64, V_MIN_NUM_F64 ; f64 f64 > f64 ; min_number(a, b)
V_LDEXP_F64 ; f64 i32 > f64 ; scale(a, b)
V_RCP_F64 ; f64 > f64 ; 1.0 / a
V_RSQ_F64 ; f64 > f64 ; 1.0 / np.sqrt(a)
V_SQRT_F64 ; f64 > f64 ; np.sqrt(a)
V_FRACT_F64 ; f64 > f64 ; min(a - np.floor(a), 0.9999999999999999)
V_TRUNC_F64 ; f64 > f64 ; np.trunc(a)
V_CEIL_F64 ; f64 > f64 ; np.ceil(a)
V_FLOOR_F64 ; f64 > f64 ; np.floor(a)
V_RNDNE_F64 ; f64 > f64 ; np.rint(a)
V_FREXP_MANT_F64 ; f64 > f64 ; mantissa_of(a)
V_FREXP_EXP_I32_F64 ; f64 > u32 ; power_of(a)
V_ADD_F16 ; f16 f16 > f16 ; a + b
V_SUB_F16 ; f16 f16 > f16 ; a - b
V_SUBREV_F16 ; f16 f16 > f16 ; b - a
V_MUL_F16 ; f16 f16 > f16 ; a * b
V_MAX_F16, V_MAX_NUM_F16 ; f16 f16 > f16 ; max_number(a, b)
V_MIN_F16, V_MIN_NUM_F16 ; f16 f16 > f16 ; min_number(a, b)
V_MAX3_F16, V_MAX3_NUM_F16 ; f16 f16 f16 > f16 ; max_number(max_number(a, b), c)
V_MIN3_F16, V_MIN3_NUM_F16 ; f16 f16 f16 > f16 ; min_number(min_number(a, b), c)
V_MED3_F16, V_MED3_NUM_F16 ; f16 f16 f16 > f16 ; med3(a, b, c)
V_MAXMIN_F16, V_MAXMIN_NUM_F16 ; f16 f16 f16 > f16 ; min_number(max_number(a, b), c)
V_MINMAX_F16, V_MINMAX_NUM_F16 ; f16 f16 f16 > f16 ; max_number(min_number(a, b), c)
V_MAXIMUM_F16, V_PK_MAXIMUM_F16 ; f16 f16 > f16 ; maximum(a, b)
V_MINIMUM_F16, V_PK_MINIMUM_F16 ; f16 f16 > f16 ; minimum(a, b)
V_MAXIMUM3_F16, V_PK_MAXIMUM3_F16 ; f16 f16 f16 > f16 ; maximum(maximum(a, b), c)
V_MINIMUM3_F16, V_PK_MINIMUM3_F16 ; f16 f16 f16 > f16 ; minimum(minimum(a, b), c)
V_MAXIMUMMINIMUM_F16 ; f16 f16 f16 > f16 ; minimum(maximum(a, b), c)
V_MINIMUMMAXIMUM_F16 ; f16 f16 f16 > f16 ; maximum(minimum(a, b), c)
V_MAXIMUM_F64 ; f64 f64 > f64 ; maximum(a, b)
V_MINIMUM_F64 ; f64 f64 > f64 ; minimum(a, b)
V_FMA_F16 ; f16 f16 f16 > f16 ; fma64(np.float64(a), np.float64(b), np.float64(c))
V_FMAC_F16 ; f16 f16 > f16 ; fma64(np.float64(a), np.float64(b), np.float64(d))
V_RCP_F16 ; f16 > f16 ; np.float32(1.0) / a
V_SQRT_F16 ; f16 > f16 ; np.sqrt(a)
V_RSQ_F16 ; f16 > f16 ; 1.0 / np.sqrt(np.float64(a))
V_EXP_F16 ; f16 > f16 ; np.exp2(np.float64(a))
V_LOG_F16 ; f16 > f16 ; np.log2(np.float64(a))
V_TRUNC_F16 ; f16 > f16 ; np.trunc(a)
V_CEIL_F16 ; f16 > f16 ; np.ceil(a)
V_FLOOR_F16 ; f16 > f16 ; np.floor(a)
V_RNDNE_F16 ; f16 > f16 ; np.rint(a)
V_LDEXP_F16 ; f16 i16 > f16 ; scale(np.float64(a), b)
V_PK_ADD_F16 ; f16 f16 > f16 ; a + b
V_PK_MUL_F16 ; f16 f16 > f16 ; a * b
V_PK_FMA_F16 ; f16 f16 f16 > f16 ; fma64(np.float64(a), np.float64(b), np.float64(c))
V_PK_MAX_F16, V_PK_MAX_NUM_F16 ; f16 f16 > f16 ; max_number(a, b)
V_PK_MIN_F16, V_PK_MIN_NUM_F16 ; f16 f16 > f16 ; min_number(a, b)
V_PK_ADD_F32 ; f32 f32 > f32 ; a + b
V_PK_MUL_F32 ; f32 f32 > f32 ; a * b
V_PK_FMA_F32 ; f32 f32 f32 > f32 ; fma32(a, b, c)
V_CVT_F32_I32 ; i32 > f32 ; np.float32(a)
V_CVT_F32_U32 ; u32 > f32 ; np.float32(a)
V_CVT_I32_F32 ; f32 > u32 ; to_integer(a, -2147483648.0, 2147483647.0)
V_CVT_U32_F32 ; f32 > u32 ; to_integer(a, 0.0, 4294967295.0)
V_CVT_RPI_I32_F32, V_CVT_NEAREST_I32_F32 ; f32 > u32 ; to_integer(np.floor(np.float64(a) + 0.5), -2147483648.0, 2147483647.0)
V_CVT_FLR_I32_F32, V_CVT_FLOOR_I32_F32 ; f32 > u32 ; to_integer(np.floor(a), -2147483648.0, 2147483647.0)
V_CVT_F16_F32 ; f32 > f16 ; a
V_CVT_F32_F16 ; f16 > f32 ; a
V_CVT_F32_BF16 ; u16 > f32 ; as_bf16(a)
V_CVT_F64_F32 ; f32 > f64 ; np.float64(a)
V_CVT_F32_F64 ; f64 > f32 ; np.float32(a)
V_CVT_F64_I32 ; i32 > f64 ; np.float64(a)
V_CVT_F64_U32 ; u32 > f64 ; np.float64(a)
V_CVT_I32_F64 ; f64 > u32 ; to_integer(a, -2147483648.0, 2147483647.0)
V_CVT_U32_F64 ; f64 > u32 ; to_integer(a, 0.0, 4294967295.0)
V_CVT_F32_UBYTE0 ; u32 > f32 ; np.float32(a & 255)
V_CVT_F32_UBYTE1 ; u32 > f32 ; np.float32((a >> 8) & 255)
V_CVT_F32_UBYTE2 ; u32 > f32 ; np.float32((a >> 16) & 255)
V_CVT_F32_UBYTE3 ; u32 > f32 ; np.float32(a >> 24)
V_CVT_F16_I16 ; i16 > f16 ; np.float32(a)
V_CVT_F16_U16 ; u16 > f16 ; np.float32(a)
V_CVT_I16_F16 ; f16 > u16 ; to_integer(a, -32768.0, 32767.0)
V_CVT_U16_F16 ; f16 > u16 ; to_integer(a, 0.0, 65535.0)
V_CVT_U32_U16 ; u16 > u32 ; a
V_CVT_I32_I16 ; i16 > u32 ; a
V_CVT_PKRTZ_F16_F32, V_CVT_PK_RTZ_F16_F32 ; f32 f32 > u32 ; bits16_cut(a) | bits16_cut(b) << 16
V_CVT_PK_BF16_F32 ; f32 f32 > u32 ; bits_bf16(a) | bits_bf16(b) << 16
V_CVT_PK_F16_F32 ; f32 f32 > u32 ; bits16(a) | bits16(b) << 16
V_CVT_PK_U16_U32 ; u32 u32 > u32 ; min(a, 65535) | min(b, 65535) << 16
V_CVT_PK_I16_I32 ; i32 i32 > u32 ; min(max(a, -32768), 32767) & 65535 | (min(max(b, -32768), 32767) & 65535) << 16
"""
