"""Attacks below the application: chunks, bytes, headers, pipelines, and connections that rest.

Each function is one client of an attack, which begins anew when it returns.
"""

from __future__ import annotations

import contextlib
import socket
import time

from attack.aim import Aim, reset

_BODY_BYTES = 31 << 20
_PIECE_BYTES = 1 << 16
#: Requests in one pipeline.
_NUM_PIPED = 200
_NO_REQUESTS = (b"\x16\x03\x01\x02\x00\x01\n", b"GET\r\n\r\n", b"a b c d\r\n\r\n")
#: Of attacks that cost the attacker as much as the server, a connection each: some 500 a second.
#: Volume alone is no defect of a server.
_PACE_SECONDS = 0.03


def _drain(connection: socket.socket) -> None:
    """Read what is there, so that nobody waits for us."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while connection.recv(1 << 20):
            pass
    connection.settimeout(20)


def _flood(aim: Aim, index: int, path: str, piece: bytes) -> None:
    """A chunked body of the same piece over and over, until the connection is cut."""
    with aim.connect() as connection:
        connection.sendall(aim.head("POST", path, "Transfer-Encoding: chunked", index=index))
        aim.seen["begun"] += 1
        while not aim.is_over:
            connection.sendall(piece)


def tiny_chunks(aim: Aim, index: int) -> None:
    """Chunks of one byte: six bytes, and one of data."""
    _flood(aim, index, "/v1/completions", b"1\r\n \r\n" * (_PIECE_BYTES // 6))


def tiny_chunks_to_health(aim: Aim, index: int) -> None:
    """The same for a route that needs no key and reads no body."""
    _flood(aim, index, "/health", b"1\r\n \r\n" * (_PIECE_BYTES // 6))


def chunk_extensions(aim: Aim, index: int) -> None:
    """A byte of data behind 8,000 of an extension."""
    _flood(aim, index, "/v1/completions", (b"1;" + b"a" * 8000 + b"\r\n \r\n") * 8)


def short_extensions(aim: Aim, index: int) -> None:
    """A byte of data behind a few of an extension: many events, and more to match in each."""
    _flood(aim, index, "/v1/completions", b'1;a="b"\r\n \r\n' * (_PIECE_BYTES // 12))


def padded_sizes(aim: Aim, index: int) -> None:
    """Sizes of chunks with zeros before them."""
    _flood(aim, index, "/v1/completions", b"00000000000000000001\r\n \r\n" * (_PIECE_BYTES // 25))


def trailers(aim: Aim, index: int) -> None:
    """A body that is over, and trailers that never are."""
    with aim.connect() as connection:
        head = aim.head("POST", "/v1/completions", "Transfer-Encoding: chunked", index=index)
        connection.sendall(head + b"0\r\n")
        aim.seen["begun"] += 1
        while not aim.is_over:
            connection.sendall(b"a: b\r\n" * 1000)


def bytes_of_body(aim: Aim, index: int) -> None:
    """One byte a packet, as fast as they go."""
    with aim.connect() as connection:
        told = f"Content-Length: {_BODY_BYTES}"
        connection.sendall(aim.head("POST", "/v1/completions", told, index=index))
        aim.seen["begun"] += 1
        while not aim.is_over:
            for _ in range(100):
                connection.send(b" ")


def bytes_of_headers(aim: Aim, index: int) -> None:
    """The same of a request's head, up to what is allowed."""
    with aim.connect() as connection:
        connection.send(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nx: ")
        aim.seen["begun"] += 1
        for _ in range(60_000):
            if aim.is_over:
                return
            connection.send(b"a")


def slow_bodies(aim: Aim, index: int) -> None:
    """A body of 31 MiB but for its last bytes, which come one by one."""
    with aim.connect() as connection:
        told = f"Content-Length: {_BODY_BYTES}"
        connection.sendall(aim.head("POST", "/v1/completions", told, index=index))
        blank = b" " * _PIECE_BYTES
        for _ in range(_BODY_BYTES // _PIECE_BYTES - 1):
            connection.sendall(blank)
        aim.seen["begun"] += 1
        while not aim.is_over:
            connection.send(b" ")
            aim.rest(1.0)


def dripped_bodies(aim: Aim, index: int) -> None:
    """A byte of the body every half second: who reads it waits for ever."""
    with aim.connect() as connection:
        told = f"Content-Length: {_BODY_BYTES}"
        connection.sendall(aim.head("POST", "/v1/completions", told, index=index))
        aim.seen["begun"] += 1
        while not aim.is_over:
            connection.send(b" ")
            aim.rest(0.5)


def refused_bodies(aim: Aim, index: int) -> None:
    """Whole bodies for what is no route, is no method of it, or is too long."""
    path, told = (("/nope", _BODY_BYTES), ("/v1/models", _BODY_BYTES), ("/tokenize", 33 << 20))[
        index % 3
    ]
    with aim.connect() as connection:
        connection.sendall(aim.head("POST", path, f"Content-Length: {told}", index=index))
        blank = b" " * _PIECE_BYTES
        aim.seen["begun"] += 1
        for _ in range(told // _PIECE_BYTES):
            if aim.is_over:
                return
            connection.sendall(blank)


def expectations(aim: Aim, index: int) -> None:
    """`Expect: 100-continue`, and never the body."""
    with aim.connect() as connection:
        told = ("Expect: 100-continue", "Content-Length: 1000000")
        connection.sendall(aim.head("POST", "/v1/completions", *told, index=index))
        aim.seen["begun"] += 1
        aim.status(connection)
    aim.rest(_PACE_SECONDS)


def slow_headers(aim: Aim, index: int) -> None:
    """A byte of the headers now and then: `num` threads have ten connections each."""
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(aim.connect()) for _ in range(10)]
        for connection in connections:
            connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
            aim.seen["begun"] += 1
        while not aim.is_over:
            for connection in connections:
                connection.send(b"a")
            aim.rest(1.0)


def huge_headers(aim: Aim, index: int) -> None:
    """64 KiB of headers: in one line, in many, and more than is allowed."""
    many = [f"a{number}: b" for number in range(5000)]
    lines = (["x: " + "a" * 60_000], many, ["x: " + "a" * (1 << 20)])[index % 3]
    with aim.connect() as connection:
        connection.sendall(aim.head("GET", "/v1/models", *lines, index=index))
        aim.status(connection)


def idle(aim: Aim, index: int) -> None:
    """A connection that says nothing: `num` threads have fifty each."""
    with contextlib.ExitStack() as held:
        for _ in range(50):
            held.enter_context(aim.connect())
        aim.seen["begun"] += 50
        while not aim.is_over:
            aim.rest(1.0)


def comings_and_goings(aim: Aim, index: int) -> None:
    """Connections that are reset, some within a request."""
    with aim.connect() as connection:
        if index % 2:
            connection.sendall(aim.head("GET", "/health", index=index)[: 10 + index])
        aim.seen["begun"] += 1
        reset(connection)
    aim.rest(_PACE_SECONDS)


def no_requests(aim: Aim, index: int) -> None:
    """What is no HTTP: the log must not tell of each."""
    with aim.connect() as connection:
        connection.sendall(_NO_REQUESTS[index % len(_NO_REQUESTS)])
        aim.status(connection)
    aim.rest(_PACE_SECONDS)


def pipelines(aim: Aim, index: int) -> None:
    """Two hundred requests in one go, whose answers are read."""
    one = aim.head("GET", ("/health", "/metrics", "/openapi.json")[index % 3], index=index)
    with aim.connect() as connection:
        while not aim.is_over:
            connection.sendall(one * _NUM_PIPED)
            aim.seen["begun"] += 1
            _drain(connection)


def unread_pipelines(aim: Aim, index: int) -> None:
    """The same, whose answers nobody reads."""
    one = aim.head("GET", ("/metrics", "/openapi.json")[index % 2], index=index)
    with aim.connect() as connection:
        aim.seen["begun"] += 1
        connection.settimeout(1.0)
        while not aim.is_over:
            with contextlib.suppress(TimeoutError):
                connection.sendall(one * _NUM_PIPED)


def piped_work(aim: Aim, index: int) -> None:
    """Requests of work in a pipeline, and the client leaves."""
    body = {"prompt": aim.name() * 20, "max_tokens": 200, "ignore_eos": True}
    with aim.connect() as connection:
        connection.sendall(aim.request("/v1/completions", body, index) * _NUM_PIPED)
        aim.seen["begun"] += 1
        aim.rest(0.2)


def small_requests(aim: Aim, index: int) -> None:
    """One request after the other on one connection, of methods that read and that do not."""
    method, path = (
        ("HEAD", "/health"), ("OPTIONS", "/v1/completions"), ("GET", "/metrics"),
        ("GET", "/openapi.json"), ("GET", "/slots"), ("DELETE", "/x"),
    )[index % 6]  # fmt: skip
    with aim.connect() as connection:
        for _ in range(500):
            if aim.is_over:
                return
            connection.sendall(aim.head(method, path, index=index))
            if aim.status(connection) == "cut":
                return
            time.sleep(0.0005)
            _drain(connection)


def unread_streams(aim: Aim, index: int) -> None:
    """Long answers with all that may be asked for, which nobody reads."""
    body = {
        "prompt": aim.name(), "n": 4, "max_tokens": 400, "logprobs": 20, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    with aim.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(aim.request("/v1/completions", body, index))
        aim.seen["begun"] += 1
        while not aim.is_over:
            aim.rest(1.0)
