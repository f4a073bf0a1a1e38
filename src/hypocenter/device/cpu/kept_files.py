"""Small files of the cache that hold machine code and what is known of it: whole, or not there.

Each begins with a digest of its name and the rest, so one that was cut, changed or exchanged counts
as missing. The folder is private (`settings/cache_folder.py`): code that is run comes from nobody
else.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import tempfile
from functools import cache
from pathlib import Path

from hypocenter.settings.cache_folder import private_folder

_log = logging.getLogger("hypocenter.cpu")
_FOLDER = "linked"
_DIGEST_BYTES = 16
_MAX_BYTES = 64 << 20


def read(name: str) -> bytes | None:
    """What `write` was given; None where there is no such file, or not as it was written."""
    folder = _folder()
    if folder is None:
        return None
    try:
        with open(folder / name, "rb", opener=_open_own) as file:
            data = file.read(_MAX_BYTES)
    except OSError:
        return None
    kept, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return body if kept == _digest(name, body) else None


def write(name: str, body: bytes) -> None:
    """Keep `body` under a name; without a folder, or room in it, that is left undone."""
    folder = _folder()
    if folder is None:
        return
    try:
        # Under a name of its own first: who reads meanwhile finds all of it or nothing.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-", delete=False) as file:
            try:
                file.write(_digest(name, body) + body)
                file.flush()
                os.replace(file.name, folder / name)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        _log.info("linked code is not kept in %s: %s", folder, error.strerror or error)


def cache_problem() -> str:
    """Why compiled kernels are not kept on disk; empty when they are."""
    return private_folder("kernels")[1]


def _open_own(path: str, flags: int) -> int:
    """Raises OSError for a link, and for a file that another user has, or may have, written: it may
    be there since the folder was open to all."""
    opened = os.open(path, flags | os.O_NOFOLLOW)
    found = os.fstat(opened)
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        os.close(opened)
        raise PermissionError(errno.EPERM, "others may have written it", path)
    return opened


@cache
def _folder() -> Path | None:
    return private_folder(_FOLDER)[0]


def _digest(name: str, body: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + body).digest()[:_DIGEST_BYTES]
