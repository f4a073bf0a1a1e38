"""What one run of a program below the doctor came to: a row of the one table.

`Case` is what the collections have in common. Nothing here runs anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from faults.judge import Says, Verdict
from hypocenter.doctor import diagnosis


class Platform(StrEnum):
    """What a run is on: this processor, a GPU that is simulated on it, or a real one.

    On `emu:mi300x` kernels run as AMD's machine code: executed by our emulator of it; not hardware.
    """

    CPU = "cpu"
    SIMULATED = "simulated"
    EMULATED = "emu:mi300x"
    CARD = "card"


class Role(StrEnum):
    """Whether a fault was planted; a twin goes the same way as a fault, without it."""

    FAULT = "fault"
    TWIN = "twin"
    HEALTHY = "healthy"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `says` is "" for one without a fault; `is_seen`: a doctor looks for such a fault.

    `problems` are what is wrong beside the claims: a symptom that was not the declared one, a
    launch that nobody recorded, an alarm. Of a fix that was applied `mended` tells whether the
    fault is gone, and `whole` whether every other is, too; None where none could be applied.
    """

    collection: str
    name: str
    platform: Platform
    role: Role
    says: str = ""
    is_seen: bool = True
    claims: Mapping[str, str] = {}
    symptom: str = ""
    options: Sequence[str] = ()
    seconds: float = 0.0
    exit_code: int | None = None
    roots: Sequence[Mapping[str, Any]] | None = None
    problems: Sequence[str] = ()
    mended: bool | None = None
    whole: bool | None = None

    @property
    def key(self) -> str:
        """That of its case."""
        return f"{self.collection}/{self.name}"

    @property
    def is_alarm(self) -> bool:
        """Whether a healthy program was not let pass."""
        return self.role is not Role.FAULT and (bool(self.roots) or bool(self.problems))

    @property
    def is_as_wanted(self) -> bool:
        """Whether all is told of a fault, and nothing of what is none."""
        if self.role is not Role.FAULT:
            return not self.is_alarm
        wanted = {Says.RIGHT} if self.is_seen else {Says.SILENT, Says.RIGHT}
        return self.says in wanted and not self.problems

    def with_verdict(self, verdict: Verdict, *, is_seen: bool = True) -> Row:
        claims = {name: claim.value for name, claim in verdict.claims.items()}
        return msgspec.structs.replace(
            self, says=verdict.says.value, claims=claims, is_seen=is_seen
        )


@dataclass(frozen=True, slots=True)
class Again:
    """Whether a bundle still names its fault, and the rungs that confirmed something of it."""

    is_right: bool
    rungs: frozenset[str]

    @classmethod
    def of(cls, found: diagnosis.Diagnosis, is_right: bool) -> Again:
        confirmed = (one for one in found.hypotheses if one.verdict is diagnosis.Verdict.CONFIRMED)
        return cls(is_right, frozenset(one.diagnostic for one in confirmed))


class Case(ABC):
    """A fault with its twin, or something healthy, of one collection."""

    collection: str
    name: str
    platforms: frozenset[Platform]

    @property
    def key(self) -> str:
        """What no other case is called."""
        return f"{self.collection}/{self.name}"

    @property
    def words(self) -> frozenset[str]:
        """What one may call it by: several cases may have a word."""
        return frozenset({self.name, self.collection, self.key})

    @abstractmethod
    def run(self, platform: Platform, work: Path) -> list[Row]:
        """Run it and its twin below the doctor; `work` is the folder of its collection."""

    @abstractmethod
    def named_again(self, work: Path, without: Collection[str]) -> Again | None:
        """What the bundle that `run` left tells of the fault without some of the doctor's rungs.

        None where it left none.
        """
