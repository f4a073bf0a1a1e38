"""Folders that last as long as the process that made them, even where it is killed.

A killed process removes nothing: whoever makes the next folder of that prefix removes those whose
process is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

#: Is held as long as the process lives whose folder it is; before that a dot begins the name.
_LOCK = "lock"
_MAKING_SECONDS = 60
#: How `tempfile.mkdtemp` ends a name.
_RANDOM = re.compile("[a-z0-9_]{8}")


@contextlib.contextmanager
def own_folder(prefix: str, base: Path | None = None) -> Iterator[Path]:
    """A folder whose name begins so, for this user alone, below `base` or that of temporary files.

    It is removed at the end; what processes have left that were killed goes now. Raises OSError
    when it cannot be made.
    """
    base = base or Path(tempfile.gettempdir())
    for left in (*base.glob(f"{prefix}*"), *base.glob(f".{prefix}*")):
        if _is_named_by_us(left, prefix) and is_ours(left) and not _is_locked(left):
            shutil.rmtree(left, ignore_errors=True)
    # Locked before it has its name: whoever sees it without a lock may take it for a leftover.
    begun = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=base))
    # Over NFS what is open to be read alone cannot be locked for oneself.
    lock = os.open(begun / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    name = begun.name.removeprefix(".")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # without locks nobody could tell, so by this name it is no leftover
        name += "-unlocked"
    folder = begun.rename(base / name)
    maker = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == maker:  # and no child that was forked within
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def is_ours(folder: Path) -> bool:
    """Whether nobody else can have put anything there."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_private = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return stat.S_ISDIR(found.st_mode) and is_private


def _is_named_by_us(folder: Path, prefix: str) -> bool:
    """Whether `mkdtemp` may have made it: a person's folder whose name begins so has another mode,
    or goes on otherwise."""
    with contextlib.suppress(OSError):
        is_private = folder.lstat().st_mode & 0o777 == 0o700
        return is_private and bool(_RANDOM.fullmatch(folder.name.removeprefix(".")[len(prefix) :]))
    return False


def _is_locked(folder: Path) -> bool:
    """Whether the process lives whose folder this is, in a container of any sort.

    No process number tells: another container has other ones, and shares the folder.
    """
    with contextlib.suppress(OSError):
        # One that is being made has no lock yet, or does not hold it, for a moment.
        age = time.time() - folder.stat().st_mtime
        if folder.name.startswith(".") and age < _MAKING_SECONDS:
            return True
    try:
        file = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
