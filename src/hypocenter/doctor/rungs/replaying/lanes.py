"""Where the lane of a finding is in a replay, and what its address hangs on, by replaying again.

An address says nothing of where it comes from; one that moves when a number is another one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.doctor.rungs.replaying.trials import Bench, Seen
from hypocenter.replay.findings import Finding


@dataclass(frozen=True, slots=True)
class FaultyLane:
    """The access of a finding in one replay, and the number of its lane."""

    key: object
    number: int
    pointer: int
    width_bytes: int


def lane_of(seen: Seen, finding: Finding) -> FaultyLane | None:
    """The first lane outside, in the program and the line of the finding."""
    if finding.program is None:
        return None
    for key, access in seen.census.accesses.items():
        is_there = key[0] == finding.program and access.line == finding.line
        if not is_there or seen.census.aims_at(access) not in ("", finding.argument):
            continue
        outside = np.flatnonzero(access.active & ~seen.census.inside(access))
        if outside.size:
            number = int(outside[0])
            return FaultyLane(key, number, int(access.pointers[number]), access.width_bytes)
    return None


def moved_by(bench: Bench, lane: FaultyLane, corrections: Mapping[str, Any]) -> int | None:
    """Elements by which the lane is elsewhere with these corrections; None if it is not to be seen.

    Positive: the recorded address is the higher one.
    """
    after = bench.replay(corrections, None, False)
    again = after.census.accesses.get(lane.key) if after is not None else None
    if again is None or again.pointers.size <= lane.number:
        return None
    bytes_apart = lane.pointer - int(again.pointers[lane.number])
    if bytes_apart % lane.width_bytes:
        return None
    return bytes_apart // lane.width_bytes


def is_tail(seen: Seen, finding: Finding) -> bool:
    """Whether each access of that line that leaves the tensor begins inside of it."""
    for access in seen.census.accesses.values():
        if access.line != finding.line or seen.census.aims_at(access) != finding.argument:
            continue
        if access.active.any() and not seen.census.inside(access).any():
            return False
    return True
