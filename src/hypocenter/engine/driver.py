"""Driver: one thread that steps an engine for requests whose owners wait elsewhere.

Knows no event loop, no HTTP and no model. Whoever submits is told of news by the request itself
(`Request.on_news`), takes its pieces from `Request.deltas`, and asks `Engine.result` at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hypocenter.base.errors import as_exception
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request


class Driver:
    """Steps an engine as long as a request of its own is open; all methods are thread-safe.

    The thread begins with the first request and ends with the last one, so that an idle engine has
    none and nobody has to stop it. Others may drive the same engine meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._open: set[Request] = set()
        self._thread: threading.Thread | None = None

    def submit(self, request: Request, on_news: Callable[[], None]) -> None:
        """Queue a request and drive it; returns at once.

        `on_news` is called in the thread that steps, after each piece and when the request is done.
        It must be quick, and must not ask anything of the engine. One that raises ends its own
        request with that error.
        """
        self.engine.require_own_process()
        request.on_news = on_news
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._drive, name="hypocenter driver")
                thread.start()  # it waits for the lock
                self._thread = thread
            self._open.add(request)
            self.engine.submit(request)

    def cancel(self, request: Request) -> None:
        """Have a request end with what it has so far, before the next step; returns at once."""
        request.cancel_requested = True

    def join(self) -> None:
        """Wait until no request of its own is open. `Engine.close` ends them all."""
        if not self.engine.is_of_this_process:  # the thread is the parent's
            return
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _drive(self) -> None:
        while requests := self._still_open():
            try:
                self.engine.step()
            except BaseException as error:  # of the engine itself: whoever waits must hear of it
                self._fail(requests, as_exception(error))

    def _fail(self, requests: set[Request], error: Exception) -> None:
        try:
            self.engine.fail(requests, error)
        except BaseException as second:
            # An engine that cannot even end them must not keep them waiting.
            error.add_note(f"and ending the requests raised {second!r}")
            for request in requests:
                if not request.done:
                    request.fail(error)

    def _still_open(self) -> set[Request]:
        with self._lock:
            self._open = {request for request in self._open if not request.done}
            if not self._open:
                self._thread = None  # under the lock: who submits now begins another
            return self._open.copy()
