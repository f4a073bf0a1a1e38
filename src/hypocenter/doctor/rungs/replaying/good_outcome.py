"""What the good run's launch gave, beside what a launch gives with something put right.

A correction that gives other results is none. Nothing follows where both launches were given other
numbers, or where the good run's own replay does not give what that launch gave.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypocenter.base.errors import HypoError
from hypocenter.doctor.beside.counterpart import counterpart
from hypocenter.doctor.case import Case
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.contents import LaunchOutcome
from hypocenter.replay.findings import ReplayReport

#: Seconds of the good launch's own replay.
_SECONDS = 2.0


class GoodRunSays(enum.Enum):
    """What the good run's results say of a correction."""

    NOTHING = enum.auto()
    SAME = enum.auto()
    OTHER = enum.auto()


@dataclass(frozen=True, slots=True)
class GoodOutcome:
    """The results of the good run's launch; `alike` are parameters that held the same before."""

    #: A `replay/compare.py:KnownResults`, whose import needs Triton.
    results: Any
    alike: frozenset[str]

    def judge(self, report: ReplayReport, census: Any, left: Mapping[str, Any]) -> GoodRunSays:
        """Compare what a replay left; a launch that goes astray still has no results yet."""
        if report.findings or not report.coverage.is_complete:
            return GoodRunSays.NOTHING
        if not census.is_whole or not _read_names(census) <= self.alike:
            return GoodRunSays.NOTHING
        is_other = self.results.other_than(left) is not None
        return GoodRunSays.OTHER if is_other else GoodRunSays.SAME


def good_outcome(case: Case, use: LaunchMade) -> GoodOutcome | None:
    """That of the good run's launch of this kernel with this number; None where nothing is known
    of it, or its tensors are other ones."""
    good = case.good_case
    there = counterpart(case, good, use) if good is not None and case.is_foreign else None
    if good is None or there is None or there.place is None or use.place is None:
        return None
    at = there.place.step, there.place.launch
    found = (
        result
        for result in good.bundle.outcomes
        if (result.step, result.launch) == at and result.gave
    )
    outcome = next(found, None)
    tensors, theirs = _tensors(case, use), _tensors(good, there)
    if outcome is None or tensors != theirs:
        return None
    try:
        from hypocenter.replay.compare import known_results, replay_outcome

        if not _is_faithful(good, outcome, replay_outcome):
            return None
        results = known_results(good.index, outcome)
    except (HypoError, ImportError):  # what cannot be replayed tells nothing
        return None
    held = case.index.values(use.place)
    mine = {a.name: held[a.tensor].data for a in use.launch.arguments if a.tensor in held}
    alike = {name for name, data in results.before.items() if mine.get(name) == data}
    return GoodOutcome(results, frozenset(alike))


def _is_faithful(good: Case, outcome: LaunchOutcome, replay_outcome: Callable[..., Any]) -> bool:
    """Whether the replay of the good run's launch gives what that launch gave."""
    made = replay_outcome(
        good.index, outcome, allow_source=good.allow_source, budget_seconds=_SECONDS
    )
    use = good.index.launch(made.place)
    held = {values.tensor: values.data for values in (*outcome.given, *outcome.gave)}
    on_device = {a.name: held[a.tensor] for a in use.arguments if a.tensor in held}
    is_clean = not made.report.findings and made.report.coverage.is_complete
    return is_clean and not made.differing(on_device)


def _tensors(case: Case, use: LaunchMade) -> dict[str, tuple[object, ...]]:
    return {
        argument.name: (tensor.dtype, tensor.shape)
        for argument in use.launch.arguments
        if argument.tensor is not None and (tensor := case.tensors.get(argument.tensor))
    }


def _read_names(census: Any) -> set[str]:
    """The arguments that lanes read, or add to; "" for an access to several."""
    return {
        census.aims_at(access)
        for access in census.accesses.values()
        if access.operation != "store" and access.active.any()
    }
