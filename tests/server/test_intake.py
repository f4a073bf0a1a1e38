"""What the server believes of strangers: names, sites, chunks, sizes and shapes of bodies."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import h11
import msgspec
import pytest
from starlette.requests import Request
from test_supervisor import FACTS

from hypocenter.server.api_error import ApiError
from hypocenter.server.fields import ChatBody, CompletionBody, prompts_of, read_body
from hypocenter.server.intake import json_bounds
from hypocenter.server.intake.bodies import Bodies
from hypocenter.server.intake.chunks import BadChunks, Chunks
from hypocenter.server.intake.json_bounds import BodyShape, decode_body, fields_of
from hypocenter.server.intake.parser import Parser
from hypocenter.server.intake.strangers import Strangers, is_host
from hypocenter.server.reading.readers import SMALL
from hypocenter.server.routes import raw_body_of

LONG_BODY = json_bounds.SLICE_BYTES + 1
LOCAL = Strangers(is_local=True)
NAMED = Strangers(is_local=True, hosts=["LLM.example.com:8443", "10.0.0.7"])
OPEN = Strangers(is_local=False)
OPEN_NAMED = Strangers(is_local=False, hosts=["llm.example.com"])
SITES = Strangers(is_local=True, origins=["https://chat.example.com", "vscode-webview://abc"])
ALL_SITES = Strangers(is_local=True, origins=["*"])


def code(rules: Strangers, host: str, origin: str = "", site: str = "") -> str | None:
    found = rules.refusal(host, origin, site, is_open=False)
    assert found is None or found.status == 403
    return None if found is None else found.code


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "localhost:8080", "LocalHost:8080", "localhost.", "127.0.0.1:8080",
        "127.0.0.2", "[::1]:8080", "[::1]", "[::ffff:127.0.0.1]:1", "",
    ],
)  # fmt: skip
def test_a_local_server_knows_its_own_names(host: str) -> None:
    assert code(LOCAL, host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example",
        "localhost:8080@evil.example", "evil.example#localhost", "192.168.0.1", "0.0.0.0:8080",
        "[::2]:8080", "localhost:x", "localhost evil", "a, localhost", "::1", "[localhost",
    ],
)  # fmt: skip
def test_a_local_server_refuses_other_names(host: str) -> None:
    assert code(LOCAL, host) == "host_not_allowed"
    assert LOCAL.refusal(host, "", "", is_open=True) is None


def test_names_that_are_allowed() -> None:
    for host in ("llm.example.com", "LLM.EXAMPLE.COM.:99", "10.0.0.7:8080", "localhost"):
        assert code(NAMED, host) is None
    assert code(NAMED, "example.com") == "host_not_allowed"
    assert code(OPEN, "evil.example") is None
    assert code(OPEN_NAMED, "llm.example.com:1") is None
    assert code(OPEN_NAMED, "localhost") is None
    assert code(OPEN_NAMED, "evil.example") == "host_not_allowed"
    assert is_host("llm.example.com:8443")
    assert not any(is_host(name) for name in ("", "https://a.example", "a b", "a/b", "*/"))


@pytest.mark.parametrize(
    ("rules", "host", "origin", "site", "expected"),
    [
        (LOCAL, "localhost:8080", "http://localhost:8080", "same-origin", None),
        (LOCAL, "LOCALHOST:8080", "http://localhost:8080", "", None),
        (LOCAL, "localhost", "http://localhost", "", None),
        (LOCAL, "localhost", "http://localhost:80", "", None),
        (LOCAL, "localhost:443", "https://localhost", "", None),
        (LOCAL, "[::1]:8080", "http://[::1]:8080", "", None),
        (LOCAL, "localhost:8080", "http://localhost:3000", "same-site", "origin_not_allowed"),
        (LOCAL, "localhost:8080", "https://evil.example", "cross-site", "origin_not_allowed"),
        (LOCAL, "localhost:8080", "null", "", "origin_not_allowed"),
        (LOCAL, "localhost:8080", "localhost:8080", "", "origin_not_allowed"),
        (LOCAL, "", "http://", "", "origin_not_allowed"),
        (LOCAL, "localhost:8080", "", "cross-site", "cross_site"),
        (LOCAL, "localhost:8080", "", "Cross-Site", "cross_site"),
        (LOCAL, "localhost:8080", "", "none", None),
        (LOCAL, "localhost:8080", "", "same-site", None),
        (SITES, "localhost:8080", "https://chat.example.com", "cross-site", None),
        (SITES, "localhost:8080", "vscode-webview://abc", "cross-site", None),
        (SITES, "localhost:8080", "https://chat.example.com.evil", "", "origin_not_allowed"),
        (SITES, "evil.example", "https://chat.example.com", "", "host_not_allowed"),
        (ALL_SITES, "localhost", "https://a.example", "cross-site", None),
        (OPEN, "a.example", "https://a.example", "same-origin", None),
        (OPEN, "a.example", "https://b.example", "cross-site", "origin_not_allowed"),
    ],
)
def test_pages_that_may_ask(
    rules: Strangers, host: str, origin: str, site: str, expected: str | None
) -> None:
    assert code(rules, host, origin, site) == expected


# -- chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 50, 1000])
def test_chunks_in_pieces_of_any_size(size: int) -> None:
    whole = b"5\r\nabcde\r\n00A;a=b\r\n0123456789\r\n0\r\nx: y\r\n\r\nGET"
    one, inbox, got = Chunks(), bytearray(), b""
    for at in range(0, len(whole), size):
        inbox += whole[at : at + size]
        got += one.take(inbox, 100)
    assert (got, one.is_over, bytes(inbox)) == (b"abcde0123456789", True, b"GET")
    assert (one.num_chunks, one.num_bytes) == (3, 15)


def test_chunks_are_taken_a_few_at_a_time() -> None:
    one, inbox = Chunks(), bytearray(b"1\r\na\r\n" * 10)
    assert one.take(inbox, 4) == b"aaa"  # the fourth has begun
    assert one.take(inbox, 100) == b"aaaaaaa"


@pytest.mark.parametrize(
    "bad",
    [
        b"1" * 300, b"x\r\n", b"\r\n", b"0x1\r\n", b"1\r\nab\r\n", b"1;\x01\r\n",
        b"0\r\n" + b"a: b\r\n" * 3000, b"0\r\na" + b"a" * 9000, b"0\r\n a: b\r\n\r\n",
        b"1111111111111111\r\n",
    ],
)  # fmt: skip
def test_what_is_no_chunk(bad: bytes) -> None:
    with pytest.raises(BadChunks):
        Chunks().take(bytearray(bad), 100)


# -- memory of bodies ------------------------------------------------------------------------------


def test_bodies_have_a_bound_together_and_each_client_has_half_of_it() -> None:
    bodies = Bodies(1000)
    first, second, third = bodies.of("a"), bodies.of("a"), bodies.of("b")
    first.take(300)
    with pytest.raises(ApiError, match="your requests and their answers hold 600 bytes") as info:
        second.take(300)
    assert (info.value.status, info.value.code, info.value.retry) == (429, "bodies_full", True)
    second.take(200)
    third.take(500)
    with pytest.raises(ApiError, match="hold 1001 of 1000 bytes"):
        bodies.of("c").take(1)
    second.release()
    second.release()
    fourth = bodies.of("c")
    fourth.take(200)
    for one in (first, third, fourth):
        one.release()
    assert bodies.num_bytes == 0
    assert not bodies._by_client


def test_long_bodies_are_decoded_one_after_the_other_and_short_ones_at_once() -> None:
    """A body is in memory twice while it is decoded: its bytes, and what they say."""

    async def work() -> None:
        bodies, within = Bodies(1000), list[int]()
        most = 0

        async def decode(num_bytes: int) -> None:
            nonlocal most
            async with bodies.decoding(num_bytes):
                within.append(num_bytes)
                most = max(most, within.count(LONG_BODY))
                await asyncio.sleep(0)
                assert num_bytes == LONG_BODY or within.count(1) == 3
                await asyncio.sleep(0)
                within.remove(num_bytes)

        await asyncio.gather(*map(decode, [LONG_BODY, LONG_BODY, 1, LONG_BODY, 1, 1]))
        assert (most, within) == (1, [])

    asyncio.run(work())


def test_a_body_counts_for_what_it_becomes_and_passes_alone() -> None:
    bodies = Bodies(1000)
    one, other = bodies.of("a"), bodies.of("b")
    one.take(100)
    one.settle(400)
    assert bodies.num_bytes == 400
    one.settle(90_000)
    assert bodies.num_bytes == 500
    other.take(10)
    with pytest.raises(ApiError):
        bodies.of("a").settle(10)
    one.settle(10)
    assert bodies.num_bytes == 510


# -- shapes ----------------------------------------------------------------------------------------


def count(data: bytes, size: int) -> None:
    shape = BodyShape()
    for at in range(0, len(data), size):
        shape.add(data[at : at + size])


def counted(data: bytes, sizes: random.Random) -> list[int]:
    """What a BodyShape counts when the body comes in pieces."""
    shape, at = BodyShape(), 0
    while at < len(data):
        size = sizes.randrange(1, 9)
        shape.add(data[at : at + size])
        at += size
    return list(shape._counts.values())


def made(value: Any) -> list[int]:
    """Lists and objects, names, and values but the first of each list and object."""
    if isinstance(value, dict):
        parts, num_names = list(value.values()), len(value)
    elif isinstance(value, list):
        parts, num_names = value, 0
    else:
        return [0, 0, 0]
    total = [1, num_names, max(1, len(parts))]
    for part in parts:
        total = [a + b for a, b in zip(total, made(part), strict=True)]
    return total


def any_value(chosen: random.Random, depth: int = 0) -> Any:
    kind = chosen.randrange(6 if depth < 4 else 3)
    if kind > 3:
        return [any_value(chosen, depth + 1) for _ in range(chosen.randrange(4))]
    if kind == 3:
        names = (any_text(chosen) for _ in range(chosen.randrange(4)))
        return {name: any_value(chosen, depth + 1) for name in names}
    return any_text(chosen) if kind else chosen.randrange(1000)


def any_text(chosen: random.Random) -> str:
    return "".join(chosen.choice('ab"\\[]{},:\n/\u4e2d') for _ in range(chosen.randrange(9)))


@pytest.mark.parametrize("seed", range(200))
def test_a_shape_counts_what_is_made_and_nothing_in_texts(seed: int) -> None:
    chosen = random.Random(seed)
    value = any_value(chosen)
    data = json.dumps(value, ensure_ascii=bool(seed % 2)).encode()
    assert counted(data, chosen) == made(value)


M = 1 << 20
TOO_MUCH = {
    "lists": (b'{"prompt": [' + b"[]," * M + b"1]}", "65536 lists and objects"),
    "names": (b'{"messages": [{' + b'"a":1,' * M + b'"b": 1}]}', "65536 names"),
    "numbers": (b'{"prompt": [' + b"300," * M + b"1]}", "524288 values"),
    "texts": (b'{"prompt": [' + b'"",' * M + b'""]}', "524288 values"),
    "a text": (b'{"prompt": "' + b"a" * (9 * M) + b'"}', "a text of more than 8388608 bytes"),
    "escapes": (b'{"prompt": "' + rb"\\" * (5 * M) + b'"}', "a text of more than 8388608 bytes"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_bodies_that_would_take_seconds_are_refused_while_they_come(case: str) -> None:
    data, what = TOO_MUCH[case]
    with pytest.raises(ApiError, match=what) as info:
        count(data, 1 << 16)
    assert (info.value.status, info.value.code) == (400, "body_too_complex")


def test_memory_is_foreseen() -> None:
    cases = (('["abc"]', 7), ('["\u4e2d"]', 4 * 7), (r'["\u0041"]', 4 * 10))
    for text, num_text_bytes in cases:
        shape = BodyShape()
        shape.add(text.encode())
        assert shape.memory_bytes(len(text.encode())) == num_text_bytes + 200 + 40


# -- decoding in slices ----------------------------------------------------------------------------


class Sliced(msgspec.Struct):
    prompt: str | list[str | int | list[int]] = ""
    content: str | None = None
    n: int = 1


LONG = 300_000
BODIES: list[dict[str, Any]] = [
    {"prompt": "a" * LONG, "n": 2},
    {"prompt": ["b" * 1000] * 600, "content": "c" * LONG},
    {"prompt": list(range(LONG))},
    {"prompt": [list(range(1000))] * 300, "ignored": 1},
    {"content": "\u4e2d" * LONG, "n": 3},
    {"prompt": "a"},
]


@pytest.mark.parametrize("body", BODIES)
def test_slices_are_the_whole(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    read = asyncio.run(decode_body(data, fields_of(data, Sliced), Sliced))
    assert read == msgspec.json.decode(data, type=Sliced)


def test_others_run_between_slices() -> None:
    data = json.dumps({"prompt": ["b" * 1000] * 4000}).encode()

    async def run() -> int:
        num_turns = 0
        reading = asyncio.ensure_future(decode_body(data, fields_of(data, Sliced), Sliced))
        while not reading.done():
            await asyncio.sleep(0)
            num_turns += 1
        return num_turns

    assert asyncio.run(run()) > len(data) // json_bounds.SLICE_BYTES


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": ["a" * 1000] * 600 + [None]}, "prompt", "prompt: Expected"),
        ({"prompt": {"a": "b" * LONG}}, "prompt", "Expected `str | array`"),
        ({"content": ["a" * LONG]}, "content", "content: Expected"),
        ({"prompt": "a" * LONG, "n": "x"}, "n", "Expected `int`"),
        ({"n": ["a" * (2 << 20)]}, "n", "n has 2097156 bytes, but at most 393216 are allowed"),
        ({"tools": "a" * (1 << 20)}, "tools", "but at most 1048576 are allowed"),
        ({str(number): 1 for number in range(1001)}, None, "the body has 1001 fields"),
    ],
)
def test_errors_of_long_bodies_name_the_field(
    body: dict[str, Any], param: str | None, message: str
) -> None:
    data = json.dumps(body).encode()
    with pytest.raises(ApiError) as info:
        asyncio.run(decode_body(data, fields_of(data, Sliced), Sliced))
    assert message in str(info.value)
    assert (info.value.status, info.value.param) == (400, param)


def test_texts_that_could_never_wait_together_are_refused_before_anything_is_made_of_them() -> None:
    body = CompletionBody(prompt=["b" * 100_000] * 84)
    with pytest.raises(ApiError, match="84 prompts have 8400000 characters, but at most 8388608"):
        prompts_of(body, FACTS)
    with pytest.raises(ApiError) as info:
        prompts_of(body, FACTS)
    assert (info.value.status, info.value.param, info.value.retry) == (413, "prompt", None)
    assert len(prompts_of(CompletionBody(prompt=["b" * 100_000] * 83), FACTS)) == 83
    assert len(prompts_of(CompletionBody(prompt=["b" * (8 << 20) + "b"]), FACTS)) == 1
    assert len(prompts_of(CompletionBody(prompt=["b" * SMALL] * 512), FACTS)) == 512


def test_bodies_of_routes_are_read_in_slices_too() -> None:
    data = json.dumps({"prompt": ["b" * 1000] * 600, "n": 2, "new": 1}).encode()
    body, unknown = asyncio.run(read_body(data, CompletionBody))
    assert (body.prompt, body.n, unknown) == (["b" * 1000] * 600, 2, ["new"])
    messages = [{"role": "user", "content": "b" * 1000}] * 600
    chat, _ = asyncio.run(read_body(json.dumps({"messages": messages}).encode(), ChatBody))
    assert chat.messages == messages


def test_a_number_has_so_many_digits() -> None:
    shape = BodyShape()
    shape.add(b'{"seed": ' + b"9" * 1000 + b', "text": "' + b"9" * 5000 + b'"')
    with pytest.raises(ApiError, match="a number of more than 1024 digits"):
        shape.add(b', "n": -' + b"9" * 1024)


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", ()),
        ("1.0", ()),
        ("1.1", ((b"content-length", b"7"),)),
        ("1.1", ((b"content-length", b"7"), (b"x-own", b"transfer-encoding: chunked"))),
    ],
)
def test_an_answer_is_framed_as_h11_frames_it(
    version: str, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    def sent(answering: h11.Connection) -> bytes:
        answering.receive_data(f"GET / HTTP/{version}\r\nHost: a\r\n\r\n".encode())
        assert isinstance(answering.next_event(), h11.Request)
        assert isinstance(answering.next_event(), h11.EndOfMessage)
        parts = [h11.Data(data=part) for part in (b"one", b"", b"four")]
        events = [h11.Response(status_code=200, headers=list(headers)), *parts, h11.EndOfMessage()]
        return b"".join(answering.send(event) or b"" for event in events)

    own = Parser(1000, lambda status, reason: None)
    assert sent(own) == sent(h11.Connection(h11.SERVER))
    with pytest.raises(h11.LocalProtocolError):
        own.send(h11.Data(data=b"behind its end"))


def test_an_error_keeps_no_part_of_the_body_that_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error has the frame that raised it, and lives until the collector finds it."""
    parts = [bytes([number]) * 600 for number in range(3)]
    num_before = [sys.getrefcount(part) for part in parts]

    async def stream() -> AsyncIterator[bytes]:
        for part in list(parts):
            yield part

    state = SimpleNamespace(body=Bodies(2000).of("a client"))
    request = SimpleNamespace(headers={}, stream=stream, state=state)
    served = SimpleNamespace(max_body_bytes=10_000)
    monkeypatch.setattr("hypocenter.server.routes.service_of", lambda _: served)
    with pytest.raises(ApiError) as refused:
        asyncio.run(raw_body_of(cast(Request, request)))
    assert refused.value.code == "bodies_full"
    # The frame has the one that was too much, and none of those before.
    num_more = sum(sys.getrefcount(part) for part in parts) - sum(num_before)
    assert num_more <= 1


#: Prints how many MiB more the process has once long blocks were freed behind which others stay.
_FREED = """
import sys
from hypocenter.server.operating.heap import return_freed_blocks

def resident():
    with open("/proc/self/statm") as table:
        return int(table.read().split()[1]) * 4 >> 10

if sys.argv[1] == "returns":
    return_freed_blocks()
del_first = bytes(31 << 20)
del del_first
before, held, stay = resident(), [], []
for number in range(100):
    held.append(b"x" * (1 << 20))
    stay.append(b"x" * 2000)
del held
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_blocks_go_back_to_the_system() -> None:
    def left(how: str) -> int:
        told = subprocess.run([sys.executable, "-c", _FREED, how], capture_output=True, check=True)
        return int(told.stdout)

    assert left("keeps") > 20, "is this still needed?"
    assert left("returns") < 10


#: Prints how many MiB more the process has once small blocks were freed amid which others stay.
_LOOKED_AT = """
import asyncio, sys
from hypocenter.server.operating import heap

heap._EVERY_SECONDS = 0.0
of_server = heap.Heap()
before = heap._resident_bytes()
held = [bytes(3000 + number % 2) for number in range(40_000)]
stay = held[::100]
del held
if sys.argv[1] == "looks":
    asyncio.run(of_server.look())
print(heap._resident_bytes() - before >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_free_amid_small_blocks_goes_back() -> None:
    def left(how: str) -> int:
        command = [sys.executable, "-c", _LOOKED_AT, how]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    assert left("keeps") > 60, "is this still needed?"
    assert left("looks") < 20
