"""Where the packed weights of a file lie in lent memory, kept on disk from one start to the next.

Whoever knows that beforehand can take the memory and tell others of it before anything is read. A
layout only says what to expect: it is compared with what was packed, and one that cannot be read or
written costs time alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from hypocenter.settings.cache_folder import private_folder
from hypocenter.wire.messages import SharedWeight

_log = logging.getLogger("hypocenter.engine")
_FOLDER = "layouts"
#: Goes up when the same file gives another layout.
_VERSION = 1
#: Of a file, far beyond any model's; and how many are kept, the oldest of which go first.
_MAX_BYTES, _MAX_FILES = 64 << 20, 64


class WeightLayout(msgspec.Struct, frozen=True):
    """The sizes of the pieces of memory, and the weights in them by name and number of part."""

    piece_bytes: tuple[int, ...]
    weights: dict[str, SharedWeight]


def read_layout(stamps: str) -> WeightLayout | None:
    """What `write_layout` kept for a file, or a part of it, of these stamps; None: nothing."""
    if (path := _path(stamps)) is None:
        return None
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=WeightLayout)
    except (OSError, msgspec.DecodeError):
        return None


def write_layout(stamps: str, layout: WeightLayout) -> None:
    """Keep a layout for the next start."""
    if (path := _path(stamps)) is None:
        return
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(layout))
        os.replace(file.name, path)
        by_age = sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime)
        for old in by_age[:-_MAX_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        _log.info("the next start waits for the weights: %s: %s", path, error.strerror)


def forget_layout(stamps: str) -> None:
    """Nobody is to expect it any more."""
    if (path := _path(stamps)) is not None:
        path.unlink(missing_ok=True)


def _path(stamps: str) -> Path | None:
    folder, _ = private_folder(_FOLDER)
    if folder is None:
        return None
    name = hashlib.blake2b(repr((_VERSION, stamps)).encode(), digest_size=16).hexdigest()
    return folder / f"{name}.json"
