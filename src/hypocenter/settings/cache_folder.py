"""Folders of the cache: private to the user, so that what is found there can be trusted.

numba's machine code is a pickle, and a key must stay one's own: neither may lie where another user
can write, nor where he can put another folder in the place of ours.
"""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path

from hypocenter.settings.environment import Environment


@cache
def private_folder(name: str) -> tuple[Path | None, str]:
    """The folder `name` of the cache, made when it is missing, or None and why there is none."""
    chosen = Environment.read().cache_dir
    try:
        make_private(chosen)
        # Without links: each folder on the way is one that was looked at.
        real = chosen.resolve(strict=True)
        for above in (real, *real.parents):
            if problem := _problem(above):
                return None, problem
        folder = real / name
        make_private(folder)
        for private in (folder, *filter(Path.is_dir, folder.iterdir())):
            private.chmod(0o700)
            found = private.stat()
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                return None, f"{private} is not private to this user"
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return None, f"{chosen / name}: {error.strerror or error}"
    return folder, ""


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing; `parents=True` would leave them open."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(exist_ok=True, mode=0o700)


def folder_bytes(folder: Path) -> int:
    """The bytes of all files below a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def forget_blocks_of(folder: Path, pid: int) -> None:
    """Remove what a process wrote into a disk cache of KV blocks (`engine/disk_blocks.py`)."""
    for path in folder.glob(f"*/*.{pid}.kv"):
        path.unlink(missing_ok=True)


def changeable_by_others(folder: Path) -> str:
    """Why others could change what lies in `folder`, or put another in its place; empty when none
    can. It need not be there yet; a link there may lead anywhere, so it is a reason.

    Raises OSError where nothing of the kind can be looked at.
    """
    if folder.is_symlink():
        return f"{folder} is a link"
    there = next(path for path in (folder, *folder.parents) if path.exists())
    real = there.resolve(strict=True)
    for above in (real, *real.parents):
        if problem := _problem(above):
            return problem
    if there == folder:
        found = real.stat()
        if found.st_uid != os.getuid():
            return f"{folder} belongs to another user"
        # In a folder with the sticky bit what is ours is safe; this one others may add to.
        if found.st_mode & 0o022:
            return f"others may write to {folder}; chmod go-w it"
    return ""


def _problem(folder: Path) -> str:
    """Why another user could exchange what lies in `folder`; empty when none can."""
    found = folder.stat()
    if found.st_uid not in (0, os.getuid()):
        return f"{folder} belongs to another user"
    # With the sticky bit, as in /tmp, others may add to a folder but not replace what is ours.
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        return f"others may write to {folder}; chmod go-w it"
    return ""
