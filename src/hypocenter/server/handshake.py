"""A connection that is not encrypted yet: it holds a place, and may lose it to another one.

asyncio by itself tells nobody of a connection before its TLS handshake is over. Without a count of
those a client that opens many and never shakes hands would take all files of the process.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.server import ServerState

from hypocenter.server.connection import Connection, has_room, note_gone

#: A client shakes hands within a round trip or two.
HANDSHAKE_SECONDS = 10.0


class Handshake(asyncio.Protocol):
    """Takes uvicorn's place for a protocol until TLS stands, then hands over to a `Connection`."""

    context: ClassVar[ssl.SSLContext]
    made: ClassVar[type[Connection]]
    seconds: ClassVar[float] = HANDSHAKE_SECONDS

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._state = server_state
        self._limit = config.limit_concurrency
        self._inner = self.made(config, server_state, app_state, _loop)
        self._early = bytearray()
        self._address = ""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else ""
        self._state.connections.add(self)  # type: ignore[arg-type]
        if not has_room(self._state, self._limit):
            self.give_way()
            return
        self._inner.resting.add(self._address, self)
        self._task = asyncio.get_running_loop().create_task(self._shake())

    def data_received(self, data: bytes) -> None:
        """What came with the last message of the handshake; asyncio reads 256 KiB at most."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def give_way(self) -> None:
        """Go at once. Nothing can be said to who has no TLS."""
        self._leave()
        self._wire.abort()

    def shutdown(self) -> None:
        """The server ends."""
        self.give_way()

    def _leave(self) -> None:
        note_gone(self._state, self._address, self)

    async def _shake(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            secure = await loop.start_tls(
                self._wire,
                self,
                self.context,
                server_side=True,
                ssl_handshake_timeout=self.seconds,
            )
        except OSError:  # the client has gone, is too slow, or speaks no TLS of ours
            self._leave()
            return
        is_here = self in self._state.connections
        self._leave()
        if secure is None or not is_here:
            return
        secure.set_protocol(self._inner)
        self._inner.connection_made(secure)
        if self._early:
            self._inner.data_received(bytes(self._early))


def handshake_class(context: ssl.SSLContext, made: type[Connection]) -> type[Handshake]:
    """Connections of the class `made`, with TLS by `context`."""
    return type("Handshake", (Handshake,), {"context": context, "made": made})
