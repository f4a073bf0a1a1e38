"""The base of all events, and those that hypocenter's own engine alone tells.

Read with the others as `events.AnyEvent`.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that the host did; `seq` orders all events of a run, `step` is the step then."""

    seq: int
    step: int


class LostRank(msgspec.Struct, frozen=True, kw_only=True):
    """Of several processes with a part of a model each, one that has ended; `how` says by what."""

    rank: int
    num_ranks: int
    process: int
    how: str


class Entered(Event, frozen=True, kw_only=True, tag=True):
    """A request has come in: `settings` are what its tokens are drawn by, as the sampler has them.

    Their order is that of `kernels/sampling/draw.py:columns_of`.
    """

    request: int
    num_prompt_tokens: int
    settings: tuple[float, ...]
    seed: int


class TextAsked(Event, frozen=True, kw_only=True, tag=True):
    """A text or a conversation came in, of which a prompt's tokens are made next.

    `digest` is a keyed one over all that it says: two runs that were asked the same have the same.
    """

    digest: str


class BlockChanged(Event, frozen=True, kw_only=True, tag=True):
    """After a step `block` of the pages `tensor` was not as it was kept for others to read.

    `request` filled it, and in step `kept_in` it was kept. Only a traced run looks.
    """

    tensor: int
    block: int
    request: int
    kept_in: int


class BlocksNamed(Event, frozen=True, kw_only=True, tag=True):
    """Blocks of the cache hold the keys of first tokens of `request`: it filled them, or others.

    They are its blocks from number `first` on. `prefixes` has PREFIX_BYTES of a keyed digest for
    each (`prefixes.py`). Without them what the blocks hold came from an archive, and nobody knows
    who filled them. `made_with` says on what their keys and values depend beside the tokens, as
    `request` has it, or as the archive noted it when they were filled.
    """

    request: int
    blocks: tuple[int, ...]
    prefixes: bytes
    first: int = 0
    made_with: dict[str, str] = {}


class Drawn(Event, frozen=True, kw_only=True, tag=True):
    """Tokens are about to be chosen: one of each of `requests`, in the order of their logits.

    A request stands there once more for each of its drafts.

    `positions` are those that the tokens will have, on which their random numbers depend. The
    others are keyed digests of what the choice depends on beside the logits, each empty where it
    does not: which tokens are allowed, what is added to logits, which tokens came before.
    """

    requests: tuple[int, ...]
    positions: tuple[int, ...]
    masks: tuple[str, ...]
    biases: tuple[str, ...]
    counts: tuple[str, ...]


class Answered(Event, frozen=True, kw_only=True, tag=True):
    """A request has ended: `digest` is a keyed one over its prompt and its answer.

    `said` is one over what was made of its tokens: text, thoughts, calls of tools, and why it
    ended. It is empty in bundles from before this field. `failed` is the class of the error by
    which it ended without an answer, if it did.
    """

    request: int
    num_tokens: int
    digest: str
    said: str = ""
    failed: str = ""
