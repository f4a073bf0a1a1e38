"""Finds the run folders of processes that died or failed with nobody watching, by their headers.

Every command asks this, so it loads next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hypocenter.record import ring

#: Run folders that are looked into: a command may start a few processes, and never so many.
MAX_FOLDERS = 32
#: A file in a run folder whose death has been told of, and one that names the bundle made of it.
TOLD, BUNDLED = "told", "bundle"
#: Begins the name of a folder in which a watched command's processes have their run folders.
_WATCHED = "doctor-"


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

    Raises OSError when it cannot be made.
    """
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(base):
        raise PermissionError(
            1, "is open to others; set HYPO_RUN_DIR to a folder of yours", str(base)
        )
    for left in base.glob(f"{_WATCHED}*"):
        pid = left.name.removeprefix(_WATCHED)
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = base / f"{_WATCHED}{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
