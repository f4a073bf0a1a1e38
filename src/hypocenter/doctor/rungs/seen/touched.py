"""Which elements of a tensor the lanes of a launch touch, by a replay of all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.doctor.case import Case
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord
from hypocenter.replay.terms import KernelText, Schedule, SeenReplay

if TYPE_CHECKING:
    from hypocenter.replay.census import SeenAccess

#: Seconds of a replay that counts what is touched.
_COUNT_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Touched:
    """Accesses of one tensor: `offsets` are those of all lanes, in bytes from its first element."""

    accesses: tuple[SeenAccess, ...]
    offsets: Array
    item_bytes: int


def touches_of(
    case: Case,
    use: LaunchMade,
    parameter: str,
    given: Mapping[str, int] | None = None,
    edited: SourceRecord | None = None,
) -> Touched | None:
    """What a whole replay touches of `parameter`; None where it was not whole, found a wrong access
    or touched nothing.

    `given` are numbers that are passed instead, and `edited` another text of the kernel. Raises as
    `replay_place` does.
    """
    from hypocenter.replay.census import Census
    from hypocenter.replay.recorded import replay_place

    if use.place is None:
        return None
    census = Census()
    report = replay_place(
        case.index,
        use.place,
        corrections=given or {},
        text=KernelText(case.allow_source, edited=edited),
        schedule=Schedule(budget_seconds=_COUNT_SECONDS),
        seen=SeenReplay(census=census),
    )
    argument = next((a for a in census.arguments if a.name == parameter), None)
    if argument is None or report.findings or not report.coverage.is_complete:
        return None
    found = tuple(
        access for access in census.accesses.values() if census.aims_at(access) == parameter
    )
    if not census.is_whole or not found:
        return None
    lanes = np.concatenate([access.pointers[access.active] for access in found])
    offsets: Array = (lanes - np.uint64(argument.address)).view(np.int64)
    return Touched(found, offsets, argument.item_bytes)
