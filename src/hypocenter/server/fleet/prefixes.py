"""Which beginnings of prompts each replica has read, as far as the server handed them over.

A guess that costs a prompt read twice where it is wrong: nothing depends on it but the choice of a
replica. So blocks are known by Python's hashes, and a replica is taken to keep as many blocks as
its KV cache has, the last ones used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hypocenter.server.generation import Generation


class Prefixes:
    """Full blocks of tokens by replica; a block's digest covers all that comes before it."""

    def __init__(self) -> None:
        self._blocks: dict[int, OrderedDict[int, None]] = {}

    def num_known_tokens(self, replica: int, one: Generation, block_size: int) -> int:
        """Tokens at the beginning of its prompt that the replica need not read again."""
        known = self._blocks.get(replica)
        if not known:
            return 0
        num = 0
        for digest in _prompt_digests(one, block_size):
            if digest not in known:
                break
            num += 1
        return num * block_size

    def note(self, replica: int, one: Generation, block_size: int, num_blocks: int) -> None:
        """The replica reads its prompt, or has ended its answer."""
        known = self._blocks.setdefault(replica, OrderedDict())
        digests = _prompt_digests(one, block_size)
        if one.output_ids:
            digests = _digests(one, [*(one.prompt_ids or ()), *one.output_ids], block_size)
        for digest in digests:
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > num_blocks:
            known.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Its worker has ended, and its KV cache with it."""
        self._blocks.pop(replica, None)


def _prompt_digests(one: Generation, block_size: int) -> Sequence[int]:
    if one.prompt_digests is None:
        one.prompt_digests = _digests(one, one.prompt_ids or (), block_size)
    return one.prompt_digests


def _digests(one: Generation, ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Of each full block; requests of another salt, or of other adapters, share nothing."""
    digest, digests = hash((one.cache_salt, one.params.lora)), []
    for end in range(block_size, len(ids) + 1, block_size):
        digest = hash((digest, *ids[end - block_size : end]))
        digests.append(digest)
    return tuple(digests)
