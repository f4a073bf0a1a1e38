"""Files that a verb writes beside its output: new ones, for their owner alone.

What may come out of a bundle is nobody else's to read, and no file that is there is overwritten.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypocenter.base.errors import UsageError


def check_new_file(option: str, file: str) -> None:
    """Before a long command runs: raises UsageError where `file` of `option` cannot be made.

    The folder must be there: one that was mistyped is not made.
    """
    path = Path(file)
    if os.path.lexists(path):
        raise UsageError(f"{option} {file} is there already; name another file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {file}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{option} {file}: the folder {path.parent} cannot be written to")


def write_new_file(file: str, data: bytes) -> None:
    """Write `data` as a new file that only its owner can read.

    Raises OSError that names the file: also where it has come to be there meanwhile.
    """
    try:
        with open(file, "xb", opener=_private) as new:
            new.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
