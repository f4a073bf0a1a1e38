"""Allocation: tensors on any device, and the arrays of packed weights in one piece of memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.refusals import FreedTensor, OutsideTensor
from hypocenter.base.tensor import Allocation, DType, Tensor, contiguous_strides
from hypocenter.device import arrays
from hypocenter.device.copies import NUMPY_TYPES, copy_in, refuse
from hypocenter.device.cpu import large_pages
from hypocenter.device.devices import backend_of, call_device, call_site, names_of
from hypocenter.record.recorder import current

ALIGNMENT_BYTES = 64
_PART_ALIGNMENT_BYTES = 256

# How a GPU kernel sees the arrays of a packed weight; words of either sign are bits to it.
_PART_TYPES = {
    "float32": DType.F32,
    "float16": DType.F16,
    "int16": DType.I16,
    "int32": DType.I32,
    "uint32": DType.I32,
}
_BLOCK_KINDS = {DType.Q8_0: np.int8, DType.Q4_0: np.uint8}
_allocation_ids = itertools.count(1)


def allocate(
    name: str, owner: str, dtype: DType, shape: tuple[int, ...], *, device: str = "cpu"
) -> Tensor:
    """A zeroed, contiguous tensor whose memory starts at a multiple of 64 bytes or more.

    Large zeroed memory on the CPU is not touched here: pages appear when a kernel writes them.
    """
    num_elements = math.prod(shape)
    num_bytes = num_elements * np.dtype(NUMPY_TYPES[dtype]).itemsize
    if device == "cpu":
        raw = _zeros(num_bytes)
        data = raw.view(NUMPY_TYPES[dtype]).reshape(shape)
        address = raw.ctypes.data
        allocation = Allocation(next(_allocation_ids), device, num_bytes, call_site(), address)
        _record_allocation(allocation, name, owner)
        strides = contiguous_strides(shape)
        return Tensor(name, owner, dtype, shape, strides, 0, allocation, data)
    tensor = allocate_undefined(name, owner, dtype, shape, device=device)
    call_device(device, "clear", tensor.address, num_bytes)
    return tensor


def allocate_transposed(name: str, owner: str, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """As `allocate` on the CPU, but the second axis is the outermost in memory."""
    first, second, *rest = shape
    tensor = allocate(name, owner, dtype, (second, first, *rest))
    outer, inner, *others = tensor.strides
    data = tensor.data.swapaxes(0, 1)
    strides = (inner, outer, *others)
    return Tensor(name, owner, dtype, shape, strides, 0, tensor.allocation, data)


def allocate_blocks(
    name: str,
    owner: str,
    dtype: DType,
    shape: tuple[int, ...],
    *,
    along: int,
    device: str = "cpu",
) -> Tensor:
    """As `allocate` on a GPU, and as `allocate_transposed` on the CPU, of GGUF's blocks.

    Their bytes lie along axis `along`, which must be the last or the one before it.

    On the CPU `data` has these bytes; those of Q8_0 are int8, those of Q4_0 uint8, by which kernels
    tell them apart. Raises ValueError where that axis is no whole blocks.
    """
    first, second, *rest = shape
    sizes = list(shape)
    sizes[along] = dtype.num_bytes(shape[along])
    if device != "cpu":
        return as_blocks(allocate(name, owner, DType.U8, tuple(sizes), device=device), dtype, shape)
    held = allocate_transposed(name, owner, DType.U8, tuple(sizes))
    outer, inner, *others = contiguous_strides((second, first, *rest))
    data, strides = held.data.view(_BLOCK_KINDS[dtype]), (inner, outer, *others)
    return Tensor(name, owner, dtype, shape, strides, 0, held.allocation, data)


def as_blocks(held: Tensor, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """A GPU's bytes as GGUF's blocks."""
    strides = contiguous_strides(shape)
    return Tensor(held.name, held.owner, dtype, shape, strides, 0, held.allocation, held.data)


def as_bytes(tensor: Tensor, row: int | None = None) -> Tensor:
    """Blocks of `allocate_blocks` as a tensor of their bytes: all, or those of one row of the first
    axis."""
    allocation, data, start = tensor.allocation, tensor.data, 0
    num_bytes = allocation.num_bytes
    if tensor.device == "cpu":
        data = data if row is None else data[row : row + 1]
        shape = data.shape
    else:
        if row is not None:
            num_bytes //= tensor.shape[0]
            start = row * num_bytes
        shape, data = (num_bytes,), None
    strides = contiguous_strides(shape)
    return Tensor(tensor.name, tensor.owner, DType.U8, shape, strides, start, allocation, data)


def _zeros(num_bytes: int) -> np.ndarray[Any, Any]:
    """Zeroed host bytes; what is as large as a large page, as a KV cache is, lies in such pages."""
    if num_bytes >= large_pages.PAGE_BYTES:
        return large_pages.zeros((num_bytes,), np.uint8)
    raw = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + num_bytes]


def allocate_undefined(
    name: str, owner: str, dtype: DType, shape: tuple[int, ...], *, device: str
) -> Tensor:
    """A GPU tensor whose contents are whatever the memory held before."""
    num_bytes = math.prod(shape) * np.dtype(NUMPY_TYPES[dtype]).itemsize
    address = call_device(device, "allocate", num_bytes)
    names_of(device)[address] = f"{name} ({owner})"
    return tensor_at(device, address, name, owner, dtype, shape)


def tensor_at(
    device: str,
    address: int,
    name: str,
    owner: str,
    dtype: DType,
    shape: tuple[int, ...],
    kind: str = "",
) -> Tensor:
    """A GPU tensor over memory that is there already, of a `kind` as in AllocationRecord."""
    num_elements = math.prod(shape)
    num_bytes = num_elements * np.dtype(NUMPY_TYPES[dtype]).itemsize
    allocation = note_allocation(device, num_bytes, address, name, owner, kind)
    data = backend_of(device).argument(address, dtype, num_elements)
    return Tensor(name, owner, dtype, shape, contiguous_strides(shape), 0, allocation, data)


def adopt(
    name: str, owner: str, dtype: DType, shape: tuple[int, ...], data: Any, num_bytes: int
) -> Tensor:
    """Give host data that exists already (a packed weight, say) a name and an allocation."""
    allocation = Allocation(next(_allocation_ids), "cpu", num_bytes, call_site())
    _record_allocation(allocation, name, owner)
    return Tensor(name, owner, dtype, shape, contiguous_strides(shape), 0, allocation, data)


@dataclass(frozen=True, slots=True)
class PackedArray:
    """One array of a packed weight on a GPU: what a launch passes for it, its size, what it is."""

    argument: Any
    num_bytes: int
    address: int = 0
    dtype: str = ""
    num_elements: int = 0


def upload(
    parts: tuple[Any, ...], device: str, name: str, owner: str
) -> tuple[Allocation, tuple[Any, ...]]:
    """Put the arrays among `parts` of the tensor `name` into one allocation of `device`.

    Returns it, and the parts with each array replaced by a PackedArray.
    """
    num_bytes = packed_bytes(parts)
    address = call_device(device, "allocate", num_bytes)
    names_of(device)[address] = f"{name} ({owner})"
    allocation = note_allocation(device, num_bytes, address, name, owner)
    return allocation, copy_parts(parts, device, f"{name} ({owner})", address)


def packed_bytes(parts: tuple[Any, ...]) -> int:
    """What `copy_parts` takes."""
    return _starts(parts)[-1]


def copy_parts(parts: tuple[Any, ...], device: str, label: str, address: int) -> tuple[Any, ...]:
    """Copy the arrays among `parts` to `address`, one behind the other; a PackedArray for each."""
    placed = list(parts)
    for index, (part, start) in enumerate(zip(parts, _starts(parts), strict=False)):
        if arrays.is_array(part):
            dtype, num_elements = _PART_TYPES[arrays.kind_of(part)], arrays.size_of(part)
            data = arrays.bits_as(part.reshape(-1), "uint8")
            copy_in(device, label, address + start, data)
            placed[index] = packed_array(device, address + start, dtype, num_elements, part.nbytes)
    return tuple(placed)


def packed_array(
    device: str, address: int, dtype: DType, num_elements: int, num_bytes: int
) -> PackedArray:
    """An array of a packed weight that lies at `address` of a GPU."""
    argument = backend_of(device).argument(address, dtype, num_elements)
    return PackedArray(argument, num_bytes, address, dtype.name, num_elements)


def _starts(parts: tuple[Any, ...]) -> list[int]:
    """Where each part begins behind the ones before it, and where the last one ends."""
    sizes = (part.nbytes if arrays.is_array(part) else 0 for part in parts)
    rounded = (-(-size // _PART_ALIGNMENT_BYTES) * _PART_ALIGNMENT_BYTES for size in sizes)
    return [0, *itertools.accumulate(rounded)]


def note_allocation(
    device: str, num_bytes: int, address: int, name: str, owner: str, kind: str = ""
) -> Allocation:
    """An allocation of memory that is there already, of a `kind` as in AllocationRecord."""
    allocation = Allocation(next(_allocation_ids), device, num_bytes, call_site(), address)
    _record_allocation(allocation, name, owner, kind)
    return allocation


def free(tensor: Tensor) -> None:
    """Give a tensor's memory back; later launches with it are refused in checked mode.

    Raises UsageError while a captured graph uses it.
    """
    allocation = tensor.allocation
    if allocation.freed_at:
        refuse(tensor, FreedTensor(site=allocation.freed_at, again=True))
    site = call_site()
    if allocation.device != "cpu":
        call_device(allocation.device, "free", allocation.address)
        names_of(allocation.device).pop(allocation.address, None)
    current().record_free(allocation, site)
    allocation.freed_at = site


def rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The view of rows start..stop along the first axis; the tensor itself when these are all."""
    if not 0 <= start <= stop <= tensor.shape[0]:
        refuse(tensor, _outside("rows", start, stop, tensor.shape[0]))
    if stop - start == tensor.shape[0]:
        return tensor
    shape = (stop - start, *tensor.shape[1:])
    offset = tensor.offset + start * tensor.strides[0]
    allocation = tensor.allocation
    if allocation.device == "cpu":
        data = tensor.data[start:stop]
    else:
        address = allocation.address + offset * tensor.dtype.block_bytes
        num_elements = math.prod(shape)
        data = backend_of(allocation.device).argument(address, tensor.dtype, num_elements)
    return Tensor(
        tensor.name, tensor.owner, tensor.dtype, shape, tensor.strides, offset, allocation, data
    )


def _outside(what: str, start: int, stop: int, num_there: int) -> OutsideTensor:
    asked = f"{what} {start}:{stop}"
    return OutsideTensor(what=what, asked=asked, num_asked=stop, num_there=num_there)


def stretch(tensor: Tensor, shape: tuple[int, ...], start: int = 0) -> Tensor:
    """The elements of a contiguous host tensor from `start` on, in another shape."""
    stop = start + math.prod(shape)
    if not 0 <= start <= stop <= tensor.data.size:
        refuse(tensor, _outside("elements", start, stop, tensor.data.size))
    data = tensor.data.reshape(-1)[start:stop].reshape(shape)
    return Tensor(
        tensor.name,
        tensor.owner,
        tensor.dtype,
        shape,
        contiguous_strides(shape),
        tensor.offset + start,
        tensor.allocation,
        data,
    )


def allocate_pinned(
    name: str, owner: str, dtype: DType, shape: tuple[int, ...], *, device: str
) -> Tensor:
    """A host tensor that `device` reads by itself, in `copy_in_pinned`; its contents are undefined.

    Change it by `fill_pinned`.
    """
    num_bytes = math.prod(shape) * np.dtype(NUMPY_TYPES[dtype]).itemsize
    raw = call_device(device, "allocate_pinned", num_bytes)
    address = int(raw.ctypes.data)
    allocation = Allocation(next(_allocation_ids), "cpu", num_bytes, call_site(), address)
    _record_allocation(allocation, name, owner, "pinned")
    data = raw.view(NUMPY_TYPES[dtype]).reshape(shape)
    return Tensor(name, owner, dtype, shape, contiguous_strides(shape), 0, allocation, data)


def _record_allocation(allocation: Allocation, name: str, owner: str, kind: str = "") -> None:
    current().record_allocation(allocation, name, owner, kind)
