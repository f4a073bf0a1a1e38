"""Which bytes of a tensor the programs of a replay have touched, and whether two such lists meet.

Reads what the memory of a replay has noted; runs nothing.
"""

from __future__ import annotations

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.replay.arguments import Argument


def touched_bytes(argument: Argument, *, writes: bool, reads: bool) -> Array:
    """Rows of start and end, in bytes from the argument's first one, in order and apart.

    Empty as well where a tensor is so large that its replay keeps none of it.
    """
    region, granule = argument.region, argument.region.granule
    if region.data is None:
        return np.empty((0, 2), np.int64)
    first = argument.start // granule
    last = -(-(argument.start + argument.num_bytes) // granule)
    is_touched = np.zeros(last - first, bool)
    if writes:
        is_touched |= region.writer[first:last] != 0
    if reads:
        is_touched |= region.reader[first:last] != 0
    edges = np.flatnonzero(np.diff(is_touched, prepend=False, append=False))
    spans: Array = edges.reshape(-1, 2).astype(np.int64) * granule
    return spans + (first * granule - argument.start)


def share_bytes(one: Array, other: Array) -> bool:
    """Whether two lists of spans, each in order and apart, have a byte in common."""
    if not len(one) or not len(other):
        return False
    # The first span of the other that ends behind a span's start may begin before its end.
    at = np.searchsorted(other[:, 1], one[:, 0], side="right")
    is_there = at < len(other)
    return bool((other[at[is_there], 0] < one[is_there, 1]).any())
