"""Arguments of a kernel as words of 8 bytes, and what stands for their types, without numba."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

#: What stands for an argument's type, by what that hangs on: a plan has thousands of arguments.
_known: dict[Any, str] = {}


def key_of(args: Sequence[Any]) -> tuple[str, ...]:
    """What stands for the types that numba compiles a kernel for when it is launched with `args`:
    arguments with one key have the same types."""
    found = []
    for value in args:
        key: Any = type(value)
        if key is np.ndarray:
            key = value.dtype, value.ndim, value.flags.num
        elif key is int and not -(1 << 63) <= value < 1 << 63:
            key = "unsigned"
        if (told := _known.get(key)) is None:
            told = _known[key] = _describe(value, key)
        found.append(told)
    return tuple(found)


def slot_types_of(args: Sequence[Any]) -> tuple[str, ...]:
    """Types of LLVM in numba's convention: of each argument one, of an array several."""
    return tuple(kind for value in args for kind in _slot_types(value))


def slots_of(args: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Words u64 [num_slots] in numba's convention."""
    return np.fromiter((word for value in args for word in _words(value)), np.uint64)


def _describe(value: Any, key: Any) -> str:
    if not isinstance(value, np.ndarray):
        return key if isinstance(key, str) else str(key.__name__)
    flags, dtype = value.flags, value.dtype
    order = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
    # Of a record: names, types and places of fields, and whether they are aligned.
    kind = dtype.str if dtype.fields is None else f"{dtype!r} {dtype.itemsize}"
    return f"{kind} {value.ndim}{order}{flags.aligned:d}{flags.writeable:d}"


def _slot_types(value: Any) -> Sequence[str]:
    if isinstance(value, np.ndarray):
        return ["i64"] * (5 + 2 * value.ndim)
    if isinstance(value, bool | np.bool_):
        return ["i8"]
    if isinstance(value, np.generic):
        if isinstance(value, np.floating):
            return ["float" if value.itemsize == 4 else "double"]
        return [f"i{8 * value.itemsize}"]
    return ["double" if isinstance(value, float) else "i64"]


def _words(value: Any) -> Iterator[int]:
    if isinstance(value, np.ndarray):
        # No owner and no parent: nobody counts references.
        yield from (0, 0, value.size, value.itemsize, value.ctypes.data)
        yield from value.shape
        yield from (step & 0xFFFFFFFFFFFFFFFF for step in value.strides)
    elif isinstance(value, float | np.floating):
        form = "<fxxxx" if isinstance(value, np.float32) else "<d"
        yield int.from_bytes(struct.pack(form, value), "little")
    else:
        yield int(value) & 0xFFFFFFFFFFFFFFFF
