"""Lanes of one program that meet at an element, with no barrier between them.

A store and a load behind it may be laid out differently over a GPU's threads. Triton orders them by
a barrier alone (`tl.debug_barrier`). What makes all threads of a program meet on the way counts as
one: an atomic, a reduction, a scan, a dot product, a change of shape.
"""

from __future__ import annotations

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.replay.arguments import Region

#: Bits of a stamp that hold the lane that stored last, counted from 1: a block has at most 2**20.
_LANE_BITS = 21
_LANE = (1 << _LANE_BITS) - 1
#: Several lanes stored there in one go, the same value.
_SEVERAL = _LANE


class Lanes:
    """Who of a program's lanes stored last where; a turn is what lies between two barriers."""

    def __init__(self) -> None:
        #: Off where one warp runs the program: its lanes go in step.
        self.is_on = True
        self._turn = 1

    def meet(self) -> None:
        """All lanes have met: what was stored before is there for all of them."""
        self._turn += 1

    def clash(self, region: Region, granules: Array, lanes: Array | None) -> Array | None:
        """For each access whether another lane has stored there in this turn; None: nowhere."""
        if not self.is_on or region.stamped != self._turn:
            return None
        stamps = region.stamps[granules]
        last = stamps & _LANE
        own = _numbers(lanes, granules.size) + 1
        found: Array = (stamps >> _LANE_BITS == self._turn) & (last != own) & (last != _SEVERAL)
        return found if found.any() else None

    def store(
        self, region: Region, granules: Array, lanes: Array | None, twice: Array | None
    ) -> None:
        """Lanes store there; `twice` are places that several of them store to."""
        if not self.is_on:
            return
        region.stamped = self._turn
        stamp = self._turn << _LANE_BITS
        region.stamps[granules] = stamp + 1 + _numbers(lanes, granules.size)
        if twice is not None:
            region.stamps[twice] = stamp + _SEVERAL


def _numbers(lanes: Array | None, count: int) -> Array:
    return np.arange(count) if lanes is None else lanes
