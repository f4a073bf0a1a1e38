"""A connection without a network: what of a client's bytes is read, when, and how it is refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import logging
import resource
import socket
import ssl
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from pretended.virtual_time import run_in_virtual_time
from uvicorn.server import ServerState

from hypocenter.base.errors import UsageError
from hypocenter.server import connection, serve
from hypocenter.server.connection import Connection
from hypocenter.server.handshake import handshake_class
from hypocenter.server.hosting.terms import ModelTerms
from hypocenter.server.intake import chunks
from hypocenter.server.intake.sparse_log import SparseLog
from hypocenter.server.serve import ServerConfig
from hypocenter.settings.config import EngineConfig

CHUNKED = b"Transfer-Encoding: chunked\r\n"
ONE_BYTE = b"1\r\n \r\n"
LATER = b"GET /later HTTP/1.1\r\nHost: a\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that keeps what is asked of it."""

    max_size = 256 << 10  # as asyncio's for sockets

    def __init__(self, address: str | None = "192.0.2.7") -> None:
        super().__init__({"peername": (address, 4242) if address else ""})
        self.sent = b""
        self.is_paused = self.is_closed = self.has_eof = self.is_aborted = False

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = self.is_closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_eof = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in self.sent.split(b"HTTP/1.1 ")[1:]]


class Impatient(Connection):
    header_seconds = body_seconds = 0.1
    linger_seconds = 0.1
    body_rate = 1000


class App:
    """Reads each body and answers 200; at `/refused` it answers 401 and reads nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while scope["path"] != "/refused":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.seen.append((scope["path"], body))
        status = 401 if scope["path"] == "/refused" else 200
        length = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": status, "headers": length})
        await send({"type": "http.response.body", "body": b"{}"})


Talk = Callable[[Connection, Wire], Awaitable[None]]


def talk(work: Talk, kind: type[Connection] = Connection) -> tuple[App, Wire]:
    """What `work` has a connection read and say."""
    app, wire = App(), Wire()

    async def run() -> None:
        made = kind(uvicorn.Config(app, log_config=None, lifespan="off"), ServerState(), {})
        made.connection_made(wire)
        await work(made, wire)
        made.connection_lost(None)
        await asyncio.sleep(0)

    run_in_virtual_time(run())
    return app, wire


def say(*parts: bytes, kind: type[Connection] = Connection, seconds: float = 0) -> tuple[App, Wire]:
    """What a connection does with these bytes, each part in a turn of its own."""

    async def work(made: Connection, wire: Wire) -> None:
        for part in parts:
            made.data_received(part)
            await settle()
        await asyncio.sleep(seconds)

    return talk(work, kind)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def post(path: str = "/", *headers: str, body: bytes = b"") -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"POST {path} HTTP/1.1", "Host: a", *headers))
    return head.encode() + b"\r\n" + body


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has the log's first lines to itself."""
    log = logging.getLogger("hypocenter.server")
    monkeypatch.setattr(connection, "_log", SparseLog(log))


# -- who is refused is read no further -------------------------------------------------------------


def test_nothing_is_read_of_who_is_refused_within_a_body() -> None:
    head = post("/refused", "Content-Length: 100")
    app, wire = say(head, b"a" * 100, LATER)
    assert app.seen == [("/refused", b"")]
    assert wire.statuses == [401]
    assert b"connection: close" in wire.sent.lower()
    assert wire.has_eof
    assert not wire.is_closed  # the client gets its time to take the answer
    assert not wire.is_paused  # what it still sends is taken, and dropped


def test_nothing_is_read_while_a_refusal_is_sent() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": []})
        for _ in range(10):
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"{}"})

    async def work(made: Connection, wire: Wire) -> None:
        made.app = slow
        made.data_received(post("/", "Transfer-Encoding: chunked"))
        await asyncio.sleep(0)
        made.data_received(b"nothing that is a chunk\r\n")
        for _ in range(3):
            await asyncio.sleep(0)
        assert not made._inbox
        await settle()

    _, wire = talk(work)
    assert wire.statuses == [413]
    assert b"{}" in wire.sent
    assert wire.has_eof


def test_who_was_refused_is_left_after_a_while() -> None:
    _, wire = say(post("/refused", "Content-Length: 100"), kind=Impatient, seconds=0.3)
    assert wire.is_aborted


def test_no_chunk_is_read_of_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    head = post("/refused", "Transfer-Encoding: chunked")
    taken = []
    take = chunks.Chunks.take

    def noting(one: chunks.Chunks, inbox: bytearray, most: int) -> bytes:
        taken.append(len(inbox))
        return take(one, inbox, most)

    monkeypatch.setattr(chunks.Chunks, "take", noting)
    _, wire = say(head, *[ONE_BYTE * 40_000] * 20)
    assert taken == [0]
    assert wire.statuses == [401]


def test_whose_body_is_whole_stays_connected() -> None:
    app, wire = say(post("/refused", "Content-Length: 3", body=b"abc") + LATER)
    assert [path for path, _ in app.seen] == ["/refused", "/later"]
    assert wire.statuses == [401, 200]
    assert b"close" not in wire.sent
    assert not wire.has_eof


def test_who_waits_for_a_go_ahead_is_told_none_when_refused() -> None:
    _, wire = say(post("/refused", "Content-Length: 5", "Expect: 100-continue"))
    assert wire.statuses == [401]
    _, wire = say(post("/", "Content-Length: 5", "Expect: 100-continue"), b"abcde")
    assert wire.statuses == [100, 200]


def test_a_server_that_ends_waits_for_nobody_who_was_refused() -> None:
    async def work(made: Connection, wire: Wire) -> None:
        made.data_received(post("/refused", "Content-Length: 100"))
        await settle()
        assert not wire.is_closed
        made.shutdown()
        assert wire.is_aborted

    talk(work)


def test_an_application_is_told_when_its_client_is_refused() -> None:
    async def work(made: Connection, wire: Wire) -> None:
        made.data_received(post("/", "Transfer-Encoding: chunked", body=b"zz\r\n"))
        await settle()
        assert made.cycle.disconnected

    app, wire = talk(work)
    assert wire.statuses == [400]
    assert app.seen == []


# -- one reading only ------------------------------------------------------------------------------

TWICE = "Content-Length: 6\r\nTransfer-Encoding: chunked"
#: Requests that two readers take for different ones, or for none.
REFUSED = {
    "two lengths": post("/", TWICE, body=b"0\r\n\r\n"),
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "LF in the head": b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
    "LF at its end": b"GET / HTTP/1.1\r\nHost: a\n\n",
    "an empty line first": b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01",
    "LF behind a size": post("/", CHUNKED.decode()[:-2], body=b"3\nabc\r\n0\r\n\r\n" + b" " * 300),
    "LF behind a chunk": post("/", CHUNKED.decode()[:-2], body=b"3\r\nabc\n0\r\n\r\n"),
    "no line's end behind a chunk": post("/", CHUNKED.decode()[:-2], body=b"3\r\nabcXY0\r\n\r\n"),
    "a long chunk": post("/", CHUNKED.decode()[:-2], body=b"3\r\nabcd\r\n0\r\n\r\n"),
    "a size of two": post("/", CHUNKED.decode()[:-2], body=b"3 3\r\nabc\r\n0\r\n\r\n"),
    "a negative size": post("/", CHUNKED.decode()[:-2], body=b"-3\r\nabc\r\n0\r\n\r\n"),
    "a trailer of none": post("/", CHUNKED.decode()[:-2], body=b"0\r\nnothing\r\n\r\n"),
    "an LF in a trailer": post("/", CHUNKED.decode()[:-2], body=b"0\r\na: b\nc: d\r\n\r\n"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_be_read_in_two_ways_is_refused(case: str) -> None:
    app, wire = say(REFUSED[case] + LATER)
    assert app.seen == []
    assert wire.statuses == [400]
    assert b"connection: close" in wire.sent.lower()


def test_what_begins_as_no_request_is_not_waited_for() -> None:
    assert say(b"\x16\x03\x01")[1].statuses == [400]
    assert say(b"\r")[1].statuses == [400]


def test_heads_have_a_bound() -> None:
    many = [f"a{number}: b" for number in range(connection.MAX_HEADERS)]
    assert say(post("/", *many))[1].statuses == [431]
    assert say(post("/", *many[1:]))[1].statuses == [200]
    assert say(post("/", "a: " + "b" * connection.MAX_HEADER_BYTES))[1].statuses == [431]
    assert say(b"POST /" + b"a" * (1 << 16) + b"b")[1].statuses == [431]


@pytest.mark.parametrize("size", [1, 7, 1 << 18])
def test_requests_that_follow_each_other_are_read_whatever_the_pieces(size: int) -> None:
    whole = post("/1", "Content-Length: 3", body=b"abc")
    whole += post("/2", CHUNKED.decode()[:-2], body=b"2;x=y\r\nde\r\n1\r\nf\r\n0\r\nt: u\r\n\r\n")
    whole += post("/3", "Content-Length: 0") + LATER
    app, wire = say(*[whole[at : at + size] for at in range(0, len(whole), size)])
    assert app.seen == [("/1", b"abc"), ("/2", b"def"), ("/3", b""), ("/later", b"")]
    assert wire.statuses == [200] * 4
    assert not wire.is_paused


# -- the end of a connection -----------------------------------------------------------------------


async def _until_left(scope: Any, receive: Any, send: Any) -> None:
    """Work until the client leaves, as a route does that computes."""
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize(
    "ahead",
    [
        post("/", body=LATER),
        post("/", "Connection: close", body=b"x"),
        post("/", body=post("/", "Content-Length: 40000", body=b"a" * 39_000)),
        post("/", "Connection: Upgrade", "Upgrade: h2c", body=LATER),
    ],
    ids=["a second request", "more than was announced", "half a request", "behind an upgrade"],
)
def test_the_end_is_seen_behind_what_came_ahead(ahead: bytes) -> None:
    """While the socket is not read, asyncio sees no end of the connection."""

    async def work(made: Connection, wire: Wire) -> None:
        made.app = _until_left
        made.data_received(ahead)
        await settle()
        assert len(made.tasks) == 1
        assert not wire.is_paused
        made.connection_lost(None)
        await settle()
        assert not made.tasks

    talk(work)


def test_who_sends_too_much_ahead_is_refused() -> None:
    most = connection.MAX_AHEAD_BYTES

    async def work(made: Connection, wire: Wire) -> None:
        made.app = _until_left
        made.data_received(post("/") + b"a" * most)
        await settle()
        assert len(made.tasks) == 1
        assert not wire.sent
        made.data_received(b"a")
        await settle()
        assert not made.tasks  # what runs is told of it
        assert not wire.is_closed  # the client gets its time to take the answer
        made.data_received(b"a" * most)
        assert not made._inbox

    _, wire = talk(work)
    assert wire.statuses == [400]
    assert f"more than {most} bytes".encode() in wire.sent
    assert wire.has_eof


# -- shares and rates ------------------------------------------------------------------------------


def test_tiny_chunks_are_refused_and_larger_ones_are_not() -> None:
    head = post("/", "Transfer-Encoding: chunked")
    app, wire = say(head, ONE_BYTE * 4000)
    assert wire.statuses == [400]
    assert b"send larger chunks" in wire.sent
    assert app.seen == []
    block = b"200\r\n" + b" " * 512 + b"\r\n"
    app, wire = say(head, *[block * 500] * 10, b"0\r\n\r\n")
    assert wire.statuses == [200]
    assert len(app.seen[0][1]) == 5000 * 512


def test_a_body_is_read_in_slices() -> None:
    async def work(made: Connection, wire: Wire) -> None:
        made.data_received(post("/", "Content-Length: 250000", body=b"a" * 250_000))
        num_left = [len(made._inbox)]
        while made._inbox:
            await asyncio.sleep(0)
            num_left.append(len(made._inbox))
        steps = [now - later for now, later in itertools.pairwise(num_left)]
        assert max(steps) == connection._BYTES_A_TURN
        await settle()

    app, wire = talk(work)
    assert wire.max_size == connection._READ_BYTES
    assert app.seen == [("/", b"a" * 250_000)]
    assert wire.statuses == [200]


def test_few_bodies_are_read_in_a_turn() -> None:
    app = App()

    async def run() -> None:
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        all_of_them = [Connection(config, ServerState(), {}) for _ in range(30)]
        for made in all_of_them:
            made.connection_made(Wire())
            made.data_received(post("/", "Content-Length: 100000"))
        await settle()
        for made in all_of_them:
            made.data_received(b"a" * 100_000)
            assert cast(Wire, made._wire).is_paused
        num_left = [3_000_000]
        while num_left[-1]:
            await asyncio.sleep(0)
            num_left.append(sum(len(made._inbox) for made in all_of_them))
        steps = [now - later for now, later in itertools.pairwise(num_left)]
        assert max(steps) == connection._BODIES_A_TURN * connection._BYTES_A_TURN
        first = 30 // connection._BODIES_A_TURN
        assert min(steps[1:first]) == max(steps)  # in turn, and none twice
        await settle()
        for made in all_of_them:
            made.connection_lost(None)

    asyncio.run(run())
    assert app.seen == [("/", b"a" * 100_000)] * 30


def test_one_connection_gets_its_share_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "NUM_FREE_CHUNKS", 1 << 20)

    async def work(made: Connection, wire: Wire) -> None:
        made.data_received(post("/", "Transfer-Encoding: chunked", body=ONE_BYTE * 5000))
        seen = []
        while made._chunks is not None and made._chunks.num_chunks < 5000:
            assert wire.is_paused  # nothing more is taken while there is something to read
            seen.append(made._chunks.num_chunks)
            await asyncio.sleep(0)
        steps = [later - now for now, later in zip([0, *seen], seen, strict=False)]
        assert max(steps) <= connection._CHUNKS_A_TURN
        await settle()
        assert not wire.is_paused

    talk(work)


def test_a_body_that_nobody_takes_is_not_read_on() -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def work(made: Connection, wire: Wire) -> None:
        made.app = never
        made.data_received(post("/", "Content-Length: 999999"))
        made.data_received(b"a" * 200_000)
        await settle()
        assert wire.is_paused
        made.data_received(b"a" * 100_000)
        await settle()
        taken = 3 * connection._BYTES_A_TURN  # uvicorn's mark is 64 KiB
        assert len(made.cycle.body) == taken
        assert len(made._inbox) == 300_000 - taken

    talk(work)


def test_framing_is_no_data() -> None:
    """Who sends much, but next to nothing of the body, is too slow."""
    head = post("/", "Transfer-Encoding: chunked", body=b"ffff\r\n")
    slow = [b"1;" + b"x" * 200 + b"\r\n \r\n"] * 20

    async def work(made: Connection, wire: Wire) -> None:
        made.data_received(head.replace(b"ffff\r\n", b""))
        for part in slow:
            made.data_received(part)
            await asyncio.sleep(0.02)

    _, wire = talk(work, Impatient)
    assert wire.statuses == [408]
    assert b"slower than 1000 bytes a second" in wire.sent


def test_who_is_fast_enough_may_take_its_time() -> None:
    async def work(made: Connection, wire: Wire) -> None:
        made.data_received(post("/", "Content-Length: 15000"))
        for _ in range(15):
            made.data_received(b"a" * 1000)
            await asyncio.sleep(0.02)

    _, wire = talk(work, Impatient)
    assert wire.statuses == [200]


def test_a_beginning_that_was_fast_does_not_buy_time() -> None:
    head = post("/", "Content-Length: 100000")
    _, wire = say(head, b"a" * 50_000, kind=Impatient, seconds=0.35)
    assert wire.statuses == [408]


# -- whose place another one gets ------------------------------------------------------------------


class Crowd:
    """Connections of one server that lets in `most` of them."""

    def __init__(self, most: int, app: Any) -> None:
        self.state = ServerState()
        self.config = uvicorn.Config(app, log_config=None, lifespan="off", limit_concurrency=most)
        self.made: list[Connection] = []

    async def come(self, address: str | None, sent: bytes = b"") -> Wire:
        """A connection that says `sent`; others go first that were cut off."""
        wire = Wire(address)
        made = Impatient(self.config, self.state, {})
        self.made.append(made)
        made.connection_made(wire)
        if sent:
            made.data_received(sent)
        await settle()
        for other in list(self.made):
            if cast(Wire, other._wire).is_aborted:
                self.made.remove(other)
                other.connection_lost(None)
        return wire

    def leave(self) -> None:
        for made in self.made:
            made.connection_lost(None)


def crowd(work: Callable[[Crowd], Awaitable[None]], most: int, app: Any = _until_left) -> None:
    async def run() -> None:
        them = Crowd(most, app)
        await work(them)
        them.leave()
        await settle()

    asyncio.run(run())


def test_who_rests_longest_of_the_most_makes_room() -> None:
    async def work(them: Crowd) -> None:
        first = await them.come("192.0.2.1")
        many = [await them.come("192.0.2.2", b"GET /half") for _ in range(3)]
        for number in range(2):
            wire = await them.come("192.0.2.3")
            assert not wire.sent
            assert [one.is_aborted for one in many] == [True] * (number + 1) + [False] * (
                2 - number
            )
        assert not first.is_aborted
        await them.come("192.0.2.3")  # it has the most itself by now
        assert not first.is_aborted
        assert not many[2].is_aborted
        assert len(them.state.connections) == 4

    crowd(work, 4)


def test_nobody_goes_whose_request_is_under_way() -> None:
    async def work(them: Crowd) -> None:
        await them.come("192.0.2.2")
        them.made.pop().connection_lost(None)  # who has left makes no room
        wires = [await them.come("192.0.2.2", post("/")) for _ in range(2)]
        wires.append(await them.come("192.0.2.2", post("/", "Content-Length: 9", body=b"half")))
        refused = await them.come("192.0.2.1")
        assert refused.statuses == [503]
        assert not any(wire.is_aborted for wire in wires)

    crowd(work, 3)


def test_who_was_answered_or_refused_rests() -> None:
    async def work(them: Crowd) -> None:
        answered = await them.come(None, post("/"))  # as of a Unix socket
        refused = await them.come(None, post("/refused", "Content-Length: 9"))
        assert (answered.statuses, refused.statuses) == ([200], [401])
        them.made[0].data_received(post("/"))
        await settle()
        assert not (await them.come(None)).sent
        assert (answered.is_aborted, refused.is_aborted) == (False, True)
        assert not (await them.come(None)).sent
        assert answered.is_aborted

    crowd(work, 2, App())


# -- TLS ------------------------------------------------------------------------------------------


TLS = Path(__file__).resolve().parents[1] / "fixtures/tls"


def served_with_tls(
    work: Callable[[int, ServerState], Awaitable[None]], most: int, seconds: float = 10.0
) -> None:
    """`work` with the port of a server that lets in `most`."""

    async def run() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "one.pem", TLS / "one.key")
        kind = handshake_class(context, Impatient)
        kind.seconds = seconds
        state = ServerState()
        config = uvicorn.Config(App(), log_config=None, lifespan="off", limit_concurrency=most)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
        try:
            await asyncio.wait_for(work(server.sockets[0].getsockname()[1], state), 20)
        finally:
            server.close()
            for connection in list(state.connections):
                connection.shutdown()
            await settle()

    asyncio.run(run())


async def _asked_by_tls(port: int) -> bytes:
    trusted = ssl.create_default_context(cafile=TLS / "one.pem")
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=trusted, server_hostname="localhost"
    )
    writer.write(post("/", "Connection: close"))
    answer = await reader.read()
    await _closed(writer)
    return answer


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def test_who_never_shakes_hands_gives_way() -> None:
    async def work(port: int, state: ServerState) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        answers = await asyncio.gather(*(_asked_by_tls(port) for _ in range(3)))
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        assert len(state.connections) <= 4
        ended = [await asyncio.wait_for(reader.read(), 5) for reader, _ in silent[:4]]
        assert ended == [b""] * 4
        for _, writer in silent:
            await _closed(writer)

    served_with_tls(work, 4)


def test_a_handshake_has_its_time() -> None:
    async def work(port: int, state: ServerState) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01\x02\x00")  # a client's first message begins so
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert not state.connections
        await _closed(writer)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")  # no TLS at all
        await asyncio.wait_for(reader.read(), 5)
        await _closed(writer)
        assert not state.connections
        assert (await _asked_by_tls(port)).startswith(b"HTTP/1.1 200")

    served_with_tls(work, 4, seconds=0.3)


# -- the log ---------------------------------------------------------------------------------------


def test_a_bad_request_is_one_line_and_many_are_few(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        say(b"nothing \x1b[31m\r\n\r\n")
    assert {record.name for record in caplog.records} == {"hypocenter.server"}
    assert len(caplog.records) == 5
    line = caplog.records[0].getMessage()
    assert line.startswith("192.0.2.7:4242 was refused (400): ")
    assert line.isprintable()


def test_lines_that_were_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = SparseLog(logging.getLogger("hypocenter.server"), clock=lambda: now)
    for _ in range(9):
        log.warn("a")
    now = 11.0
    log.warn("b\n" + "c" * 1000)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:5] == ["a"] * 5
    assert lines[5].startswith("b?ccc")
    assert lines[5].endswith(" (and 4 more that were not told)")
    assert len(lines) == 6
    assert len(lines[5]) < 400


# -- files -----------------------------------------------------------------------------------------


def test_the_number_of_clients_leaves_files_for_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, clients in ((1024, 980), (1 << 20, connection.MAX_CONNECTIONS), (64, 20)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, n=files: (n, n))
        assert connection.max_connections() == clients
    monkeypatch.setattr(resource, "getrlimit", lambda _: (47, 47))
    with pytest.raises(UsageError, match="limit of open files is 47 "):
        connection.max_connections()


def test_too_few_addresses_are_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (292 << 20, 292 << 20))
    with pytest.raises(UsageError, match="limit of memory is 292 MiB") as info:
        serve._require_addresses()
    assert "\n" not in str(info.value)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    serve._require_addresses()


@pytest.mark.parametrize(
    ("family", "address", "is_local"),
    [
        (socket.AF_INET, ("127.0.0.1", 0), True),
        (socket.AF_INET, ("0.0.0.0", 0), False),
        (socket.AF_UNIX, "hypo.sock", True),
    ],
)
def test_only_this_machine_reaches_loopback(
    family: int, address: Any, is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(family) as one:
        one.bind(address)
        assert serve._is_local(one) is is_local


def test_settings_that_make_no_sense_are_named() -> None:
    for more, message in (
        (
            {"allowed_hosts": ("https://a.example",)},
            "--allowed-host 'https://a.example' is no name",
        ),
        ({"max_bodies_bytes": 0}, "--body-memory is 0, but must be from 1 to 1048576"),
    ):
        with pytest.raises(UsageError, match=message):
            ServerConfig(models=(ModelTerms(path="m", engine=EngineConfig()),), **cast(Any, more))


@pytest.mark.parametrize("has_pages", [True, False])
def test_each_model_has_what_the_server_was_told(has_pages: bool, tmp_path: Path) -> None:
    async def work() -> list[bool]:
        models = tuple(ModelTerms(path=name, engine=EngineConfig()) for name in "ab")
        config = ServerConfig(models=models, has_pages=has_pages, loads_on_demand=True)
        renewal = cast(Any, SimpleNamespace(sink=None))
        hosting = serve._hosting(config, tmp_path, renewal, None)
        return [host.service.has_pages for host in hosting.hosts]

    assert asyncio.run(work()) == [has_pages] * 2


def test_too_few_files_are_a_line_and_other_errors_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.new_event_loop()
    error = OSError(errno.EMFILE, "Too many open files")
    context: dict[str, Any] = {"message": "socket.accept() out of system resource"}
    for _ in range(100):
        connection.tell_of_loop(loop, {**context, "exception": error, "socket": None})
    assert len(caplog.records) == 5
    assert caplog.records[0].exc_info is None
    assert "Too many open files" in caplog.records[0].getMessage()
    connection.tell_of_loop(loop, {"message": "a defect", "exception": ValueError("x")})
    assert caplog.records[-1].name == "asyncio"
    loop.close()


@pytest.mark.parametrize(
    "parts",
    [(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n",) * 2, (b"nonsense\r\n\r\n",), (b"POST / HT",), ()],
)
def test_who_has_left_goes_without_the_collector(parts: tuple[bytes, ...]) -> None:
    """Thousands come and go, and each in a circle would keep memory between two collections."""

    async def run() -> weakref.ref[Connection]:
        made = Connection(uvicorn.Config(App(), log_config=None, lifespan="off"), ServerState(), {})
        made.connection_made(Wire())
        for part in parts:
            made.data_received(part)
            await settle()
        made.connection_lost(None)
        await settle()
        return weakref.ref(made)

    gc.collect()
    gc.disable()
    try:
        assert run_in_virtual_time(run())() is None
    finally:
        gc.enable()
