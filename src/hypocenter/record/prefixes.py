"""Which first tokens a block of the cache stands for: a short digest for the end of each block.

Made of the token ids themselves, and not of what the prefix cache looks blocks up by: where the two
disagree, the cache gives out blocks of another text.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence

from hypocenter.record.keyed_digest import KeyedDigest

#: Of the digest of a prefix so many bytes are written down: it is compared within one run alone.
PREFIX_BYTES = 8
#: The request of blocks that came from an archive: of a process before, whose numbers say nothing.
NOBODY = -1


class BlockPrefixes:
    """Those of the leading blocks of a sequence of tokens that only grows."""

    __slots__ = ("_digest", "_prefixes")

    def __init__(self) -> None:
        self._digest = KeyedDigest()
        self._prefixes: list[bytes] = []

    def of_blocks(self, first: int, stop: int, block_size: int, token_ids: Sequence[int]) -> bytes:
        """PREFIX_BYTES for each of the blocks `first` .. `stop` - 1 of these tokens."""
        for number in range(len(self._prefixes), stop):
            ids = token_ids[number * block_size : (number + 1) * block_size]
            self._digest.add(struct.pack(f"<{len(ids)}i", *ids))
            self._prefixes.append(self._digest.short(PREFIX_BYTES))
        return b"".join(self._prefixes[first:stop])


#: What `BlocksNamed.made_with` may say: the settings of the process, whose requests may read a
#: block, for which of two tables of a rotation a text was long enough, and what adapters counted.
SETTINGS, SALT, ROTATION, ADAPTERS = "settings", "salt", "rotation", "adapters"


def settings_digest(*settings: object) -> str:
    """A short digest of what the keys and values of a whole process depend on.

    Without a key, since another process may have another one.
    """
    return hashlib.blake2b(repr(settings).encode(), digest_size=PREFIX_BYTES).hexdigest()


@functools.lru_cache(maxsize=256)
def salt_digest(salt: str) -> str:
    """One of what tells apart whose requests read each other's blocks."""
    return KeyedDigest(salt.encode("utf-8", "surrogatepass")).short(PREFIX_BYTES).hex()


def split_prefixes(prefixes: bytes) -> list[bytes]:
    """One for each block."""
    starts = range(0, len(prefixes), PREFIX_BYTES)
    return [prefixes[start : start + PREFIX_BYTES] for start in starts]
