"""Opens GGUF model files, split ones too, and hands out metadata and tensors; parsing is elsewhere.

A file that shrinks while it is open is out of scope: the operating system then kills the reader.
"""

from __future__ import annotations

import difflib
import itertools
import math
import mmap
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import EllipsisType, MappingProxyType, TracebackType
from typing import TypeVar

import numpy as np

from hypocenter.base.errors import MISSING, BadModelFile, UsageError, Words
from hypocenter.model.gguf.overrides import OverriddenMetadata, Override
from hypocenter.model.gguf.parse import Shard, parse_shard
from hypocenter.model.gguf.values import Metadata, StringArray, TensorInfo, ValueType

__all__ = ["GGUFFile", "StringArray", "TensorInfo", "open_gguf"]

MAX_SHARDS = 512
MAX_TEXT_BYTES = 1 << 20
MAX_COUNT = (1 << 31) - 1

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.S)
_D = TypeVar("_D")


def open_gguf(path: str | Path, overrides: Mapping[str, Override] | None = None) -> GGUFFile:
    """Open a GGUF model; of a split one, give the first file (`NAME-00001-of-0000N.gguf`).

    `overrides` are metadata in place of the file's own, or beside it.
    Raises UsageError when nothing exists at `path`, BadModelFile for whatever exists and is not a
    whole, well-formed model, UnsupportedModel for a tensor type that we cannot run.
    """
    path = Path(path)
    first = _open_shard(path, 0)
    shards = (first, *_further_shards(first))
    names: set[str] = set()
    for shard in shards:
        for info in shard.tensors:
            if info.name in names:
                limit = "a shard before has a tensor of that name"
                raise BadModelFile(shard.path, "tensor name", info.name, limit)
            names.add(info.name)
    return GGUFFile(shards, overrides)


class GGUFFile:
    """An open model. Arrays and metadata that were handed out stay valid after `close`."""

    def __init__(
        self, shards: tuple[Shard, ...], overrides: Mapping[str, Override] | None = None
    ) -> None:
        self.path = shards[0].path
        self.version = shards[0].version
        self.shard_paths = tuple(shard.path for shard in shards)
        self._shards = shards
        self._overridden = OverriddenMetadata(shards[0].metadata, overrides) if overrides else None
        self._tensors = MappingProxyType(
            {info.name: info for shard in shards for info in shard.tensors}
        )

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. Its map goes with the last array that views it."""
        self._shards = ()

    @property
    def metadata(self) -> Metadata:
        """The first shard's key-value pairs, decoded when asked for, under those given over it."""
        return self._overridden or self._open()[0].metadata

    def require_overrides_read(self) -> None:
        """Raises UsageError for metadata given over the file's that nobody asked for."""
        if self._overridden is not None:
            self._overridden.require_read()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name, in the order of the file."""
        return self._tensors

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor: uint8 [num_bytes], read-only, a view of the mapped file.

        Raises BadModelFile when the model has no tensor of that name.
        """
        shards = self._open()
        info = self._tensors.get(name)
        if info is None:
            limit = f"the file has {len(self._tensors)} tensors and none of that name"
            raise self._bad_field("tensor", name, limit, _nearest(name, self._tensors))
        return np.frombuffer(shards[info.shard].buffer, np.uint8, info.num_bytes, info.offset)

    def let_go(self, name: str) -> None:
        """Take a tensor's pages out of this process's memory; reading brings them back."""
        info = self._tensors[name]
        first = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            num_bytes = info.offset + info.num_bytes - first
            self._open()[info.shard].buffer.madvise(mmap.MADV_DONTNEED, first, num_bytes)

    def let_go_of(self, view: np.ndarray) -> None:
        """Take the whole pages of a contiguous view of the mapped file out as well; of an array
        that is no such view nothing."""
        start = view.__array_interface__["data"][0]
        for shard in self._open():
            base = np.frombuffer(shard.buffer, np.uint8, 1).__array_interface__["data"][0]
            first = -(-(start - base) // mmap.PAGESIZE) * mmap.PAGESIZE
            num_bytes = (start - base + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
            is_in_it = base <= start and start + view.nbytes <= base + len(shard.buffer)
            if is_in_it and num_bytes > 0 and hasattr(mmap, "MADV_DONTNEED"):
                shard.buffer.madvise(mmap.MADV_DONTNEED, first, num_bytes)

    @property
    def stamps(self) -> tuple[tuple[int, ...], ...]:
        """The stamp of each file: device, inode, size in bytes, and when content and inode last
        changed, in ns since 1970. One that was written to has another stamp."""
        return tuple(shard.stamp for shard in self._open())

    def is_unchanged(self) -> bool:
        """Whether the files on disk are still those that were opened."""
        try:
            return all(_stamp(shard.path.stat()) == shard.stamp for shard in self._open())
        except OSError:
            return False

    def shard_bytes(self, shard: int) -> np.ndarray:
        """A whole file of the model: uint8 [num_bytes], read-only, a view of the mapped file."""
        return np.frombuffer(self._open()[shard].buffer, np.uint8)

    def integer(
        self, key: str, default: _D | EllipsisType = ..., *, low: int = 0, high: int = MAX_COUNT
    ) -> int | _D:
        """An integer from `low` to `high`, both included. Without `default` it is required.

        Raises BadModelFile when it is missing, of another type or outside.
        """
        if key not in self.metadata:
            return self._default(key, default)
        value = self.metadata[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(key, "one integer")
        if not low <= value <= high:
            raise BadModelFile.out_of_range(self.path, key, value, low, high)
        return value

    def number(self, key: str, default: _D | EllipsisType = ...) -> float | _D:
        """A finite number. Without `default` it is required; raises BadModelFile."""
        if key not in self.metadata:
            return self._default(key, default)
        value = self.metadata[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(key, "one number")
        if not math.isfinite(value):
            raise self._bad_field(key, value, "it must be finite")
        return float(value)

    def flag(self, key: str, default: _D | EllipsisType = ...) -> bool | _D:
        """True or False. Without `default` it is required; raises BadModelFile."""
        if key not in self.metadata:
            return self._default(key, default)
        value = self.metadata[key]
        if not isinstance(value, bool):
            raise self._wrong_type(key, "one flag")
        return value

    def text(
        self, key: str, default: _D | EllipsisType = ..., *, max_bytes: int = MAX_TEXT_BYTES
    ) -> str | _D:
        """One UTF-8 string of at most `max_bytes`. Without `default` it is required.

        Raises BadModelFile when it is missing, of another type, longer, or not UTF-8.
        """
        if key not in self.metadata:
            return self._default(key, default)
        entry = self.metadata.entry(key)
        if entry.is_array or entry.type is not ValueType.STRING:
            raise self._wrong_type(key, "one string")
        if entry.size > max_bytes:
            raise self._bad_field(f"length of {key}", entry.size, f"the limit is {max_bytes} bytes")
        raw = self.metadata.raw_text(key)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            bad = raw[error.start : error.start + 8]
            raise self._bad_field(
                key, bad, f"it must be UTF-8, also at byte {error.start}"
            ) from None

    def strings(self, key: str) -> StringArray:
        """An array of strings, decoded one by one; required. Raises BadModelFile.

        Their bytes may be anything: see `StringArray`.
        """
        if key not in self.metadata:
            return self._default(key, ...)
        value = self.metadata[key]
        if not isinstance(value, StringArray):
            raise self._wrong_type(key, "an array of strings")
        return value

    def numbers(self, key: str) -> np.ndarray:
        """An array of integers or floats, read-only, in the file's type; required.

        Raises BadModelFile.
        """
        if key not in self.metadata:
            return self._default(key, ...)
        value = self.metadata[key]
        if not isinstance(value, np.ndarray) or value.dtype == np.bool_:
            raise self._wrong_type(key, "an array of numbers")
        return value

    def _open(self) -> tuple[Shard, ...]:
        if not self._shards:
            raise UsageError(f"{self.path} is closed; read what you need before close()")
        return self._shards

    def _default(self, key: str, default: _D | EllipsisType) -> _D:
        if isinstance(default, EllipsisType):
            raise self._bad_field(key, MISSING, "the model needs it", _nearest(key, self.metadata))
        return default

    def _wrong_type(self, key: str, wanted: str) -> BadModelFile:
        return self._bad_field(f"type of {key}", self.metadata.kind(key), f"it must be {wanted}")

    def _bad_field(self, field: str, value: object, limit: str, way_out: str = "") -> BadModelFile:
        return BadModelFile(self.path, field, value, limit, way_out)


def require_file(path: Path) -> None:
    """Raises UsageError where nothing can be read as a file, with the nearest names."""
    os.close(_open_regular(path))


def _open_regular(path: Path) -> int:
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file{_did_you_mean(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise _unreadable(path, error) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise UsageError(f"{path} is {kind}, but a model must be a GGUF file")
    return descriptor


def _open_shard(path: Path, shard: int) -> Shard:
    descriptor = _open_regular(path)
    try:
        status = os.fstat(descriptor)
        if not status.st_size:
            limit = "a model has at least a header; the file is empty"
            raise BadModelFile(path, "file size in bytes", 0, limit, "download it again")
        buffer = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: emptied since the size was read
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return replace(parse_shard(path, buffer, shard), stamp=_stamp(status))


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """What is another one as soon as a file has other bytes; nobody can set the time of a change
    of the inode."""
    size = status.st_size
    return (status.st_dev, status.st_ino, size, status.st_mtime_ns, status.st_ctime_ns)


def _unreadable(path: Path, error: Exception) -> BadModelFile:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    way_out = "give read permission" if isinstance(error, PermissionError) else ""
    return BadModelFile(path, "path", Words(reason), "it must be readable", way_out)


def _did_you_mean(path: Path) -> str:
    try:
        with os.scandir(path.parent) as entries:
            near = _nearest(
                path.name, (name for e in entries if (name := e.name).endswith(".gguf"))
            )
    except OSError:
        return f", nor a folder {str(path.parent)!r} that can be listed"
    return f"; {near}" if near else ""


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, itertools.islice(names, 4096), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def _further_shards(first: Shard) -> tuple[Shard, ...]:
    """Shards 2 to N of a split model, checked against what each says of itself.

    Names and keys are those of llama.cpp's `gguf-split`: files count from 1, `split.no` from 0, and
    `split.tensors.count` is the total of all files.
    """
    count = GGUFFile((first,)).integer("split.count", 1, high=MAX_SHARDS)
    if count <= 1:
        return ()
    _refuse_joined(first, count)
    paths = _shard_paths(first, count)
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        limit = f"{len(missing)} of {count} shards are missing in {str(first.path.parent)!r}"
        raise BadModelFile(first.path, "missing shard", missing[0], limit, "download it there")
    shards = [first, *(_open_shard(path, index) for index, path in enumerate(paths[1:], start=1))]
    for index, shard in enumerate(shards):
        _expect(shard, "split.no", index)
        _expect(shard, "split.count", count)
    num_tensors = sum(len(shard.tensors) for shard in shards)
    for shard in shards:
        _expect(shard, "split.tensors.count", num_tensors)
    return tuple(shards[1:])


def _refuse_joined(first: Shard, count: int) -> None:
    """Raises BadModelFile where another GGUF file begins behind the last tensor of this one."""
    head = b"GGUF" + first.version.to_bytes(4, "little")
    begin, end = len(head), len(first.buffer)
    if first.tensors:
        begin = max(info.offset + info.num_bytes for info in first.tensors)
        end = begin + 2 * first.alignment
    if first.buffer.find(head, begin, end) >= 0:
        what = Words(f"parts of a split model behind one another, of which it has {count}")
        limit = "each has a head of its own, so they are not joined by cat"
        way_out = "put them beside each other under their own names and open the first"
        raise BadModelFile(first.path, "the file", what, limit, way_out)


def _expect(shard: Shard, key: str, wanted: int) -> None:
    found = GGUFFile((shard,)).integer(key, low=-MAX_COUNT, high=MAX_COUNT)
    if found != wanted:
        limit = f"by the names and contents of the shards it must be {wanted}"
        raise BadModelFile(shard.path, key, found, limit, "take all shards from one model")


def _shard_paths(first: Shard, count: int) -> list[Path]:
    name = _SHARD_NAME.fullmatch(first.path.name)
    stem = name["stem"] if name else "NAME"
    names = [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    number = GGUFFile((first,)).integer("split.no", high=count - 1)
    if number:
        limit = "a split model is opened by its first file"
        raise BadModelFile(first.path, "split.no", number, limit, f"open {names[0]!r}")
    if first.path.name != names[0]:
        limit = f"the first of {count} shards must be named {names[0]!r}"
        raise BadModelFile(first.path, "file name", first.path.name, limit, "rename it")
    return [first.path.with_name(name) for name in names]
