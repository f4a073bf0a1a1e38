"""Time of an event loop that passes only while the loop waits: no stall of the machine is in it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.SelectSelector):
    """Never waits; what it would have waited is added to `now`."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            return super().select(None)  # for another thread
        if not ready and timeout is not None:
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers come in their order and at their times, all of them at once for whoever watches."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_in_virtual_time(work: Coroutine[Any, Any, _T]) -> _T:
    """What `asyncio.run` does, in a loop whose time is no machine's."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
