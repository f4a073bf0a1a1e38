"""How long a connection waits for a client that takes nothing of its answer. Knows no routes."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Is cut off when its buffer (64 KiB) has been full for `unread_seconds`.

    Answers wait while it is full. It counts as full until three quarters of it are taken.
    """

    unread_seconds: float
    _cutting: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing it would wait for the client to take the rest.
        self._cutting = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._go_on()
        super().connection_lost(exc)

    def _go_on(self) -> None:
        if self._cutting is not None:
            self._cutting.cancel()
            self._cutting = None


def connection_class(seconds: float) -> type[Connection]:
    """Connections that are cut off after so many seconds."""
    return type("Connection", (Connection,), {"unread_seconds": seconds})
