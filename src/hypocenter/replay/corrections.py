"""What a replay is told of tensors: their types by name, and facts put right for a green half."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hypocenter.dtypes import NUMPY_DTYPES, Array
from hypocenter.record.events import ScalarValue, TensorRecord, Values
from hypocenter.replay.arguments import Argument
from hypocenter.tensor import DType

FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True)
class TensorCorrection:
    """What is put right about one tensor for the green half of a proof; None leaves a fact be.

    `num_bytes` is how far the tensor reaches; a corrected `dtype` or `shape` has it worked out
    anew. `elements` replaces single values, by index. `is_alive` undoes a free, and whatever else
    keeps the launch from its memory: a null or host pointer, another device. `is_defined` has
    zeros where the memory held nothing that anybody wrote.
    """

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    num_bytes: int | None = None
    elements: Mapping[tuple[int, ...], int | float] = field(default_factory=dict)
    is_alive: bool = False
    is_defined: bool = False


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


def write_rows(data: Array, given: Array, values: Values, tensor: TensorRecord) -> None:
    """Values narrower than their tensor's rows go row by row, as the copy did."""
    width = element_bytes(values.dtype.upper()) or 1
    if len(values.shape) < 2 or len(tensor.strides) != len(values.shape):
        data[: given.size] = given
        return
    row_bytes, pitch = math.prod(values.shape[1:]) * width, tensor.strides[0] * width
    for row in range(values.shape[0]):
        part = given[row * row_bytes : (row + 1) * row_bytes]
        target = data[row * pitch :]
        target[: min(part.size, target.size)] = part[: target.size]


def holds_nan(argument: Argument, dtype: str) -> bool:
    """Whether a launch wrote NaN into `argument`; True, too, where its type cannot tell."""
    region, width = argument.region, argument.item_bytes
    is_plain = region.data is not None and region.granule == width and argument.start % width == 0
    if dtype not in FLOATS or not is_plain or region.data is None:
        return True
    stop = argument.start + argument.num_bytes // width * width
    raw = region.data[argument.start : stop]
    written = region.writer[argument.start // width : stop // width] != 0
    if dtype == "bfloat16":
        bits = raw.view(np.uint16)[written]
        return bool(((bits & 0x7FFF) > 0x7F80).any())
    values = raw.view(np.dtype(dtype))[written]
    return bool(np.isnan(values).any())
