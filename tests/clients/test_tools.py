"""Tools by OpenAI's own client and LangChain: whole, streamed, parsed, a turn that goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from outside.served import serving
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from clients.conftest import KEY

#: As Qwen's: tools as JSON, calls between tags.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}\n{% endfor %}"
)
ANSWER = 'I look.\n<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
#: Makes any model call so.
CALLS: Any = {"grammar": f"root ::= {json.dumps(ANSWER)}\n"}
ASKED: Any = [{"role": "user", "content": "Weather?"}]


class Weather(pydantic.BaseModel):
    """Tells the weather of a city."""

    city: str


TOOLS: Any = [openai.pydantic_function_tool(Weather)]


@pytest.fixture(scope="module")
def tools_url(tmp_path_factory: pytest.TempPathFactory, python: str, model: Path) -> Iterator[str]:
    words = (str(model), "--api-key", KEY, "--chat-template", TEMPLATE)
    with serving(tmp_path_factory.mktemp("tools"), *words, python=python) as one:
        yield f"http://127.0.0.1:{one.port}/v1"


@pytest.fixture(scope="module")
def client(tools_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tools_url, api_key=KEY, max_retries=0) as one:
        yield one


def test_a_call_and_the_turn_behind_it(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    whole = create(model="chat", messages=ASKED, tools=TOOLS, extra_body=CALLS)
    [choice] = whole.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "Weather", {"city": "Oslo"},
    )  # fmt: skip
    turn = [*ASKED, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    then = create(model="chat", messages=turn, tools=TOOLS, max_tokens=4, temperature=0)
    assert then.usage is not None
    assert whole.usage is not None
    assert then.usage.prompt_tokens > whole.usage.prompt_tokens


def test_a_streamed_call(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "messages": ASKED, "tools": TOOLS, "extra_body": CALLS}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Oslo")


def test_parsed_arguments(client: openai.OpenAI) -> None:
    parse = client.chat.completions.parse
    done = parse(model="chat", messages=ASKED, tools=TOOLS, extra_body=CALLS)
    [call] = done.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Oslo")


class Turn(pydantic.BaseModel):
    """Turns to a side."""

    side: Literal["left", "right"]


def test_a_call_that_is_asked_for(client: openai.OpenAI) -> None:
    """Whole, in pieces and by its name, held to its schema by the server alone."""
    tools: Any = [openai.pydantic_function_tool(Turn)]
    by_name: Any = {"type": "function", "function": {"name": "Turn"}}
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [by_name]},
    }
    for choice in ("required", by_name, allowed):
        asked: Any = {"model": "chat", "messages": ASKED, "tools": tools, "tool_choice": choice}
        asked |= {"seed": 7, "parallel_tool_calls": False}
        whole = client.chat.completions.create(**asked).choices[0].message
        [call] = whole.tool_calls or []
        assert call.type == "function"
        turn = Turn.model_validate_json(call.function.arguments)
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
        assert streamed.function.parsed_arguments == turn


def test_a_choice_that_is_none_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice names 'x'") as refused:
        client.chat.completions.create(
            model="chat",
            messages=ASKED,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "x"}},
        )
    assert refused.value.param == "tool_choice"


def test_langchain_has_structured_output_by_a_call(tools_url: str) -> None:
    model: Any = ChatOpenAI(base_url=tools_url, api_key=KEY, model="chat")
    held = model.with_structured_output(Turn, method="function_calling")
    assert held.invoke("Where?").side in ("left", "right")
    [call] = model.bind_tools([Turn], tool_choice="any").invoke("Where?").tool_calls[:1]
    assert Turn.model_validate(call["args"])


def test_pydantic_ai_has_output_of_a_type(tools_url: str) -> None:
    """As its tutorial begins: a type of output is a tool that must be called."""

    async def run() -> Turn:
        async with openai.AsyncOpenAI(base_url=tools_url, api_key=KEY) as client:
            model = OpenAIChatModel("chat", provider=OpenAIProvider(openai_client=client))
            done = await Agent(model, output_type=Turn).run("Where?")
            return Turn.model_validate(done.output)

    assert asyncio.run(run()).side in ("left", "right")


def test_langchain_binds_tools(tools_url: str) -> None:
    model: Any = ChatOpenAI(base_url=tools_url, api_key=KEY, model="chat", extra_body=CALLS)
    bound = model.bind_tools([Weather])
    answer = bound.invoke("Weather?")
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("Weather", {"city": "Oslo"})
    gathered: Any = None
    for chunk in bound.stream("Weather?"):
        gathered = chunk if gathered is None else gathered + chunk
    assert [call["args"] for call in gathered.tool_calls] == [{"city": "Oslo"}]
    said = ToolMessage("rain", tool_call_id=call["id"])
    again = bound.invoke([HumanMessage("Weather?"), answer, said])
    assert again.tool_calls[0]["name"] == "Weather"
