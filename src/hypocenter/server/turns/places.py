"""Which request a worker is handed next, and which replica's that is.

It is handed what it can run and no more, so that the order among clients is decided here, where
they are known. What was sent and not taken yet is bounded, too: nobody fills the worker's socket.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypocenter.server.fleet.prefixes import Prefixes
from hypocenter.server.generation import Generation
from hypocenter.server.turns.fair_order import FairOrder
from hypocenter.wire.messages import ServedModel

#: That may wait for their first token, whatever their prompts.
MAX_UNBEGUN = 2
#: Steps that the prompts of others take, so that the worker always has its next one.
UNBEGUN_STEPS = 2
#: What a token counts that the replica has read before, beside one that is new: that it is still in
#: the KV cache is a guess, and nobody is to wait for long where it is wrong.
KNOWN_TOKEN = 1 / 4
#: One place of so many is kept for who has none, where several clients were served lately.
KEPT_PART = 8
#: That were sent, and that the worker has not taken yet: without a form, and with generation.
MAX_UNTAKEN, MAX_UNTAKEN_FORMS = 8, 1
#: A token of an answer takes a step, one of a prompt a part of generation.
_PROMPT_TOKEN = 1 / 16
#: What an open request costs the next one on its replica, in tokens of prompts: a step of so many
#: answers takes about as much longer as one of so many more tokens.
_OPEN_REQUEST = 128
#: A replica counts at most so many times slower than the fastest: what it does next may be faster.
_MOST_SLOWNESS = 4.0

Generations = Mapping[int, Generation]


@dataclass(frozen=True, slots=True)
class Offer:
    """A replica whose worker takes requests. `gap_seconds`: between two pieces of an answer."""

    replica: int
    facts: ServedModel
    gap_seconds: float | None = None


class Places:
    """Gives the workers' places to requests, in a fair order by client; a canary needs none.

    Those that are `leaving` have their places until the worker is through with them.
    """

    def __init__(self) -> None:
        self._order = FairOrder()
        self.prefixes = Prefixes()

    def hand_over(self, one: Generation, offer: Offer) -> None:
        """A replica gets it, and reads what it does not know of its prompt."""
        replica, facts = offer.replica, offer.facts
        one.num_known_tokens = self.prefixes.num_known_tokens(replica, one, facts.block_size)
        self.prefixes.note(replica, one, facts.block_size, facts.num_blocks)

    def charge(self, client: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """A worker did something for a client."""
        if num_prompt_tokens or num_tokens:
            self._order.charge(client, num_prompt_tokens * _PROMPT_TOKEN + num_tokens)

    def next(
        self, open_ones: Generations, leaving: Generations, offers: Sequence[Offer]
    ) -> tuple[Generation, Offer] | None:
        """The one that gets a place now, and where; None where none is free, or nobody waits."""
        there, waiting = _divide(open_ones, leaving)
        if not waiting or not offers:
            return None
        of = {offer.replica: [g for g in there if g.replica == offer.replica] for offer in offers}
        takes_form = [o for o in offers if _num_untaken(of[o.replica], True) < MAX_UNTAKEN_FORMS]
        takes_free = [o for o in offers if _num_untaken(of[o.replica], False) < MAX_UNTAKEN]
        waiting = [g for g in waiting if (takes_form if g.form else takes_free)]
        at_work = collections.Counter(g.client for g in there)
        chosen = self._order.first(waiting, lambda g: g.client, at_work)
        if chosen is None:
            return None
        # Whose turn it is does not depend on what clients say.
        chosen = min((g for g in waiting if g.client == chosen.client), key=lambda g: g.priority)
        is_first = not at_work[chosen.client]
        with_room = [
            offer
            for offer in (takes_form if chosen.form else takes_free)
            if self._has_room(of[offer.replica], chosen, offer, is_first=is_first)
        ]
        return (chosen, self._best(chosen, with_room, of)) if with_room else None

    def to_pause(
        self, open_ones: Generations, leaving: Generations, offers: Sequence[Offer]
    ) -> Generation | None:
        """The one that gives way to a client that has none there; None where none is to.

        It is the newest of the client that has the most there, which has others still.
        """
        there, waiting = _divide(open_ones, leaving)
        at_work = collections.Counter(g.client for g in there)
        first = next((g for g in waiting if not at_work[g.client]), None)
        is_one_going = bool(leaving) or any(g.is_pausing for g in there)
        if first is None or is_one_going:
            return None
        for offer in offers:
            own = [g for g in there if g.replica == offer.replica]
            if self._has_room(own, first, offer, is_first=True):
                return None
        open_to = {offer.replica for offer in offers}
        there = [g for g in there if g.replica in open_to]
        if not there:
            return None
        [(client, num)] = collections.Counter(g.client for g in there).most_common(1)
        return max((g for g in there if g.client == client), key=_id) if num > 1 else None

    def _best(
        self, one: Generation, offers: Sequence[Offer], of: Mapping[int, list[Generation]]
    ) -> Offer:
        """The replica on which it is likely to be done first.

        That is where few tokens are to be read before it begins, its own among them but for those
        that were read there, and where few others run. A slower card counts for as much slower.
        """
        if len(offers) == 1:
            return offers[0]
        gaps = [offer.gap_seconds for offer in offers if offer.gap_seconds is not None]

        def cost(offer: Offer) -> tuple[float, int]:
            there = of[offer.replica]
            known = self.prefixes.num_known_tokens(offer.replica, one, offer.facts.block_size)
            num_to_read: float = _num_tokens(one) - known
            num_to_read += sum(map(_num_to_read, (g for g in there if not g.has_begun)))
            slowness = 1.0
            if offer.gap_seconds is not None:
                slowness = min(offer.gap_seconds / max(min(gaps), 1e-6), _MOST_SLOWNESS)
            work = num_to_read + _OPEN_REQUEST * (len(there) + 1)
            return slowness * work, offer.replica

        return min(offers, key=cost)

    def _has_room(
        self, there: list[Generation], one: Generation, offer: Offer, *, is_first: bool
    ) -> bool:
        """Whether a worker can run it now; others' prompts wait here, and not in its queue.

        `is_first`: its client has none with any worker.
        """
        facts = offer.facts
        num_kept = 0 if is_first else self._num_kept(one.client, facts)
        if len(there) >= facts.max_requests - num_kept:
            return False
        unbegun = [other for other in there if not other.has_begun]
        if len(unbegun) < MAX_UNBEGUN:
            return True
        if sum(num_blocks_of(other, facts) for other in [*there, one]) > facts.num_blocks:
            return False
        if is_first:
            return True
        known = self.prefixes.num_known_tokens(offer.replica, one, facts.block_size)
        num_to_read = _cost_of(one, known) + sum(map(_num_to_read, unbegun))
        return num_to_read <= UNBEGUN_STEPS * facts.step_tokens

    def _num_kept(self, client: str, facts: ServedModel) -> int:
        """Places that a client leaves to those that come: none where it is alone."""
        return facts.max_requests // KEPT_PART if self._order.has_others(client) else 0


def _num_untaken(there: list[Generation], has_form: bool) -> int:
    """That a worker was sent, and has not taken yet."""
    return sum(not g.is_accepted and bool(g.form) == has_form for g in there)


def _divide(
    open_ones: Generations, leaving: Generations
) -> tuple[list[Generation], list[Generation]]:
    """Those that workers have, and those that wait for a place."""
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


def _num_to_read(generation: Generation) -> float:
    """Tokens that its replica has to read before it begins; those that it knows count less."""
    return _cost_of(generation, generation.num_known_tokens)


def _cost_of(generation: Generation, num_known: int) -> float:
    return _num_tokens(generation) - (1 - KNOWN_TOKEN) * num_known
