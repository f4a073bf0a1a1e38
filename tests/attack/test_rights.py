"""What other pages, other keys and unclear framings get: nothing that is not theirs."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from attack.arena import BOSS, MALLORY, VICTIM, Arena, Row
from attack.attacks import KEYS, OPEN

Arenas = Callable[[str], Arena]
Note = Callable[[Row], None]

_FOREIGN_HOSTS = (
    "evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example",
    "127.0.0.1@evil.example", "evil.example#127.0.0.1", "127.0.0.1,evil.example", "[::1].evil",
    "evil.example, 127.0.0.1", "xn--lcalhost-i1a", "127.0.0.1\x00evil", "0",
)  # fmt: skip
_OWN_HOSTS = ("127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "[::1]:{port}", "127.0.0.1")
_FOREIGN_ORIGINS = ("https://evil.example", "null", "http://localhost.evil.example", "file://")
_GETS = (
    "/v1/models", "/props", "/slots", "/metrics", "/tokenizer_info", "/openapi.json", "/version",
    "/v1/requests/x", "/v1/responses/x",
)  # fmt: skip
_BODY = b'{"prompt": "x", "max_tokens": 2}'


def _exchange(port: int, data: bytes, seconds: float = 5.0) -> bytes:
    """All that comes back until the server closes, or says nothing more for so long."""
    parts = []
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(data)
        try:
            while part := connection.recv(1 << 16):
                parts.append(part)
        except TimeoutError:
            parts.append(b"(still open)")
        except ConnectionResetError:
            pass
    return b"".join(parts)


def _request(method: str, path: str, *lines: str, body: bytes = b"") -> bytes:
    told = [*lines, "Connection: close"]
    if body:
        told.append(f"Content-Length: {len(body)}")
    return "\r\n".join([f"{method} {path} HTTP/1.1", *told, "", ""]).encode() + body


def _statuses(answer: bytes) -> list[int]:
    return [int(one) for one in re.findall(rb"HTTP/1\.1 ([1-5][0-9][0-9]) ", answer)]


def test_a_name_that_was_bound_anew_reaches_nothing(arenas: Arenas, note: Note) -> None:
    port, row = arenas(OPEN).served.port, Row("DNS rebinding: foreign Hosts")
    for host in _FOREIGN_HOSTS:
        line = f"Host: {host.format(port=port)}"
        for path in _GETS:
            if set(_statuses(_exchange(port, _request("GET", path, line)))) - {400, 403}:
                row.problems.append(f"GET {path} with {line!r} is answered")
        answer = _exchange(port, _request("POST", "/v1/completions", line, body=_BODY))
        if set(_statuses(answer)) - {400, 403}:
            row.problems.append(f"POST with {line!r} is answered: {answer[:80]!r}")
    for host in _OWN_HOSTS:
        answer = _exchange(port, _request("GET", "/props", f"Host: {host.format(port=port)}"))
        if _statuses(answer) != [200]:
            row.problems.append(f"its own Host {host} is refused: {answer[:80]!r}")
    note(row)


def test_a_page_of_another_site_starts_nothing(arenas: Arenas, note: Note) -> None:
    arena, row = arenas(OPEN), Row("cross-site Origins")
    port = arena.served.port
    own = f"Host: 127.0.0.1:{port}"
    steps = arena.state()["engine"]["num_steps"]
    for origin in _FOREIGN_ORIGINS:
        for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
            lines = (
                own,
                f"Origin: {origin}",
                f"Content-Type: {kind}",
                "Sec-Fetch-Site: cross-site",
            )
            answer = _exchange(port, _request("POST", "/v1/completions", *lines, body=_BODY))
            if _statuses(answer) != [403]:
                row.problems.append(f"{origin} as {kind}: {answer[:80]!r}")
    if arena.state()["engine"]["num_steps"] != steps:
        row.problems.append("a page made the model run")
    answer = _exchange(port, _request("GET", "/props", own, f"Origin: http://127.0.0.1:{port}"))
    if _statuses(answer) != [200]:
        row.problems.append(f"its own Origin is refused: {answer[:80]!r}")
    note(row)


_SMUGGLED = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_CHUNK = b"2\r\n{}\r\n0\r\n\r\n"
#: What two readers of a stream may understand in two ways.
_FRAMINGS = {
    "both lengths": (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", _CHUNK),
    "both, turned round": (b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n", _CHUNK),
    "two lengths": (b"Content-Length: 2\r\nContent-Length: 3\r\n", b"{}"),
    "a list of lengths": (b"Content-Length: 2, 3\r\n", b"{}"),
    "a signed length": (b"Content-Length: +2\r\n", b"{}"),
    "a length with a gap": (b"Content-Length : 2\r\n", b"{}"),
    "a length of many digits": (b"Content-Length: " + b"0" * 5000 + b"2\r\n", b"{}"),
    "an encoding with a gap": (b"Transfer-Encoding : chunked\r\n", _CHUNK),
    "an encoding with a tab": (b"Transfer-Encoding:\x0bchunked\r\n", _CHUNK),
    "two encodings": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", _CHUNK),
    "gzip, chunked": (b"Transfer-Encoding: gzip, chunked\r\n", _CHUNK),
    "an unknown encoding": (b"Transfer-Encoding: xchunked\r\n", _CHUNK),
    "a signed chunk": (b"Transfer-Encoding: chunked\r\n", b"+2\r\n{}\r\n0\r\n\r\n"),
    "a chunk in C": (b"Transfer-Encoding: chunked\r\n", b"0x2\r\n{}\r\n0\r\n\r\n"),
    "a chunk with _": (b"Transfer-Encoding: chunked\r\n", b"0_2\r\n{}\r\n0\r\n\r\n"),
    "chunks that end in LF": (b"Transfer-Encoding: chunked\r\n", b"2\n{}\n0\n\n"),
    "a chunk too long": (b"Transfer-Encoding: chunked\r\n", b"2\r\n{}xx\r\n0\r\n\r\n"),
    "a bare CR": (b"X: a\rContent-Length: 2\r\n", b""),
    "a NUL": (b"X: a\0b\r\nContent-Length: 2\r\n", b"{}"),
}


def test_a_framing_with_two_meanings_is_refused_and_ends_the_connection(
    arenas: Arenas, note: Note
) -> None:
    port, row = arenas(OPEN).served.port, Row("framings with two meanings")
    for name, (lines, body) in _FRAMINGS.items():
        head = f"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode() + lines + b"\r\n"
        _require_refused(row, name, _exchange(port, head + body + _SMUGGLED, 2.0))
    old = b"POST /tokenize HTTP/1.0\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\n"
    framed = old + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNK
    _require_refused(row, "chunks in HTTP/1.0", _exchange(port, framed + _SMUGGLED, 2.0))
    bare = b"GET /version HTTP/1.1\nHost: 127.0.0.1\n\n"
    _require_refused(row, "lines that end in LF", _exchange(port, bare + _SMUGGLED, 2.0))
    note(row)


def _require_refused(row: Row, name: str, answer: bytes) -> None:
    if _statuses(answer) not in ([400], [411], [501]):
        row.problems.append(f"{name}: {_statuses(answer)}")
    elif answer.endswith(b"(still open)"):
        row.problems.append(f"{name}: refused, but the connection stays open")


@pytest.mark.parametrize("kind", [KEYS])
def test_a_key_is_what_it_must_be(arenas: Arenas, note: Note, kind: str) -> None:
    served, row = arenas(kind).served, Row("keys in other forms")
    forms = (
        VICTIM, f"Basic {VICTIM}", f"Bearer{VICTIM}", f"Bearer  {VICTIM}x", f"Token {VICTIM}",
        "Bearer ", "Bearer", f"Bearer {VICTIM[:-1]}", f"Bearer {VICTIM.upper()}", "",
        f"Bearer {VICTIM},{BOSS}", "Bearer \xff", f"Bearer Bearer {VICTIM}",
    )  # fmt: skip
    for form in forms:
        for path in ("/v1/models", "/props", "/slots", "/metrics"):
            if served.get(path, headers={"Authorization": form}).status != 401:
                row.problems.append(f"{form!r} opens {path}")
    for path in ("/debug/requests", "/debug/faults", "/debug/x"):
        if served.get(path, headers={"Authorization": f"Bearer {VICTIM}"}).status not in (401, 403):
            row.problems.append(f"a user's key opens {path}")
    note(row)


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_one_key_neither_sees_nor_ends_what_another_one_asked_for(
    arenas: Arenas, note: Note
) -> None:
    served, row = arenas(KEYS).served, Row("requests of another key")
    body = {"prompt": "one's own", "max_tokens": 400, "ignore_eos": True}
    with served.stream("/v1/completions", body, _bearer(VICTIM)) as events:
        name = next(events)["id"]
        for method, path in (
            ("GET", f"/v1/requests/{name}"), ("POST", f"/v1/requests/{name}/cancel"),
        ):  # fmt: skip
            reply = served.ask(method, path, headers=_bearer(MALLORY))
            if reply.status not in (403, 404):
                row.problems.append(f"{method} {path.replace(name, 'ID')}: {reply.status}")
        if served.get(f"/v1/requests/{name}", headers=_bearer(VICTIM)).status != 200:
            row.problems.append("its owner does not see it")
        ends = [
            choice["finish_reason"]
            for event in events
            if isinstance(event, dict)
            for choice in event["choices"]
        ]
    if ends[-1] != "length":
        row.problems.append(f"it ended with {ends[-1]!r}")
    if served.get(f"/v1/requests/{name}", headers=_bearer(MALLORY)).status not in (403, 404):
        row.problems.append("another one sees how it ended")
    note(row)


def test_one_key_neither_sees_nor_goes_on_with_anothers_response(
    arenas: Arenas, note: Note
) -> None:
    served, row = arenas(KEYS).served, Row("responses of another key")
    body = {"input": "one's own", "max_output_tokens": 2}
    made = served.post("/v1/responses", body, headers=_bearer(VICTIM))
    if made.status != 200:
        row.problems.append(f"no response was made: {made.body[:200]!r}")
        note(row)
        return
    name, item = made.json["id"], made.json["output"][0]["id"]
    for method, path in (
        ("GET", f"/v1/responses/{name}"), ("DELETE", f"/v1/responses/{name}"),
        ("POST", f"/v1/responses/{name}/cancel"), ("GET", f"/v1/requests/{name}"),
    ):  # fmt: skip
        reply = served.ask(method, path, headers=_bearer(MALLORY))
        if reply.status != 404 or b"own" in reply.body:
            row.problems.append(f"{method} {path.replace(name, 'ID')}: {reply.status}")
    for more in (
        {"previous_response_id": name}, {"input": [{"type": "item_reference", "id": item}]},
    ):  # fmt: skip
        reply = served.post("/v1/responses", {**body, **more}, headers=_bearer(MALLORY))
        unknown = served.post(
            "/v1/responses",
            json.loads(json.dumps({**body, **more}).replace(name, "no").replace(item, "no")),
            headers=_bearer(MALLORY),
        )
        same = reply.body.replace(name.encode(), b"no").replace(item.encode(), b"no")
        if reply.status != 400 or same != unknown.body:
            row.problems.append(f"{[*more]} tells that there is one: {reply.body[:200]!r}")
    if served.get(f"/v1/responses/{name}", headers=_bearer(VICTIM)).status != 200:
        row.problems.append("its owner does not see it")
    note(row)


def test_one_key_does_not_learn_what_another_one_asked(arenas: Arenas, note: Note) -> None:
    served, row = arenas(KEYS).served, Row("the prefix cache of another key")
    body = {"prompt": "my password is 'correct horse battery staple'\n" * 6, "max_tokens": 1}

    def num_cached(key: str, **more: Any) -> int:
        usage = served.post("/v1/completions", {**body, **more}, headers=_bearer(key)).json["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    num_cached(VICTIM)
    if (num := num_cached(MALLORY)) > 0:
        row.problems.append(f"{num} tokens of another key were found")
    if num_cached(VICTIM) == 0:
        row.problems.append("one's own are not found either")
    num_cached(VICTIM, cache_salt="s")
    if (num := num_cached(MALLORY, cache_salt="s")) > 0:
        row.problems.append(f"{num} tokens of another key were found by its salt")
    note(row)


_MARK = "FORGED LINE"


def test_no_name_of_a_request_forges_a_line_of_the_log(arenas: Arenas, note: Note) -> None:
    arena, row = arenas(KEYS), Row("names that forge the log")
    served, num_lines = arena.served, len(arena.served.stderr)
    forged = (f"\n{_MARK}", f"\r\n{_MARK}", f"\u2028{_MARK}", f"\x1b[2K\r{_MARK}", f"\x85{_MARK}")
    key = _bearer(MALLORY)
    for text in forged:
        quoted = "".join(f"%{byte:02x}" for byte in text.encode())
        served.get(f"/v1/models/{quoted}", headers=key)
        served.get(f"/{quoted}?{quoted}", headers=key)
        served.get(f"/v1/requests/{quoted}", headers=key)
        for body in (
            {"model": text, "prompt": "x"}, {text: 1, "prompt": "x", "max_tokens": 1},
            {"prompt": "x", "max_tokens": 1, "user": text, "cache_salt": text},
            {"prompt": "x", "max_tokens": 1, "grammar": text}, {"prompt": text, "max_tokens": 1},
        ):  # fmt: skip
            served.post("/v1/completions", body, headers=key)
        lines = f"Host: 127.0.0.1\r\nX-Request-Id: {text}\r\nUser-Agent: {text}"
        raw = f"GET /health HTTP/1.1\r\n{lines}\r\n\r\n"
        _exchange(served.port, raw.encode(), 0.5)
        _exchange(served.port, f"{text} / HTTP/1.1\r\n\r\n".encode(), 0.5)
    for line in served.stderr[num_lines:]:
        if line.startswith(_MARK) or not line.replace("\t", " ").isprintable():
            row.problems.append(f"the log has {line!r}")
    row.seen = {"lines": len(served.stderr) - num_lines}
    note(row)


def test_a_name_of_a_field_ends_no_header(arenas: Arenas, note: Note) -> None:
    served, row = arenas(KEYS).served, Row("names that end a header")
    names = ("a\r\nX-Forged: 1", "a\nX-Forged: 1", "é\r\n\r\n<html>", "\0", "a" * 5000, "𝔘\u2028")
    for name in names:
        body = json.dumps({name: 1, "prompt": "x", "max_tokens": 1}).encode()
        reply = served.post("/v1/completions", body, headers=_bearer(MALLORY))
        if reply.status != 200 or "x-forged" in reply.headers:
            row.problems.append(f"{name[:20]!r}: {reply.status} {reply.headers}")
    note(row)
