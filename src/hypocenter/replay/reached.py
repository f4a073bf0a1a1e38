"""Whether a launch goes to addresses that are no tensor's of its own, by its replay."""

from __future__ import annotations

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Place
from hypocenter.replay.rebuild import Rebuilt
from hypocenter.replay.replay import replay
from hypocenter.replay.source import kernel_of
from hypocenter.replay.terms import KernelText, Observers, Schedule


def reaches(
    index: BundleIndex,
    place: Place,
    first: int,
    past: int,
    *,
    text: KernelText,
    seconds: float = 4.0,
) -> bool | None:
    """Whether a lane of the launch accesses an address from `first` up to `past`.

    None where not all programs were replayed, and none of these did. Raises as `replay_place` does.
    """
    found = [False]

    def look(operation: str, pointers: Array, mask: Array, values: Array, width: int) -> None:
        active = np.broadcast_to(mask, pointers.shape) & (pointers >= first) & (pointers < past)
        found[0] |= bool(active.any())

    launch = index.launch(place)
    kernel = kernel_of(index, launch, allow_source=text.may_run, edited=text.edited)
    rebuilt = Rebuilt(index, place, launch, {})
    report = replay(
        kernel,
        rebuilt.grid,
        rebuilt.arguments,
        schedule=Schedule(budget_seconds=seconds, program_seconds=seconds),
        observers=Observers(on_lanes=look),
    )
    return True if found[0] else (False if report.coverage.is_complete else None)
