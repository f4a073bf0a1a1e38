"""Numbers that a launch wrote into a cache whose type does not hold them: of the rung of values.

A cache that holds infinity was not left unwritten, then: whoever reads it is innocent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import Place, TensorRecord

#: The largest number of a type that caches are kept in, where f32 holds more.
_LARGEST = {"F16": 65504.0}


@dataclass(frozen=True, slots=True)
class Overflow:
    """`use` wrote numbers of up to `largest` from `source` into `cache`, its argument."""

    use: LaunchMade
    source: str
    cache: str
    tensor: TensorRecord
    largest: float
    limit: float


def find_overflow(case: Case, reader: LaunchMade, caches: Collection[str]) -> Overflow | None:
    """The last launch before `reader` that wrote into one of its caches what has no room there."""
    pages = {
        tensor.id: _LARGEST[tensor.dtype.upper()]
        for name in caches
        if (tensor := case.tensor_of(reader.launch, name)) and tensor.dtype.upper() in _LARGEST
    }
    until = next((at for at, use in enumerate(case.launches) if use.place == reader.place), 0)
    for use in reversed(case.launches[:until]):
        tensors, written = case.tensors_of(use.launch), case.written_by(use.launch)
        for cache, tensor in tensors.items():
            if cache not in written or tensor.id not in pages:
                continue
            for source, given in tensors.items():
                largest = _largest(case, given, use) if source not in written else 0.0
                if largest > pages[tensor.id]:
                    return Overflow(use, source, cache, tensor, largest, pages[tensor.id])
    return None


def _largest(case: Case, tensor: TensorRecord, use: LaunchMade) -> float:
    """The largest magnitude that a tensor had when it was last looked at before a launch."""
    seen = 0.0
    for statistics in case.bundle.statistics:
        if use.place is None or _order(statistics.place) > _order(use.place):
            continue
        if statistics.tensor == tensor.id and not statistics.is_digest_alone:
            seen = max(abs(statistics.low), abs(statistics.high))
    return seen


def _order(place: Place) -> tuple[int, int, int]:
    return place.step, place.plan, place.launch
