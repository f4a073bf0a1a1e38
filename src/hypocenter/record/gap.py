"""What of a run is not known, and why: facts, which reports put into words."""

from __future__ import annotations

import enum

import msgspec


class GapKind(enum.StrEnum):
    """Why something is not known.

    DAMAGED: it was there once, and is not whole any more. LEFT_OUT: there was no room for it.
    NOT_RECORDED: nobody wrote it down. NOT_EXAMINED: it is there, and was not looked at.
    NOT_REPLAYED: so are launches of the kernel that `Gap.what` names. SOURCE_NOT_RUN: so are they,
    because the program's own text of the kernel was not allowed to run. ZEROS: a kernel takes
    addresses from what `Gap.what` names, and zeros stood in for that in its replay. LOST_LAUNCH:
    launches were made that could not be recorded.
    """

    DAMAGED = "damaged"
    LEFT_OUT = "left out"
    NOT_RECORDED = "not recorded"
    NOT_EXAMINED = "not examined"
    NOT_REPLAYED = "not replayed"
    SOURCE_NOT_RUN = "source not run"
    ZEROS = "replayed as zeros"
    LOST_LAUNCH = "launch not recorded"


class Gap(msgspec.Struct, frozen=True):
    """`what` is not known; `reason` says why, or what would make it known."""

    kind: GapKind
    what: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}" if self.reason else self.what

    @classmethod
    def damage(cls, what: str, reason: str) -> Gap:
        return cls(GapKind.DAMAGED, what, reason)

    @classmethod
    def left_out(cls, what: str, reason: str = "") -> Gap:
        return cls(GapKind.LEFT_OUT, what, reason)

    @classmethod
    def not_recorded(cls, what: str, reason: str = "") -> Gap:
        return cls(GapKind.NOT_RECORDED, what, reason)

    @classmethod
    def not_examined(cls, what: str, reason: str = "") -> Gap:
        return cls(GapKind.NOT_EXAMINED, what, reason)


#: What nobody kept of a process that died unwatched.
UNWATCHED = Gap.not_recorded(
    "stderr and exit code", "run the command as `hypo doctor -- ...` to keep them"
)
