"""The bound of a folder of KV blocks, which holds for all processes that write there.

A file `kv-room` there has the number of bytes that all others take. Its lock is held while
one is written: processes write in turn. What is removed elsewhere makes that number too high, which
is put right when the bound is reached. What a process left unfinished that died is removed then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

#: How files of blocks end, and what others may lie beside: the user may have chosen any folder.
SUFFIX = ".kv"
_FOLDER, _UNFINISHED = re.compile(r"[0-9a-f]{32}"), re.compile(r"\.[0-9a-f]{16}")
_BLOCK = re.compile(rf".*\{SUFFIX}")
_NAME = "kv-room"
_COUNT = struct.Struct("<Q")
#: One in so many parts of the bound is freed at once.
_PARTS = 16


class DiskRoom:
    """Keeps files of blocks in the folders of `root`, and what is unfinished there, within
    `max_bytes`. The one that was used longest ago goes first. Raises OSError."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._has_counted = False

    @contextlib.contextmanager
    def reserve(self, num_bytes: int) -> Iterator[bool]:
        """Whether there is room for a file of so many bytes, which is written within.

        Waits for as long as another process is within, be it stopped there.
        """
        if num_bytes > self._max_bytes:
            yield False
            return
        with self._lock() as file:
            total = _read_total(file) if self._has_counted else None
            if total is None or total + num_bytes > self._max_bytes:
                total = self._make_room(self._max_bytes - num_bytes)
                self._has_counted = True
            has_room = total + num_bytes <= self._max_bytes
            _write_total(file, total + num_bytes if has_room else total)
            yield has_room

    @contextlib.contextmanager
    def _lock(self) -> Iterator[int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._root / _NAME, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield file
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it, too
        finally:
            os.close(file)

    def _make_room(self, most: int) -> int:
        """Where more than `most` bytes are there, remove the files used longest ago, and some more,
        so that it is not done again for the next block. Returns how many bytes are left."""
        for unfinished in _paths_below(self._root, _UNFINISHED):
            with contextlib.suppress(OSError):
                os.unlink(unfinished)  # nobody else writes now
        files = sorted(_files_below(self._root))
        total = sum(num_bytes for _, num_bytes, _ in files)
        if total <= most:
            return total
        for _, num_bytes, path in files:
            if total <= most - most // _PARTS:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= num_bytes
        return total


def _read_total(file: int) -> int | None:
    read = os.pread(file, _COUNT.size + 1, 0)
    return int(_COUNT.unpack(read)[0]) if len(read) == _COUNT.size else None


def _write_total(file: int, num_bytes: int) -> None:
    os.pwrite(file, _COUNT.pack(num_bytes), 0)


def _paths_below(root: Path, names: re.Pattern[str]) -> Iterator[str]:
    """Paths of what has such a name in a folder of a fingerprint."""
    for folder in os.scandir(root):
        if _FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
            for file in os.scandir(folder.path):
                if names.fullmatch(file.name):
                    yield file.path


def _files_below(root: Path) -> list[tuple[float, int, str]]:
    """When each file of a block was used last, its size and its path."""
    found = []
    for path in _paths_below(root, _BLOCK):
        with contextlib.suppress(OSError):  # another process found it damaged
            status = os.lstat(path)
            found.append((status.st_mtime, status.st_size, path))
    return found
