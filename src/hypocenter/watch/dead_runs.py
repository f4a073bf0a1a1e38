"""Finds the run folders of processes that died or failed with nobody watching, by their headers.

Every command asks this, so it loads next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hypocenter.base.errors import UsageError
from hypocenter.base.own_folder import is_ours, own_folder
from hypocenter.record import ring
from hypocenter.settings.cache_folder import make_private

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
    if not is_ours(base):
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
    if not is_ours(base):
        raise UsageError(
            f"{base} is not this user's alone, but what runs record is private; chmod 700 it, or "
            "set HYPO_RUN_DIR to a folder of yours"
        )
    with own_folder(_WATCHED, base) as folder:
        yield folder


def keep_runs(folder: Path) -> Path | None:
    """Move the run folders out of a folder of `watched_runs`, which will be removed.

    They lie beside it then, as those of runs that nobody watched. Returns the one that was begun
    last, None where there is none. Raises OSError.
    """
    kept = [runs.rename(folder.parent / runs.name) for runs in ring.run_folders(folder)]
    return kept[0] if kept else None


def is_watched(base: Path) -> bool:
    """Whether this process was started by the doctor, who will look at what it leaves."""
    return base.name.startswith(_WATCHED)
