"""Packed weights of a model on disk: what one start has packed, the next one maps.

`weights/` of the cache has a file for each model and layout, `DIGEST-LAYOUT.packed`: the arrays,
each from the start of a page, then an index as JSON, its length and the magic number. DIGEST is of
the model file's bytes. Which bytes a file has is known from its stamp (device, inode, size and the
times of its last change), so they are read whole only when that is new. What is mapped is checked
against its own digest once after each start of the machine: a crash may lose what was written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.cpu.sources import source_hash
from hypocenter.kernels.weights import packing
from hypocenter.kernels.weights.row_groups import side_by_side
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.settings.cache_folder import private_folder
from hypocenter.settings.environment import Environment

_log = logging.getLogger("hypocenter.weights")
FOLDER = "weights"
_MAGIC = b"hypopack"
_TAIL = struct.Struct("<Q8s")
_MAX_INDEX_BYTES = 64 << 20
_DIGEST_BYTES = 16
#: What a thread digests at a time.
_CHUNK_BYTES = 8 << 20
#: Files and models that are remembered, each the last to be used.
_MAX_REMEMBERED = 256
#: A file that changed less than so long ago may change again without a new stamp.
_SETTLED_NS = 2_000_000_000
#: Of the free room of the disk, what packed weights may take.
_SHARE_OF_DISK = 0.5
#: Less than that is packed as fast as it is found.
_WORTH_BYTES = 64 << 20


class _Place(msgspec.Struct):
    """Where the bytes of an array are in the file."""

    offset: int
    num_bytes: int


class _Index(msgspec.Struct):
    arrays: dict[str, _Place]
    digest: str


class _Remembered(msgspec.Struct):
    """`digests`: of model files, by their stamps. `checked`: by packed file, in which run of the
    machine its bytes were found to be those that were written."""

    digests: dict[str, str] = {}
    checked: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Packing:
    """How the CPU has matrices.

    `in_bf16`: those of F16 and BF16 are rounded for products in bf16; a token table that is none of
    them is not. `joins_gates`: a feed-forward's gate and up are one weight where they can be; else
    something may be added to each. `num_host_layers`: where a GPU has the model, the CPU has the
    experts of so many layers, from the first on.
    """

    in_bf16: bool = False
    joins_gates: bool = True
    num_host_layers: int = 0


USUAL = Packing()


class PackedWeights:
    """The packed arrays of one model: those on disk, or those that are to be kept there.

    `find` gives an array that is there. When there are none `keep` takes each as it is made, and
    `finish` puts the file in its place; left without it, nothing stays. Nothing that goes wrong on
    disk stops a model from loading. On a GPU nothing is found, and nothing kept.
    """

    def __init__(
        self, file: GGUFFile, device: str, *, num_bytes: int, held: Packing = USUAL
    ) -> None:
        """`num_bytes`: what the packed weights will take."""
        self._map: dict[str, Array] = {}
        self._new: _NewFile | None = None
        #: Why they are not on disk for the next start; empty when they are, or will be.
        self.problem = ""
        if device != "cpu":
            self.problem = "a GPU's are not kept"
            return
        if num_bytes < _WORTH_BYTES:
            self.problem = f"less than {_WORTH_BYTES >> 20} MiB are packed as fast as found"
            return
        folder, self.problem = private_folder(FOLDER)
        if folder is None:
            return
        try:
            apart = "" if held.joins_gates else "-apart"
            name = f"{_content(file, folder)}-{_layout(in_bf16=held.in_bf16)}{apart}.packed"
            self._map = _open(folder, name)
            if not self._map:
                self.problem = _lack_of_room(folder, num_bytes)
            if not self._map and not self.problem:
                self._new = _NewFile(folder, name)
        except OSError as error:
            self._fail(folder, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._new is not None:
            self._new.give_up()
            self._new = None

    def find(self, key: str, shape: tuple[int, ...], dtype: Any) -> Array | None:
        """The array that was kept by this key, or None."""
        found = self._map.get(key)
        if found is None or found.nbytes != int(np.prod(shape)) * np.dtype(dtype).itemsize:
            return None
        array: Array = found.view(dtype).reshape(shape)
        return array

    def keep(self, key: str, parts: tuple[Any, ...]) -> None:
        """Put the one array of a packed weight on disk, when they are being kept."""
        self._try(lambda new: new.add(key, parts[0]))

    def finish(self) -> None:
        """All arrays were kept."""
        self._try(lambda new: new.finish())
        self._new = None

    def _try(self, what: Callable[[_NewFile], None]) -> None:
        if self._new is None:
            return
        try:
            what(self._new)
        except OSError as error:
            folder = self._new.path.parent
            self.__exit__()
            self._fail(folder, error)

    def _fail(self, folder: Path, error: OSError) -> None:
        self.problem = error.strerror or str(error)
        _log.warning("packed weights cannot be kept in %s: %s", folder, self.problem)


class _NewFile:
    """A file that is being written; it has its name when it is whole."""

    def __init__(self, folder: Path, name: str) -> None:
        _remove_leftovers(folder)
        self.path = folder / name
        descriptor, self._partial = tempfile.mkstemp(prefix="making-", dir=folder)
        self._file = os.fdopen(descriptor, "wb")
        fcntl.flock(self._file, fcntl.LOCK_EX)  # says that somebody is at it
        self._arrays: dict[str, _Place] = {}
        self._digests: list[bytes] = []

    def add(self, key: str, array: Array) -> None:
        raw = array.reshape(-1).view(np.uint8)
        offset = -(-self._file.tell() // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file.seek(offset)
        self._file.write(raw.data)
        self._arrays[key] = _Place(offset, raw.nbytes)
        self._digests.append(_digest(raw))

    def finish(self) -> None:
        digest = _digest_of_all(self._digests)
        index = msgspec.json.encode(_Index(self._arrays, digest))
        self._file.write(index + _TAIL.pack(len(index), _MAGIC))
        self._file.flush()
        folder, name = self.path.parent, self.path.name
        with _memory_of(folder) as remembered:
            _make_room(folder, self._file.tell(), self.path)
            os.replace(self._partial, self.path)
            remembered.checked[name] = _run_of_machine()
        self._file.close()

    def give_up(self) -> None:
        Path(self._partial).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what is still to be written may find the disk full
            self._file.close()


def _open(folder: Path, name: str) -> dict[str, Array]:
    """The arrays of a packed file, by key; empty when there is none that is whole."""
    path = folder / name
    try:
        with open(path, "rb") as file:
            index, buffer = _read(file)
    except FileNotFoundError:
        return {}
    except (ValueError, msgspec.MsgspecError) as error:
        _log.warning("%s is damaged (%s) and is made anew", path, error)
        return {}
    arrays = {
        key: np.frombuffer(buffer, np.uint8, place.num_bytes, place.offset)
        for key, place in index.arrays.items()
    }
    run = _run_of_machine()
    with _memory_of(folder) as remembered:
        is_checked = run and remembered.checked.get(name) == run
    if not is_checked:
        if _digest_of_all([_digest(array) for array in arrays.values()]) != index.digest:
            _log.warning("%s is damaged (other bytes than were written) and is made anew", path)
            return {}
        with _memory_of(folder) as remembered:
            remembered.checked[name] = run
    os.utime(path)  # those that were not used for longest go first
    return arrays


def _read(file: BinaryIO) -> tuple[_Index, mmap.mmap]:
    """Raises ValueError, OSError or MsgspecError for what is not whole."""
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes < _TAIL.size:
        raise ValueError("cut off")
    # A copy on write, since kernels are compiled for arrays that could be written to.
    buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    index_bytes, magic = _TAIL.unpack_from(buffer, num_bytes - _TAIL.size)
    start = num_bytes - _TAIL.size - index_bytes
    if magic != _MAGIC or start < 0 or index_bytes > _MAX_INDEX_BYTES:
        raise ValueError("cut off")
    if hasattr(mmap, "MADV_WILLNEED"):
        buffer.madvise(mmap.MADV_WILLNEED)
    index = msgspec.json.decode(buffer[start : start + index_bytes], type=_Index)
    for place in index.arrays.values():
        if place.offset < 0 or place.num_bytes < 0 or place.offset + place.num_bytes > start:
            raise ValueError("an array outside of the file")
    return index, buffer


def _content(file: GGUFFile, folder: Path) -> str:
    """Digest of the bytes of a model file, as hexadecimal digits."""
    stamp = json.dumps(file.stamps)
    with _memory_of(folder) as remembered:
        if known := remembered.digests.get(stamp):
            remembered.digests[stamp] = remembered.digests.pop(stamp)
            return known
    digest = _digest_of_all([_digest(file.shard_bytes(shard)) for shard in range(len(file.stamps))])
    newest = max(max(stamp[-2:]) for stamp in file.stamps)
    if file.is_unchanged() and time.time_ns() - newest > _SETTLED_NS:
        with _memory_of(folder) as remembered:
            remembered.digests[stamp] = digest
    return digest


@cache
def _layout(*, in_bf16: bool) -> str:
    """What the arrays' meaning hangs on besides the model: the code that packs."""
    return f"{source_hash(Path(packing.__file__))}{'-bf16' if in_bf16 else ''}"


def _digest(raw: Array) -> bytes:
    """The digest of bytes, uint8 [num_bytes]: that of the digests of its chunks."""
    chunks = [raw[start : start + _CHUNK_BYTES] for start in range(0, len(raw), _CHUNK_BYTES)]
    digests: dict[int, bytes] = {}

    def digest(part: tuple[int, Array]) -> None:
        index, chunk = part
        digests[index] = hashlib.blake2b(chunk.data, digest_size=_DIGEST_BYTES).digest()

    side_by_side(digest, enumerate(chunks))
    return b"".join(digests[index] for index in range(len(chunks)))


def _digest_of_all(digests: list[bytes]) -> str:
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for digest in digests:
        whole.update(struct.pack("<Q", len(digest)) + digest)
    return whole.hexdigest()


@contextlib.contextmanager
def _memory_of(folder: Path) -> Iterator[_Remembered]:
    """What is remembered of files, for one process at a time; what changed is written back."""
    path = folder / "remembered.json"
    with open(folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            remembered = msgspec.json.decode(path.read_bytes(), type=_Remembered)
        except (OSError, msgspec.MsgspecError):
            remembered = _Remembered()
        before = msgspec.json.encode(remembered)
        yield remembered
        for known in (remembered.digests, remembered.checked):
            for oldest in list(known)[:-_MAX_REMEMBERED]:
                del known[oldest]
        if (after := msgspec.json.encode(remembered)) != before:
            partial = path.with_suffix(".new")
            partial.write_bytes(after)
            partial.replace(path)


def _run_of_machine() -> str:
    """Changes when the machine starts anew; empty where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _lack_of_room(folder: Path, num_bytes: int) -> str:
    limit = Environment.read().packed_bytes
    free = int(shutil.disk_usage(folder).free * _SHARE_OF_DISK)
    if num_bytes > limit:
        return f"they take {num_bytes} bytes, and HYPO_PACKED_GIB allows {limit}"
    if num_bytes > free:
        return f"they take {num_bytes} bytes, and half of what the disk has free is {free}"
    return ""


def _make_room(folder: Path, num_bytes: int, path: Path) -> None:
    """Remove what was not used for longest until `num_bytes` more are allowed."""
    files = [(entry.stat().st_mtime_ns, entry) for entry in folder.glob("*.packed")]
    total = num_bytes + sum(entry.stat().st_size for _, entry in files if entry != path)
    for _, entry in sorted(files):
        if total <= Environment.read().packed_bytes:
            return
        if entry != path:
            total -= entry.stat().st_size
            entry.unlink()


def _remove_leftovers(folder: Path) -> None:
    """Files of processes that were killed while they wrote."""
    for path in folder.glob("making-*"):
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except OSError:
            continue  # somebody is at it, or it is gone
