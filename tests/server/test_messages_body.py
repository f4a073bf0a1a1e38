"""Anthropic's bodies become chats: blocks, tools, choices, thoughts; what is not read is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hypocenter.server.api_error import ApiError
from hypocenter.server.dialects import turns
from hypocenter.server.dialects.messages_body import MessagesBody, chat_of
from hypocenter.server.fields import ChatBody

THINKS = "{% if enable_thinking %}<think>{% endif %}</think>{{ messages }}"
ALWAYS = "<think></think>{{ messages }}"
PLAIN = "{{ messages }}"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def chat(template: str = PLAIN, /, **fields: Any) -> tuple[ChatBody, list[str]]:
    body = msgspec.convert({"messages": HI, **fields}, MessagesBody)
    return chat_of(body, template)


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def texts(*said: str) -> list[dict[str, Any]]:
    return [block("text", text=text) for text in said]


def test_a_turn_with_a_tool_keeps_its_order() -> None:
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": [block("text", text="a", cache_control={"type": "x"})]},
        {
            "role": "assistant",
            "content": [
                block("thinking", thinking="hm", signature="s"),
                *texts("b", "c"),
                block("tool_use", id="t1", name="f", input={"x": 1}),
                block("tool_use", id="t2", name="g", input={}),
            ],
        },
        {
            "role": "user",
            "content": [
                block("tool_result", tool_use_id="t1", content=texts("d", "e")),
                block("tool_result", tool_use_id="t2", is_error=True),
                *texts("go on"),
            ],
        },
    ]
    told, ignored = chat(messages=asked, system=texts("be", "brief"))
    assert told.messages == [
        {"role": "system", "content": texts("be", "brief")},
        {"role": "user", "content": texts("a")},
        {
            "role": "assistant",
            "content": "bc",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
                {"id": "t2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "d\ne"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: "},
        {"role": "user", "content": texts("go on")},
    ]
    assert ignored == ["messages[].content[].cache_control"]
    assert told.continue_final_message is None


def test_words_before_a_result_stay_before_it() -> None:
    result = block("tool_result", tool_use_id="t", content="rain")
    told, _ = chat(messages=[{"role": "user", "content": [*texts("a"), result, *texts("b")]}])
    assert [message["content"] for message in told.messages] == [texts("a"), "rain", texts("b")]


def test_documents_are_texts() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "rain"}
    found = block("search_result", source="s", title="t", content=texts("u"))
    asked = [block("document", source=source, title="day", context="Oslo"), found]
    told, _ = chat(messages=[{"role": "user", "content": asked}])
    assert told.messages[0]["content"] == texts("day\nOslo\nrain", "t\ns\nu")


def test_an_answer_that_was_begun_goes_on() -> None:
    told, _ = chat(messages=[*HI, {"role": "assistant", "content": "So "}])
    assert told.continue_final_message
    assert told.messages[-1] == {"role": "assistant", "content": "So "}


@pytest.mark.parametrize(
    ("choice", "name", "one_call"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any"}, "required", None),
        ({"type": "none"}, "none", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
    ],
)
def test_choices(choice: Any, name: Any, one_call: bool | None) -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}
    told, ignored = chat(tool_choice=choice, tools=[{**tool, "type": "custom", "cache_control": 1}])
    assert (told.tool_choice, told.parallel_tool_calls) == (name, one_call)
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert told.tools == [{"type": "function", "function": function}]
    assert ignored == ["tools[].cache_control"]


@pytest.mark.parametrize(
    ("template", "fields", "effort", "variables", "ignored"),
    [
        (THINKS, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, None,
         {"enable_thinking": True}, ["thinking.budget_tokens"]),
        (THINKS, {"thinking": {"type": "disabled"}}, None, {"enable_thinking": False}, []),
        (THINKS, {"thinking": {"type": "adaptive", "display": "omitted"}}, None, None, []),
        (THINKS, {"output_config": {"effort": "max"}}, "xhigh", None, []),
        # There is nothing to switch: what clients send to every model is told of.
        (PLAIN, {"thinking": {"type": "enabled"}}, None, None, ["thinking"]),
        (PLAIN, {"thinking": {"type": "disabled"}}, None, None, []),
        (ALWAYS, {"thinking": {"type": "enabled"}}, None, None, []),
        (ALWAYS, {"thinking": {"type": "disabled"}}, None, None, ["thinking"]),
    ],
)  # fmt: skip
def test_thinking(
    template: str, fields: Any, effort: Any, variables: Any, ignored: list[str]
) -> None:
    told, passed = chat(template, **fields)
    assert (told.reasoning_effort, told.chat_template_kwargs) == (effort, variables)
    assert passed == ignored


def test_settings_stand_beside_anthropics_fields() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
    told: Any
    told, _ = chat(stop_sequences=["a"], top_k=3, seed=1, max_tokens=9, output_config=form)
    assert (told.stop, told.top_k, told.seed, told.max_tokens) == (["a"], 3, 1, 9)
    assert told.response_format is not None
    assert told.response_format.json_schema is not None
    assert told.response_format.json_schema.schema == {"type": "integer"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"n": 2}, "n is 2, but a message has one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role is 'tool', but must be user"),
        ({"messages": [{"role": "user", "content": 1}]}, "content is 1, but must be"),
        (user(1), "content\\[0\\] is 1, but must be an object"),
        (user(block("image", source={})), "'image', which is not read: .* no image"),
        (user(block("image", source={})), "^messages\\[0\\].content\\[0\\].type"),
        (user(block("container_upload")), "it may be text, thinking"),
        (user({"type": ["text"]}), "which is not read"),
        (user(block("text", text=1)), "text is 1, but must be a text"),
        (user(block("thinking", thinking="x")), "'thinking', which no user says"),
        (user(block("tool_use", id="a", name="b", input={})), "'tool_use', which no user says"),
        (user(block("document", source={"type": "base64"})), "a document must be a text"),
        (user(block("tool_result", tool_use_id="a", content=[block("image")])), "no image"),
        ({"messages": [*HI, {"role": "assistant",
                             "content": [block("tool_use", id="a", name="f", input={})]}]},
         "put what the tool said behind it"),
        ({"messages": [{"role": "assistant",
                        "content": [block("tool_use", id="a", name="f", input="x")]}]},
         "input is 'x', but must be an object"),
        ({"system": [block("image")]}, "system\\[0\\].type is 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "of the server's own"),
        ({"tool_choice": {"type": "x"}}, "tool_choice is .* but its type must be"),
        ({"tool_choice": {"type": {}}}, "tool_choice is .* but its type must be"),
        ({"thinking": {"type": "x"}}, "thinking.type is 'x'"),
        ({"thinking": {"type": []}}, "thinking.type is \\[\\]"),
        ({"output_config": {"effort": 1}}, "output_config.effort is 1"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format must have"),
        ({"output_format": {"type": "json_schema"}}, "output_format must have"),
        ({"stop": "a", "stop_sequences": ["b"]}, "both stop and stop_sequences"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        chat(**fields)
    assert refused.value.status == 400


def test_items_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_ITEMS", 8)
    chat(**user(*texts(*"abcdefg")))
    with pytest.raises(ApiError, match="more than 8 items"):
        chat(**user(*texts(*"abcdefgh")))


def test_the_line_for_billing_is_no_part_of_the_prompt() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch={};"
    passed = ["system.x-anthropic-billing-header"]
    alone, _ = chat(system=texts("You are an agent."))
    for number in ("a1b2c", "00000"):
        own = line.format(number)
        for system in (texts(own, "You are an agent."), f"{own}\nYou are an agent."):
            told, ignored = chat(system=system)
            assert (told.messages, ignored) == (alone.messages, passed)
    told, ignored = chat(system=texts(line))
    assert (told.messages, ignored) == (chat()[0].messages, passed)


def test_such_a_line_elsewhere_is_a_text_like_any() -> None:
    line = "x-anthropic-billing-header: cch=1;"
    for system in (texts("You are an agent.", line), f"Read this:\n{line}\n"):
        told, ignored = chat(system=system)
        assert line in str(told.messages[0])
        assert ignored == []
    told, ignored = chat(messages=[{"role": "user", "content": line}])
    assert line in str(told.messages)
    assert ignored == []
