"""Writes a GGUF file: metadata of another file as its bytes are, new values, tensors as they come.

The file is one of version 3, and is named as was asked only when it is whole.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.parse import DEFAULT_ALIGNMENT
from hypocenter.model.gguf.values import NUMPY_TYPES, Entry, ValueType

_VERSION = 3
_MAX_BEGIN_BYTES = 128
#: A new value: a text, or a whole number, which is written as u32.
NewValue = str | int


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that will be written. `shape` is row-major, as in `TensorInfo`."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        num_elements = 1
        for size in self.shape:
            num_elements *= size
        return self.dtype.num_bytes(num_elements)


def head_of(
    source: GGUFFile,
    tensors: Sequence[PlannedTensor],
    new: Mapping[str, NewValue],
    dropped: Sequence[str],
) -> bytes:
    """All that lies before the data: metadata of `source` without those `dropped`, then those that
    are `new`, and where each tensor will lie. Ends where the data begins."""
    kept = [key for key in source.metadata if key not in new and key not in dropped]
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(kept) + len(new))]
    data = source.shard_bytes(0)
    for key in kept:
        parts += (_text(key), _entry(data, source.metadata.entry(key)))
    for key, value in new.items():
        parts += (_text(key), _new(value))
    alignment, offset = alignment_of(source), 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        parts.append(_text(tensor.name))
        parts.append(struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        parts.append(struct.pack("<IQ", tensor.dtype.ggml_id or 0, offset))
        offset += _pad(tensor.num_bytes, alignment)
    head = b"".join(parts)
    return head.ljust(_pad(len(head), alignment), b"\0")


def alignment_of(source: GGUFFile) -> int:
    """What offsets of tensors are multiples of."""
    return source.integer("general.alignment", DEFAULT_ALIGNMENT, low=8)


def file_bytes(head: bytes, tensors: Sequence[PlannedTensor], alignment: int) -> int:
    """The size of the whole file."""
    return len(head) + sum(_pad(tensor.num_bytes, alignment) for tensor in tensors)


class TensorWriter:
    """Writes the bytes of one tensor after the other."""

    def __init__(self, file: BinaryIO, alignment: int) -> None:
        self._file, self._alignment = file, alignment

    def write(self, data: Array) -> None:
        """Bytes of the present tensor, uint8 and contiguous."""
        self._file.write(data.data)

    def end_tensor(self) -> None:
        """Zeros up to where the next one begins."""
        position = self._file.tell()
        self._file.write(bytes(_pad(position, self._alignment) - position))


@contextmanager
def new_file(path: Path, head: bytes, alignment: int) -> Iterator[TensorWriter]:
    """A file that appears at `path` when the block ends well; else nothing is left of it.

    Raises OSError that names the file, also where another has made it meanwhile.
    """
    # A name has room for 255 bytes: the partial file's must not be what is too long.
    begin = os.fsdecode(os.fsencode(path.name)[:_MAX_BEGIN_BYTES])
    partial = path.with_name(f".{begin}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            file.write(head)
            yield TensorWriter(file, alignment)
            file.flush()
            os.fsync(file.fileno())
        _appear(partial, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def _appear(partial: Path, path: Path) -> None:
    """Name `partial` as `path`. Raises FileExistsError, and leaves what is there alone."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # some file systems have no links: the name is taken first, by an empty file
        path.open("xb").close()
        os.replace(partial, path)


def _pad(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _new(value: NewValue) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", ValueType.STRING) + _text(value)
    return struct.pack("<II", ValueType.U32, value)


def _entry(data: Array, entry: Entry) -> bytes:
    """A value with its type before it, as the file has it."""
    if entry.is_array:
        head = struct.pack("<IQ", entry.type, entry.size)
        kind = struct.pack("<I", ValueType.ARRAY)
        return kind + head + _items(data, entry)
    kind = struct.pack("<I", entry.type)
    if entry.type is ValueType.STRING:
        raw = data[entry.position : entry.position + entry.size].tobytes()
        return kind + struct.pack("<Q", len(raw)) + raw
    end = entry.position + NUMPY_TYPES[entry.type].itemsize
    return kind + data[entry.position : end].tobytes()


def _items(data: Array, entry: Entry) -> bytes:
    if entry.type is ValueType.ARRAY:
        # Each child is an array, whose own type was told by this one.
        return b"".join(_entry(data, child)[4:] for child in entry.children)
    if entry.starts is not None:
        # String i lies at starts[i]; eight bytes before it have its length.
        return data[entry.position : entry.starts[-1] - 8].tobytes()
    return data[entry.position :][: entry.size * NUMPY_TYPES[entry.type].itemsize].tobytes()
