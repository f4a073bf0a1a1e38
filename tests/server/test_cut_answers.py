"""A forced call that max_tokens cuts, on each route: whole and streamed, what there is of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from outside.served import Served, serving
from repository import DEMO
from test_strangers import FACTS, Fake

from hypocenter.base.results import CallPiece
from hypocenter.server.generation import Generation
from hypocenter.wire.messages import Accepted, Ending, Piece

HI: Any = [{"role": "user", "content": "hi"}]
#: Cut within a text, behind a number whose end is not known, and before its arguments.
CUT = '{"q": "a < b", "deep": {"x": [1, "y'
SAID = {"q": "a < b", "deep": {"x": [1]}}
SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["q", "n"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
#: By route: its body for a tool that must be called, and the field of its limit.
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {
            "messages": HI,
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "function": {"name": "find"}},
        },
        "max_tokens",
    ),
    "/v1/messages": (
        {
            "model": "m",
            "messages": HI,
            "tools": [{"name": "find", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "find"},
        },
        "max_tokens",
    ),
    "/v1/responses": (
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "find", "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "find"},
        },
        "max_output_tokens",
    ),
    "/api/chat": (
        # Its clients cannot ask for a call.
        {"model": "m", "messages": HI, "tools": [FUNCTION]},
        "num_predict",
    ),
}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{# <tool_call> #}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %};\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def asked(path: str, limit: int, *, stream: bool) -> dict[str, Any]:
    body, name = BODIES[path]
    if path == "/api/chat":
        return {**body, "options": {name: limit, "temperature": 0}, "stream": stream}
    return {**body, name: limit, "temperature": 0, "stream": stream}


#: Why it ended, and its calls: each a name, the arguments as a text, and as an object.
Told = tuple[str, list[tuple[str, str | None, Any]], str]


def whole_of(path: str, answer: dict[str, Any]) -> Told:
    """Why an answer ended, its calls, and its text."""
    match path:
        case "/v1/chat/completions":
            [choice] = answer["choices"]
            calls = choice["message"].get("tool_calls", [])
            made = [(c["function"]["name"], c["function"]["arguments"], None) for c in calls]
            return choice["finish_reason"], made, choice["message"]["content"] or ""
        case "/v1/messages":
            used = [block for block in answer["content"] if block["type"] == "tool_use"]
            texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
            made = [(block["name"], None, block["input"]) for block in used]
            return answer["stop_reason"], made, "".join(texts)
        case "/v1/responses":
            items = [item for item in answer["output"] if item["type"] == "function_call"]
            if items and answer["status"] == "incomplete":
                assert items[-1]["status"] == "incomplete"
            made = [(item["name"], item["arguments"], None) for item in items]
            texts = [x["content"][0]["text"] for x in answer["output"] if x["type"] == "message"]
            return answer["status"], made, "".join(texts)
    calls = answer["message"].get("tool_calls", [])
    made = [(call["function"]["name"], None, call["function"]["arguments"]) for call in calls]
    return answer["done_reason"], made, answer["message"]["content"]


def streamed_of(path: str, data: bytes) -> Told:
    """The same of a stream, as a client puts it together."""
    if path == "/api/chat":
        lines = [json.loads(line) for line in data.splitlines()]
        calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
        text = "".join(line["message"]["content"] for line in lines)
        joined = {"tool_calls": calls, "content": text}
        return whole_of(path, {**lines[-1], "message": joined})
    events = [
        json.loads(line[6:])
        for line in data.decode().splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    if path == "/v1/responses":
        done = [event for event in events if event["type"] == "response.output_item.done"]
        grown = [
            "".join(
                event["delta"]
                for event in events
                if event["type"].endswith("arguments.delta")
                and event["output_index"] == one["output_index"]
            )
            for one in done
        ]
        last = events[-1]["response"]
        named = [item["arguments"] for item in last["output"] if item["type"] == "function_call"]
        assert named == [text for text, one in zip(grown, done, strict=True)
                         if one["item"]["type"] == "function_call"]  # fmt: skip
        return whole_of(path, last)
    if path == "/v1/messages":
        content: list[Any] = []
        for event in events:
            if event["type"] == "content_block_start":
                content.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                content[-1]["json"] += delta.get("partial_json", "")
                if "text" in delta:
                    content[-1]["text"] += delta["text"]
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = as_a_client_reads(block["json"])
        stopped = next(event for event in events if event["type"] == "message_delta")
        return whole_of(path, {"content": content, **stopped["delta"]})
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = ""
    for event in events:
        for choice in event["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    message["tool_calls"].append({"function": {**call["function"]}})
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return whole_of(path, {"choices": [{"finish_reason": reason, "message": message}]})


def as_a_client_reads(text: str) -> Any:
    """What is whole of JSON that is cut: tried from its end with what would close it."""
    for at in range(len(text), 0, -1):
        for closing in ("", "}", "]}", "]}}", "}}"):
            try:
                return json.loads(text[:at].rstrip().removesuffix(",") + closing)
            except ValueError:
                continue
    return {}


class Cut(Fake):
    """A supervisor whose worker is cut off in a call."""

    def __init__(self, arguments: str, reason: str) -> None:
        super().__init__()
        self.facts = msgspec.structs.replace(FACTS, chat_template=TEMPLATE)
        self.arguments, self.reason = arguments, reason
        self.must_call = False

    def submit(self, generation: Generation) -> None:
        self.must_call = generation.must_call
        generation.note_read((5,), ())
        generation.take(Accepted(1))
        loop = asyncio.get_running_loop()
        call = CallPiece(0, "find", self.arguments)
        loop.call_soon(
            generation.take, Piece(1, "", (7,), calls=(call,), ending=Ending(self.reason))
        )

    def told(self, path: str, *, stream: bool) -> Told:
        body = json.dumps(asked(path, 20, stream=stream)).encode()
        status, answer = self.ask("POST", path, body=[body])
        assert status == 200, answer
        if stream:
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            return streamed_of(path, data)
        return whole_of(path, answer)


REASONS = {
    "/v1/chat/completions": "length",
    "/v1/messages": "max_tokens",
    "/v1/responses": "incomplete",
    "/api/chat": "length",
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("arguments", "given"), [(CUT, SAID), ("", {}), ('{"n": 12, "m"', {"n": 12})]
)
def test_a_cut_call_is_told_as_far_as_it_goes(path: str, arguments: str, given: Any) -> None:
    one = Cut(arguments, "length")
    as_text = path in ("/v1/chat/completions", "/v1/responses")
    call = ("find", arguments, None) if as_text else ("find", None, given)
    for stream in (False, True):
        assert one.told(path, stream=stream) == (REASONS[path], [call], "")
        assert one.must_call == (path != "/api/chat")


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
def test_arguments_that_the_model_ended_badly_are_a_text(path: str) -> None:
    for stream in (False, True):
        _, calls, text = Cut(CUT, "stop").told(path, stream=stream)
        assert (calls, text) == ([], f"find {CUT}")


def test_free_text_of_a_custom_tool_is_told_as_far_as_it_goes() -> None:
    one = Cut('{"input": "*** Begin\\nfile \\u00', "length")
    body = {"input": "hi", "tools": [{"type": "custom", "name": "find"}], "tool_choice": "required"}
    _, answer = one.ask("POST", "/v1/responses", body=[json.dumps(body).encode()])
    [item] = answer["output"]
    assert (item["type"], item["input"], item["status"]) == (
        "custom_tool_call", "*** Begin\nfile ", "incomplete",
    )  # fmt: skip


# -- with a model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = (str(DEMO), "--chat-template", TEMPLATE, "-t", "1", "--alias", "m")
    with serving(tmp_path_factory.mktemp("served"), *words) as one:
        yield one


@pytest.mark.tier("whole")
@pytest.mark.parametrize("path", [path for path in BODIES if path != "/api/chat"])
def test_each_limit_gives_the_beginning_of_the_call(served: Served, path: str) -> None:
    """Whole and streamed alike; what is told grows with the limit, and no mark is told as text."""
    whole = whole_of(path, served.post(path, asked(path, 200, stream=False)).json)
    [(name, arguments, given)] = whole[1]
    assert (name, whole[0] != REASONS[path]) == ("find", True)
    num_partial = 0
    for limit in range(1, 60):
        reply = served.post(path, asked(path, limit, stream=False))
        assert reply.status == 200, reply.body
        told = whole_of(path, reply.json)
        assert streamed_of(path, served.post(path, asked(path, limit, stream=True)).body) == told
        reason, calls, text = told
        assert text == "", "no mark is told"
        if reason != REASONS[path]:
            assert told == whole
            break
        assert len(calls) <= 1
        for one in calls:
            assert one[0] == "find"
            if arguments is not None:
                assert arguments.startswith(one[1] or "")
            else:
                assert one[2].items() <= given.items()
            num_partial += 1
    else:
        pytest.fail("it never ended")
    assert num_partial > 5
