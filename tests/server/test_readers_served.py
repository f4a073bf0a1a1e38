"""What clients do with texts and forms harms no other client of a real server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from outside.served import Reply, Served, serving

#: The rules have tests of their own: `test_readers.py`, `test_reader_process.py`,
#: `test_fair_order.py`, and of salts `tests/engine/test_prefix_cache.py`.
pytestmark = pytest.mark.tier("sim")

ANN, BOB = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
PROMPT = "import os\nimport sys\n\n\ndef read_lines(path):\n    with open(path) as file:\n"
MAX_OPEN = 12


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = ("-np", "4", "--max-queued", str(MAX_OPEN - 4), "-t", "1")
    keys = ("--api-key", "ann", "--api-key", "bob", "--admin-key", "boss")
    with serving(tmp_path_factory.mktemp("readers"), *words, *keys) as served:
        yield served


def slow(number: int) -> dict[str, Any]:
    """A schema that takes longer to read than is allowed, another one for each number."""
    names: dict[str, Any] = {f"a{index}": {} for index in range(4900)}
    more = {"additionalProperties": {"type": "integer"}, "title": str(number)}
    return {"type": "object", "properties": names, **more}


def complete(served: Served, who: dict[str, str], **body: Any) -> Reply:
    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **body}
    return served.post("/v1/completions", asked, headers=who)


def test_a_key_learns_nothing_of_what_another_has_in_the_cache(served: Served) -> None:
    def cached(who: dict[str, str], **more: Any) -> int:
        reply = complete(served, who, **more)
        assert reply.status == 200, reply.body
        return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(ANN) == 0
    assert cached(ANN) > 0
    assert cached(BOB) == 0
    assert cached(BOB) > 0
    assert cached(BOB, cache_salt="x") == 0


def test_a_slow_form_is_refused_by_name_once_and_holds_up_nobody(served: Served) -> None:
    ended: list[str] = []

    def ask(number: int) -> None:
        reply = complete(served, ANN, json_schema=slow(number))
        ended.append(f"ann {reply.status}")
        assert reply.json["error"]["param"] == "json_schema"
        assert "2 s of processor time" in reply.json["error"]["message"]

    threads = [threading.Thread(target=ask, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    for _ in range(3):
        assert complete(served, BOB).status == 200
        assert served.post("/tokenize", {"content": "a b"}, headers=BOB).status == 200
    ended.append("bob")
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["ann 400", "ann 400", "bob"]
    assert ended[-1] != "bob", "all of the slow ones were read before"
    pids = served.reader_pids
    ask(0)
    assert served.reader_pids == pids, "what was refused is not read again"


def test_a_form_that_gets_too_complex_is_the_clients(served: Served) -> None:
    names = {f"name{index}": {"type": "string"} for index in range(1500)}
    many = {"type": "object", "properties": names, "additionalProperties": False}
    reply = complete(served, ANN, json_schema=many)
    assert reply.status == 400
    error = reply.json["error"]
    assert (error["code"], error["param"]) == (None, "json_schema"), "it is found out at reading"
    deep = {"type": "object", "properties": {"a" * 20: many}, "required": ["a" * 20]}
    reply = complete(served, ANN, json_schema=deep, max_tokens=100)
    assert reply.status == 400, "an answer comes to it late"
    error = reply.json["error"]
    assert (error["code"], error["param"]) == ("grammar_failed", "json_schema")


def test_texts_are_read_while_the_worker_is_stopped(served: Served) -> None:
    pid = served.worker_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        told = served.post("/tokenize", {"content": "import os"}, headers=ANN)
        assert told.status == 200
        back = served.post("/detokenize", {"tokens": told.json["tokens"]}, headers=ANN)
        assert back.json["content"] == "import os"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_readers_that_are_killed_are_replaced(served: Served) -> None:
    before = served.reader_pids
    assert len(before) == 2
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert complete(served, ANN).status == 200
    assert complete(served, ANN, grammar='start: "a" "b"').json["choices"][0]["text"] == "ab"
    assert not set(before) & set(served.reader_pids)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_text_that_is_too_long_is_refused_unread(served: Served, path: str) -> None:
    body = {"prompt": "x" * ((1 << 20) + 1)}
    reply = served.post(path, body, headers=ANN)
    assert reply.status == 400
    assert reply.json["error"]["param"] == "prompt"
    assert "1048577 characters" in reply.json["error"]["message"]
    if path == "/v1/completions":
        assert reply.json["error"]["code"] == "context_length_exceeded"


def test_nobody_fills_the_queue_for_all(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 480, "temperature": 0, "ignore_eos": True, "n": 9}
    with served.stream("/v1/completions", body, headers=ANN) as events:
        next(events)
        refused = complete(served, ANN)
        assert refused.status == 429
        assert "at most 9 may be open" in refused.json["error"]["message"]
        began = time.monotonic()
        assert complete(served, BOB, max_tokens=2).status == 200
        told = served.get("/debug/requests", headers={"Authorization": "Bearer boss"}).json
        assert len(told["open"]) == 1, "it came before them, though all places were taken"
        assert time.monotonic() - began < 60


def test_who_gives_way_has_the_same_tokens(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 80, "seed": 3, "n": 6, "logprobs": 1}

    def ask() -> list[Any]:
        while (reply := complete(served, ANN, temperature=1.0, **body)).status == 429:
            time.sleep(0.05)  # answers that were left before are still being ended
        return [(one["index"], one["text"], one["logprobs"]) for one in reply.json["choices"]]

    def num_paused() -> float:
        text = served.get("/metrics", headers=BOB).body.decode()
        return float(re.findall(r"hypocenter:requests_paused_total\{\S* (\S+)", text)[0])

    expected, before = ask(), num_paused()
    got: list[Any] = []
    asking = threading.Thread(target=lambda: got.extend(ask()))
    asking.start()
    while asking.is_alive():
        assert complete(served, BOB, max_tokens=1).status == 200
    assert got == expected
    assert num_paused() > before


def test_who_leaves_while_he_is_read_counts_and_is_dropped(served: Served) -> None:
    """Many slow forms whose clients leave at once: one is read still, and all others are not."""
    for number in range(3 * MAX_OPEN):
        body = json.dumps({"prompt": PROMPT, "json_schema": slow(100 + number)}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(("127.0.0.1", served.port)) as one:
            one.sendall(f"{head}Authorization: Bearer ann\r\n\r\n".encode() + body)
            time.sleep(0.02)
    began = time.monotonic()
    assert complete(served, BOB, grammar='start: "c" "d"').json["choices"][0]["text"] == "cd"
    assert time.monotonic() - began < 20, "it waits for one that is read, and for no other"
    state = served.get("/debug/requests", headers={"Authorization": "Bearer boss"}).json
    assert state["open"] == []
