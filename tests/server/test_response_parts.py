"""Responses without a worker: log probabilities of their texts, and what they were asked with."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from test_strangers import FACTS, Fake

from hypocenter.base.results import CallPiece, TokenLogprob, TopLogprob
from hypocenter.server.generation import Generation
from hypocenter.wire.logprobs import pack_logprobs
from hypocenter.wire.messages import Accepted, Ending, Piece

TOLD = TokenLogprob(7, b"b", -0.5, (TopLogprob(8, b"c", -1.5),))
ENTRY = {
    "token": "b",
    "logprob": -0.5,
    "bytes": [98],
    "top_logprobs": [{"token": "c", "logprob": -1.5, "bytes": [99]}],
}


class Telling(Fake):
    """A supervisor whose worker thinks and answers with one token each."""

    def submit(self, generation: Generation) -> None:
        self.params = generation.params
        generation.note_read((5,), ())
        generation.take(Accepted(1))
        told = b"" if generation.params.logprobs is None else pack_logprobs([TOLD])
        loop = asyncio.get_running_loop()
        loop.call_soon(generation.take, Piece(1, "", (6,), told, reasoning="hm"))
        loop.call_soon(generation.take, Piece(1, "b", (7,), told))
        loop.call_soon(generation.take, Piece(1, "", (2,), ending=Ending("stop")))

    def post(self, **body: Any) -> Any:
        return self.ask("POST", "/v1/responses", body=[json.dumps(body).encode()])

    def get(self, name: str) -> tuple[int, Any]:
        return self.ask("GET", f"/v1/responses/{name}/input_items")


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/input_items", "order=up", "order"),
        ("/input_items", "limit=0", "limit"),
        ("/input_items", "after=x", "after"),
        ("/input_items", "order=asc&limit=1", None),
        ("", "stream=true", "stream"),
        ("", "stream=x", "stream"),
        ("", "stream=false", None),
    ],
)
def test_a_parameter_that_is_wrong_is_refused(path: str, query: str, param: str | None) -> None:
    one = Telling()
    name = one.post(input="hi")[1]["id"]
    status, told = one.ask("GET", f"/v1/responses/{name}{path}", query=query)
    if param is None:
        assert status == 200
    else:
        assert (status, told["error"]["param"]) == (400, param)


def text_of(response: dict[str, Any]) -> Any:
    [_, message] = response["output"]
    return message["content"][0]


def test_texts_come_with_the_log_probabilities_that_are_asked_for() -> None:
    one = Telling()
    for asked, num_top in (
        ({"top_logprobs": 1}, 1),
        ({"include": ["message.output_text.logprobs"]}, 0),
    ):
        status, response = one.post(input="hi", **asked)
        assert (status, one.params.logprobs, response["top_logprobs"]) == (200, num_top, num_top)
        assert text_of(response)["logprobs"] == [ENTRY], "a thought has none"
    assert text_of(one.post(input="hi")[1])["logprobs"] == []
    assert one.params.logprobs is None
    status, answer = one.post(input="hi", top_logprobs=21)
    assert (status, answer["error"]["param"]) == (400, "top_logprobs")


def test_a_stream_tells_them_with_each_piece_and_at_the_end() -> None:
    sent = Telling().post(input="hi", top_logprobs=1, stream=True)[1].decode()
    events = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: ")]
    by_kind = {event["type"].removeprefix("response."): event for event in events}
    assert by_kind["output_text.delta"]["logprobs"] == [ENTRY]
    assert by_kind["output_text.done"]["logprobs"] == [ENTRY]
    assert text_of(by_kind["completed"]["response"])["logprobs"] == [ENTRY]


def test_what_a_response_was_asked_with() -> None:
    one = Telling()
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    gave = {"type": "function_call_output", "call_id": "c", "output": "rain"}
    first = one.post(input=[{"role": "user", "content": "hi"}, called, gave])[1]["id"]
    status, told = one.get(first)
    assert (status, told["has_more"]) == (200, False)
    kinds = [(item["type"], item.get("role")) for item in told["data"]]
    assert kinds == [("function_call_output", None), ("function_call", None), ("message", "user")]
    assert told["data"][0]["output"] == "rain"
    assert (told["first_id"], told["last_id"]) == (told["data"][0]["id"], told["data"][-1]["id"])
    assert len({item["id"] for item in told["data"]}) == 3
    second = one.post(input="more", previous_response_id=first)[1]["id"]
    texts = [item.get("content", [{}])[0].get("text") for item in one.get(second)[1]["data"]]
    assert texts[0] == "more", "the newest first"
    assert "b" in texts, "the answer before it"
    assert one.get("resp_none")[0] == 404
    forgotten = one.post(input="hi", store=False)[1]["id"]
    assert one.get(forgotten)[0] == 404


CUSTOM = {"type": "custom", "name": "patch", "description": "Patches", "format": {"type": "text"}}


class Patching(Fake):
    """A supervisor whose worker calls a tool of free text, its arguments in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        template = "{{ messages }}{{ tools }}<tool_call>"  # of a format whose calls are read
        self.facts = msgspec.structs.replace(FACTS, chat_template=template)

    def submit(self, generation: Generation) -> None:
        assert generation.asked is not None
        self.messages, self.tools = generation.messages, generation.asked.tools
        generation.note_read((5,), ())
        generation.take(Accepted(1))
        loop = asyncio.get_running_loop()
        for name, part in (("patch", '{"input": "a\\n'), ("", 'b"}')):
            loop.call_soon(generation.take, Piece(1, "", (6,), calls=(CallPiece(0, name, part),)))
        loop.call_soon(generation.take, Piece(1, "", (2,), ending=Ending("stop")))


def test_a_tool_of_free_text_is_called_with_a_text() -> None:
    one = Patching()
    asked = {"input": "hi", "tools": [CUSTOM]}
    body = [json.dumps(asked).encode()]
    status, response = one.ask("POST", "/v1/responses", body=body)
    assert status == 200, response
    [called] = response["output"]
    assert (called["type"], called["name"], called["input"]) == (
        "custom_tool_call",
        "patch",
        "a\nb",
    )
    assert one.tools is not None
    function = one.tools[0]["function"]
    assert (function["name"], function["description"]) == ("patch", "Patches")
    assert function["parameters"]["required"] == ["input"]
    body = [json.dumps({**asked, "stream": True}).encode()]
    sent = Patching().ask("POST", "/v1/responses", body=body)[1].decode()
    events = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: ")]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2:6] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert (events[3]["delta"], events[4]["input"]) == ("a\nb", "a\nb")
    gave = {"type": "custom_tool_call_output", "call_id": called["call_id"], "output": "done"}
    turn = {"input": [{"role": "user", "content": "hi"}, called, gave], "tools": [CUSTOM]}
    assert one.ask("POST", "/v1/responses", body=[json.dumps(turn).encode()])[0] == 200
    assert one.messages is not None
    [_, call, result] = one.messages
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"input": "a\nb"}
    assert (result["role"], result["content"]) == ("tool", "done")
