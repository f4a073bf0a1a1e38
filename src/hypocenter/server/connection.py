"""A client's connection where no application hears of it: what is no HTTP, or does not go on.

The protocol is uvicorn's own for h11, whichever others are installed, so that limits and errors are
the same everywhere. What comes is cut here into a head and the data of its body, and h11 is given
no more than that. So nobody holds a connection by saying nothing or by taking nothing, who is
refused is read no further, and one connection gets its share of each turn of the event loop. Knows
no route.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import resource
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from hypocenter.base.errors import UsageError
from hypocenter.server.api_error import ApiError
from hypocenter.server.inquiry import new_name
from hypocenter.server.intake.chunks import BadChunks, Chunks
from hypocenter.server.intake.parser import Parser
from hypocenter.server.intake.resting import Resting
from hypocenter.server.intake.sparse_log import SparseLog

#: Of the line and the headers of a request together.
MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 256
#: Of what comes behind a request before its answer is whole.
MAX_AHEAD_BYTES = 64 << 10
MAX_CONNECTIONS = 4096
#: Of the process's files, those that are no connections: workers, libraries, the log.
_OTHER_FILES = 44
_MIN_CONNECTIONS = 4
#: Between two requests a connection may rest this long.
KEEP_ALIVE_SECONDS = 75
#: What is read in a turn of the event loop: of so many bodies as much as takes less than half a
#: millisecond each.
_BODIES_A_TURN = 8
_BYTES_A_TURN = 32 << 10
_CHUNKS_A_TURN = 256
#: What asyncio takes of a socket at once. By itself it takes 256 KiB, and nobody counts these.
_READ_BYTES = 64 << 10
#: Of what is said of a request that cannot be read; h11 repeats the whole line.
_MAX_REASON_CHARS = 200
#: The end of a head, a line that ends with LF alone, or a beginning that no request has.
_HEAD = re.compile(rb"\r\n\r\n|(?<!\r)\n|\A[\x00-\x20]")

#: Why the system lets nobody in.
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_log = SparseLog(logging.getLogger("hypocenter.server"))


def max_connections() -> int:
    """How many clients may be connected, so that files are left for a new worker.

    Raises UsageError where the limit of open files leaves next to none.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OTHER_FILES + _MIN_CONNECTIONS:
        raise UsageError(
            f"the limit of open files is {soft} (ulimit -n), but must be at least "
            f"{_OTHER_FILES + _MIN_CONNECTIONS}"
        )
    return min(MAX_CONNECTIONS, soft - _OTHER_FILES)


def tell_of_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's handler of errors: without files it lets nobody in for a second."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _NO_ROOM and "socket" in context:
        _log.warn(f"no client was let in for a second: {error}; see ulimit -n")
    else:
        loop.default_exception_handler(context)


def _weakly(method: Callable[[int, str], None]) -> Callable[[int, str], None]:
    """The method for as long as what it is of is there: nothing once that has gone."""
    held = weakref.WeakMethod(method)

    def call(status: int, reason: str) -> None:
        if (found := held()) is not None:
            found(status, reason)

    return call


class _Gate(asyncio.Transport):
    """The transport as uvicorn is shown it: when to read and how to close is the connection's.

    That goes with its transport. In a circle with this one it would stay until the collector comes.
    """

    def __init__(self, wire: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._wire, self._connection = wire, weakref.ref(connection)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._wire.get_extra_info(name, default)

    def write(self, data: Any) -> None:
        self._wire.write(data)

    def is_closing(self) -> bool:
        connection = self._connection()
        return connection is None or connection.is_leaving or self._wire.is_closing()

    def close(self) -> None:
        if (connection := self._connection()) is not None:
            connection.leave()

    def abort(self) -> None:
        self._wire.abort()

    def pause_reading(self) -> None:
        self._hold(is_full=True)

    def resume_reading(self) -> None:
        self._hold(is_full=False)

    def _hold(self, *, is_full: bool) -> None:
        if (connection := self._connection()) is not None:
            connection.hold(is_full=is_full)


class _Turns:
    """The connections with something of a body to read, the one that waited longest first."""

    def __init__(self) -> None:
        self._waiting: deque[Connection] = deque()
        self._is_due = False

    def add(self, connection: Connection) -> None:
        """Have it read in a later turn of its event loop."""
        self._waiting.append(connection)
        if not self._is_due:
            self._is_due = True
            connection.loop.call_soon(self._run, connection.loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(_BODIES_A_TURN, len(self._waiting))):
            loop.call_soon(self._waiting.popleft().read)
        self._is_due = bool(self._waiting)
        if self._is_due:
            loop.call_soon(self._run, loop)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()
_resting: WeakKeyDictionary[ServerState, Resting[GivesWay]] = WeakKeyDictionary()


class GivesWay(Protocol):
    """A connection that may be cut off for another one."""

    def give_way(self) -> None: ...


def has_room(state: ServerState, limit: int | None) -> bool:
    """Whether the connections are as many as may be; where not, one that rests is cut off.

    The newest counts as connected already.
    """
    if limit is None or len(state.connections) <= limit:
        return True
    other = _resting.setdefault(state, Resting()).next_to_go()
    if other is not None:
        other.give_way()
    return other is not None


def note_gone(state: ServerState, address: str, connection: GivesWay) -> None:
    """A connection that shook hands does so no more."""
    state.connections.discard(connection)
    _resting.setdefault(state, Resting()).discard(address, connection)


class Connection(H11Protocol):
    """`limit_concurrency` of uvicorn's configuration bounds the connections.

    When there are so many, one without a request is cut off for a new one, or the new one refused.
    The headers of a request must be there `header_seconds` after the connection or the request
    began. In each `body_seconds` of a body come `body_rate` bytes of data a second, or its end. Who
    leaves its buffer (64 KiB) full for `unread_seconds` is cut off; it counts as full until three
    quarters of it are taken. Who is refused within a body gets `linger_seconds` to take the answer;
    what it goes on to send is dropped unread.
    """

    header_seconds = 30.0
    body_seconds = 30.0
    body_rate = 1024
    unread_seconds = 600.0
    linger_seconds = 5.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = Parser(MAX_HEADER_BYTES, _weakly(self._refuse_request))
        # Uvicorn would refuse in its own words, and keep the connection.
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self.is_leaving = False
        self._turns = _turns.setdefault(self.loop, _Turns())
        self.resting = _resting.setdefault(server_state, Resting())
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None
        self._cutting: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        #: What came and was not read yet.
        self._inbox = bytearray()
        self._num_searched = 0
        self._is_full = False
        self._is_due = False
        # Of the body that is being read:
        self._chunks: Chunks | None = None
        self._num_left = 0
        self._num_data_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._wire = transport
        if hasattr(transport, "max_size"):  # TLS has none
            transport.max_size = _READ_BYTES
        super().connection_made(_Gate(transport, self))
        self._address = self.client[0] if self.client else ""
        self._peer = f"{self._address}:{self.client[1]}" if self.client else "a client"
        if not has_room(self.server_state, limit := self._max_connections):
            message = f"{limit} clients are connected, and no more may be; try again in a moment"
            self._refuse(ApiError(503, message, kind="unavailable_error", retry=True))
            return
        self._rest()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._note_taken()
        self.resting.discard(self._address, self)
        if self._lingering is not None:
            self._lingering.cancel()
        self.is_leaving = True
        self._inbox.clear()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends: nobody is waited for who was refused."""
        self.linger_seconds = 0.0
        if self.is_leaving:
            self._wire.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing it would wait for the client to take the rest.
        self._cutting = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_taken()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._rest()
            self._read_soon()
            self._watch()

    def _unsupported_upgrade_warning(self) -> None:
        """A request to upgrade is answered as if it were none, and that is nobody's concern."""

    # -- reading -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.is_leaving:
            return
        self._unset_keepalive_if_required()
        self._inbox += data
        if self._is_due:
            return
        if self.conn.their_state is h11.SEND_BODY:
            self._read_soon()
            self._pace()
        else:
            self.read()

    def hold(self, *, is_full: bool) -> None:
        """Whether the application has enough of a body for now."""
        self._is_full = is_full
        if not is_full and not self.is_leaving:
            self._read_soon()

    def _read_soon(self) -> None:
        """Read on in a later turn of the event loop, when others had theirs."""
        if not self._is_due:
            self._is_due = True
            self._turns.add(self)

    def read(self) -> None:
        """Read of what came as much as one turn allows: a head, and a part of a body."""
        self._is_due = False
        if self.is_leaving:
            return
        num_before = len(self._inbox)
        if self.conn.their_state is h11.IDLE and self._inbox:
            self._read_head()
        if self.conn.their_state is h11.SEND_BODY and not (self._is_full or self.is_leaving):
            self._read_body()
        if self._is_answering() and len(self._inbox) > MAX_AHEAD_BYTES:
            what = f"more than {MAX_AHEAD_BYTES} bytes came behind this request before its answer"
            self._refuse(ApiError(400, f"{what}; wait for it, or take another connection"))
        if self.is_leaving:
            return
        self._watch()
        may_read = not (self._is_full or self._is_answering())
        if may_read and 0 < len(self._inbox) < num_before:
            self._read_soon()
        self._pace()

    def _is_answering(self) -> bool:
        """Whose body is whole gets its answer before anything else is read."""
        return self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)

    def _pace(self) -> None:
        """Take nothing more from the socket as long as there is something to read.

        While an answer is made the socket is read: else nobody would see that the client left.
        """
        if self._is_full or self._is_due:
            self._wire.pause_reading()
        else:
            self._wire.resume_reading()

    def _read_head(self) -> None:
        """Hand h11 the head of a request, once it is whole."""
        found = _HEAD.search(self._inbox, self._num_searched)
        self._num_searched = max(0, len(self._inbox) - 3)
        end = len(self._inbox) if found is None else found.end()
        if end > MAX_HEADER_BYTES:
            reason = f"its line and headers have more than {MAX_HEADER_BYTES} bytes"
            self._refuse_request(431, reason)
        elif found is not None and len(found[0]) == 1:
            self._refuse_request(400, "it begins with no method, or a line ends with LF alone")
        elif found is not None:
            head = bytes(self._inbox[:end])
            del self._inbox[:end]
            self._num_searched = 0
            if head.count(b"\n") - 2 > MAX_HEADERS:
                self._refuse_request(431, f"it has more than {MAX_HEADERS} headers")
                return
            self.resting.discard(self._address, self)
            self.conn.receive_data(head)
            self._num_data_bytes = 0
            self.handle_events()
            if self.conn.their_state is h11.SEND_BODY and not self.is_leaving:
                told = dict(self.headers)
                self._chunks = Chunks() if b"transfer-encoding" in told else None
                self._num_left = int(told.get(b"content-length", b"0"))

    def _read_body(self) -> None:
        """Hand h11 what came of a body, the data of all chunks as one."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._inbox.clear()  # it is answered already, and closed then
            return
        if self._chunks is None:
            data = bytes(self._inbox[: min(self._num_left, _BYTES_A_TURN)])
            del self._inbox[: len(data)]
            self._num_left -= len(data)
            framed = data
        else:
            try:
                data = self._chunks.take(self._inbox, _CHUNKS_A_TURN)
            except BadChunks as error:
                self._refuse_request(400, str(error))
                return
            framed = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            framed += b"0\r\n\r\n" if self._chunks.is_over else b""
        if framed:  # to h11 nothing is the end of the connection
            self._num_data_bytes += len(data)
            self.conn.receive_data(framed)
            self.handle_events()

    # -- waiting -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """See to it that what the client owes us comes; nothing, while we owe it an answer."""
        state = self.conn.their_state
        is_resting = self.timeout_keep_alive_task is not None
        if self.transport.is_closing() or state not in (h11.IDLE, h11.SEND_BODY) or is_resting:
            self._stop_watching()
        elif self._deadline is None or self._awaited is not state:
            self._stop_watching()
            self._awaited = state
            if state is h11.IDLE:
                self._deadline = self.loop.call_later(self.header_seconds, self._give_up_head)
            else:
                self._await_data()

    def _await_data(self) -> None:
        self._deadline = self.loop.call_later(
            self.body_seconds, self._judge_body, self._num_data_bytes
        )

    def _judge_body(self, num_before: int) -> None:
        """Whether enough of a body came since there were `num_before` bytes of it."""
        is_enough = self._num_data_bytes - num_before >= self.body_rate * self.body_seconds
        if is_enough or self._is_full:
            self._await_data()
            return
        self._refuse(
            ApiError(
                408,
                f"the body came slower than {self.body_rate} bytes a second for "
                f"{self.body_seconds:g} seconds",
                retry=True,
            )
        )

    def _give_up_head(self) -> None:
        what = f"the headers did not come within {self.header_seconds:g} seconds"
        self._refuse(ApiError(408, what, retry=True))

    def _note_taken(self) -> None:
        if self._cutting is not None:
            self._cutting.cancel()
            self._cutting = None

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # -- leaving -----------------------------------------------------------------------------------

    def _refuse_request(self, status: int, reason: str) -> None:
        reason = reason[:_MAX_REASON_CHARS]
        self._refuse(ApiError(status, f"this is no HTTP request that can be read: {reason}"))

    def _refuse(self, error: ApiError) -> None:
        """Say why, if nothing has been said yet, and close."""
        if self.is_leaving:
            return
        _log.warn(f"{self._peer} was refused ({error.status}): {error.message}")
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
                self._wire.write(self.conn.send(event) or b"")
        self.leave()

    def _rest(self) -> None:
        """From now on it may go for another one; see `Resting`."""
        self.resting.add(self._address, self)

    def give_way(self) -> None:
        """Go at once: without a request, or refused, this one is the next to go."""
        _log.warn(f"{self._max_connections} clients are connected; {self._peer} gave way")
        self.resting.discard(self._address, self)
        self.is_leaving = True
        self._wire.abort()

    def leave(self) -> None:
        """Close, and read nothing more.

        With bytes unread the system would tell the client so at once, and that may cost it the
        answer. So these are taken for a while, and dropped.
        """
        if self.is_leaving:
            return
        is_within = self.conn.their_state in (h11.SEND_BODY, h11.ERROR) or bool(self._inbox)
        self.is_leaving = True
        self._inbox.clear()
        self._stop_watching()
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application need not wait for the connection's end
            self.cycle.message_event.set()
        if not (is_within and self.linger_seconds and self._wire.can_write_eof()):
            self._wire.close()
            return
        self._rest()
        try:
            self._wire.write_eof()
        except OSError:  # the client has gone
            self._wire.abort()
            return
        self._wire.resume_reading()
        self._lingering = self.loop.call_later(self.linger_seconds, self._wire.abort)


def connection_class(unread_seconds: float) -> type[Connection]:
    """Connections that are cut off when nothing is taken of an answer for so many seconds."""
    return type("Connection", (Connection,), {"unread_seconds": unread_seconds})
