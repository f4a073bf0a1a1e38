"""What a verification found: its stages, and what each has looked at."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec


class StageVerdict(StrEnum):
    """`right`: all that was looked at is. `wrong`: something is not. `blind`: a planted error was
    not seen, so nothing that was found may be believed. `not_run`: nothing was looked at."""

    RIGHT = "right"
    WRONG = "wrong"
    BLIND = "blind"
    NOT_RUN = "not run"


class Mistake(msgspec.Struct, frozen=True):
    """One thing that is wrong: what, where, and by how much."""

    what: str
    where: str = ""
    details: dict[str, Any] = {}


class PlantedError(msgspec.Struct, frozen=True):
    """An error that was planted: of what size, how often, and how often it was seen."""

    planted: str
    num_planted: int
    num_seen: int


class Uncovered(msgspec.Struct, frozen=True):
    """What was not looked at, and why."""

    what: str
    why: str


class Stage(msgspec.Struct, frozen=True):
    """`num_covered` of `num_all` `things` were looked at."""

    name: str
    asks: str
    verdict: StageVerdict
    things: str = ""
    num_covered: int = 0
    num_all: int = 0
    num_checks: int = 0
    canary: PlantedError | None = None
    findings: tuple[Mistake, ...] = ()
    uncovered: tuple[Uncovered, ...] = ()
    details: dict[str, Any] = {}
    seconds: float = 0.0


class Verification(msgspec.Struct, frozen=True):
    """All stages of a verification of one model on one device."""

    model: str
    device: str
    hardware: str
    effort: str
    budget_seconds: float
    stages: tuple[Stage, ...]
    seconds: float
    #: Those of `seconds` in which the model was loaded and kernels were compiled.
    preparing_seconds: float = 0.0

    @property
    def verdict(self) -> StageVerdict:
        """The worst of the stages that ran; a stage that saw no planted error outweighs all."""
        found = [stage.verdict for stage in self.stages]
        for worst in (StageVerdict.BLIND, StageVerdict.WRONG):
            if worst in found:
                return worst
        return StageVerdict.RIGHT if StageVerdict.RIGHT in found else StageVerdict.NOT_RUN


def verdict_of(findings: Sequence[Mistake], canary: PlantedError, num_covered: int) -> StageVerdict:
    """What a stage may say of itself. That nothing is wrong needs a planted error that was seen."""
    if not num_covered:
        return StageVerdict.NOT_RUN
    if canary.num_seen < canary.num_planted:
        return StageVerdict.BLIND
    if findings:
        return StageVerdict.WRONG
    return StageVerdict.RIGHT if canary.num_planted else StageVerdict.BLIND
