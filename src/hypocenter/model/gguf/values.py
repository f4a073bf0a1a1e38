"""What a GGUF file holds: metadata, decoded on demand, and tensors by place; checks nothing."""

from __future__ import annotations

import enum
import mmap
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np

from hypocenter.base.tensor import DType


class ValueType(enum.IntEnum):
    """Types of a metadata value, with the ids of the specification."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


#: How numpy reads each type that is a number or a flag.
NUMPY_TYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.U8: np.dtype("<u1"),
    ValueType.I8: np.dtype("<i1"),
    ValueType.U16: np.dtype("<u2"),
    ValueType.I16: np.dtype("<i2"),
    ValueType.U32: np.dtype("<u4"),
    ValueType.I32: np.dtype("<i4"),
    ValueType.F32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.U64: np.dtype("<u8"),
    ValueType.I64: np.dtype("<i8"),
    ValueType.F64: np.dtype("<f8"),
}


class StringArray(Sequence[str]):
    """A metadata array of strings, decoded one by one when asked for.

    Bytes that are not UTF-8 become surrogates (`surrogateescape`), so that
    `text.encode("utf-8", "surrogateescape")` gives the file's bytes back; `raw` has them directly.
    """

    __slots__ = ("_buffer", "_starts")

    def __init__(self, buffer: mmap.mmap | bytes, starts: array[int]) -> None:
        # String i lies at starts[i] : starts[i + 1] - 8; the 8 bytes between hold a length.
        self._buffer = buffer
        self._starts = starts

    def raw(self, index: int) -> bytes:
        """The bytes of string `index`, as the file holds them."""
        index = range(len(self))[index]
        return self._buffer[self._starts[index] : self._starts[index + 1] - 8]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self.raw(index).decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        buffer, starts = self._buffer, self._starts
        for index in range(len(self)):
            piece = buffer[starts[index] : starts[index + 1] - 8]
            yield piece.decode("utf-8", "surrogateescape")


#: What a metadata key may hold; arrays of numbers and flags are read-only numpy copies.
MetadataValue: TypeAlias = (
    "bool | int | float | str | StringArray | np.ndarray | tuple[MetadataValue, ...]"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a value lies. `size`: bytes of a string, items of an array, else 1."""

    type: ValueType  # of the items, if an array
    is_array: bool
    position: int
    size: int
    starts: array[int] | None = None  # arrays of strings
    children: tuple[Entry, ...] = ()  # arrays of arrays

    def __str__(self) -> str:
        name = self.type.name.lower()
        return f"array of {self.size} {name}" if self.is_array else name


class Metadata(Mapping[str, MetadataValue]):
    """The key-value pairs of a file; a value is decoded each time it is asked for."""

    __slots__ = ("_buffer", "_entries")

    def __init__(self, buffer: mmap.mmap | bytes, entries: dict[str, Entry]) -> None:
        self._buffer = buffer
        self._entries = entries

    def __getitem__(self, key: str) -> MetadataValue:
        return self._value(self._entries[key])

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, key: str) -> Entry:
        """Type and size of a value without decoding it; raises KeyError."""
        return self._entries[key]

    def kind(self, key: str) -> str:
        """The type of a value in words: `u32`, `string`, `array of 4096 string`."""
        return str(self._entries[key])

    def raw_text(self, key: str) -> bytes:
        """The bytes of a value that is one string."""
        entry = self._entries[key]
        assert entry.type is ValueType.STRING, entry
        assert not entry.is_array, entry
        return self._buffer[entry.position : entry.position + entry.size]

    def _value(self, entry: Entry) -> MetadataValue:
        if entry.type is ValueType.ARRAY:
            return tuple(self._value(child) for child in entry.children)
        if entry.type is ValueType.STRING:
            if entry.starts is not None:
                return StringArray(self._buffer, entry.starts)
            text = self._buffer[entry.position : entry.position + entry.size]
            return text.decode("utf-8", "surrogateescape")
        # A copy: values in the file are unaligned, and compiled kernels may rely on alignment.
        values = np.frombuffer(
            self._buffer, NUMPY_TYPES[entry.type], entry.size, entry.position
        ).copy()  # [size]
        if not entry.is_array:
            scalar: bool | int | float = values[0].item()
            return scalar
        values.flags.writeable = False
        return values


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major: shape[-1] is GGUF's ne[0].

    It has no axes of 1 in front, though the file may write some: ggml has no rank, so one writer
    keeps them and another drops them. `offset` counts bytes from the start of the file of shard
    `shard` (0 for the first).
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    num_bytes: int
    shard: int
    offset: int

    def in_axes(self, count: int) -> tuple[int, ...]:
        """The shape with axes of 1 in front, up to `count` in all."""
        return (1,) * (count - len(self.shape)) + self.shape


def without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` from its first axis that is not 1 on; the last axis stays."""
    first = next((axis for axis, size in enumerate(shape) if size != 1), len(shape) - 1)
    return shape[max(first, 0) :]
