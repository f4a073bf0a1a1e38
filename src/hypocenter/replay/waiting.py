"""Programs that wait: told from those that go on, and others have their turn meanwhile.

All programs of a launch count as resident at once. One runs at a time, each that began after the
first wait in a thread of its own. What a program is, `replay.py` says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array

#: Different accesses that are kept; a circle has few.
_MAX_KNOWN = 1 << 16
#: Accesses after which a program that goes on need not be watched for much longer.
_ENOUGH_SEEN = 64
#: Times that the same comes from the same place until a program counts as waiting.
_POLLS = 32
#: Words that a program waits for at once.
_MAX_POLLED = 128


class Polls:
    """The last accesses of one program, as far as they are one and the same."""

    def __init__(self) -> None:
        self._last: tuple[str, bytes, bytes] | None = None
        self._count = 0
        self._state: object = None
        #: What is read again and again, and where.
        self.place = ("", 0)

    def note(self, operation: str, pointers: Array, values: Array) -> bool:
        """Whether this access has come so often, with the same result, that it is a wait."""
        if operation == "store" or not 0 < pointers.size <= _MAX_POLLED:
            self._last = self._state = None
            return False
        seen = operation, pointers.tobytes(), values.tobytes()
        if seen != self._last:
            self._last, self._state, self._count = seen, None, 0
            return False
        self._count += 1
        if self._count % _POLLS:
            return False
        self.place = operation, int(pointers.reshape(-1)[0])
        return True

    def has_moved(self, state: object) -> bool:
        """Whether a program that waits has done anything else since the last time.

        `state` is what its names stand for: a loop that counts goes on, however it reads.
        """
        before, self._state = self._state, state
        return before is None or before != state


class Repetition:
    """The accesses of one program from `since` on, in seconds of this thread's time."""

    def __init__(self, since: float) -> None:
        self.since = since
        self._known: set[object] = set()
        self._num_seen = self._num_since_new = 0
        #: Until the first access, what names stand for at each step is looked at instead.
        self.has_no_access = True

    def note(self, operation: str, pointers: Array, values: Array) -> None:
        """An access of these addresses, and what was read or written there."""
        if self.has_no_access:
            self.has_no_access = False
            self._known.clear()
            self._num_seen = self._num_since_new = 0
        self._count((operation, hash(pointers.tobytes()), hash(values.tobytes())))

    def note_state(self, state: object) -> None:
        """Where a program is that has made no access, and what its names stand for there."""
        self._count(hash(state))

    def _count(self, seen: object) -> None:
        self._num_seen += 1
        if seen in self._known or len(self._known) >= _MAX_KNOWN:
            self._num_since_new += seen in self._known
            return
        self._known.add(seen)
        self._num_since_new = 0

    @property
    def has_seen_enough(self) -> bool:
        """Whether a circle would show by now, if it is a short one."""
        return self._num_seen >= _ENOUGH_SEEN

    @property
    def is_circle(self) -> bool:
        """Whether the same comes again and again, with the same values, and nothing new.

        Nothing changes then unless another program changes it.
        """
        return self._num_since_new > max(self._num_seen // 2, len(self._known))


#: Programs that wait at once.
MAX_WAITING = 512


class Abandoned(BaseException):
    """The launch ends, and with it a program that still waits."""


class _Program:
    """A program with a thread of its own; `go` gives it its turn."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.go = threading.Semaphore(0)
        self.is_done = False
        self.has_moved = True
        self.error: BaseException | None = None


class Turns:
    """Whose turn it is. The first program that waits does so on the stack of the caller.

    `run` runs a program, `save` and `restore` keep what belongs to the one that is running, and
    `begin_next` gives the next program to begin, or None. `stuck` is told, of each program that
    waits, that none is left which could end that; it may raise.
    """

    def __init__(
        self,
        run: Callable[[int], None],
        save: Callable[[], Any],
        restore: Callable[[Any], None],
        begin_next: Callable[[], int | None],
        stuck: Callable[[int], None],
    ) -> None:
        self._run, self._save, self._restore = run, save, restore
        self._begin_next, self._stuck = begin_next, stuck
        self._back = threading.Semaphore(0)
        self._waiting: list[_Program] = []
        self._current: _Program | None = None
        self._is_stuck = self._is_over = False
        self.num_ended = 0  # in threads of their own
        self.seconds = 0.0  # of the processor that these have had

    @property
    def is_stuck(self) -> bool:
        return self._is_stuck

    @property
    def is_over(self) -> bool:
        """Whether the launch ends: a program that runs on in a thread of its own is to end too."""
        return self._is_over

    def wait(self, has_moved: bool) -> None:
        """The program that is running waits; `has_moved`: it did more than that since it last did.

        Returns when it is its turn again. Raises Abandoned when it never will be.
        """
        kept, own = self._save(), self._current
        if own is None:
            self._round(has_moved)
        else:
            own.has_moved = has_moved
            self._back.release()
            own.go.acquire()
        self._restore(kept)
        if self._is_stuck and not self._is_over:
            self._stuck(len(self._waiting) + (own is None))
        if self._is_stuck or self._is_over:
            raise Abandoned

    def drain(self) -> None:
        """Let the programs that still wait end; the others have."""
        while self._waiting:
            self._round(False)

    def close(self) -> None:
        """End the threads of programs that still wait."""
        self._is_over = True
        for program in list(self._waiting):
            self._turn_of(program)

    def _round(self, has_moved: bool) -> None:
        """Each program that waits has its turn, and one more begins."""
        if self._is_stuck:
            for program in list(self._waiting):
                self._take(program)
            return
        for program in list(self._waiting):
            has_moved |= self._take(program)
        number = self._begin_next() if len(self._waiting) < MAX_WAITING else None
        if number is None:
            self._is_stuck = not has_moved
            return
        program = _Program(number)
        self._waiting.append(program)
        threading.Thread(target=self._body, args=(program,), daemon=True).start()
        self._take(program)

    def _take(self, program: _Program) -> bool:
        """The turn is `program`'s until it waits or ends; gives whether that got it anywhere."""
        self._turn_of(program)
        if program.error is not None:
            raise program.error
        return program.is_done or program.has_moved

    def _turn_of(self, program: _Program) -> None:
        before, self._current = self._current, program
        program.go.release()
        try:
            self._back.acquire()
        finally:  # who stops us, as when time is over, leaves a program in the midst of its turn
            self._current = before
        if program.is_done:
            self._waiting.remove(program)

    def _body(self, program: _Program) -> None:
        program.go.acquire()
        try:
            with np.errstate(all="ignore"):
                self._run(program.number)
            self.num_ended += 1
        except Abandoned:
            pass
        except BaseException as error:  # whatever it is, it is the caller's
            program.error = error
        self.seconds += time.thread_time()
        program.is_done = True
        self._back.release()
