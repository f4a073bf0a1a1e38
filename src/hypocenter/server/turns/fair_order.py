"""Whose turn it is where several clients wait for one thing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

_Item = TypeVar("_Item")

#: After so long half of what a client was given is forgotten.
HALF_LIFE_SECONDS = 60.0
#: Clients that are remembered; those beyond were given nothing lately.
_MAX_CLIENTS = 4096


class FairOrder:
    """Chooses who has the fewest at work, then who was given the least lately, then who came first.

    What was given is counted in any unit, such as seconds of a process, and halves with time. So
    nobody pays for ever for a busy hour, and nobody saves up by being away. `clock` in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._given: dict[str, tuple[float, float]] = {}  # amount, and when it was that much

    def amount_of(self, client: str) -> float:
        """What a client was given lately."""
        amount, then = self._given.get(client, (0.0, 0.0))
        return float(amount * 0.5 ** ((self._clock() - then) / HALF_LIFE_SECONDS))

    def has_others(self, client: str) -> bool:
        """Whether anybody else was given something lately."""
        start = self._clock() - HALF_LIFE_SECONDS
        return any(name != client and then >= start for name, (_, then) in self._given.items())

    def charge(self, client: str, amount: float) -> None:
        """A client was given something."""
        self._given[client] = (self.amount_of(client) + amount, self._clock())
        if len(self._given) > _MAX_CLIENTS:
            del self._given[min(self._given, key=self.amount_of)]

    def first(
        self,
        waiting: Iterable[_Item],
        client_of: Callable[[_Item], str],
        num_at_work: Mapping[str, int],
    ) -> _Item | None:
        """Whose turn it is of those that wait, in the order in which they came; None: nobody's."""
        oldest: dict[str, _Item] = {}
        for item in waiting:
            oldest.setdefault(client_of(item), item)
        if not oldest:
            return None
        return oldest[
            min(oldest, key=lambda name: (num_at_work.get(name, 0), self.amount_of(name)))
        ]
