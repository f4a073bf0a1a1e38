"""Which request the worker is handed next.

It is handed what it can run and a few more, so that the order among clients is decided here, where
they are known. What was sent and not taken yet is bounded, too: nobody fills the worker's socket.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from hypocenter.messages import ServedModel
from hypocenter.server.fair_order import FairOrder
from hypocenter.server.generation import Generation

#: Beyond those that it can run, so that it need not wait for the next one.
LOOK_AHEAD = 2
#: That were sent, and that the worker has not taken yet: without a form, and with one.
MAX_UNTAKEN, MAX_UNTAKEN_FORMS = 8, 1
#: A token of an answer takes a step, one of a prompt a part of one.
_PROMPT_TOKEN = 1 / 16


class Places:
    """Gives the worker's places to requests, in a fair order by client."""

    def __init__(self) -> None:
        self._order = FairOrder()

    def charge(self, client: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """The worker did something for a client."""
        if num_prompt_tokens or num_tokens:
            self._order.charge(client, num_prompt_tokens * _PROMPT_TOKEN + num_tokens)

    def next(
        self,
        open_ones: Mapping[int, Generation],
        leaving: Mapping[int, Generation],
        facts: ServedModel,
    ) -> Generation | None:
        """The one that gets a place now; None where none is free, or nobody waits.

        Those that are `leaving` have their places until the worker is through with them.
        """
        there = [one for one in open_ones.values() if one.is_with_worker] + [*leaving.values()]
        waiting = [one for one in open_ones.values() if one.is_read and not one.is_with_worker]
        if not waiting or len(there) >= facts.max_requests + LOOK_AHEAD:
            return None
        untaken = [bool(one.form) for one in there if not one.is_accepted]
        if untaken.count(True) >= MAX_UNTAKEN_FORMS:
            waiting = [one for one in waiting if not one.form]
        if untaken.count(False) >= MAX_UNTAKEN:
            waiting = [one for one in waiting if one.form]
        at_work = collections.Counter(one.client for one in there)
        chosen = self._order.first(waiting, lambda one: one.client, at_work)
        if chosen is None:
            return None
        num_unbegun = sum(not one.has_begun for one in there)
        if num_unbegun >= LOOK_AHEAD:  # what they share is not known here, so some may always try
            num_needed = sum(num_blocks_of(one, facts) for one in [*there, chosen])
            if num_needed > facts.num_blocks:
                return None
        return chosen


def num_blocks_of(generation: Generation, facts: ServedModel) -> int:
    """Blocks of the KV cache that it has with its next token, if it shares none."""
    num_tokens = len(generation.prompt_ids or ()) + len(generation.output_ids) + 1
    return -(-num_tokens // facts.block_size)
