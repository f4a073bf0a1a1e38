"""Arrays of NumPy or of torch as one, for what packs weights on the host or on a GPU alike.

Kinds have the names that both give them: `int8`, `float16`. Operators, slices and `reshape` are
spelled alike; what is not stands here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

#: An array of either.
AnyArray = Any


def is_host(array: AnyArray) -> bool:
    """Whether it is NumPy's."""
    return isinstance(array, np.ndarray)


def is_array(value: object) -> bool:
    """Whether it is an array of either; numbers are none."""
    return hasattr(value, "nbytes") and not isinstance(value, np.generic)


def address_of(array: AnyArray) -> int:
    """Where its first element lies, on the host or on a device."""
    return int(array.ctypes.data if is_host(array) else array.data_ptr())


def kind_of(array: AnyArray) -> str:
    """The name of its element type."""
    return str(array.dtype).removeprefix("torch.")


def size_of(array: AnyArray) -> int:
    """How many elements it has."""
    return math.prod(array.shape)


def zeros(shape: Sequence[int], kind: str, beside: AnyArray) -> AnyArray:
    """Where `beside` lies."""
    if is_host(beside):
        return np.zeros(shape, kind)
    torch = _torch()
    return torch.zeros(tuple(shape), dtype=getattr(torch, kind), device=beside.device)


def constants(values: Any, kind: str, beside: AnyArray) -> AnyArray:
    """Numbers as an array where `beside` lies."""
    if is_host(beside):
        return np.array(values, kind)
    torch = _torch()
    return torch.tensor(values, dtype=getattr(torch, kind), device=beside.device)


def cast(array: AnyArray, kind: str) -> AnyArray:
    """The same numbers in another type, rounded to nearest even."""
    return array.astype(kind) if is_host(array) else array.to(getattr(_torch(), kind))


def in_order(array: AnyArray) -> AnyArray:
    """The same elements without gaps, in the order of their indices."""
    return np.ascontiguousarray(array) if is_host(array) else array.contiguous()


def bits_as(array: AnyArray, kind: str) -> AnyArray:
    """Its bits as another type; the last axis counts what they are."""
    return seen_as(in_order(array), kind)


def seen_as(array: AnyArray, kind: str) -> AnyArray:
    """The same memory as another type, of an array whose last axis has no gaps."""
    return array.view(kind) if is_host(array) else array.view(getattr(_torch(), kind))


def on_host(array: AnyArray) -> np.ndarray[Any, Any]:
    """Its elements as an array of NumPy, once they are computed."""
    found: np.ndarray[Any, Any] = array if is_host(array) else array.cpu().numpy()
    return found


def join(parts: Sequence[AnyArray], axis: int) -> AnyArray:
    """One behind the other along `axis`."""
    if is_host(parts[0]):
        return np.concatenate(parts, axis=axis)
    return _torch().cat(list(parts), dim=axis)


def stack(parts: Sequence[AnyArray], axis: int) -> AnyArray:
    """One behind the other along a new `axis`."""
    if is_host(parts[0]):
        return np.stack(parts, axis=axis)
    return _torch().stack(list(parts), dim=axis)


def turn(array: AnyArray, axes: Sequence[int]) -> AnyArray:
    """Its axes in another order."""
    return array.transpose(axes) if is_host(array) else array.permute(tuple(axes))


def pad(array: AnyArray, num_rows: int, num_columns: int) -> AnyArray:
    """Two axes with so many more rows and columns of zeros."""
    if not num_rows and not num_columns:
        return array
    if is_host(array):
        return np.pad(array, ((0, num_rows), (0, num_columns)))
    return _torch().nn.functional.pad(array, (0, num_columns, 0, num_rows))


def look_up(table: AnyArray, at: AnyArray) -> AnyArray:
    """Elements of a table of one axis."""
    return table[at] if is_host(at) else table[at.int()]


def largest_size(array: AnyArray) -> float:
    """The largest size of its elements that are numbers; 0 of none."""
    if is_host(array):
        sizes = np.abs(array)
        return float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))
    if not array.numel():
        return 0.0
    sizes = array.abs()
    return float(_torch().where(sizes.isfinite(), sizes, 0.0).max())


def _torch() -> Any:
    return import_module("torch")
