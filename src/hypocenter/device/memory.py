"""Allocation, and the one door for copies between host and device.

On the CPU a copy is a copy all the same: code above this floor never reaches for `.data`.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hypocenter.config import launch_blocking
from hypocenter.errors import CopyRejected, UsageError
from hypocenter.tensor import Allocation, DType, Tensor, contiguous_strides

if TYPE_CHECKING:
    from hypocenter.device.backend import Backend

ALIGNMENT_BYTES = 64
_PART_ALIGNMENT_BYTES = 256

_NUMPY_TYPES: dict[DType, Any] = {
    DType.F32: np.float32,
    DType.F16: np.uint16,  # bits; kernels convert them as they load
    DType.I16: np.int16,
    DType.I32: np.int32,
    DType.I64: np.int64,
    DType.U8: np.uint8,
}
# How a GPU kernel sees the arrays of a packed weight; words of either sign are bits to it.
_PART_TYPES = {
    "float32": DType.F32,
    "uint16": DType.F16,
    "int16": DType.I16,
    "int32": DType.I32,
    "uint32": DType.I32,
}
_allocation_ids = itertools.count(1)
_backends: dict[str, Backend] = {}


def open_device(name: str) -> str:
    """Make the device `name` (cpu, cuda, hip, cuda:1, sim:mi300x) ready; returns its full name.

    A device is opened once per process. Raises UsageError when it is not to be had.
    """
    if name == "cpu" or name in _backends:
        return name
    if name.startswith("sim:"):
        from hypocenter.device.limits import simulated

        simulated(name)  # a misspelt name is told before anything about Triton
        from hypocenter.device.sim import open_sim

        backend: Backend = open_sim(name, blocking=launch_blocking() is not None)
    elif name.split(":")[0] in ("cuda", "hip"):
        from hypocenter.device.gpu import open_gpu

        backend = open_gpu(name)
    else:
        raise UsageError(f"device is {name!r}, but must be cpu, cuda, hip or sim:NAME")
    _backends[name] = backend
    return name


def use_backend(backend: Backend) -> None:
    """Make a backend known under its name, in place of one opened before."""
    _backends[backend.name] = backend


def backend_of(device: str) -> Backend:
    """The opened device of that name; the CPU has none."""
    return _backends[device]


def allocate(
    name: str, owner: str, dtype: DType, shape: tuple[int, ...], *, device: str = "cpu"
) -> Tensor:
    """A zeroed, contiguous tensor whose memory starts at a multiple of 64 bytes or more.

    Large zeroed memory on the CPU is not touched here: pages appear when a kernel writes them.
    """
    num_elements = int(np.prod(shape, dtype=np.int64))
    num_bytes = num_elements * np.dtype(_NUMPY_TYPES[dtype]).itemsize
    if device == "cpu":
        raw = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        address = raw.ctypes.data + start
        data = raw[start : start + num_bytes].view(_NUMPY_TYPES[dtype]).reshape(shape)
        allocation = Allocation(next(_allocation_ids), device, num_bytes, _call_site(), address)
        strides = contiguous_strides(shape)
        return Tensor(name, owner, dtype, shape, strides, 0, allocation, data)
    tensor = allocate_undefined(name, owner, dtype, shape, device=device)
    _backends[device].clear(tensor.address, num_bytes)
    return tensor


def allocate_undefined(
    name: str, owner: str, dtype: DType, shape: tuple[int, ...], *, device: str
) -> Tensor:
    """A GPU tensor whose contents are whatever the memory held before."""
    backend, num_elements = _backends[device], int(np.prod(shape, dtype=np.int64))
    num_bytes = num_elements * np.dtype(_NUMPY_TYPES[dtype]).itemsize
    address = backend.allocate(num_bytes)
    allocation = Allocation(next(_allocation_ids), device, num_bytes, _call_site(), address)
    data = backend.argument(address, dtype, num_elements)
    strides = contiguous_strides(shape)
    return Tensor(name, owner, dtype, shape, strides, 0, allocation, data)


def adopt(
    name: str, owner: str, dtype: DType, shape: tuple[int, ...], data: Any, num_bytes: int
) -> Tensor:
    """Give host data that exists already (a packed weight, say) a name and an allocation."""
    allocation = Allocation(next(_allocation_ids), "cpu", num_bytes, _call_site())
    return Tensor(name, owner, dtype, shape, contiguous_strides(shape), 0, allocation, data)


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a packed weight on a GPU: what a launch passes for it, and its size."""

    argument: Any
    num_bytes: int


def upload(parts: tuple[Any, ...], device: str) -> tuple[Allocation, tuple[Any, ...]]:
    """Put the arrays among `parts` into one allocation of `device`.

    Returns it, and the parts with each array replaced by a Part.
    """
    backend = _backends[device]
    sizes = [part.nbytes if isinstance(part, np.ndarray) else 0 for part in parts]
    starts = [0, *itertools.accumulate(-(-size // _PART_ALIGNMENT_BYTES) for size in sizes)]
    address = backend.allocate(starts[-1] * _PART_ALIGNMENT_BYTES)
    placed = list(parts)
    for index, part in enumerate(parts):
        if isinstance(part, np.ndarray):
            at = address + starts[index] * _PART_ALIGNMENT_BYTES
            backend.copy_in(at, np.ascontiguousarray(part).reshape(-1).view(np.uint8))
            argument = backend.argument(at, _PART_TYPES[part.dtype.name], part.size)
            placed[index] = Part(argument, part.nbytes)
    num_bytes = starts[-1] * _PART_ALIGNMENT_BYTES
    site = _call_site()
    return Allocation(next(_allocation_ids), device, num_bytes, site, address), tuple(placed)


def free(tensor: Tensor) -> None:
    """Give a tensor's memory back; later launches with it are refused in checked mode."""
    allocation = tensor.allocation
    if allocation.freed_at:
        raise CopyRejected(tensor.name, f"was freed before, at {allocation.freed_at}")
    allocation.freed_at = _call_site()
    if allocation.device != "cpu":
        _backends[allocation.device].free(allocation.address)


def rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The view of rows start..stop along the first axis."""
    if not 0 <= start <= stop <= tensor.shape[0]:
        raise CopyRejected(tensor.name, f"rows {start}:{stop}, but it has {tensor.shape[0]}")
    shape = (stop - start, *tensor.shape[1:])
    offset = tensor.offset + start * tensor.strides[0]
    allocation = tensor.allocation
    if allocation.device == "cpu":
        data = tensor.data[start:stop]
    else:
        address = allocation.address + offset * tensor.dtype.block_bytes
        num_elements = int(np.prod(shape, dtype=np.int64))
        data = _backends[allocation.device].argument(address, tensor.dtype, num_elements)
    return Tensor(
        tensor.name, tensor.owner, tensor.dtype, shape, tensor.strides, offset, allocation, data
    )


def to_device(tensor: Tensor, values: np.ndarray[Any, Any]) -> None:
    """Copy host values into the leading part of `tensor`; the element types must be equal.

    On a GPU the rest of the rows that are written becomes zero. Raises CopyRejected when the
    values do not fit or the tensor was freed.
    """
    _refuse_freed(tensor)
    if values.dtype != np.dtype(_NUMPY_TYPES[tensor.dtype]):
        raise CopyRejected(tensor.name, f"{values.dtype} values for {tensor.dtype.name}")
    if values.ndim != len(tensor.shape) or any(
        given > room for given, room in zip(values.shape, tensor.shape, strict=True)
    ):
        raise CopyRejected(tensor.name, f"shape {values.shape} into {tensor.shape}")
    if tensor.device == "cpu":
        tensor.data[tuple(slice(0, size) for size in values.shape)] = values
        return
    if values.shape[1:] != tensor.shape[1:]:
        wide = np.zeros((values.shape[0], *tensor.shape[1:]), values.dtype)
        wide[tuple(slice(0, size) for size in values.shape)] = values
        values = wide
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    _backends[tensor.device].copy_in(tensor.address, data)


def to_host(tensor: Tensor, num_rows: int | None = None) -> np.ndarray[Any, Any]:
    """A host copy of the first `num_rows` rows (all by default), after all launches before it.

    Raises CopyRejected for a freed tensor or more rows than there are.
    """
    _refuse_freed(tensor)
    num_rows = tensor.shape[0] if num_rows is None else num_rows
    if not 0 <= num_rows <= tensor.shape[0]:
        raise CopyRejected(tensor.name, f"{num_rows} rows, but it has {tensor.shape[0]}")
    if tensor.device == "cpu":
        return np.array(tensor.data[:num_rows])
    shape = (num_rows, *tensor.shape[1:])
    kind = np.dtype(_NUMPY_TYPES[tensor.dtype])
    num_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    copied = _backends[tensor.device].copy_out(tensor.address, num_bytes)
    return np.asarray(copied.view(kind).reshape(shape))


def _refuse_freed(tensor: Tensor) -> None:
    if tensor.allocation.freed_at:
        raise CopyRejected(tensor.name, f"was freed at {tensor.allocation.freed_at}")


def _call_site() -> str:
    """File and line of the nearest caller outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
