"""What is told of workers that follow each other: who ended, how, who took over, after how long.

It starts and ends none of them: that is the supervisor's.
"""

from __future__ import annotations

import logging
import time

from hypocenter.base.wording import count_text, signal_name
from hypocenter.server.operating.log import since, tell
from hypocenter.watch.child import Ended


def how(ended: Ended | Exception) -> str:
    """How a worker ended, in a few words."""
    if isinstance(ended, Exception):
        return f"could not be run: {ended}"
    if ended.hung_seconds is not None:
        return f"was ended, since a step ran for {ended.hung_seconds:.0f} seconds"
    if ended.signal is not None:
        return f"was ended by {signal_name(ended.signal)}"
    return f"ended with exit code {ended.exit_code}"


class Succession:
    """Remembers who was lost until somebody has taken over; `name` says on which card."""

    def __init__(self, name: str = "") -> None:
        self._of = f"{name}: " if name else ""
        #: How the worker ended that the next one follows, and when.
        self._lost: tuple[str, float] | None = None

    def tell_lost(self, ended: Ended | Exception, num_open: int) -> None:
        """The worker that had the model is gone, and so many requests were open."""
        pid = None if isinstance(ended, Exception) else ended.pid
        told = f"worker {pid} {how(ended)}"
        if self._lost is None:  # of those that nobody has followed yet the first one counts
            self._lost = told, time.monotonic()
        message = f"{self._of}{told}; "
        message += f"{count_text(num_open, 'request waits', 'requests wait')} for another"
        tell(logging.WARNING, "worker_ended", message, pid=pid, num_open=num_open)

    def tell_ready(self, pid: int | None, load_seconds: float, num_open: int) -> None:
        """A worker takes requests, which needed so long to load the model."""
        if self._lost is None:
            seconds = round(load_seconds, 3)
            message = f"{self._of}worker {pid} is ready after {seconds:.1f} s"
            tell(logging.INFO, "worker_ready", message, pid=pid, seconds=seconds)
            return
        (told, moment), self._lost = self._lost, None
        seconds = since(moment)
        message = f"{self._of}{told}; worker {pid} took over after {seconds:.1f} s, "
        message += f"{count_text(num_open, 'request goes', 'requests go')} on"
        data = {"pid": pid, "seconds": seconds, "num_open": num_open}
        tell(logging.WARNING, "worker_took_over", message, **data)
