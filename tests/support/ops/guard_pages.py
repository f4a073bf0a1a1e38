"""CPU tensors that end at a page nobody may touch: one element too far is a crash."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hypocenter.base.tensor import Allocation, DType, Tensor, contiguous_strides
from hypocenter.device import copies, memory
from hypocenter.kernels.weights import packing
from hypocenter.kernels.weights.packing import Packed

PAGE = mmap.PAGESIZE
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put every tensor and packed weight that a test makes against such a page."""
    monkeypatch.setattr(memory, "allocate", _allocate)
    place = packing.place

    def place_guarded(name: str, owner: str, packed: Packed, *, device: str = "cpu") -> Tensor:
        parts = tuple(_moved(part) for part in packed.parts)
        return place(name, owner, replace(packed, parts=parts), device=device)

    monkeypatch.setattr("ops.kernel_launch.place", place_guarded)


def guarded_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A zeroed array whose last byte is the last one before an inaccessible page."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if not num_bytes:
        return np.zeros(shape, dtype)
    num_pages = -(-num_bytes // PAGE)
    block = mmap.mmap(-1, (num_pages + 1) * PAGE)
    raw = np.frombuffer(block, np.uint8)  # keeps the block alive
    if _libc.mprotect(raw.ctypes.data + num_pages * PAGE, PAGE, _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    array: np.ndarray = raw[num_pages * PAGE - num_bytes : num_pages * PAGE].view(dtype)
    return array.reshape(shape)


def _allocate(
    name: str, owner: str, dtype: DType, shape: tuple[int, ...], *, device: str = "cpu"
) -> Tensor:
    data = guarded_array(shape, copies.NUMPY_TYPES[dtype])
    allocation = Allocation(next(memory._allocation_ids), "cpu", data.nbytes, "", data.ctypes.data)
    return Tensor(name, owner, dtype, shape, contiguous_strides(shape), 0, allocation, data)


def _moved(part: Any) -> Any:
    if not isinstance(part, np.ndarray):
        return part
    moved = guarded_array(part.shape, part.dtype)
    moved[...] = part
    return moved
