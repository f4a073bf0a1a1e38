"""One model of a server: its file, whether it is loaded, and who uses it now.

A supervisor lives as long as the model is loaded; the next time there is another one. What clients
are told of the model, its figures and its canary's tokens stay meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Literal

from hypocenter.base.errors import EXIT_ERROR, HypoError
from hypocenter.server.canary import Canary
from hypocenter.server.fleet.replica import CannotStart
from hypocenter.server.hosting.terms import ModelTerms
from hypocenter.server.operating.log import tell
from hypocenter.server.routes import Service
from hypocenter.server.supervisor import Supervisor
from hypocenter.wire.messages import ServedModel

HostState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
_STOP_SECONDS = 10.0
_MAGIC = b"GGUF"


class Host:
    """`make` gives a supervisor that is not started. `service` has the first one."""

    def __init__(
        self,
        terms: ModelTerms,
        service: Service,
        make: Callable[[], Supervisor],
        make_canary: Callable[[Supervisor], Canary] | None = None,
    ) -> None:
        self.terms, self.service = terms, service
        self._make, self._make_canary = make, make_canary
        self.state: HostState = "unloaded"
        #: Why it could not be loaded, in one line, and when that was tried, by the monotonic clock.
        self.error, self.failed_at = "", 0.0
        #: The class of that error, as the worker named it.
        self.error_kind = ""
        #: Requests that wait for it to be loaded, or that it answers; and of these the latter.
        self.num_held = self.num_served = 0
        #: Of requests that wait for it to be loaded.
        self.waiting: list[asyncio.Future[None]] = []
        self.last_used = time.monotonic()
        #: Whether it is to make room for another one, and takes nothing new until it has.
        self.is_leaving = False
        #: What was last known of it when it was loaded.
        self.facts: ServedModel | None = None
        self.has_file_changed = False
        self._stamp = _stamp(terms.path)
        self._asking: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.terms.all_names[0]

    @property
    def is_loaded(self) -> bool:
        return self.state == "loaded"

    @property
    def may_be_unloaded(self) -> bool:
        """Whether it is loaded, and not only to stay so."""
        return self.is_loaded and not self.terms.is_pinned

    @property
    def is_file_as_it_failed(self) -> bool:
        """Whether another attempt would find the file that could not be loaded."""
        return self.state == "failed" and _stamp(self.terms.path) == self._stamp

    def require_file(self) -> None:
        """Raises CannotStart for a file that is plainly no model, before another one makes room."""
        path, reason = self.terms.path, ""
        try:
            with open(path, "rb") as file:
                if (magic := file.read(len(_MAGIC))) != _MAGIC:
                    reason = f"{path} begins with {magic!r}, but a GGUF file with {_MAGIC!r}"
        except OSError as error:
            reason = f"{path}: {error.strerror}"
        if reason:
            self._stamp = _stamp(path)
            failed = CannotStart(EXIT_ERROR, reason)
            self._note_failure(failed)
            raise failed

    async def load(self) -> None:
        """Load it and wait until it takes requests. Raises CannotStart, and whatever starting a
        process raises; then nothing is left of the attempt."""
        self.state, self.error, self.error_kind = "loading", "", ""
        stamp = _stamp(self.terms.path)
        if stamp != self._stamp and self.service.canary is not None:
            self.service.canary = None  # another file says other tokens
        self._stamp, self.has_file_changed = stamp, False
        try:
            await self.service.supervisor.start()
        except BaseException as error:
            self.state = "unloaded"
            if isinstance(error, Exception):
                self._note_failure(error)
            await self._drop("the model could not be loaded")
            raise
        self.note_loaded()

    def note_loaded(self) -> None:
        """Its supervisor takes requests."""
        self.facts = self.service.supervisor.facts
        self.state, self.last_used = "loaded", time.monotonic()
        self.service.metrics.count("loaded")
        self._ask_canaries()

    def admit_waiting(self) -> None:
        """It serves all that wait for it."""
        for waiting in self.waiting:
            if not waiting.done():
                self.num_served += 1
                waiting.set_result(None)
        self.waiting.clear()

    async def unload(self, why: str) -> None:
        """End its processes; whatever is open ends with an error that says why."""
        self.state = "unloading"
        try:
            await self._drop(f"the model was unloaded: {why}")
        finally:
            self.state, self.is_leaving = "unloaded", False
            self.service.metrics.count("unloaded")
        tell(logging.INFO, "unloaded", f"{self.name} is unloaded: {why}", model=self.name)

    async def stop(self, seconds: float) -> None:
        """End its processes with the server's."""
        self._stop_asking()
        await self.service.supervisor.stop(seconds)

    async def note_given_up(self) -> None:
        """No worker of it can be started any more: it has failed, as one that was never loaded."""
        self._note_failure(HypoError("its workers ended, one after the other, before they loaded"))
        await self._drop("no worker can be started")

    def look_at_file(self) -> None:
        """Tell once that the file is another one than that which was loaded."""
        if self.is_loaded and not self.has_file_changed and _stamp(self.terms.path) != self._stamp:
            self.has_file_changed = True
            message = f"{self.terms.path} has changed since {self.name} was loaded; unload it and "
            message += "load it again to serve what is there now"
            tell(logging.WARNING, "file_changed", message, model=self.name)

    def _note_failure(self, error: Exception) -> None:
        self.state, self.failed_at = "failed", time.monotonic()
        self.error = " ".join(str(error).split()) or type(error).__name__
        self.error_kind = error.kind if isinstance(error, CannotStart) else ""
        self.service.metrics.count("load_failed")
        message = f"{self.name} cannot be loaded: {self.error}"
        tell(logging.ERROR, "load_failed", message, model=self.name)

    async def _drop(self, reason: str) -> None:
        self._stop_asking()
        gone = self.service.supervisor
        self.service.supervisor = self._make()
        self.service.metrics.follow(self.service.supervisor)
        await gone.stop(_STOP_SECONDS, reason)

    def _ask_canaries(self) -> None:
        if self._make_canary is None:
            return
        supervisor = self.service.supervisor
        if self.service.canary is None:
            self.service.canary = self._make_canary(supervisor)
        self.service.canary.follow(supervisor)
        self._asking = asyncio.get_running_loop().create_task(self.service.canary.run())

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None


def _stamp(path: str) -> tuple[int, ...]:
    """What tells a file from another one that took its place; empty where there is none."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return ()
