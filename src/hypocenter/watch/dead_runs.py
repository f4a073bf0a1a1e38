"""Finds the run folders of processes that died or failed with nobody watching, by their headers.

Every command asks this, so it loads next to nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hypocenter.base.errors import UsageError
from hypocenter.record import ring
from hypocenter.settings.cache_folder import make_private

#: Run folders that are looked into: a command may start a few processes, and never so many.
MAX_FOLDERS = 32
#: A file in a run folder whose death has been told of, and one that names the bundle made of it.
TOLD, BUNDLED = "told", "bundle"
#: Begins the name of a folder in which a watched command's processes have their run folders.
_WATCHED = "doctor-"
#: Is held as long as the process lives whose folder it is; before that a dot begins the name.
_LOCK = "lock"
_MAKING_SECONDS = 60


class DeadRun(msgspec.Struct, frozen=True):
    """A run that ended badly: its folder, its process, and when it last wrote to its log."""

    folder: Path
    pid: int
    seconds: float

    @property
    def when(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.seconds))


def dead_runs(base: Path) -> list[DeadRun]:
    """Runs below `base` whose process is gone and which did not end well; the latest first.

    Those that somebody ended on purpose are none.
    """
    found: list[DeadRun] = []
    if not _is_ours(base):
        return found
    for folder in ring.run_folders(base)[:MAX_FOLDERS]:
        beat = ring.read_heartbeat(folder)
        if beat is None or beat.is_clean or ring.is_alive(folder) or ring.was_by_hand(folder):
            continue
        with contextlib.suppress(OSError):
            found.append(DeadRun(folder, beat.pid, os.stat(folder / "static").st_mtime))
    return found


def notice(base: Path) -> str | None:
    """A sentence about the latest run that died, once for each; never raises OSError."""
    with contextlib.suppress(OSError):
        for dead in dead_runs(base)[:1]:
            if tell(dead.folder):
                return (
                    f"the previous run (pid {dead.pid}, {dead.when}) died; see `hypo doctor --last`"
                )
    return None


def tell(folder: Path) -> bool:
    """Note that a person has been told of this run; False when that was so before."""
    try:
        os.close(os.open(folder / TOLD, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def watched_runs(base: Path) -> Iterator[Path]:
    """A folder of its own for the run folders of a command; removed at the end.

    Raises UsageError where others may write to `base`, OSError when it cannot be made.
    """
    make_private(base)
    if not _is_ours(base):
        raise UsageError(
            f"{base} is not this user's alone, but what runs record is private; chmod 700 it, or "
            "set HYPO_RUN_DIR to a folder of yours"
        )
    with locked_folder(base, _WATCHED) as folder:
        yield folder


@contextlib.contextmanager
def locked_folder(base: Path, prefix: str) -> Iterator[Path]:
    """A folder below `base` whose name begins so, for this user alone; removed at the end.

    A process that is killed cannot remove it: whoever makes the next one removes those whose
    process is gone. Raises OSError when it cannot be made.
    """
    for left in (*base.glob(f"{prefix}*"), *base.glob(f".{prefix}*")):
        if _is_ours(left) and not _is_locked(left):
            shutil.rmtree(left, ignore_errors=True)
    # Locked before it has its name: whoever sees it without a lock may take it for a leftover.
    begun = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=base))
    lock = os.open(begun / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = begun.rename(base / begun.name.removeprefix("."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def keep_runs(folder: Path) -> Path | None:
    """Move the run folders out of a folder of `watched_runs`, which will be removed.

    They lie beside it then, as those of runs that nobody watched. Returns the one that was begun
    last, None where there is none. Raises OSError.
    """
    kept = [runs.rename(folder.parent / runs.name) for runs in ring.run_folders(folder)]
    return kept[0] if kept else None


def _is_locked(folder: Path) -> bool:
    """Whether the process lives whose folder this is, in a container of any sort.

    No process number tells: another container has other ones, and shares the folder.
    """
    try:
        file = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        # One that is being made has no lock yet, for a moment.
        with contextlib.suppress(OSError):
            return time.time() - folder.stat().st_mtime < _MAKING_SECONDS
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def is_watched(base: Path) -> bool:
    """Whether this process was started by the doctor, who will look at what it leaves."""
    return base.name.startswith(_WATCHED)


def _is_ours(base: Path) -> bool:
    """Whether nobody else can have put anything there."""
    try:
        found = base.lstat()
    except OSError:
        return False
    is_private = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return stat.S_ISDIR(found.st_mode) and is_private
