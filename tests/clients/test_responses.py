"""`/v1/responses` by OpenAI's own client, and as Codex asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from outside.served import Served, serving

from clients.conftest import KEY
from clients.test_tools import ASKED, CALLS, TEMPLATE

WEATHER: Any = {
    "type": "function",
    "name": "Weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, python: str, model: Any) -> Iterator[Served]:
    words = (str(model), "--api-key", KEY, "--chat-template", TEMPLATE)
    with serving(tmp_path_factory.mktemp("responses"), *words, python=python) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as one:
        yield one


def test_a_call_and_the_turn_behind_it(client: openai.OpenAI) -> None:
    create = client.responses.create
    first = create(model="chat", input=ASKED, tools=[WEATHER], extra_body=CALLS)
    text, call = first.output
    assert (first.status, first.output_text, text.type) == ("completed", "I look.", "message")
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("Weather", {"city": "Oslo"})
    said: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    then = create(model="chat", input=said, tools=[WEATHER], previous_response_id=first.id,
                  max_output_tokens=4)  # fmt: skip
    sent: Any = [*ASKED, *first.output, *said]
    whole = create(model="chat", input=sent, tools=[WEATHER], max_output_tokens=4, store=False)
    assert then.usage is not None
    assert whole.usage is not None
    assert then.usage.input_tokens == whole.usage.input_tokens
    assert (then.status, then.incomplete_details and then.incomplete_details.reason) in (
        ("incomplete", "max_output_tokens"), ("completed", None),
    )  # fmt: skip


def test_a_stream_is_the_whole_response(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "input": ASKED, "tools": [WEATHER], "extra_body": CALLS}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    text, call = final.output
    assert final.output_text == "I look."
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Oslo"}
    assert text.type == "message"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "Weather"}])
def test_a_call_that_is_asked_for(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": "chat", "input": ASKED, "tools": [WEATHER], "tool_choice": choice}
    answer = client.responses.create(**asked, instructions="Be brief.", parallel_tool_calls=False)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")


class Turn(pydantic.BaseModel):
    """Turns to a side."""

    left: bool


def test_an_answer_of_a_type(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="chat", input=ASKED, text_format=Turn).output_parsed
    assert isinstance(parsed, Turn)


def test_a_response_is_kept_and_forgotten(client: openai.OpenAI) -> None:
    made = client.responses.create(model="chat", input=ASKED, max_output_tokens=4)
    found = client.responses.retrieve(made.id)
    assert found.output_text == made.output_text
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="not kept"):
        client.responses.create(model="chat", input="x", previous_response_id=made.id)


#: The shape of a request of Codex: nothing is kept, thoughts come sealed, a tool of the server's.
CODEX: Any = {
    "model": "chat",
    "instructions": "You write code.",
    "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "<permissions>read only</permissions>"}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "<environment>x</environment>"}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False,
         "parameters": {"type": "object", "required": ["command"],
                        "properties": {"command": {"type": "array", "items": {"type": "string"}},
                                       "timeout_ms": {"type": "number"}}}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a",
    "client_metadata": {"x": "y"},
}  # fmt: skip


def test_as_codex_asks(server: Served) -> None:
    answer = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'
    forced = {"grammar": f"root ::= {json.dumps(answer)}\n"}
    headers = {"Authorization": f"Bearer {KEY}", "Accept": "text/event-stream"}
    reply = server.post("/v1/responses", {**CODEX, **forced}, headers=headers)
    assert reply.status == 200, reply.body
    assert "client_metadata" in reply.headers["x-ignored-fields"]
    last = reply.events[-1]
    assert last["type"] == "response.completed"
    [call] = last["response"]["output"]
    said = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"}
    again = {**CODEX, "input": [*CODEX["input"], call, said], "max_output_tokens": 4}
    reply = server.post("/v1/responses", again, headers=headers)
    assert reply.status == 200, reply.body
    assert reply.events[-1]["type"] in ("response.completed", "response.incomplete")
