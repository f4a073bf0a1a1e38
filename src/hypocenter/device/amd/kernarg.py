"""The bytes of a kernel's arguments, as a runtime lays them out before a launch.

Source: LLVM's user guide of the AMDGPU backend, "Code Object V5 Metadata", value kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hypocenter.base.errors import UsageError
from hypocenter.device.amd.code_object import Kernel, KernelArgument
from hypocenter.device.amd.evidence.parameter_types import NumberType

PassedNumber = bool | int | float | np.generic


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Blocks, threads of a block, and the bytes of LDS that are asked for beside the kernel's."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0


def pack_arguments(
    kernel: Kernel, values: Mapping[str, PassedNumber | bytes], shape: LaunchShape
) -> bytes:
    """The kernarg of a launch: `values` by the name of each parameter, in their order.

    An address is an int. Raises UsageError for another number of parameters, and for a value that
    does not fit its parameter.
    """
    shown = kernel.shown
    if len(values) > len(shown) or (len(values) < len(shown) and _needs_all(kernel, len(values))):
        raise UsageError(
            f"{kernel.name}: {len(shown)} parameters in {kernel.descriptor.kernarg_bytes} bytes, "
            f"and the launch gives {len(values)}: {', '.join(values) or 'none'}"
        )
    packed = bytearray(kernel.descriptor.kernarg_bytes)
    for parameter, (name, value) in zip(shown, values.items(), strict=False):
        value = _as_typed(kernel.name, name, value, parameter.type)
        _put(packed, parameter, _bytes_of(kernel.name, name, value, parameter.num_bytes))
    for hidden in kernel.arguments:
        made = _HIDDEN.get(hidden.kind)
        if made is not None:
            number = made(shape)
            _put(packed, hidden, number.to_bytes(hidden.num_bytes, "little"))
    return bytes(packed)


def _as_typed(
    kernel: str, name: str, value: PassedNumber | bytes, wanted: NumberType
) -> PassedNumber | bytes:
    """A number of Python's as C++ converts it to the parameter's type, where that is known."""
    if wanted is NumberType.FLOAT and type(value) is int:
        return float(value)
    if wanted is NumberType.INTEGER and isinstance(value, float):
        if not value.is_integer():
            raise UsageError(f"{kernel}: {name} is {value}, and the kernel takes a whole number")
        return int(value)
    return value


def _needs_all(kernel: Kernel, given: int) -> bool:
    """Triton adds pointers to scratch memory of its own behind a kernel's parameters."""
    added = kernel.shown[given:]
    return not (len(added) == 2 and all(part.is_pointer for part in added))


def _put(packed: bytearray, part: KernelArgument, data: bytes) -> None:
    packed[part.offset : part.offset + part.num_bytes] = data


def _bytes_of(kernel: str, name: str, value: PassedNumber | bytes, num_bytes: int) -> bytes:
    if isinstance(value, np.generic):
        value = value.tobytes()
    if isinstance(value, bytes):
        if len(value) != num_bytes:
            raise UsageError(
                f"{kernel}: {name} is given as {len(value)} bytes, and the kernel takes {num_bytes}"
            )
        return value
    if isinstance(value, float):
        if num_bytes not in (2, 4, 8):
            raise UsageError(f"{kernel}: {name} is a float, and the kernel takes {num_bytes} bytes")
        return np.array(value, f"<f{num_bytes}").tobytes()
    try:
        return int(value).to_bytes(num_bytes, "little", signed=value < 0)
    except OverflowError as error:
        raise UsageError(
            f"{kernel}: {name} is {value}, which does not fit the {num_bytes} bytes that it takes"
        ) from error


def _axis(
    values: Callable[[LaunchShape], tuple[int, int, int]], axis: int
) -> Callable[[LaunchShape], int]:
    return lambda shape: values(shape)[axis]


#: What a launcher fills in by itself. Blocks are always whole, so that nothing remains.
_HIDDEN: dict[str, Callable[[LaunchShape], int]] = {
    **{
        f"hidden_block_count_{name}": _axis(lambda shape: shape.grid, axis)
        for axis, name in enumerate("xyz")
    },
    **{
        f"hidden_group_size_{name}": _axis(lambda shape: shape.block, axis)
        for axis, name in enumerate("xyz")
    },
    "hidden_grid_dims": lambda shape: max(
        (axis + 1 for axis in range(3) if shape.grid[axis] > 1), default=1
    ),
    "hidden_dynamic_lds_size": lambda shape: shape.shared_bytes,
}
