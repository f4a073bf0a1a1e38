"""Makes a launch's arguments those of a replay: each tensor an Argument of the checked memory.

Runs nothing; tensors are neither copied nor changed.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hypocenter.base.dtypes import TORCH_OF_TRITON, Array
from hypocenter.base.errors import UsageError
from hypocenter.device.interpret.interpret import Descriptor, Pointer
from hypocenter.replay.arguments import Argument, Region, extent_bytes
from hypocenter.replay.memory import CheckedMemory

if TYPE_CHECKING:
    import torch

#: GPU allocations begin at a multiple of this, so that addresses of views are what they are there.
_ALLOCATION_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class VirtualTensor:
    """A tensor without data: reads give zeros, writes vanish, addresses are checked.

    For launches whose tensors would need gigabytes. `dtype` is torch's name ("float32"),
    `strides` count elements.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTensor:
    """A tensor as a bundle tells of it: `num_bytes` from byte `start` of `data` are its own.

    `dtype` is torch's name of what the kernel's pointer points to, `item_bytes` the width of the
    tensor's own elements; `data` holds the bytes of its allocation (None: extent only, as of a
    VirtualTensor), `init` says which of them were ever written. `alignment` is that of its address.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    num_bytes: int
    data: Array | None = None
    start: int = 0
    alignment: int = 0
    init: Array | None = None
    keeps_width: bool = False


def admit(
    memory: CheckedMemory,
    name: str,
    value: Any,
    undefined: Collection[str],
    outputs: Collection[str],
    initialised: Mapping[int, Array],
) -> Any:
    """The value as the interpreter takes it; a tensor becomes an Argument of `memory`."""
    if isinstance(value, VirtualTensor):
        item_bytes = item_bytes_of(value.dtype)
        num_bytes = extent_bytes(value.shape, value.strides, item_bytes)
        region = Region(None, num_bytes, item_bytes, None)
        number = len(memory.arguments) + 1
        memory.add(
            Argument(name, number, value.shape, value.strides, item_bytes, region, 0, num_bytes)
        )
        return Pointer(memory.arguments[-1].address, value.dtype)
    if isinstance(value, RecordedTensor):
        argument = _recorded_argument(name, len(memory.arguments) + 1, value)
        memory.add(argument)
        return Pointer(argument.address, value.dtype)
    if _is_torch(value):
        if value.device.type != "cpu":
            raise UsageError(f"{name} is on {value.device}; replay works on CPU copies")
        argument = _argument(name, len(memory.arguments) + 1, value, initialised)
        argument.is_output = name in outputs
        if name in undefined:
            _undefine(argument)
        memory.add(argument)
        return Pointer(argument.address, str(value.dtype).removeprefix("torch."))
    if hasattr(value, "base") and hasattr(value, "block_shape"):
        base = admit(memory, name, value.base, undefined, outputs, initialised)
        padding = str(getattr(value, "padding", "zero"))
        shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.strides))
        return Descriptor(base, shape, strides, tuple(map(int, value.block_shape)), padding)
    if type(value).__name__ == "TensorWrapper":  # triton.reinterpret
        pointer = admit(memory, name, value.base, undefined, outputs, initialised)
        return Pointer(pointer.address, _torch_name(value.dtype))
    if isinstance(value, tuple):
        parts = [
            admit(memory, f"{name}[{i}]", part, undefined, outputs, initialised)
            for i, part in enumerate(value)
        ]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def item_bytes_of(dtype: str) -> int:
    """Width of a type by torch's name of it: its first number counts bits; a bool has 8."""
    bits = re.search(r"[0-9]+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _is_torch(value: Any) -> bool:
    """Whether it is a tensor of torch, which nobody loads here."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _torch_name(dtype: Any) -> str:
    """torch's name of a Triton or torch dtype."""
    name = str(dtype).removeprefix("torch.")
    return TORCH_OF_TRITON.get(name, name)


def _argument(
    name: str, number: int, tensor: torch.Tensor, initialised: Mapping[int, Array]
) -> Argument:
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    data = np.zeros(0, np.uint8)
    if storage.nbytes():
        data = np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(address))
    item_bytes = tensor.element_size()
    region = Region(data, storage.nbytes(), item_bytes, initialised.get(address))
    start = int(tensor.storage_offset()) * item_bytes
    shape, strides = tuple(tensor.shape), tensor.stride()
    return Argument(
        name,
        number,
        shape,
        strides,
        item_bytes,
        region,
        start,
        extent_bytes(shape, strides, item_bytes),
        start % _ALLOCATION_ALIGNMENT,
    )


def _recorded_argument(name: str, number: int, tensor: RecordedTensor) -> Argument:
    size = tensor.num_bytes if tensor.data is None else tensor.data.size
    granule = math.gcd(tensor.item_bytes, item_bytes_of(tensor.dtype))
    return Argument(
        name,
        number,
        tensor.shape,
        tensor.strides,
        tensor.item_bytes,
        Region(tensor.data, size, granule, tensor.init),
        tensor.start,
        tensor.num_bytes,
        tensor.alignment % _ALLOCATION_ALIGNMENT,
        keeps_width=tensor.keeps_width,
    )


def _undefine(argument: Argument) -> None:
    region = argument.region
    if region.init is None and region.data is not None:
        region.init = np.ones(region.data.size, bool)
    if region.init is not None:
        region.init[argument.start : argument.start + argument.num_bytes] = False


def at_real_address(
    address: int, find: Callable[[int], tuple[int, int] | None], initialised: Mapping[int, Array]
) -> Argument | None:
    """The storage that holds `address` as an Argument of bytes; `find` gives (start, bytes)."""
    found = find(address)
    if found is None:
        return None
    start, num_bytes = found
    data = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(start))
    region = Region(data, num_bytes, 1, initialised.get(start))
    return Argument(
        f"tensor at {start:#x}", 0, (num_bytes,), (1,), 1, region, 0, num_bytes, real_address=start
    )


def share_regions(memory: CheckedMemory) -> None:
    """Arguments in one storage share a Region, so that races between them are seen."""
    by_storage: dict[int, list[Argument]] = {}
    for argument in memory.arguments:
        data = argument.region.data
        if data is not None and data.size:
            by_storage.setdefault(data.ctypes.data, []).append(argument)
    for members in by_storage.values():
        if len(members) < 2:
            continue
        first = members[0].region
        assert first.data is not None
        known = [m.region.init for m in members if m.region.init is not None]
        init: Array | None = np.logical_and.reduce(known) if known else None
        if len({id(flags) for flags in known}) == 1:
            init = known[0]  # the caller's own, to be updated
        granule = math.gcd(*(m.item_bytes for m in members))
        shared = Region(first.data, first.data.size, granule, init)
        for member in members:
            member.region = shared
