"""Which bytes of a tensor the programs of a replay have touched, and whether two such lists meet.

Reads what the memory of a replay has noted; runs nothing.
"""

from __future__ import annotations

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.replay.arguments import Argument

#: Notes that are looked at together: those of gigabytes would be copied several times over.
_TOGETHER = 1 << 20


def touched_bytes(argument: Argument, *, writes: bool, reads: bool) -> Array:
    """Rows of start and end, in bytes from the argument's first one, in order and apart.

    Empty as well where a tensor is so large that its replay keeps none of it.
    """
    region, granule = argument.region, argument.region.granule
    if region.data is None:
        return np.empty((0, 2), np.int64)
    first = argument.start // granule
    last = -(-(argument.start + argument.num_bytes) // granule)
    kept = [region.writer] * writes + [region.reader] * reads
    edges = [np.empty(0, np.int64)]
    before = False
    for start in range(first, last, _TOGETHER):
        stop = min(start + _TOGETHER, last)
        if not before and not any(notes[start:stop].any() for notes in kept):
            continue
        is_touched = np.logical_or.reduce([notes[start:stop] != 0 for notes in kept])
        edges.append(np.flatnonzero(np.diff(is_touched, prepend=before)) + start - first)
        before = bool(is_touched[-1])
    if before:
        edges.append(np.array([last - first]))
    spans: Array = np.concatenate(edges).reshape(-1, 2) * granule
    return spans + (first * granule - argument.start)


def share_bytes(one: Array, other: Array) -> bool:
    """Whether two lists of spans, each in order and apart, have a byte in common."""
    if not len(one) or not len(other):
        return False
    # The first span of the other that ends behind a span's start may begin before its end.
    at = np.searchsorted(other[:, 1], one[:, 0], side="right")
    is_there = at < len(other)
    return bool((other[at[is_there], 0] < one[is_there, 1]).any())
