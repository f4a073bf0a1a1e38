"""HTTP as h11 reads it, but for what two readers would take for different requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h11


class Parser(h11.Connection):
    """h11, which is handed a head or data of a body, and nothing beyond them.

    `refuse` is told of what is no HTTP, and of what two readers would take for different requests.
    """

    def __init__(self, max_header_bytes: int, refuse: Callable[[int, str], None]) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._refuse = refuse
        self._is_chunked = False  # the answer that is being sent

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # A frame of h11 has the error, which has all frames: none would go for long.
            error.__traceback__ = None
            self._refuse(error.error_status_hint, str(error))
            return h11.NEED_DATA
        if isinstance(event, h11.Request) and (reason := _ambiguity(event)):
            self._refuse(400, reason)
            return h11.NEED_DATA
        return event

    def send(self, event: Any) -> Any:
        """As h11 does, but an answer that begins before its body has come closes the connection.

        A chunk of an answer is framed here, which takes a tenth of h11's time: there is one for
        each piece of a stream.
        """
        if isinstance(event, h11.Data) and self._is_chunked and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            headers = [pair for pair in event.headers if pair[0] != b"connection"]
            event = h11.Response(
                status_code=event.status_code,
                headers=[*headers, (b"connection", b"close")],
                reason=event.reason,
            )
        sent = super().send(event)
        if isinstance(event, h11.Response):
            # A line of its own: within a value a client may have chosen these words.
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in (sent or b"").lower()
        return sent


def _ambiguity(request: h11.Request) -> str:
    """Why it cannot be told where a request's body ends; "" when it can (RFC 9112, 6.1 and 6.3)."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return ""
    if b"content-length" in names:
        return "it has both Content-Length and Transfer-Encoding"
    if request.http_version < b"1.1":
        return "it is HTTP/1.0 and has Transfer-Encoding"
    return ""
