"""What a launch on a simulated GPU is given: as it is kept, and as a compiler would type it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.interpret import Pointer
from hypocenter.errors import LaunchRejected

_TRITON_NAMES = {
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64", "int8": "i8",
    "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8",
}  # fmt: skip


def plain(jit: Any, name: str, value: Any) -> Any:
    """A copy of an argument that nobody changes later; arrays of the host are refused."""
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__array__") or hasattr(value, "data_ptr"):
        raise LaunchRejected(
            jit.__name__,
            f"{name} is a {type(value).__name__} of the host; copy it in and pass argument(...)",
        )
    return value


def triton_type(parameter: Any, value: Any) -> str:
    """The type that Triton gives to an argument."""
    if isinstance(value, Pointer):
        return f"*{_TRITON_NAMES[value.dtype]}"
    if parameter.annotation_type:
        return str(parameter.annotation_type)
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    return "fp32"
