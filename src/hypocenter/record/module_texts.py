"""The texts of the engine's own Python, on which answers depend beside the texts of its kernels.

A run writes digests down. Whoever collects its record reads the files whose digests are still so.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hypocenter.base import package
from hypocenter.record.gap import Gap

#: The rooms whose Python decides what a run answers, and files beside them.
ROOMS = (
    *("engine", "model", "device", "kernels", "contracts", "conversation", "worker"),
    *("settings", "wire", "base"),
)
#: Of one file, and of so many files, no more is read.
_MAX_BYTES, _MAX_FILES = 1 << 20, 2000


class ModuleDigests(msgspec.Struct, frozen=True, kw_only=True):
    """The sha256 of each module's file by its path below `folder`, in which the package lies."""

    folder: str
    digests: dict[str, str]


class ModuleText(msgspec.Struct, frozen=True, kw_only=True):
    """A module's file: its path below the package, the sha256 of its bytes, and these as text.

    `text` is empty where the file had changed before somebody read it.
    """

    file: str
    digest: str
    text: str = ""


def digests_of_modules() -> ModuleDigests:
    """Those of this package's files, which takes some milliseconds. Raises OSError."""
    found = {
        path.relative_to(package.FOLDER).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in _files()
    }
    return ModuleDigests(folder=str(package.FOLDER), digests=found)


def _files() -> Iterator[Path]:
    yield from sorted(package.FOLDER.glob("*.py"))
    for room in ROOMS:
        yield from package.module_files(room)


def read_texts(recorded: ModuleDigests | None) -> tuple[tuple[ModuleText, ...], list[Gap]]:
    """The modules of a run, with the text of each file that is still as it was then."""
    if recorded is None:
        return (), []
    found, num_changed = [], 0
    for file, digest in list(recorded.digests.items())[:_MAX_FILES]:
        data = _read(os.path.join(recorded.folder, file))
        is_same = data is not None and hashlib.sha256(data).hexdigest() == digest
        num_changed += not is_same
        text = data.decode(errors="replace") if data is not None and is_same else ""
        found.append(ModuleText(file=file, digest=digest, text=text))
    if not num_changed:
        return tuple(found), []
    what = f"the texts of {num_changed} of the engine's modules"
    return tuple(found), [Gap.not_recorded(what, "their files have changed since the run began")]


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return None
