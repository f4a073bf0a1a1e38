"""Makes requests ready in threads of their own, so that none waits for another's form.

A matcher over a large vocabulary takes up to a second of a core. The library gives Python's lock
back meanwhile, so neither a step nor another request waits for that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from hypocenter.wire.messages import Submit


class Arrivals:
    """Calls `admit` with each request that comes, in order; those with a form in another thread.

    `admit` is also told how to ask whether the request is wanted still. What it raises goes to
    `on_error`, in that thread.
    """

    def __init__(
        self,
        admit: Callable[[Submit, Callable[[], bool]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._admit, self._on_error = admit, on_error
        #: Ids that came and were not admitted yet, each with whether it is wanted.
        self._wanted: dict[int, bool] = {}
        self._lock = threading.Lock()
        self._plain: queue.SimpleQueue[Submit | None] = queue.SimpleQueue()
        self._with_form: queue.SimpleQueue[Submit | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=[messages], name="arrivals", daemon=True)
            for messages in (self._plain, self._with_form)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, message: Submit) -> None:
        """A request has come; returns at once."""
        with self._lock:
            self._wanted[message.id] = True
        (self._with_form if message.form else self._plain).put(message)

    def cancel(self, number: int) -> None:
        """Nobody wants that request any more, if it is still to be admitted; returns at once."""
        with self._lock:
            if number in self._wanted:
                self._wanted[number] = False

    def close(self) -> None:
        """Admit nothing more; waits for what is being made ready."""
        with self._lock:
            self._wanted = dict.fromkeys(self._wanted, False)
        for messages, thread in zip((self._plain, self._with_form), self._threads, strict=True):
            messages.put(None)
            thread.join()

    def _run(self, messages: queue.SimpleQueue[Submit | None]) -> None:
        try:
            while (message := messages.get()) is not None:
                self._admit(message, lambda number=message.id: self._is_wanted(number))  # type: ignore[misc]
                with self._lock:
                    self._wanted.pop(message.id, None)
        except BaseException as error:
            self._on_error(error)

    def _is_wanted(self, number: int) -> bool:
        with self._lock:
            return self._wanted.get(number, False)
