"""The base of all events, and those that hypocenter's own engine alone tells.

Read with the others as `events.AnyEvent`.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that the host did; `seq` orders all events of a run, `step` is the step then."""

    seq: int
    step: int


class Entered(Event, frozen=True, kw_only=True, tag=True):
    """A request has come in: `settings` are what its tokens are drawn by, as the sampler has them.

    Their order is that of `kernels/sampling/draw.py:columns_of`.
    """

    request: int
    num_prompt_tokens: int
    settings: tuple[float, ...]
    seed: int


class BlockChanged(Event, frozen=True, kw_only=True, tag=True):
    """After a step `block` of the pages `tensor` was not as it was kept for others to read.

    `request` filled it, and in step `kept_in` it was kept. Only a traced run looks.
    """

    tensor: int
    block: int
    request: int
    kept_in: int


class Answered(Event, frozen=True, kw_only=True, tag=True):
    """A request has ended with an answer: `digest` is a keyed one over its prompt and that."""

    request: int
    num_tokens: int
    digest: str
