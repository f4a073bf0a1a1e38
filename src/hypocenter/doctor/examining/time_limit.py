"""How long an examination may take: what is known by then is told, with what was left out.

Checks that know their own length ask for the time that is left. One that does not come back is
stopped by a signal, in a process whose main thread examines; elsewhere nothing stops it. Python
hears of a signal between two of its own instructions. So a call of native code, such as numpy's or
a compiler's, ends first; `seconds_over` says how long that took.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

Made = TypeVar("Made")
#: Of one examination, where nobody asked for another time.
EXAMINE_SECONDS = 60.0
#: A check that was stopped may take so long to give what it has before it is stopped again.
_AGAIN_SECONDS = 5.0


class OutOfTime(BaseException):
    """The time of an examination is over; no `except Exception` takes it for a fault of its own."""


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """So many seconds from its making on."""

    seconds: float = EXAMINE_SECONDS
    ends: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", time.monotonic() + self.seconds)

    @property
    def left(self) -> float:
        """Seconds, 0 where it is over."""
        return max(self.ends - time.monotonic(), 0.0)

    @property
    def seconds_over(self) -> float:
        """How long it is over."""
        return max(time.monotonic() - self.ends, 0.0)

    def until(self, seconds: float) -> float:
        """When a part ends that may take so long, if there is the time, by time.monotonic."""
        return min(time.monotonic() + seconds, self.ends)

    @contextlib.contextmanager
    def enforce(self) -> Iterator[None]:
        """Within, OutOfTime is raised when the time is over, and again for as long as one stays."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            raise OutOfTime

        before = signal.signal(signal.SIGALRM, stop)
        timer = signal.setitimer(signal.ITIMER_REAL, max(self.left, 0.001), _AGAIN_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, before)


def make_within(seconds: float, make: Callable[[], Made]) -> Made | None:
    """Return what `make` does; None where that takes longer."""
    try:
        with TimeLimit(seconds).enforce():
            return make()
    except OutOfTime:
        return None
