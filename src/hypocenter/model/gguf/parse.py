"""Parses one GGUF file, checking every number before it is used; knows neither splits nor models.

Format: the GGUF specification of the ggml project (docs/gguf.md), versions 2 and 3, little-endian.
Opening decodes keys and tensor names only: values are found, checked and left where they are.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from array import array
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from hypocenter.base.errors import BadModelFile, UnsupportedModel
from hypocenter.base.tensor import WEIGHT_TYPES, DType
from hypocenter.model.gguf.identity import HEAD_BYTES, not_gguf
from hypocenter.model.gguf.values import (
    NUMPY_TYPES,
    Entry,
    Metadata,
    TensorInfo,
    ValueType,
    without_leading_ones,
)

MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # the specification's limit
MAX_NAME_BYTES = 127  # ggml allows 63, builds of it for diffusion models 127
MAX_STRING_BYTES = 1 << 24
MAX_STRINGS = 1 << 22  # in all arrays of a file; the largest vocabularies with merges need < 2^20
MAX_NUMBERS = 1 << 26  # and flags, in all arrays of a file; those of a vocabulary are < 2^22
MAX_NESTED_ARRAYS = 1 << 16
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_INT64 = (1 << 63) - 1

_MIN_FIELD_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_CUT_OFF = "the file was cut off or is damaged; download it again"


_VALUE_TYPES = {int(kind): kind for kind in ValueType}
_WEIGHT_TYPES = {dtype.ggml_id: dtype for dtype in WEIGHT_TYPES}

#: Tensor types of ggml that we cannot run, so that a refusal can name them. From `ggml.h`.
UNSUPPORTED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


@dataclass(frozen=True, slots=True)
class Shard:
    """One parsed file; its map lives as long as anything refers to it."""

    path: Path
    buffer: mmap.mmap
    version: int
    alignment: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    #: Device, inode, size in bytes, and when content and inode last changed, in ns since 1970.
    stamp: tuple[int, ...] = ()


def parse_shard(path: Path, buffer: mmap.mmap, shard: int) -> Shard:
    """Parse a mapped GGUF file; `shard` is its place in a split model.

    Raises BadModelFile for a broken file, UnsupportedModel for a tensor type that we cannot run.
    """
    cursor = _Cursor(path, buffer)
    version = _read_version(cursor)
    num_tensors = cursor.count("number of tensors", MAX_TENSORS, _MIN_TENSOR_BYTES)
    num_fields = cursor.count("number of metadata keys", MAX_FIELDS, _MIN_FIELD_BYTES)
    entries: dict[str, Entry] = {}
    for index in range(num_fields):
        key = cursor.text(f"metadata key {index}", MAX_KEY_BYTES)
        if key in entries:
            raise cursor.bad_field(f"metadata key {index}", key, "that key was there before")
        entries[key] = _read_entry(cursor, quote(key))
    metadata = Metadata(buffer, entries)
    alignment = _alignment(cursor, metadata)
    headers = [_read_tensor_header(cursor, index) for index in range(num_tensors)]
    tensors = _place(cursor, headers, alignment, shard)
    return Shard(path, buffer, version, alignment, metadata, tensors)


def quote(name: str, max_chars: int = 80) -> str:
    """A name from a file as one bounded, printable line."""
    return repr(name) if len(name) <= max_chars else f"{name[:max_chars]!r}..."


class _Cursor:
    """Reads forward through a file and refuses to pass its end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.position = 0
        self.end = len(buffer)
        self.num_strings = 0
        self.num_numbers = 0
        self.num_nested = 0

    def bad_field(self, field: str, value: object, limit: str, way_out: str = "") -> BadModelFile:
        return BadModelFile(self.path, field, value, limit, way_out)

    def cut(self, field: str, value: object, num_bytes: int) -> BadModelFile:
        """The error for `num_bytes` needed here when fewer are left."""
        left = self.end - self.position
        missing = num_bytes - left
        limit = (
            f"the file has {self.end} bytes, {left} of them after byte {self.position}: "
            f"at least {missing} bytes are missing"
        )
        return self.bad_field(field, value, limit, _CUT_OFF)

    def skip(self, field: str, num_bytes: int) -> int:
        """Pass over `num_bytes` and return where they begin."""
        if num_bytes > self.end - self.position:
            raise self.cut(f"{field}, size in bytes,", num_bytes, num_bytes)
        start = self.position
        self.position += num_bytes
        return start

    def u32(self, field: str) -> int:
        value: int = _U32.unpack_from(self.buffer, self.skip(field, 4))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self.buffer, self.skip(field, 8))[0]
        return value

    def count(self, field: str, max_count: int, min_item_bytes: int) -> int:
        """A count of things that follow; each takes at least `min_item_bytes`."""
        count = self.u64(field)
        if count > max_count:
            raise self.bad_field(field, count, f"it must be at most {max_count}")
        if count * min_item_bytes > self.end - self.position:
            raise self.cut(field, count, count * min_item_bytes)
        return count

    def string(self, field: str, max_bytes: int) -> tuple[int, int]:
        """Pass over a string; returns its position and its bytes."""
        num_bytes = self.u64(f"length of {field}")
        if num_bytes > max_bytes:
            raise self.bad_field(
                f"length of {field}", num_bytes, f"it must be at most {max_bytes} bytes"
            )
        return self.skip(field, num_bytes), num_bytes

    def text(self, field: str, max_bytes: int) -> str:
        """A key or name: UTF-8, not empty."""
        start, num_bytes = self.string(field, max_bytes)
        if not num_bytes:
            raise self.bad_field(field, "", "it must not be empty")
        raw = self.buffer[start : start + num_bytes]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad_field(field, raw[:64], "it must be UTF-8") from None


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def _read_version(cursor: _Cursor) -> int:
    head = cursor.buffer[:HEAD_BYTES]
    if head[:4] != b"GGUF":
        raise not_gguf(cursor.path, head, cursor.end)
    cursor.skip("magic", 4)
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0 and version:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        limit = "it is that of a big-endian file, and only little-endian files are read"
        raise cursor.bad_field("version", swapped, limit, "use the little-endian file")
    raise cursor.bad_field(
        "version", version, "only versions 2 and 3 are read", "convert the model anew"
    )


def _value_type(cursor: _Cursor, field: str) -> ValueType:
    number = cursor.u32(f"type of {field}")
    kind = _VALUE_TYPES.get(number)
    if kind is None:
        raise cursor.bad_field(f"type of {field}", number, "value types are 0 to 12")
    return kind


def _read_entry(cursor: _Cursor, field: str) -> Entry:
    kind = _value_type(cursor, field)
    if kind is ValueType.ARRAY:
        return _read_array(cursor, field, depth=1)
    if kind is ValueType.STRING:
        start, num_bytes = cursor.string(field, MAX_STRING_BYTES)
        return Entry(kind, False, start, num_bytes)
    start = cursor.skip(field, NUMPY_TYPES[kind].itemsize)
    if kind is ValueType.BOOL:
        _check_flags(cursor, field, start, 1)
    return Entry(kind, False, start, 1)


def _read_array(cursor: _Cursor, field: str, depth: int) -> Entry:
    kind = _value_type(cursor, f"items of {field}")
    label = f"length of array {field}"
    if kind is ValueType.STRING:
        count = cursor.count(label, MAX_STRINGS - cursor.num_strings, 8)
        cursor.num_strings += count
        start = cursor.position
        return Entry(kind, True, start, count, starts=_string_starts(cursor, field, count))
    if kind is ValueType.ARRAY:
        if depth == MAX_ARRAY_DEPTH:
            raise cursor.bad_field(
                f"array {field}", f"{depth + 1} arrays deep", f"the limit is {MAX_ARRAY_DEPTH}"
            )
        count = cursor.count(label, MAX_NESTED_ARRAYS - cursor.num_nested, 4 + 8)
        cursor.num_nested += count
        start = cursor.position
        children = tuple(_read_array(cursor, field, depth + 1) for _ in range(count))
        return Entry(kind, True, start, count, children=children)
    itemsize = NUMPY_TYPES[kind].itemsize
    # A sparse file of a terabyte takes no room on a disk, but the flags in it are all looked at.
    count = cursor.count(label, MAX_NUMBERS - cursor.num_numbers, itemsize)
    cursor.num_numbers += count
    start = cursor.skip(field, count * itemsize)
    if kind is ValueType.BOOL:
        _check_flags(cursor, field, start, count)
    return Entry(kind, True, start, count)


def _string_starts(cursor: _Cursor, field: str, count: int) -> array[int]:
    """Walk `count` strings. A bare loop: 300,000 of them are to take a fraction of 0.3 s."""
    buffer, end, position = cursor.buffer, cursor.end, cursor.position
    unpack = _U64.unpack_from
    starts = array("Q")
    append = starts.append
    with contextlib.suppress(struct.error):  # a length beyond the end; told below
        for _ in range(count):
            (num_bytes,) = unpack(buffer, position)
            after = position + 8 + num_bytes
            if num_bytes > MAX_STRING_BYTES or after > end:
                break
            append(position + 8)
            position = after
        else:
            append(position + 8)
            cursor.position = position
            return starts
    cursor.position = position
    cursor.string(f"string {len(starts)} of {field}", MAX_STRING_BYTES)
    raise AssertionError(f"string {len(starts)} of {field} was refused without a reason")


def _check_flags(cursor: _Cursor, field: str, start: int, count: int) -> None:
    flags = np.frombuffer(cursor.buffer, np.uint8, count, start)  # [count]
    if count and int(flags.max()) > 1:
        raise cursor.bad_field(field, int(flags.max()), "a flag must be 0 or 1")


def _alignment(cursor: _Cursor, metadata: Metadata) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    entry = metadata.entry(key)
    if entry.type is not ValueType.U32 or entry.is_array:
        raise cursor.bad_field(f"type of {key}", entry.type.name, "it must be one U32")
    value = metadata[key]
    assert isinstance(value, int), value
    # Spec: a multiple of 8. A power of two as well, because readers round up with a mask.
    if value < 8 or value & (value - 1):
        raise cursor.bad_field(key, value, "it must be a power of two of at least 8")
    return value


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    name: str
    dtype: DType
    shape: tuple[int, ...]
    num_bytes: int
    offset: int  # from the start of the data section


def _read_tensor_header(cursor: _Cursor, index: int) -> _TensorHeader:
    name = cursor.text(f"name of tensor {index}", MAX_NAME_BYTES)
    field = f"tensor {quote(name)}"
    num_dims = cursor.u32(f"number of dimensions of {field}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.bad_field(
            f"number of dimensions of {field}", num_dims, f"it must be 1 to {MAX_DIMS}"
        )
    num_elements = 1
    dims = []
    for axis in range(num_dims):
        dim = cursor.u64(f"dimension {axis} of {field}")
        num_elements *= dim
        if not dim or num_elements > MAX_INT64:
            raise cursor.bad_field(
                f"dimension {axis} of {field}",
                dim,
                "it must be at least 1 and all dimensions together at most 2^63 - 1 elements",
            )
        dims.append(dim)
    dtype = _tensor_type(cursor, field)
    if dims[0] % dtype.block_elements:
        limit = f"it must be a multiple of {dtype.block_elements}, the block size of {dtype.name}"
        raise cursor.bad_field(f"row length of {field}", dims[0], limit)
    offset = cursor.u64(f"offset of {field}")
    shape = without_leading_ones(tuple(dims[::-1]))
    return _TensorHeader(name, dtype, shape, dtype.num_bytes(num_elements), offset)


def _tensor_type(cursor: _Cursor, field: str) -> DType:
    number = cursor.u32(f"type of {field}")
    if number in _WEIGHT_TYPES:
        return _WEIGHT_TYPES[number]
    if number in UNSUPPORTED_TYPES:
        names = ", ".join(dtype.name for dtype in WEIGHT_TYPES)
        raise UnsupportedModel(
            cursor.path,
            f"type of {field}",
            UNSUPPORTED_TYPES[number],
            f"the types that run are {names}",
            "take the model in another quantisation, such as Q4_K_M",
        )
    raise cursor.bad_field(f"type of {field}", number, "ggml has no type of that number")


def _place(
    cursor: _Cursor, headers: list[_TensorHeader], alignment: int, shard: int
) -> tuple[TensorInfo, ...]:
    """Offsets in the file; refuses duplicates, misalignment, overlap and data beyond the end.

    No overlap inside the file also means that the sizes sum to less than the file.
    """
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        field = f"tensor {quote(header.name)}"
        if header.name in tensors:
            raise cursor.bad_field(
                "tensor name", header.name, "a tensor of that name was there before"
            )
        if header.offset % alignment:
            limit = f"it must be a multiple of general.alignment = {alignment}"
            raise cursor.bad_field(f"offset of {field}", header.offset, limit)
        offset = data_start + header.offset
        tensors[header.name] = TensorInfo(
            header.name, header.dtype, header.shape, header.num_bytes, shard, offset
        )
    last = max(tensors.values(), key=lambda info: info.offset + info.num_bytes, default=None)
    if last is not None and last.offset + last.num_bytes > cursor.end:
        end = last.offset + last.num_bytes
        limit = f"the file has {cursor.end} bytes: {end - cursor.end} bytes are missing"
        raise cursor.bad_field(f"end of tensor {quote(last.name)}, in bytes,", end, limit, _CUT_OFF)
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            raise cursor.bad_field(
                f"offset of tensor {quote(after.name)}",
                after.offset - data_start,
                f"tensor {quote(before.name)} ends at "
                f"{before.offset + before.num_bytes - data_start}: they overlap",
            )
    return tuple(tensors.values())
