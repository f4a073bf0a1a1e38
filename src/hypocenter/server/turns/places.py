"""Which request the worker is handed next.

It is handed what it can run and no more, so that the order among clients is decided here, where
they are known. What was sent and not taken yet is bounded, too: nobody fills the worker's socket.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from hypocenter.server.generation import Generation
from hypocenter.server.turns.fair_order import FairOrder
from hypocenter.wire.messages import ServedModel

#: That may wait for their first token, whatever their prompts: how much of these is in the KV cache
#: already is not known here.
MAX_UNBEGUN = 2
#: Steps that the prompts of others take, so that the worker always has its next one.
UNBEGUN_STEPS = 2
#: One place of so many is kept for who has none, where several clients were served lately.
KEPT_PART = 8
#: That were sent, and that the worker has not taken yet: without a form, and with generation.
MAX_UNTAKEN, MAX_UNTAKEN_FORMS = 8, 1
#: A token of an answer takes a step, one of a prompt a part of generation.
_PROMPT_TOKEN = 1 / 16

Generations = Mapping[int, Generation]


class Places:
    """Gives the worker's places to requests, in a fair order by client; a canary needs none.

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
        if chosen is not None:  # whose turn it is does not depend on what clients say
            own = (g for g in waiting if g.client == chosen.client)
            chosen = min(own, key=lambda g: g.priority)
        return None if chosen is None or not self._has_room(there, chosen, facts) else chosen

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
        if first is None or is_one_going or self._has_room(there, first, facts):
            return None
        [(client, num)] = at_work.most_common(1)
        return max((g for g in there if g.client == client), key=_id) if num > 1 else None

    def _has_room(self, there: list[Generation], one: Generation, facts: ServedModel) -> bool:
        """Whether the worker can run it now; others' prompts wait here, and not in its queue."""
        is_first = all(other.client != one.client for other in there)
        num_kept = 0 if is_first else self._num_kept(one.client, facts)
        if len(there) >= facts.max_requests - num_kept:
            return False
        unbegun = [other for other in there if not other.has_begun]
        if len(unbegun) < MAX_UNBEGUN:
            return True
        if sum(num_blocks_of(other, facts) for other in [*there, one]) > facts.num_blocks:
            return False
        num_to_read = sum(map(_num_tokens, [*unbegun, one]))
        return is_first or num_to_read <= UNBEGUN_STEPS * facts.step_tokens

    def _num_kept(self, client: str, facts: ServedModel) -> int:
        """Places that a client leaves to those that come: none where it is alone."""
        return facts.max_requests // KEPT_PART if self._order.has_others(client) else 0


def _divide(
    open_ones: Generations, leaving: Generations
) -> tuple[list[Generation], list[Generation]]:
    """Those that the worker has, and those that wait for a place."""
    asked = [g for g in open_ones.values() if not g.is_canary]
    there = [g for g in asked if g.is_with_worker]
    waiting = [g for g in asked if g.is_read and not g.is_with_worker]
    return [*there, *(g for g in leaving.values() if not g.is_canary)], waiting


def _id(generation: Generation) -> int:
    return generation.id


def num_blocks_of(generation: Generation, facts: ServedModel) -> int:
    """Blocks of the KV cache that it has with its next token, if it shares none."""
    return -(-(_num_tokens(generation) + 1) // facts.block_size)


def _num_tokens(generation: Generation) -> int:
    return len(generation.prompt_ids or ()) + len(generation.output_ids)
