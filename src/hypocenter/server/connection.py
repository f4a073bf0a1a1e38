"""A client's connection where no application hears of it: what is no HTTP, or does not go on.

The protocol is uvicorn's own for h11, whichever others are installed, so that limits and errors are
the same everywhere. Ours are the form of its errors, and that nobody holds a connection by saying
nothing or by taking nothing. Reads no body and knows no route.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import Any

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from hypocenter.server.api_error import ApiError
from hypocenter.server.inquiry import new_name

#: Of the line and the headers of a request together.
MAX_HEADER_BYTES = 64 << 10
MAX_CONNECTIONS = 4096
#: Of the process's files, those that are no connections: workers, libraries, the log.
_OTHER_FILES = 64
#: Between two requests a connection may rest this long.
KEEP_ALIVE_SECONDS = 75


def max_connections() -> int:
    """How many clients may be connected, so that files are left for a new worker."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, soft - _OTHER_FILES))


class Connection(H11Protocol):
    """`limit_concurrency` of uvicorn's configuration bounds the connections.

    The headers of a request must be there `header_seconds` after the connection or the request
    began. Within a body no more than `body_seconds` pass without a byte. Who leaves its buffer
    (64 KiB) full for `unread_seconds` is cut off; it counts as full until three quarters of it are
    taken.
    """

    header_seconds = 30.0
    body_seconds = 30.0
    unread_seconds = 600.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # Uvicorn would refuse in its own words, and keep the connection.
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None
        self._cutting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._max_connections
        if limit is not None and len(self.connections) > limit:
            message = f"{limit} clients are connected, and no more may be; try again in a moment"
            self._refuse(ApiError(503, message, kind="unavailable_error", retry=True))
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._note_taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing it would wait for the client to take the rest.
        self._cutting = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_taken()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Uvicorn calls this while it handles h11's error, which says more."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        reason = str(error or msg)
        if status == 431:
            reason = f"its line and headers have more than {MAX_HEADER_BYTES} bytes"
        self._refuse(ApiError(status, f"this is no HTTP request that can be read: {reason}"))

    def _unsupported_upgrade_warning(self) -> None:
        """A request to upgrade is answered as if it were none, and that is nobody's concern."""

    def _watch(self) -> None:
        """See to it that what the client owes us comes; nothing, while we owe it an answer."""
        state = self.conn.their_state
        is_resting = self.timeout_keep_alive_task is not None
        if self.transport.is_closing() or state not in (h11.IDLE, h11.SEND_BODY) or is_resting:
            self._stop_watching()
            return
        has_answer = self.conn.our_state is h11.DONE
        if state is h11.SEND_BODY and not has_answer:
            self._stop_watching()  # each byte counts anew
        if self._deadline is None or self._awaited is not state:
            self._stop_watching()
            self._awaited = state
            seconds = self.header_seconds if state is h11.IDLE else self.body_seconds
            self._deadline = self.loop.call_later(seconds, self._give_up, seconds)

    def _note_taken(self) -> None:
        if self._cutting is not None:
            self._cutting.cancel()
            self._cutting = None

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self, seconds: float) -> None:
        what = "the headers" if self.conn.their_state is h11.IDLE else "more of the body"
        self._refuse(ApiError(408, f"{what} did not come within {seconds:g} seconds", retry=True))

    def _refuse(self, error: ApiError) -> None:
        """Say why, if nothing has been said yet, and close."""
        self._stop_watching()
        is_head = self.cycle is not None and self.scope["method"] == "HEAD"
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not is_head:
            answer = error.response()
            headers = [
                *answer.raw_headers,
                (b"connection", b"close"),
                (b"x-request-id", new_name("req").encode()),
            ]
            head = h11.Response(status_code=error.status, headers=headers)
            for event in (head, h11.Data(data=msgspec.json.encode(error.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def connection_class(unread_seconds: float) -> type[Connection]:
    """Connections that are cut off when nothing is taken of an answer for so many seconds."""
    return type("Connection", (Connection,), {"unread_seconds": unread_seconds})
