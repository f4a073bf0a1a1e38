"""Anthropic's own client: messages whole and streamed, tools, counts, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pydantic
import pytest
from outside.served import serving

from clients.conftest import KEY
from clients.test_tools import TEMPLATE

ANSWER = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLS: Any = {"grammar": f"root ::= {json.dumps(ANSWER)}\n"}
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ASKED: Any = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, python: str, model: Path
) -> Iterator[anthropic.Anthropic]:
    words = (str(model), "--api-key", KEY, "--chat-template", TEMPLATE)
    with serving(tmp_path_factory.mktemp("messages"), *words, python=python) as one:
        url = f"http://127.0.0.1:{one.port}"
        with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as made:
            yield made


def create(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    asked: Any = {"model": "chat", "messages": ASKED, "max_tokens": 64, **fields}
    message: anthropic.types.Message = client.messages.create(**asked)
    return message


def test_a_forced_call_that_is_cut_is_the_same_whole_and_streamed(
    client: anthropic.Anthropic,
) -> None:
    """The client makes an input of what the stream has of it."""
    forced: Any = {
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "weather"},
        "extra_body": {"temperature": 0},
    }
    inputs = []
    for limit in range(1, 60, 2):
        whole = create(client, max_tokens=limit, **forced)
        asked: Any = {"model": "chat", "messages": ASKED, "max_tokens": limit, **forced}
        with client.messages.stream(**asked) as stream:
            told = stream.get_final_message()
        assert [block.model_dump(exclude={"id"}) for block in told.content] == [
            block.model_dump(exclude={"id"}) for block in whole.content
        ]
        assert told.stop_reason == whole.stop_reason
        for block in whole.content:
            assert block.type == "tool_use", "no mark is told as text"
            inputs.append(block.input)
        if whole.stop_reason == "tool_use":
            break
        assert whole.stop_reason == "max_tokens"
    assert {} in inputs, "its name comes before its input"
    assert inputs[-1] in ({"city": "Oslo"}, {"city": "Rome"})


def test_a_call_and_the_turn_behind_it(client: anthropic.Anthropic) -> None:
    message = create(client, tools=[WEATHER], extra_body=CALLS)
    assert message.stop_reason == "tool_use"
    text, call = message.content
    assert text.type == "text"
    assert text.text == "I look."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})
    said: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turn = [
        *ASKED,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{**said, "cache_control": {"type": "ephemeral"}}]},
    ]
    then = create(client, messages=turn, tools=[WEATHER], max_tokens=2)
    cached = then.usage.cache_read_input_tokens or 0
    assert cached + then.usage.input_tokens > message.usage.input_tokens
    counted = client.messages.count_tokens(model="chat", messages=turn, tools=[WEATHER])
    assert counted.input_tokens == cached + then.usage.input_tokens


def test_a_stream_is_the_whole_answer(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "chat", "messages": ASKED, "max_tokens": 64, "tools": [WEATHER]}
    with client.messages.stream(**asked, extra_body=CALLS) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    whole = create(client, tools=[WEATHER], extra_body=CALLS)
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert [block.model_dump(exclude={"id"}) for block in message.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (message.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_is_asked_for(client: anthropic.Anthropic, choice: Any) -> None:
    message = create(client, tools=[WEATHER], tool_choice=choice, system="Be brief.")
    calls = [block for block in message.content if block.type == "tool_use"]
    assert calls
    whole = calls[:-1] if message.stop_reason == "max_tokens" else calls
    assert all(call.input in ({"city": "Oslo"}, {"city": "Rome"}) for call in whole)


class Turn(pydantic.BaseModel):
    """Turns to a side."""

    left: bool


def test_an_answer_of_a_type(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(
        model="chat", messages=ASKED, max_tokens=64, output_format=Turn
    ).parsed_output
    assert isinstance(parsed, Turn)


def test_errors_are_told_by_their_classes(client: anthropic.Anthropic) -> None:
    image: Any = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(anthropic.BadRequestError, match="no image"):
        create(client, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.NotFoundError, match="'claude' is not served"):
        create(client, model="claude")
    with pytest.raises(anthropic.AuthenticationError):
        create(client.with_options(api_key="wrong"))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        create(client, messages=[{"role": "user", "content": "a b " * 9000}])
