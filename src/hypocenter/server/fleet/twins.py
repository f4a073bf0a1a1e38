"""Tells of a card that is much slower than its fastest twin: it is hot, capped, or shared.

It gets fewer requests by itself (`turns/places.py`); an operator is to know why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hypocenter.server.operating.log import tell

#: So many times as long between two pieces counts as slow, and no longer below the second.
_SLOW, _WELL = 2.0, 1.5
#: What lasts no longer may be chance, or a load that is not spread yet.
_SECONDS = 30.0


class Twins:
    """Remembers since when a card is slow, and of whom it has told."""

    def __init__(self) -> None:
        self._slow_since: dict[str, float] = {}
        self._told: set[str] = set()

    def note(self, name: str, gaps: Mapping[str, float], now: float) -> None:
        """A piece came from the card `name`; `gaps`: of each card, seconds between two pieces."""
        fastest = min(gaps, key=lambda one: gaps[one])
        times = gaps[name] / max(gaps[fastest], 1e-6)
        if times < _WELL:
            self._slow_since.pop(name, None)
            self._told.discard(name)
        if times < _SLOW:
            return
        since = self._slow_since.setdefault(name, now)
        if now - since < _SECONDS or name in self._told:
            return
        self._told.add(name)
        message = (
            f"{name} is {times:.1f} times as slow as {fastest}, for {now - since:.0f} s: "
            f"{1e3 * gaps[name]:.0f} and {1e3 * gaps[fastest]:.0f} ms between two tokens; it gets "
            "fewer requests; see its clocks and who else uses it"
        )
        tell(logging.WARNING, "replica_slow", message, replica=name, times=round(times, 2))
