"""Element types by their names in records, in torch, in Triton and in NumPy; bfloat16 in NumPy.

The one table of types: who needs another name for one takes it from here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]
Float32s = np.ndarray[Any, np.dtype[np.float32]]
Float64s = np.ndarray[Any, np.dtype[np.float64]]


#: (name in records, torch's, Triton's, NumPy's or None where it has no such type).
_TYPES = (
    ("F32", "float32", "fp32", np.float32),
    ("F16", "float16", "fp16", np.float16),
    ("BF16", "bfloat16", "bf16", None),
    ("F64", "float64", "fp64", np.float64),
    ("I8", "int8", "i8", np.int8),
    ("I16", "int16", "i16", np.int16),
    ("I32", "int32", "i32", np.int32),
    ("I64", "int64", "i64", np.int64),
    ("U8", "uint8", "u8", np.uint8),
    ("U16", "uint16", "u16", np.uint16),
    ("U32", "uint32", "u32", np.uint32),
    ("U64", "uint64", "u64", np.uint64),
    ("BOOL", "bool", "i1", np.bool_),
)
#: By the name in records.
TORCH_NAMES = {name: torch for name, torch, _, _ in _TYPES}
TRITON_NAMES = {name: triton for name, _, triton, _ in _TYPES}
NUMPY_DTYPES = {name: np.dtype(kind) for name, _, _, kind in _TYPES if kind is not None}
#: By torch's name, which is NumPy's as well.
RECORD_NAMES = {torch: name for name, torch, _, _ in _TYPES}
#: torch's names by Triton's; those of 8-bit floats appear nowhere else.
TORCH_OF_TRITON = {triton: torch for _, torch, triton, _ in _TYPES} | {
    "int1": "bool",
    "fp8e5": "float8_e5m2",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e4b8": "float8_e4m3fnuz",
    "fp8e5b16": "float8_e5m2fnuz",
}

#: Where products are of two bf16, numbers below this one are taken for zero. The others have their
#: last bit at 2**-57 or above, so sums of products have theirs at 2**-114: none is ever subnormal,
#: which `vdpbf16ps` flushes to zero and other instructions do not.
LEAST = 2.0**-50


def bf16_to_f32(bits: Array) -> Array:
    """uint16 bfloat16 bits of any shape to float32, exact."""
    wide: Array = np.left_shift(bits, 16, dtype=np.uint32)
    return wide.view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """float32 of any shape to uint16 bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    odd = (bits >> 16) & np.uint32(1)
    rounded = ((bits + (odd + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    # Rounding up a NaN whose payload lies in the dropped bits would carry into the sign.
    quiet = ((bits >> 16) | np.uint32(0x40)).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)


def factors_of_products(values: Array) -> Array:
    """float32 to the uint16 bfloat16 bits that products in bf16 take, those below `LEAST` zero."""
    return np.where(np.abs(values) < np.float32(LEAST), np.uint16(0), f32_to_bf16(values))
