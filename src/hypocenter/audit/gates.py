"""A gate: pairs of ways that must give the same, each by the route that was asked of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from hypocenter.audit import compare
from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.executed import CannotRun
from hypocenter.base.dtypes import Float32s, Float64s
from hypocenter.base.errors import HypoError, OutOfBlocks, OutOfMemory, UsageError
from hypocenter.verify.outcome import (
    Mistake,
    PlantedError,
    Stage,
    StageVerdict,
    Uncovered,
    verdict_of,
)
from hypocenter.verify.rounding import undecided_of

#: Errors of a way that was not to be had: no mistake of what it computes.
NOT_TO_BE_HAD = (UsageError, OutOfMemory, OutOfBlocks, CannotRun)
#: Mistakes of a gate that are kept.
_MAX_MISTAKES = 16


@dataclass(frozen=True, slots=True)
class Gate:
    """`axis` is the field of Executed in which both sides must differ. `pairs` runs them.

    `allowed`: the most that a row may be away, as `verify/rounding.py:distance` has it; None:
    the bits are equal. `reach` says how far rounding alone moves each row, where one is further
    away: rows that it moves too far are not compared. `why_not` says why the gate cannot be had
    here, where it cannot.
    """

    name: str
    asks: str
    axis: str
    pairs: Callable[[], Iterable[tuple[AuditedRun, AuditedRun]]]
    allowed: float | None = None
    why_not: str | None = None
    #: What of it is not audited beside, and why.
    uncovered: tuple[Uncovered, ...] = ()
    reach: Callable[[], Float64s] | None = None

    def run(self) -> Stage:
        """Run all pairs and compare them; those that cannot be run are not audited."""
        if self.why_not is not None:
            return not_audited(self.name, self.asks, self.why_not)
        started, found = time.perf_counter(), _Found(self.axis, self.allowed, self.reach)
        uncovered = self.uncovered
        try:
            for one, other in self.pairs():
                found.take(one, other)
        except NOT_TO_BE_HAD as error:
            if not found.num_pairs:
                return not_audited(self.name, self.asks, str(error))
            uncovered += (Uncovered("the pairs after these", str(error)),)
        except HypoError as error:
            found.mistakes.append(Mistake(str(error), "a way that did not end"))
        uncovered += tuple(found.undecided)
        if found.undecided and not (found.num_rows or found.mistakes):
            return not_audited(self.name, self.asks, found.undecided[0].why)
        canary = PlantedError(" and ".join(found.planted), found.num_planted, found.num_seen)
        verdict = verdict_of(found.mistakes, canary, found.num_pairs or len(found.mistakes))
        if found.mistakes and not found.num_planted:
            verdict = StageVerdict.WRONG  # it ended before there was anything to compare
        return Stage(
            name=self.name,
            asks=self.asks,
            verdict=verdict,
            things="pairs of ways",
            num_covered=found.num_pairs,
            num_all=found.num_pairs,
            num_checks=found.num_rows,
            canary=canary,
            findings=tuple(found.mistakes[:_MAX_MISTAKES]),
            uncovered=uncovered,
            details=found.details(),
            seconds=time.perf_counter() - started,
        )


class _Found:
    """What the pairs of a gate have shown so far."""

    def __init__(
        self, axis: str, allowed: float | None, reach: Callable[[], Float64s] | None
    ) -> None:
        self._axis, self._allowed, self._reach = axis, allowed, reach
        self.undecided: list[Uncovered] = []
        self.mistakes: list[Mistake] = []
        self.planted: dict[str, None] = {}
        self.num_pairs = self.num_rows = self.num_planted = self.num_seen = 0
        self._worst = 0.0
        self._routes: list[object] = []

    def take(self, one: AuditedRun, other: AuditedRun) -> None:
        """Compare a pair, and then what is planted into it."""
        self.num_pairs += 1
        self._routes.append([compare.proof(one), compare.proof(other)])
        self.mistakes += compare.route_mistakes(one, other, self._axis)
        self._plant(compare.planted_routes(one, other, self._axis))
        positions = tuple(p for p in one.positions if p in other.positions)
        if not positions:
            self.mistakes.append(Mistake("there is no token with results of both", other.name))
            return
        left, right = one.at(positions), other.at(positions)
        if self._allowed is None:
            self.num_rows += len(positions)
            mistake = compare.bit_mistake(left, right, positions)
            self._plant(compare.planted_bits(left, other, positions))
        else:
            mistake = compare.distance_mistake(left, right, positions, self._allowed)
            self._worst = max(self._worst, compare.largest_distance(left, right))
            if mistake is not None and self._reach is not None:
                mistake, positions = self._of_decided(left, right, positions, self._allowed)
                left, right = one.at(positions), other.at(positions)
            self.num_rows += len(positions)
            if positions:
                planted = compare.planted_distances(left, right, positions, self._allowed)
                self._plant(planted)
        if mistake is not None:
            where = f"{other.name}, beside {one.name}"
            self.mistakes.append(msgspec.structs.replace(mistake, where=where))

    def _of_decided(
        self, one: Float32s, other: Float32s, positions: tuple[int, ...], allowed: float
    ) -> tuple[Mistake | None, tuple[int, ...]]:
        """The first token whose rows are too far apart of those that rounding alone does not move
        as far, or that are not finite; and the positions of these tokens."""
        assert self._reach is not None
        reach = self._reach()
        if undecided := undecided_of(positions, reach, allowed):
            self.undecided.append(undecided)
        is_told = (reach <= allowed) | ~(np.isfinite(one) & np.isfinite(other)).all(axis=1)
        left = tuple(
            position for position, is_held in zip(positions, is_told, strict=True) if is_held
        )
        return compare.distance_mistake(one[is_told], other[is_told], left, allowed), left

    def _plant(self, planted: PlantedError) -> None:
        self.planted[planted.planted] = None
        self.num_planted += planted.num_planted
        self.num_seen += planted.num_seen

    def details(self) -> dict[str, object]:
        found: dict[str, object] = {"differ_in": self._axis, "routes": self._routes}
        if self._allowed is not None:
            found |= {"largest_distance": self._worst, "distance_allowed": self._allowed}
        return found


def not_audited(name: str, asks: str, why: str) -> Stage:
    """A gate at which nothing was looked, with the reason."""
    return Stage(name, asks, StageVerdict.NOT_RUN, uncovered=(Uncovered(name, why),))


def attempt(name: str, asks: str, run: Callable[[], Stage]) -> Stage:
    """What `run` gives; not audited where it cannot be had, and wrong where it ends otherwise."""
    try:
        return run()
    except NOT_TO_BE_HAD as error:
        return not_audited(name, asks, str(error))
    except HypoError as error:
        mistake = Mistake(str(error), "it did not end")
        return Stage(name, asks, StageVerdict.WRONG, findings=(mistake,))
