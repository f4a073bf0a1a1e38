"""Whose turn it is to step: a lock, the end of each turn, and the process that they belong to."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from hypocenter.base.errors import UsageError


class SteppingTurns:
    """What an engine is to the threads that drive it: whoever has the turn steps for all.

    Locks and threads stay in the process that made it; the child of a fork is refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn_ended = threading.Condition()
        self._num_turns = 0
        self._process = os.getpid()
        self._stepping: int | None = None  # the thread that has the lock

    @property
    def is_of_this_process(self) -> bool:
        """Whether no fork lies between: threads stay in the parent, and locks as they were."""
        return os.getpid() == self._process

    def require_own_process(self) -> None:
        """Raises UsageError in the child of a fork."""
        if not self.is_of_this_process:
            raise UsageError(
                f"the model was opened by process {self._process}, and this is {os.getpid()}, "
                "forked from it; open the model in each process"
            )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Within, this thread steps, and others wait."""
        self.require_own_process()
        self._require_outside_step()
        self._lock.acquire()
        self._stepping = threading.get_ident()
        try:
            yield
        finally:
            self._end_turn()

    def _take_turn(self, work: Callable[[], object]) -> None:
        """Do `work` under the lock, or wait until the thread that has the lock gives it back.

        Waiting for the end of a turn instead of the lock keeps one busy thread from starving the
        others: each gets to its own pieces after every step.
        """
        self.require_own_process()
        self._require_outside_step()
        seen = self._num_turns
        if self._lock.acquire(blocking=False):
            self._stepping = threading.get_ident()
            try:
                work()
            finally:
                self._end_turn()
        else:
            with self._turn_ended:
                self._turn_ended.wait_for(lambda: self._num_turns != seen)

    @property
    def _is_within_step(self) -> bool:
        return self._stepping == threading.get_ident()

    def _require_outside_step(self) -> None:
        if self._is_within_step:  # and would wait for itself
            asked = "the engine was asked within its own step, by on_news or a signal handler"
            raise UsageError(f"{asked}; ask it from another place")

    def _end_turn(self) -> None:
        self._stepping = None
        self._lock.release()
        with self._turn_ended:
            self._num_turns += 1
            self._turn_ended.notify_all()
