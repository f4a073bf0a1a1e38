"""Digests by which runs are compared, and from which nobody elsewhere reads what was digested.

A plain hash of a prompt is as good as the prompt to whoever can guess it: there are few passwords,
and a hash per token gives an answer away token by token. So they are keyed (BLAKE2's own key) with
a number of this user's cache folder. Bundles hold the digests and never the key.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import tempfile
from functools import cache
from typing import Any

import numpy as np

from hypocenter.settings.cache_folder import private_folder

_KEY_BYTES = 32
_DIGEST_BYTES = 32


class KeyedDigest:
    """A digest of what was added so far."""

    __slots__ = ("_hash",)

    def __init__(self, data: bytes = b"") -> None:
        self._hash = hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=_key())

    def add(self, data: bytes) -> None:
        self._hash.update(data)

    def short(self, num_bytes: int) -> bytes:
        """The beginning of the digest, which tells data of one process apart."""
        return self._hash.digest()[:num_bytes]

    def text(self) -> str:
        """The name of the key, a colon, and the digest, in hexadecimal."""
        return f"{_key_name()}:{self._hash.hexdigest()}"


def digest_of(*arrays: np.ndarray[Any, Any] | None) -> str:
    """The digest of arrays; empty where all are missing or have no elements."""
    held = [array for array in arrays if array is not None and array.size]
    return KeyedDigest(b"".join(array.tobytes() for array in held)).text() if held else ""


def are_comparable(one: str, other: str) -> bool:
    """Whether two digests are there and of one key: only then do they differ where data does."""
    return bool(one and other) and one.rpartition(":")[0] == other.rpartition(":")[0]


@cache
def _key() -> bytes:
    """The key of this user's cache folder, made once; without a private folder one of the process.

    A file is linked to its name when it is whole: of two processes the first one's key holds.
    """
    folder, _ = private_folder("keys")
    made = secrets.token_bytes(_KEY_BYTES)
    if folder is None:
        return made
    file = folder / "digest"
    with contextlib.suppress(OSError):
        if not file.exists():
            descriptor, partial = tempfile.mkstemp(prefix=".digest-", dir=folder)
            with os.fdopen(descriptor, "wb") as out:
                out.write(made)
            with contextlib.suppress(FileExistsError):
                os.link(partial, file)
            os.unlink(partial)
        kept = file.read_bytes()
        if len(kept) == _KEY_BYTES:
            return kept
    return made


@cache
def _key_name() -> str:
    """Tells keys apart and says nothing of them."""
    return hashlib.blake2b(b"name", digest_size=4, key=_key()).hexdigest()
