"""Which beginnings of prompts each replica was given, and so which one a request goes to.

The rule is that of `server/turns/places.py`, in bytes of prompts: no tokens are known here.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence

_BLOCK_BYTES = 256
_MAX_PREFIX_BYTES = 1 << 18
#: What is remembered of each replica: some tens of thousands of tokens.
_MAX_BLOCKS = 4096
#: What an open request costs the next one, in bytes of prompts: about 128 tokens.
_OPEN_REQUEST = 512


class KnownBeginnings:
    """Beginnings of prompts by replica, and how many requests each has open."""

    def __init__(self) -> None:
        self._blocks: dict[Hashable, OrderedDict[bytes, None]] = {}
        self.num_open: Counter[Hashable] = Counter()

    def in_order(self, replicas: Sequence[Hashable], prefix: bytes) -> list[Hashable]:
        """Replicas by what the request costs there, the cheapest first."""
        digests = _digests(prefix)

        def cost(replica: Hashable) -> int:
            known = self._blocks.get(replica, OrderedDict[bytes, None]())
            num = next((n for n, d in enumerate(digests) if d not in known), len(digests))
            return len(prefix) - num * _BLOCK_BYTES + _OPEN_REQUEST * self.num_open[replica]

        return sorted(replicas, key=cost)

    def note(self, replica: Hashable, prefix: bytes) -> None:
        """The replica was given that."""
        known = self._blocks.setdefault(replica, OrderedDict())
        for digest in _digests(prefix):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > _MAX_BLOCKS:
            known.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """It is gone."""
        self._blocks.pop(replica, None)
        del self.num_open[replica]


def _digests(prefix: bytes) -> list[bytes]:
    """The digests of whole blocks, each with all that comes before it."""
    running, digests = hashlib.blake2b(digest_size=16), []
    whole = min(len(prefix), _MAX_PREFIX_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
    for start in range(0, whole, _BLOCK_BYTES):
        running.update(prefix[start : start + _BLOCK_BYTES])
        digests.append(running.digest())
    return digests
