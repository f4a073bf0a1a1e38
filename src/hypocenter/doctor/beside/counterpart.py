"""Which launch of the good run a launch is: that of the same kernel with its number in its step."""

from __future__ import annotations

from hypocenter.doctor.case import Case
from hypocenter.record.bundle_index import LaunchMade


def counterpart(case: Case, good: Case, use: LaunchMade) -> LaunchMade | None:
    """The good run's launch of that kernel with that number in that step."""

    def same_of(uses: tuple[LaunchMade, ...]) -> list[LaunchMade]:
        wanted = use.step, use.launch.kernel
        return [made for made in uses if (made.step, made.launch.kernel) == wanted]

    own, others = same_of(case.launches), same_of(good.launches)
    number = next((n for n, made in enumerate(own) if made is use), len(own))
    return others[number] if number < len(others) else None
