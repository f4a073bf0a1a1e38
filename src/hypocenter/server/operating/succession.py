"""What is told of workers that follow each other: who ended, how, who took over, after how long.

It starts and ends none of them: that is the supervisor's.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from hypocenter.base.wording import count_text, signal_name
from hypocenter.server.operating.log import since, tell
from hypocenter.watch.child import Ended


class Taken(NamedTuple):
    """Requests of clients that a worker had: how many have a place with another by now, and how
    many wait for one."""

    num_elsewhere: int = 0
    num_waiting: int = 0

    def __str__(self) -> str:
        waiting = "no request waits for another"
        if self.num_waiting:
            number = count_text(self.num_waiting, "request waits", "requests wait")
            waiting = f"{number} for another"
        if not self.num_elsewhere:
            return waiting
        moved = count_text(self.num_elsewhere, "request goes", "requests go") + " on elsewhere"
        return f"{moved}, {waiting}" if self.num_waiting else moved


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

    def tell_late(self, pid: int | None, seconds: float, taken: Taken) -> None:
        """A worker is past its deadline, and its requests are taken from it before it ends."""
        message = f"{self._of}worker {pid} is past its deadline after {seconds:.1f} s; {taken}"
        data = {"pid": pid, "seconds": round(seconds, 3), "num_open": sum(taken)}
        tell(logging.WARNING, "worker_late", message, **data)

    def tell_lost(self, ended: Ended | Exception, taken: Taken) -> None:
        """The worker that had the model is gone, and what has become of its requests."""
        pid = None if isinstance(ended, Exception) else ended.pid
        told = f"worker {pid} {how(ended)}"
        if self._lost is None:  # of those that nobody has followed yet the first one counts
            self._lost = told, time.monotonic()
        message = f"{self._of}{told}; {taken}"
        tell(logging.WARNING, "worker_ended", message, pid=pid, num_open=sum(taken))

    def tell_ready(self, pid: int | None, load_seconds: float, num_open: int) -> None:
        """A worker takes requests, which needed so long to load the model; so many wait."""
        if self._lost is None:
            seconds = round(load_seconds, 3)
            message = f"{self._of}worker {pid} is ready after {seconds:.1f} s"
            tell(logging.INFO, "worker_ready", message, pid=pid, seconds=seconds)
            return
        (told, moment), self._lost = self._lost, None
        seconds = since(moment)
        going_on = count_text(num_open, "request goes", "requests go") + " on"
        message = f"{self._of}{told}; worker {pid} took over after {seconds:.1f} s, "
        message += going_on if num_open else "no request waited for it"
        data = {"pid": pid, "seconds": seconds, "num_open": num_open}
        tell(logging.WARNING, "worker_took_over", message, **data)
