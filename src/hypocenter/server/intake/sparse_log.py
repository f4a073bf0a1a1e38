"""Lines about what strangers do: told one by one while they are few, and counted when they are not.

Whoever is refused chooses how often that happens, and must not choose how long a log gets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_MAX_CHARS = 300


class SparseLog:
    """At most `num_lines` warnings in `seconds`; the next one says how many were left out."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        num_lines: int = 5,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._clock = log, clock
        self._num_lines, self._seconds = num_lines, seconds
        self._began = -seconds
        self._num_told = 0
        self._num_left_out = 0

    def warn(self, text: str) -> None:
        """Log a line, whatever stands in `text`, unless there were many just now."""
        now = self._clock()
        if now - self._began >= self._seconds:
            self._began, self._num_told = now, 0
        if self._num_told >= self._num_lines:
            self._num_left_out += 1
            return
        self._num_told += 1
        line = "".join(c if c.isprintable() else "?" for c in text[:_MAX_CHARS])
        if self._num_left_out:
            line += f" (and {self._num_left_out} more that were not told)"
            self._num_left_out = 0
        self._log.warning("%s", line)
