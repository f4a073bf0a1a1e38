"""Bytes that no client library would send, over plain sockets: refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from outside.served import Served, serving, texts

from hypocenter.server.app import ADMIN_PATHS, TABLE
from hypocenter.server.connection import MAX_HEADER_BYTES, Connection
from hypocenter.server.pages import links

LONG = {"prompt": "import os\n", "temperature": 0, "max_tokens": 480, "ignore_eos": True}
BODY = b'{"prompt": "import os", "max_tokens": 2, "temperature": 0}'
#: What an error says of itself, by whose clients a route is for.
OPENAIS_ERROR = frozenset({"message", "type", "param", "code"})
ANTHROPICS_ERROR = frozenset({"message", "type"})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("raw")
    words = ("-np", "4", "--api-key", "sesame", "--admin-key", "boss", "--body-memory", "64")
    with serving(folder, *words, "--allowed-host", "llm.example.com", "--no-spare") as one:
        yield one


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
        yield one


def post(path: str, *headers: str, body: bytes = BODY, length: int | None = None) -> bytes:
    """A request as it goes over the wire."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Authorization: Bearer sesame", *headers]
    if not any(header.startswith("Transfer-Encoding") for header in headers):
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def answer(one: socket.socket) -> tuple[int, Any]:
    """The next answer's status and JSON."""
    found = http.client.HTTPResponse(one)
    found.begin()
    return found.status, json.loads(found.read())


def require_error(
    reply: tuple[int, Any], *statuses: int, fields: frozenset[str] = OPENAIS_ERROR
) -> None:
    status, body = reply
    assert status in statuses, body
    assert set(body["error"]) == fields
    assert body["error"]["message"]


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: f"{entry.method} {entry.path}")
def test_each_route_wants_a_key(served: Served, entry: Any) -> None:
    path = entry.path.replace("{name:path}", "demo-q8_0").replace("{name}", "x")
    changes_all = (entry.method, path) == ("POST", "/lora-adapters")
    key = "boss" if path.startswith(ADMIN_PATHS) or changes_all else "sesame"
    body: Any = {} if entry.method == "POST" else None
    if path in ("/health", "/ready"):
        assert served.ask(entry.method, path).status == 200
        return
    if path.startswith(links.PATH):  # a link is its own key
        assert served.ask(entry.method, path).status == 403
        return
    wrong: tuple[dict[str, str], ...] = (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"x-api-key": ""},
    )
    for headers in wrong:
        reply = served.ask(entry.method, path, body, headers)
        if path.startswith("/api/"):  # Ollama's error is its message
            assert reply.status == 401
            assert isinstance(reply.json["error"], str)
            continue
        fields = ANTHROPICS_ERROR if path.startswith("/v1/messages") else OPENAIS_ERROR
        require_error((reply.status, reply.json), 401, fields=fields)
    headers = {"Authorization": f"Bearer {key}"}
    assert served.ask(entry.method, path, body, headers).status not in (401, 403)


NO_HTTP = {
    "a line of nothing": b"nothing\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "a length that is none": post("/v1/completions", "Content-Length: -1"),
    "two lengths": post("/v1/completions", "Content-Length: 3"),
    "a header without a name": post("/v1/completions", ": x"),
    "an unknown coding": post("/v1/completions", "Transfer-Encoding: gzip"),
    "a chunk that is none": post("/v1/completions", "Transfer-Encoding: chunked", body=b"zz\r\n"),
}


@pytest.mark.parametrize("case", NO_HTTP)
def test_what_is_no_http_is_refused(served: Served, case: str) -> None:
    with connected(served.port) as one:
        one.sendall(NO_HTTP[case])
        require_error(answer(one), 400, 501)
        assert one.recv(1) == b""


@pytest.mark.parametrize(
    "headers",
    [["X: " + "a" * (8 * MAX_HEADER_BYTES)], [f"X-{number}: a" for number in range(50_000)]],
    ids=["a giant header", "thousands of headers"],
)
def test_header_bombs(served: Served, headers: list[str]) -> None:
    with connected(served.port) as one:
        with contextlib.suppress(ConnectionError):  # it need not be read to its end
            one.sendall(post("/v1/completions", *headers))
        with contextlib.suppress(ConnectionResetError):
            require_error(answer(one), 431)
    assert served.get("/health").status == 200


def test_a_body_that_is_too_long_is_refused_before_it_comes(served: Served) -> None:
    with connected(served.port) as one:
        one.sendall(post("/v1/completions", length=1 << 40))
        require_error(answer(one), 413)
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with connected(served.port) as one:
        one.sendall(post("/v1/completions", "Transfer-Encoding: chunked", body=b""))
        for _ in range(34):
            one.sendall(chunk)
        require_error(answer(one), 413)


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    with connected(served.port) as one:
        bodies = [
            json.dumps({"prompt": "import os", "max_tokens": number}).encode()
            for number in (3, 1, 2)
        ]
        one.sendall(b"".join(post("/v1/completions", body=body) for body in bodies))
        stream = one.makefile("rb")
        for number in (3, 1, 2):
            length = 0
            while (line := stream.readline()) != b"\r\n":
                name, _, value = line.partition(b": ")
                length = int(value) if name.lower() == b"content-length" else length
            answered = json.loads(stream.read(length))
            assert answered["usage"]["completion_tokens"] == number


def test_a_client_that_leaves_within_its_body(served: Served) -> None:
    for _ in range(20):
        with connected(served.port) as one:
            one.sendall(post("/v1/completions", body=b'{"prompt": "', length=1000))
    assert served.get("/health").status == 200
    assert not any("Traceback" in line for line in served.stderr), served.stderr


COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
BIG = b"1" + b"0" * 30
IMPOSSIBLE = {"type": "integer", "minimum": 5, "maximum": 3}
#: Where it is sent, the body, the status, and the field that is named.
WRONG: dict[str, tuple[str, Any, int, str | None]] = {
    "no end of a header": (COMPLETE, {"prompt": "a", "max_tokens": 1, "x\r\ny: z": 1}, 200, None),
    "Chinese": (COMPLETE, {"prompt": "a", "max_tokens": 1, "\u4e2d": 1}, 200, None),
    "many fields": (COMPLETE, {"prompt": "a", **dict.fromkeys(map(str, range(2000)))}, 400, None),
    "a long field": (COMPLETE, {"prompt": "a", "grammar": "a" * (2 << 20)}, 400, "grammar"),
    "many answers": (COMPLETE, {"prompt": ["a"] * 512, "n": 128}, 400, "n"),
    "many ids": (COMPLETE, {"prompt": [[5], [5] * 600]}, 400, None),
    "surrogate in stop": (COMPLETE, b'{"prompt":"a","stop":"\\ud800"}', 400, None),
    "surrogate in messages": (CHAT, b'{"messages":[{"content":"\\udfff"}]}', 400, None),
    "number in messages": (CHAT, b'{"messages":[{"x":' + BIG + b"}]}", 400, "messages"),
    "no prompt": (COMPLETE, {"prompt": []}, 400, "prompt"),
    "schema of itself": (COMPLETE, {"prompt": "a", "json_schema": {"$ref": "#"}}, 400,
                         "json_schema"),
    "impossible": (COMPLETE, {"prompt": "a", "json_schema": IMPOSSIBLE}, 400, "json_schema"),
    "deep schema": (COMPLETE, b'{"prompt":"a","json_schema":' + b'{"items":' * 100 + b"{}"
                    + b"}" * 101, 400, None),
    "huge ids": ("/detokenize", b'{"tokens":[' + BIG + b"]}", 400, "tokens"),
    "another model": ("/tokenize", {"content": "a", "model": "gpt-4"}, 404, "model"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_bodies_that_are_wrong(served: Served, case: str) -> None:
    path, body, status, param = WRONG[case]
    reply = served.post(path, body, headers={"Authorization": "Bearer sesame"})
    if status == 200:
        assert reply.status == 200, reply.body
        assert reply.headers["x-ignored-fields"].isascii()
        assert "y" not in reply.headers
        return
    require_error((reply.status, reply.json), status)
    assert reply.json["error"]["param"] == param


def test_a_neighbour_is_undisturbed(served: Served) -> None:
    """While everything that is wrong here is sent, an answer comes as it would without."""
    keys = {"Authorization": "Bearer sesame"}
    expected = served.post("/v1/completions", LONG, headers=keys).json["choices"][0]["text"]
    got: list[Any] = []

    def read() -> None:
        with served.stream("/v1/completions", LONG, headers=keys) as stream:
            got.extend(stream)

    thread = threading.Thread(target=read)
    thread.start()
    for case in NO_HTTP.values():
        with connected(served.port) as one:
            one.sendall(case)
    for path, body, _, _ in WRONG.values():
        served.post(path, body, headers=keys)
    thread.join()
    assert texts(got) == expected
    assert got[-1] == "[DONE]"
    assert (
        served.get("/debug/requests", headers={"Authorization": "Bearer boss"}).json["restarts"]
        == 0
    )


def test_other_names_and_pages_of_others_are_refused(served: Served) -> None:
    keys = {"Authorization": "Bearer sesame"}
    for headers, status in (
        ({"Host": "llm.example.com"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": f"http://127.0.0.1:{served.port}"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ):
        assert served.get("/version", headers={**keys, **headers}).status == status, headers


def test_a_405_says_what_is_allowed(served: Served) -> None:
    reply = served.ask("PUT", "/v1/completions", headers={"Authorization": "Bearer sesame"})
    require_error((reply.status, reply.json), 405)
    assert reply.headers["allow"] == "POST"
    assert served.get("/version/", headers={"Authorization": "Bearer sesame"}).status == 404


@pytest.mark.tier("sim")  # waits for seconds
def test_sigterm_does_not_wait_for_a_request_that_never_comes(tmp_path: Path) -> None:
    with serving(tmp_path, "--grace", "1") as served, connected(served.port) as one:
        one.sendall(post("/v1/completions", length=1000))
        time.sleep(0.2)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0


# -- limits, with a server of our own that is less patient -----------------------------------------


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    message = {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    if scope["path"] == "/slow":
        await receive()  # until the client leaves
    await send({"type": "http.response.body", "body": b"{}"})


class _Impatient(Connection):
    header_seconds = body_seconds = 0.3
    body_rate = 1  # bytes come ten times as fast, so that a stall of a second is no slowness


@pytest.fixture
def impatient() -> Iterator[int]:
    """The port of a server that waits 0.3 seconds, for at most three clients."""
    config = uvicorn.Config(
        _echo, http=_Impatient, ws="none", lifespan="off", log_config=None, port=0,
        limit_concurrency=3, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield int(server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize(
    "start",
    [
        b"", b"POST / HT", post("/", length=1000)[:-5],
        post("/", "Transfer-Encoding: chunked", body=b"5\r\nab"),
    ],
    ids=["nothing", "half a line", "half a body", "half a chunk"],
)  # fmt: skip
def test_who_says_nothing_is_not_waited_for(impatient: int, start: bytes) -> None:
    began = time.monotonic()
    with connected(impatient) as one:
        one.sendall(start)
        require_error(answer(one), 408)
        assert one.recv(1) == b""
        assert 0.2 < time.monotonic() - began < 20


def test_who_says_something_is(impatient: int) -> None:
    with connected(impatient) as one:
        whole = post("/", body=b"0123456789")
        for part in (whole[:-10], *(whole[-10:][i : i + 1] for i in range(10))):
            one.sendall(part)
            time.sleep(0.1)
        assert answer(one) == (200, {})
        time.sleep(0.5)  # resting between requests is allowed
        one.sendall(post("/"))
        assert answer(one) == (200, {})


def until_there_is_room(port: int) -> None:
    """The server has heard that its clients left."""
    for _ in range(200):
        with connected(port) as one:
            one.sendall(post("/"))
            if answer(one)[0] == 200:
                return
        time.sleep(0.05)
    raise AssertionError("nobody is let in")


def test_no_more_clients_than_allowed(impatient: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            one = stack.enter_context(connected(impatient))
            one.sendall(post("/slow"))
            assert one.recv(1)
        with connected(impatient) as refused:
            require_error(answer(refused), 503)
    until_there_is_room(impatient)
    with contextlib.ExitStack() as stack:
        for _ in range(5):  # who rests makes room
            one = stack.enter_context(connected(impatient))
            one.sendall(post("/"))
            assert answer(one) == (200, {})
