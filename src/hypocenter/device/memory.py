"""Allocation, and the one door for copies between host and device.

On the CPU a copy is a copy all the same: code above this floor never reaches for `.data`.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np

from hypocenter.errors import CopyRejected
from hypocenter.tensor import Allocation, DType, Tensor, contiguous_strides

ALIGNMENT_BYTES = 64

_NUMPY_TYPES: dict[DType, Any] = {
    DType.F32: np.float32,
    DType.F16: np.uint16,  # bits; kernels convert them as they load
    DType.I32: np.int32,
    DType.I64: np.int64,
    DType.U8: np.uint8,
}
_allocation_ids = itertools.count(1)


def allocate(
    name: str, owner: str, dtype: DType, shape: tuple[int, ...], *, device: str = "cpu"
) -> Tensor:
    """A zeroed, contiguous tensor whose memory starts at a multiple of 64 bytes.

    Large zeroed memory is not touched here: pages appear when a kernel writes them.
    """
    element_bytes = np.dtype(_NUMPY_TYPES[dtype]).itemsize
    num_bytes = int(np.prod(shape, dtype=np.int64)) * element_bytes
    raw = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    data = raw[start : start + num_bytes].view(_NUMPY_TYPES[dtype]).reshape(shape)
    address = raw.ctypes.data + start
    allocation = Allocation(next(_allocation_ids), device, num_bytes, _call_site(), address)
    return Tensor(name, owner, dtype, shape, contiguous_strides(shape), 0, allocation, data)


def adopt(
    name: str, owner: str, dtype: DType, shape: tuple[int, ...], data: Any, num_bytes: int
) -> Tensor:
    """Give host data that exists already (a packed weight, say) a name and an allocation."""
    allocation = Allocation(next(_allocation_ids), "cpu", num_bytes, _call_site())
    return Tensor(name, owner, dtype, shape, contiguous_strides(shape), 0, allocation, data)


def rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The view of rows start..stop along the first axis."""
    if not 0 <= start <= stop <= tensor.shape[0]:
        raise CopyRejected(tensor.name, f"rows {start}:{stop}, but it has {tensor.shape[0]}")
    shape = (stop - start, *tensor.shape[1:])
    offset = tensor.offset + start * tensor.strides[0]
    data = tensor.data[start:stop]
    return Tensor(
        tensor.name, tensor.owner, tensor.dtype, shape, tensor.strides, offset,
        tensor.allocation, data,
    )  # fmt: skip


def to_device(tensor: Tensor, values: np.ndarray[Any, Any]) -> None:
    """Copy host values into the leading part of `tensor`; the element types must be equal.

    Raises CopyRejected when the values do not fit.
    """
    if values.dtype != tensor.data.dtype:
        raise CopyRejected(tensor.name, f"{values.dtype} values for {tensor.dtype.name}")
    if values.ndim != len(tensor.shape) or any(
        given > room for given, room in zip(values.shape, tensor.shape, strict=True)
    ):
        raise CopyRejected(tensor.name, f"shape {values.shape} into {tensor.shape}")
    tensor.data[tuple(slice(0, size) for size in values.shape)] = values


def to_host(tensor: Tensor, num_rows: int | None = None) -> np.ndarray[Any, Any]:
    """A host copy of the first `num_rows` rows (all by default)."""
    num_rows = tensor.shape[0] if num_rows is None else num_rows
    if not 0 <= num_rows <= tensor.shape[0]:
        raise CopyRejected(tensor.name, f"{num_rows} rows, but it has {tensor.shape[0]}")
    return np.array(tensor.data[:num_rows])


def _call_site() -> str:
    """File and line of the nearest caller outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
