"""Which request the worker is handed next.

It is handed what it can run and no more, so that the order among clients is decided here, where
they are known. What was sent and not taken yet is bounded, too: nobody fills the worker's socket.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from hypocenter.messages import ServedModel
from hypocenter.server.generation import Generation
from hypocenter.server.turns.fair_order import FairOrder

#: That may wait for room in the KV cache: how much of it they share is not known here.
MAX_UNBEGUN = 2
#: That were sent, and that the worker has not taken yet: without a form, and with generation.
MAX_UNTAKEN, MAX_UNTAKEN_FORMS = 8, 1
#: A token of an answer takes a step, one of a prompt a part of generation.
_PROMPT_TOKEN = 1 / 16

Generations = Mapping[int, Generation]


class Places:
    """Gives the worker's places to requests, in a fair order by client.

    Those that are `leaving` have their places until the worker is through with them.
    """

    def __init__(self) -> None:
        self._order = FairOrder()

    def charge(self, client: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """The worker did something for a client."""
        if num_prompt_tokens or num_tokens:
            self._order.charge(client, num_prompt_tokens * _PROMPT_TOKEN + num_tokens)

    def next(
        self, open_ones: Generations, leaving: Generations, facts: ServedModel
    ) -> Generation | None:
        """The one that gets a place now; None where none is free, or nobody waits."""
        there, waiting = _divide(open_ones, leaving)
        untaken = [bool(g.form) for g in there if not g.is_accepted]
        if untaken.count(True) >= MAX_UNTAKEN_FORMS:
            waiting = [g for g in waiting if not g.form]
        if untaken.count(False) >= MAX_UNTAKEN:
            waiting = [g for g in waiting if g.form]
        at_work = collections.Counter(g.client for g in there)
        chosen = self._order.first(waiting, lambda g: g.client, at_work)
        return None if chosen is None or not _has_room(there, chosen, facts) else chosen

    def to_pause(
        self, open_ones: Generations, leaving: Generations, facts: ServedModel
    ) -> Generation | None:
        """The one that gives way to a client that has none there; None where none is to.

        It is the newest of the client that has the most there, which has others still.
        """
        there, waiting = _divide(open_ones, leaving)
        at_work = collections.Counter(g.client for g in there)
        first = next((g for g in waiting if not at_work[g.client]), None)
        is_one_going = bool(leaving) or any(g.is_pausing for g in there)
        if first is None or is_one_going or _has_room(there, first, facts):
            return None
        [(client, num)] = at_work.most_common(1)
        return max((g for g in there if g.client == client), key=_id) if num > 1 else None


def _divide(
    open_ones: Generations, leaving: Generations
) -> tuple[list[Generation], list[Generation]]:
    """Those that the worker has, and those that wait for a place."""
    there = [g for g in open_ones.values() if g.is_with_worker]
    waiting = [g for g in open_ones.values() if g.is_read and not g.is_with_worker]
    return [*there, *leaving.values()], waiting


def _has_room(there: list[Generation], one: Generation, facts: ServedModel) -> bool:
    if len(there) >= facts.max_requests:
        return False
    num_needed = sum(num_blocks_of(other, facts) for other in [*there, one])
    num_unbegun = sum(not other.has_begun for other in there)
    return num_unbegun < MAX_UNBEGUN or num_needed <= facts.num_blocks


def _id(generation: Generation) -> int:
    return generation.id


def num_blocks_of(generation: Generation, facts: ServedModel) -> int:
    """Blocks of the KV cache that it has with its next token, if it shares none."""
    num_tokens = len(generation.prompt_ids or ()) + len(generation.output_ids) + 1
    return -(-num_tokens // facts.block_size)
