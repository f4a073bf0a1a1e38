"""What a replay is told of tensors: their types by name, and facts put right for a green half."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES, Array
from hypocenter.base.tensor import DType
from hypocenter.record.events import ScalarValue, TensorRecord, Values
from hypocenter.replay.arguments import Argument

#: Bytes of all elements of a tensor, of which some may lie in one place.
MAX_VIEW_BYTES = 64 << 20
#: The largest number of bfloat16, which has the exponents of float32 and 8 bits beside.
_LARGEST_BFLOAT16 = (2 - 2**-7) * 2.0**127
FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True)
class TensorCorrection:
    """What is put right about one tensor for the green half of a proof; None leaves a fact be.

    `num_bytes` is how far the tensor reaches; a corrected `dtype` or `shape` has it worked out
    anew. `elements` replaces single values, by index. `is_alive` undoes a free, and whatever else
    keeps the launch from its memory: a null or host pointer, another device. `defined_as` is
    the number that stands where the memory held nothing that anybody wrote, or the nearest one of
    its type.
    """

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    num_bytes: int | None = None
    elements: Mapping[tuple[int, ...], int | float] = field(default_factory=dict)
    is_alive: bool = False
    defined_as: float | None = None


#: By the kernel's parameter, the contract's argument or the tensor's name; `grid` is the grid.
Corrections = Mapping[str, "TensorCorrection | ScalarValue | tuple[int, ...]"]


def element_bytes(dtype: str) -> int | None:
    """Width of an element of a plain type by its name (F32, I16, U32), None for blocks."""
    if dtype in NUMPY_DTYPES:
        return NUMPY_DTYPES[dtype].itemsize
    known = DType.__members__.get(dtype)
    return known.block_bytes if known is not None and not known.is_quantised else None


def numpy_type(dtype: str) -> np.dtype[Any] | None:
    """NumPy's type for values of a dtype; 16-bit floats are their bits."""
    if dtype in ("F16", "BF16"):
        return np.dtype(np.uint16)
    return NUMPY_DTYPES.get(dtype)


def elements_of(data: Array, tensor: TensorRecord, width: int) -> Array | None:
    """The bytes of a tensor's elements in `data`, as shape and strides have them: a view.

    None where an element would lie outside of `data`, or there are more than it can hold.
    """
    if len(tensor.shape) != len(tensor.strides) or min(tensor.shape, default=1) < 1:
        return None
    reach = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    if low < 0 or (high + 1) * width > data.size:
        return None
    if math.prod(tensor.shape) * width > MAX_VIEW_BYTES:
        return None
    shape, strides = (*tensor.shape, width), (*(s * width for s in tensor.strides), 1)
    return np.lib.stride_tricks.as_strided(data, shape, strides)


def write_rows(data: Array, given: Array, values: Values, tensor: TensorRecord) -> None:
    """Each element goes where the strides have it; values narrower than their tensor's rows go row
    by row, as the copy did."""
    width = element_bytes(values.dtype.upper()) or 1
    is_whole = values.shape == tensor.shape and given.size == math.prod(values.shape) * width
    if is_whole and (view := elements_of(data, tensor, width)) is not None:
        view[...] = given.reshape(view.shape)
        return
    if len(values.shape) < 2 or len(tensor.strides) != len(values.shape):
        data[: given.size] = given
        return
    row_bytes, pitch = math.prod(values.shape[1:]) * width, tensor.strides[0] * width
    for row in range(values.shape[0]):
        part = given[row * row_bytes : (row + 1) * row_bytes]
        target = data[row * pitch :]
        target[: min(part.size, target.size)] = part[: target.size]


def bytes_of_number(number: float, dtype: str) -> Array:
    """A number as an element of a type by torch's name, or the nearest one that it has.

    Of types of 8 bits that NumPy lacks the bits of an unsigned number are taken.
    """
    if dtype == "bfloat16":
        most = np.float32(_LARGEST_BFLOAT16)
        return np.array([np.clip(number, -most, most)], np.float32).view(np.uint8)[2:]
    kind = np.dtype(dtype if hasattr(np, dtype) else np.uint8)
    return nearest(number, kind)


def nearest(number: float, kind: np.dtype[Any]) -> Array:
    """The bytes of the element of that type that is nearest to a number."""
    if kind.kind == "b":
        return np.array([number > 0], kind).view(np.uint8)
    limits = np.finfo(kind) if kind.kind == "f" else np.iinfo(kind)
    number = min(max(number, limits.min), limits.max)
    return np.array([number]).astype(kind).view(np.uint8)


def written_bytes(argument: Argument) -> bytes:
    """What a launch wrote into `argument`, and nothing of what was there before."""
    region = argument.region
    if region.data is None:
        return b""
    first, last = argument.start, argument.start + argument.num_bytes
    granules = slice(first // region.granule, -(-last // region.granule))
    is_written = np.repeat(region.writer[granules] != 0, region.granule)
    own = region.data[granules.start * region.granule :][: is_written.size]
    return bytes(own[is_written[: own.size]])
