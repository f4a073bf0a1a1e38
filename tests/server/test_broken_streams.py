"""What another server is asked for an answer that broke off, and where requests of a cluster go."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hypocenter.ray.broken_streams import AnswerStream, is_of_lost_server, prefix_of
from hypocenter.ray.known_beginnings import KnownBeginnings


def event(text: str, ids: list[int], name: str = "cmpl-1", **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None, "token_ids": ids, **more}
    said = {"id": name, "created": 5, "choices": [choice]}
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def said_in(lines: bytes) -> Any:
    return json.loads(lines.removeprefix(b"data: "))


def test_another_server_is_asked_to_go_on_and_the_client_sees_one_answer() -> None:
    stream = AnswerStream({"prompt": "a", "stream": True})
    first = json.loads(stream.body())
    assert first["return_token_ids"] is True
    assert "resume_token_ids" not in first
    shown = said_in(stream.take(event("x", [7, 8])))
    assert (shown["id"], shown["choices"][0]["text"]) == ("cmpl-1", "x")
    assert "token_ids" not in shown["choices"][0], "the client did not ask for them"
    stream.take(event("y", [9]) + b": still here\n\n")
    then = json.loads(stream.body())
    assert then == {**first, "resume_token_ids": [7, 8, 9]}
    assert first["seed"] == then["seed"], "or it would draw other tokens"
    assert said_in(stream.take(event("z", [10], "cmpl-2")))["id"] == "cmpl-1"
    assert stream.can_go_on
    assert stream.take(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert stream.is_over
    assert not stream.can_go_on


def test_who_asks_for_ids_or_a_seed_gets_his_own() -> None:
    stream = AnswerStream({"prompt": "a", "seed": 3, "return_token_ids": True})
    assert json.loads(stream.body())["seed"] == 3
    assert said_in(stream.take(event("x", [7])))["choices"][0]["token_ids"] == [7]


def test_a_chat_is_opened_once() -> None:
    stream = AnswerStream({"messages": [{"role": "user", "content": "a"}]})
    opening = b'data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n'
    assert stream.take(opening) != b""
    assert stream.take(opening) == b""


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}, {"prompt": [[1, 2]]}]
)
def test_of_several_answers_none_goes_on_once_something_was_sent(more: dict[str, Any]) -> None:
    stream = AnswerStream({"prompt": "a", **more})
    assert stream.can_go_on
    stream.take(event("x", [7]))
    assert not stream.can_go_on
    assert AnswerStream({"prompt": [1, 2]}).can_go_on


def test_an_error_of_the_request_ends_it_and_one_of_its_server_does_not() -> None:
    own = b'data: {"error":{"code":"bad_logits"}}\n\n'
    assert not is_of_lost_server(own)
    stream = AnswerStream({"prompt": "a"})
    assert stream.take(own) == own
    assert stream.is_over
    assert is_of_lost_server(event("x", [1]) + b'data: {"error":{"code":"worker_gone"}}\n\n')


def test_requests_go_where_their_beginning_is_and_few_others_are() -> None:
    known = KnownBeginnings()
    long = prefix_of({"prompt": "a" * 4000})
    assert known.in_order(["r0", "r1"], long) == ["r0", "r1"]
    known.note("r1", long)
    assert known.in_order(["r0", "r1"], long) == ["r1", "r0"]
    assert known.in_order(["r0", "r1"], prefix_of({"prompt": "b" * 4000}))[0] == "r0"
    assert (
        known.in_order(["r0", "r1"], prefix_of({"prompt": "a" * 4000, "cache_salt": "s"}))[0]
        == "r0"
    )
    known.num_open["r1"] = 40
    assert known.in_order(["r0", "r1"], long) == ["r0", "r1"], "a beginning is not worth any queue"
    known.forget("r1")
    assert known.num_open["r1"] == 0
