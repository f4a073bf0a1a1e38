"""Tensor, its element type and its Allocation: the one word for data that all floors share.

Holds no arithmetic: ops live in `kernels/`, allocation and copies in `device/`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to behind the last; 0 where there is none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class DType(enum.Enum):
    """Element types: plain ones and the GGUF block types.

    Each value is (GGUF type id or None, elements per block, bytes per block). The ids and sizes are
    those of ggml's `ggml_type` and its block structs.
    """

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    BF16 = (30, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ4_NL = (20, 32, 18)
    IQ4_XS = (23, 256, 136)
    MXFP4 = (39, 32, 17)
    NVFP4 = (40, 64, 36)
    IQ3_S = (21, 256, 110)
    IQ3_XXS = (18, 256, 98)
    IQ2_S = (22, 256, 82)
    IQ2_XS = (17, 256, 74)
    IQ2_XXS = (16, 256, 66)
    IQ1_M = (29, 256, 56)
    IQ1_S = (19, 256, 50)
    TQ2_0 = (35, 256, 66)
    TQ1_0 = (34, 256, 54)
    Q2_0 = (42, 64, 18)
    Q1_0 = (41, 128, 18)
    I8 = (24, 1, 1)
    I16 = (25, 1, 2)
    I32 = (26, 1, 4)
    I64 = (27, 1, 8)
    U8 = (None, 1, 1)

    def __init__(self, ggml_id: int | None, block_elements: int, block_bytes: int) -> None:
        self.ggml_id, self.block_elements, self.block_bytes = ggml_id, block_elements, block_bytes
        self.is_quantised = block_elements > 1

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of `num_elements` elements; they must fill whole blocks."""
        if num_elements % self.block_elements:
            raise ValueError(
                f"{self.name}: {num_elements} elements do not fill blocks of {self.block_elements}"
            )
        return num_elements // self.block_elements * self.block_bytes


#: The types that a weight in a model file may have.
WEIGHT_TYPES: tuple[DType, ...] = (
    *(DType.F32, DType.F16, DType.BF16),
    *(dtype for dtype in DType if dtype.is_quantised),
)


@dataclass(slots=True, eq=False)
class Allocation:
    """A stretch of device memory: who made it, where, how large it is, and where it was freed."""

    id: int
    device: str
    num_bytes: int
    site: str
    address: int = 0
    freed_at: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A named, typed view of an allocation. `.data` is the numpy or torch array beneath.

    `strides` and `offset` count elements of `dtype`. A packed weight keeps its logical shape and
    GGUF dtype here; `.data` is then the packed form that its kernels know. `address` is that of
    the first element, `span` how many elements the view reaches over from there, `extent_bytes` how
    many bytes, `end_bytes` where it ends, counted from the allocation's start.
    """

    name: str
    owner: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    allocation: Allocation
    data: Any
    address: int = field(init=False)
    span: int = field(init=False)
    extent_bytes: int = field(init=False)
    end_bytes: int = field(init=False)
    has_dense_rows: bool = field(init=False)
    is_contiguous: bool = field(init=False)

    def __post_init__(self) -> None:
        # Worked out once, so that a check before a launch only compares.
        put = object.__setattr__
        element_bytes = self.dtype.block_bytes if not self.dtype.is_quantised else 0
        span = span_of(self.shape, self.strides)
        put(self, "span", span)
        put(self, "address", self.allocation.address + self.offset * element_bytes)
        whole = self.allocation.num_bytes
        end = (self.offset + span) * element_bytes if element_bytes else whole
        put(self, "end_bytes", end)
        put(self, "extent_bytes", span * element_bytes if element_bytes else whole)
        put(self, "has_dense_rows", not self.strides or self.strides[-1] == 1)
        put(self, "is_contiguous", self.strides == contiguous_strides(self.shape))

    @property
    def device(self) -> str:
        return self.allocation.device

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        return f"Tensor({self.name}: {self.dtype.name} [{dims}] on {self.device})"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements: the last axis has stride 1."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)
