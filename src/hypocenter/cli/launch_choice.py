"""Which of a bundle's launches a verb is about: those asked for, else those under way at the end.

Runs none of them.
"""

from __future__ import annotations

from typing import Any

from hypocenter.base.errors import UsageError
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import OUTSIDE_PLANS, Place


def choose_places(index: BundleIndex, step: int | None, launch: int | None) -> tuple[Place, ...]:
    """The launches that were asked for, else those that may have been under way at the end.

    Of a run that did not die each launch of a plan is taken once.
    """
    if step is not None:
        places = index.places(step)
        if not places:
            steps = [place.step for place in index.places()]
            kept = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
            raise UsageError(f"--step is {step}, but the bundle has the launches of {kept}")
    elif index.bundle.kind == "suspect":
        places = _unlike(index)
    else:
        places = tuple(launch.place for launch in index.under_way if launch.place) or index.places()
    if launch is None:
        return places
    same = tuple(place for place in places if number_of(index, place) == launch)
    if not same:
        numbers = [number_of(index, place) for place in places]
        kept = f"{min(numbers)} to {max(numbers)}" if numbers else "none"
        raise UsageError(f"--launch is {launch}, but the launches are {kept}")
    return same


def number_of(index: BundleIndex, place: Place) -> int:
    """A launch's number as reports have it: of a program without steps they count from 1."""
    return place.step if is_outside_steps(index, place) else place.launch


def is_outside_steps(index: BundleIndex, place: Place) -> bool:
    """Whether a launch is of a program that has no steps."""
    return place.plan == OUTSIDE_PLANS and not index.launch(place).facts


def _unlike(index: BundleIndex) -> tuple[Place, ...]:
    """Each launch of each plan once: where a number first went wrong after it, else the last."""
    wrong = {
        statistics.place
        for statistics in index.bundle.statistics
        if statistics.num_nan or statistics.num_poisoned
    }
    unlike: dict[Any, Place] = {}
    for place in index.places():
        key = place if place.plan == OUTSIDE_PLANS else (place.plan, place.launch)
        if unlike.get(key) not in wrong:
            unlike[key] = place
    return tuple(unlike.values())
