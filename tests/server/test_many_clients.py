"""Many clients of `hypo serve` at once: each gets its own tokens, and no idle one harms it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvicorn
from outside.served import Served, serving, texts
from pretended.virtual_time import run_in_virtual_time
from uvicorn.server import ServerState

from hypocenter.server.connection import connection_class

NUM_STREAMS = 64
STEM = "import os\nimport sys\n\n\ndef read_lines(path):\n    with open(path) as file:\n"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "json_schema": SCHEMA},
    {"temperature": 0.7, "frequency_penalty": 0.6},
    {"temperature": 0, "stop": ["return"]},
]
ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that has room for a part of what is asked: some wait, and some give way."""
    words = ("-np", "32", "-c", "320", "--kv-tokens", "320", "--admin-key", "boss")
    with serving(tmp_path_factory.mktemp("crowded"), *words) as served:
        yield served


def body_of(number: int) -> dict[str, Any]:
    """Requests of all kinds; a third begin alike, others have 5 to 40 tokens of their own."""
    chosen = random.Random(number)
    own = f"x{number} = " + "value, " * chosen.randrange(12)
    prompt = STEM * chosen.randrange(1, 3) + own if number % 3 == 0 else own
    way = WAYS[number % len(WAYS)]
    return {
        "prompt": prompt, "max_tokens": chosen.randrange(30, 70), "seed": number, "logprobs": 0,
        **way,
    }  # fmt: skip


def said(events: list[Any]) -> tuple[Any, ...]:
    """The text of a stream, its tokens, and their log probabilities to the last bit."""
    found = [choice["logprobs"] for event in events[:-1] for choice in event["choices"]]
    tokens = [token for one in found for token in one["tokens"]]
    return texts(events), tokens, [value for one in found for value in one["token_logprobs"]]


@pytest.mark.tier("sim")  # of the engine: `test_invariance.py`, `test_grammar.py`
def test_each_of_64_streams_gets_the_tokens_that_it_gets_alone(crowded: Served) -> None:
    bodies = [body_of(number) for number in range(NUM_STREAMS)]
    left = {n: n for n in range(0, NUM_STREAMS, 5)}  # left behind so many pieces
    alone, together = [[list[Any]()] * NUM_STREAMS for _ in range(2)]
    for number, body in enumerate(bodies):
        with crowded.stream("/v1/completions", {**body, "cache_salt": "alone"}) as stream:
            alone[number] = list(stream)
    begin = threading.Barrier(NUM_STREAMS)

    def ask(number: int) -> None:
        begin.wait()
        with crowded.stream("/v1/completions", bodies[number]) as stream:
            got = []
            for event in stream:
                got.append(event)
                if number in left and len(got) > left[number]:
                    break
            together[number] = got

    threads = [threading.Thread(target=ask, args=[number]) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(NUM_STREAMS):
        whole, got = alone[number], together[number]
        assert whole[-1] == "[DONE]"
        if number not in left:
            assert got[-1] == "[DONE]", number
            assert said(got) == said(whole), bodies[number]
        elif got:
            begun = said(got if got[-1] == "[DONE]" else [*got, "[DONE]"])
            for some, all_of_it in zip(begun, said(whole), strict=True):
                assert some == all_of_it[: len(some)], bodies[number]
    assert _preemptions(crowded) > 0  # there was too little room for all
    _wait_until(crowded, num_open=0)
    state = crowded.get("/debug/requests", headers=ADMIN).json
    assert state["engine"]["num_free_blocks"] == state["num_blocks"]


def _preemptions(served: Served) -> float:
    for line in served.get("/metrics").body.decode().splitlines():
        if line.startswith("vllm:num_preemptions_total{"):
            return float(line.split()[-1])
    raise AssertionError("no such figure")


def _wait_until(served: Served, *, num_open: int, seconds: float = 30.0) -> None:
    stop = time.monotonic() + seconds
    while True:
        seen = served.get("/debug/requests", headers=ADMIN).json
        if len(seen["open"]) == num_open and not seen["engine"]["num_running"]:
            return
        assert time.monotonic() < stop, seen
        time.sleep(0.02)


# -- clients that take nothing --------------------------------------------------------------------

#: More bytes than a connection takes that nobody reads from.
MUCH = {
    "prompt": "def f(", "max_tokens": 480, "ignore_eos": True, "stream": True, "n": 4,
    "logprobs": 20,
}  # fmt: skip


def ask_and_take_nothing(served: Served) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", served.port))
    body = json.dumps(MUCH).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def everything_from(connection: socket.socket) -> bytes:
    parts = []
    with connection, contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.tier("sim")  # waits for seconds
def test_who_takes_nothing_keeps_its_place_for_a_while_and_then_is_left(tmp_path: Path) -> None:
    words = ("-np", "4", "--max-queued", "0", "--timeout", "2", "--admin-key", "boss")
    with serving(tmp_path, *words) as served:
        idle = ask_and_take_nothing(served)
        _wait_until(served, num_open=1)  # all is computed, and next to nothing is taken
        small = {"prompt": "a", "max_tokens": 1}
        refused = served.post("/v1/completions", small)
        assert (refused.status, served.get("/ready").status) == (429, 503)
        assert "not taken" in refused.json["error"]["message"]
        _wait_until(served, num_open=0)
        assert served.post("/v1/completions", small).status == 200
        assert b"[DONE]" not in everything_from(idle)
        assert not any("Traceback" in line for line in served.stderr), served.stderr


def test_only_a_buffer_that_stays_full_ends_a_connection() -> None:
    async def work() -> tuple[int, int]:
        config = uvicorn.Config(lambda scope, receive, send: None, log_config=None)
        connections, transports = [], []
        for _ in range(2):
            transport = mock.Mock(asyncio.Transport)
            transport.get_extra_info.return_value = None
            made = connection_class(0.1)(config, ServerState(), {})
            made.connection_made(transport)
            connections.append(made)
            transports.append(transport)
        for made in connections:
            made.pause_writing()
        for _ in range(6):
            await asyncio.sleep(0.04)
            connections[0].resume_writing()
            connections[0].pause_writing()
        for made in connections:
            made.connection_lost(None)
        await asyncio.sleep(0.2)
        return transports[0].abort.call_count, transports[1].abort.call_count

    assert run_in_virtual_time(work()) == (0, 1)
