"""Folders of a cache, entered one by one and never through a link.

A cache may be shared, and what lies in it may have been put there by others: a link that leads
elsewhere is neither written nor removed through. The cache's own folder may be a link; its user
named it. Each call below gets a descriptor of a folder, so nobody can exchange it in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from hypocenter.base.errors import HubError

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
#: Of a commit, an address or a version.
_MAX_TEXT_BYTES = 1 << 16
#: What the kernel says of a link where a folder or a file is wanted, and of a file for a folder.
_NO_FOLDER = (errno.ELOOP, errno.ENOTDIR)


class ThroughLink(HubError):
    """Something of a cache is a link, or no folder, or no file, where one of these must be."""

    def __init__(self, path: Path, wanted: str) -> None:
        self.path = path
        super().__init__(
            f"{path} is a link or no {wanted}; nothing is written or removed through it",
            "remove it, or name another cache by HF_HUB_CACHE",
        )


@contextlib.contextmanager
def open_folder(
    cache: Path, parts: Sequence[str], *, makes: bool = False, mode: int = 0o777
) -> Iterator[int]:
    """A descriptor of the folder `parts` below `cache`; with `makes` those that lack are made.

    Raises ThroughLink when one of them is no folder, and OSError.
    """
    if makes:
        cache.mkdir(parents=True, exist_ok=True)
    folder = os.open(cache, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        path = cache
        for part in parts:
            path /= part
            if part in ("", ".", "..") or "/" in part:
                raise ThroughLink(path, "folder")
            inner = _enter(folder, part, path, mode if makes else None)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _enter(folder: int, part: str, path: Path, mode: int | None) -> int:
    if mode is not None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, mode, dir_fd=folder)
    try:
        return os.open(part, _OPEN | os.O_DIRECTORY, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_FOLDER:
            raise ThroughLink(path, "folder") from error
        error.filename = str(path)
        raise


def open_file(folder: int, path: Path) -> int:
    """A descriptor to read and write the file of `path` in `folder`, made when it is missing.

    Raises ThroughLink for anything else than a file with this one name, and OSError.
    """
    try:
        file = os.open(path.name, _OPEN | os.O_RDWR | os.O_CREAT, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ThroughLink(path, "file") from error
        error.filename = str(path)
        raise
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(file)
        raise ThroughLink(path, "file of its own")
    return file


def read_text(path: Path | str, folder: int | None = None) -> str:
    """A short file of the cache; empty where there is none, or something else than a file."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        # Of a pipe that somebody put there nothing ever comes.
        file = os.open(path, os.O_CLOEXEC | os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as stream:
            if stat.S_ISREG(os.fstat(file).st_mode):
                return stream.read(_MAX_TEXT_BYTES).decode()
    return ""


def put_text(folder: int, name: str, text: str) -> None:
    """Write a short file as a whole, in the place of whatever had its name, unless it is so."""
    if read_text(name, folder) == text:
        return  # a cache may be for reading only
    other = _other_name()
    file = os.open(other, _OPEN | os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
    _put(folder, other, name)


def put_link(folder: int, name: str, target: str) -> None:
    """Make a link, in the place of whatever had its name."""
    with contextlib.suppress(OSError):
        if os.readlink(name, dir_fd=folder) == target:
            return
    other = _other_name()
    os.symlink(target, other, dir_fd=folder)
    _put(folder, other, name)


def size_of(folder: int, name: str) -> int | None:
    """Bytes of the file `name`; None when there is none. Of a link those of what it leads to."""
    with contextlib.suppress(OSError):
        found = os.stat(name, dir_fd=folder)
        if stat.S_ISREG(found.st_mode):
            return found.st_size
    return None


def _other_name() -> str:
    return f".hypo-{secrets.token_hex(8)}"


def _put(folder: int, other: str, name: str) -> None:
    try:
        os.rename(other, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(other, dir_fd=folder)
        raise
