"""The time of a stage, which ends before something is begun that would take longer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class StageClock:
    """Asked before each thing that a stage does, it says whether the time is over.

    It is where `seconds` have passed. Where it is known what the first thing is likely to take, it
    also is where that or one of the last two things took longer than what is left: nothing ends a
    step of a model. Once over it stays so.
    """

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float] = time.perf_counter,
        *,
        first_takes: float = 0.0,
    ) -> None:
        """`first_takes`: seconds that the first thing is likely to take; 0: things are unlike."""
        self._foresees = first_takes > 0
        self._now = now
        self._asked_at = now()
        self._end = self._asked_at + seconds
        self._last: deque[float] = deque([first_takes], maxlen=2)
        self._is_over = False

    def __call__(self) -> bool:
        now = self._now()
        self._last.append(now - self._asked_at)
        self._asked_at = now
        takes = max(self._last) if self._foresees else 0.0
        self._is_over = self._is_over or now + takes >= self._end
        return self._is_over
