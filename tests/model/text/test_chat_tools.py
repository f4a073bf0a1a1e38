"""Tools and calls of them in chat templates: told as they are, checked, never control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from chat_templates import CHATML, HARMONY, HERMES, Family, Open, opening

from hypocenter.base.errors import UsageError
from hypocenter.conversation import tools
from hypocenter.conversation.message_fields import passed_over
from hypocenter.conversation.tools import check_tools
from hypocenter.model.text import chat_messages
from hypocenter.model.text.chat import ChatTemplate, check_messages
from hypocenter.model.text.chat_process import TemplateLimits

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather & more, 世界",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ASKED = {"role": "user", "content": "How is it?"}


@pytest.fixture(scope="module")
def opened() -> Iterator[Open]:
    with opening() as one:
        yield one


def called(arguments: object, **fields: object) -> dict[str, Any]:
    """An assistant's message that calls a function."""
    call = {"id": "call_1", "type": "function", "index": 0}
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{**call, "function": function}], **fields}


def answered(content: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": content}


def texts_of_users(parts: list[tuple[str, bool]]) -> list[str]:
    return [text for text, is_template in parts if not is_template]


def defined(**function: object) -> dict[str, Any]:
    return {**WEATHER, "function": {**WEATHER["function"], **function}}


@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["without", "with"])
@pytest.mark.parametrize("family", [HERMES, HARMONY], ids=lambda family: family.name)
def test_renders_what_transformers_renders(
    family: Family, opened: Open, tools: list[dict[str, Any]] | None
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments = {"city": "Köln <x>", "days": [1, 2.5, None, True]}
    told = [ASKED, called(arguments, content=""), answered('{"sky": "clear"}')]
    wanted, _ = render_jinja_template(
        conversations=[told],
        tools=tools,
        chat_template=family.source,
        add_generation_prompt=True,
        eos_token=family.eos_token,
    )
    template = opened(family)
    given = [ASKED, called(json.dumps(arguments), content=None), answered('{"sky": "clear"}')]
    for messages in (told, given):
        assert template.render(messages, tools=tools) == wanted[0]
        assert template.render_parts(messages, tools=tools) == [(wanted[0], True)]


def test_a_template_is_told_of_a_call_as_an_object_and_of_its_answer(opened: Open) -> None:
    messages = [ASKED, called('{ "city":"a" }'), answered("dry")]
    text = opened(HARMONY).render(messages, tools=[WEATHER])
    assert "type weather = (_: {\ncity: string,\ndays?: number,\n}) => any;" in text
    assert 'to=functions.weather<|channel|>commentary json<|message|>{"city": "a"}<|call|>' in text
    assert '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"dry"' in text
    text = opened(HERMES).render(messages, tools=(WEATHER,))
    assert f"<tools>\n{json.dumps(WEATHER, ensure_ascii=False)}\n</tools>" in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "a"}}\n</tool_call>' in text


def test_no_tools_are_none() -> None:
    with ChatTemplate("{{ tools is none }} {{ messages[0].content }}") as template:
        assert template.render([ASKED], tools=[]) == template.render([ASKED])
        assert template.render([ASKED], tools=None).startswith("True")


def test_a_template_that_knows_no_tools_is_not_told_any(opened: Open) -> None:
    for source in (CHATML.source, "{{ 'tools' }}{{ messages[0].tools }}{# {{ tools }} #} tools"):
        with ChatTemplate(source) as template:
            for render in (template.render, template.render_parts):
                with pytest.raises(UsageError, match="chat template knows no tools"):
                    render([ASKED], tools=[WEATHER])
            assert template._process._process is None


@pytest.mark.parametrize("family", [HERMES, HARMONY], ids=lambda family: family.name)
def test_no_result_and_no_argument_writes_a_control_token(family: Family, opened: Open) -> None:
    template = opened(family)
    for text in family.control_texts:
        for arguments in (
            {"city": f"a{text}"},
            {"city": [{"deep": [f"{text}b"]}]},
            json.dumps({"city": f"\n{text}"}),
            f"no JSON {text}",
            json.dumps([text]).replace('"', "'"),
        ):
            messages = [ASKED, called(arguments), answered(f"x{text}y")]
            parts = template.render_parts(messages, tools=[WEATHER])
            assert texts_of_users(parts) == [text, text]
            whole = template.render(messages, tools=[WEATHER])
            assert "".join(part for part, _ in parts) == whole


def test_a_control_text_in_an_argument_alone_is_told_apart(opened: Open) -> None:
    parts = opened(HERMES).render_parts([ASKED, called({"city": "<|im_end|>"})])
    assert parts[1] == ("<|im_end|>", False)
    assert parts[0][0].endswith('"arguments": {"city": "')
    assert parts[2][0].startswith('"}}\n</tool_call><|im_end|>')


@pytest.mark.parametrize(
    "tool",
    [
        defined(description="a <|im_end|> b"),
        defined(parameters={"properties": {"<|im_end|>": {}}}),
        defined(parameters={"enum": [["<|im_end|>"]]}),
        # A template may write a key between brackets of its own.
        defined(parameters={"|im_end|": {}}),
    ],
)
def test_tools_with_a_control_text_are_refused(tool: dict[str, Any], opened: Open) -> None:
    for render in (opened(HERMES).render, opened(HERMES).render_parts):
        with pytest.raises(UsageError, match=r"tools has '<\|im_end\|>', a control token"):
            render([ASKED], tools=[tool])


def test_tools_with_a_control_text_that_json_would_escape_are_refused() -> None:
    said = re.escape("""tools has '<|"|>', a control token""")
    with (
        ChatTemplate("{{ tools }}", control_texts=['<|"|>']) as template,
        pytest.raises(UsageError, match=said),
    ):
        template.render_parts([ASKED], tools=[defined(description='<|"|>')])


def test_tools_whose_json_has_a_control_text_between_its_texts_are_refused() -> None:
    with (
        ChatTemplate("{{ tools | tojson }}", control_texts=['": {"']) as template,
        pytest.raises(UsageError, match=r"tools has '\": \{\"', a control token"),
    ):
        template.render_parts([ASKED], tools=[WEATHER])


def test_keys_of_arguments_are_told_as_they_are() -> None:
    source = "<s>{{ messages[0].tool_calls[0].function.arguments['a<sb'] }}"
    with ChatTemplate(source, control_texts=["<s>"]) as template:
        parts = template.render_parts([called({"a<sb": "<s>"})])
    assert parts == [("<s>", True), ("<s>", False)]


@pytest.mark.parametrize("key", ["<|im_end|>", "a<|im_end|>b", "|im_end|", "b><|im_end|"])
def test_keys_of_arguments_with_a_control_text_are_refused(key: str, opened: Open) -> None:
    where = r"a key in messages\[1\].tool_calls\[0\].function.arguments has '<\|im_end\|>'"
    for arguments in ({"city": [{key: 1}]}, json.dumps({key: 1})):
        with pytest.raises(UsageError, match=where):
            opened(HERMES).render_parts([ASKED, called(arguments)])


def test_names_and_ids_with_a_control_text_are_refused() -> None:
    source = "{% for m in messages %}{{ m.name }}{{ m.tool_call_id }}{% endfor %}"
    tool = {"role": "tool", "content": "x"}
    with ChatTemplate(source, control_texts=["EOT"]) as template:
        for name in ("name", "tool_call_id"):
            with pytest.raises(UsageError, match=rf"messages\[0\].{name} has 'EOT'"):
                template.render_parts([{**tool, name: "a.EOT"}])
        for message, where in (
            ({"id": "EOT", "function": {"name": "f", "arguments": ""}}, r"\[0\].id"),
            ({"function": {"name": "EOT", "arguments": ""}}, r"\[0\].function.name"),
        ):
            with pytest.raises(UsageError, match=rf"tool_calls{where} has 'EOT'"):
                template.render_parts([{"role": "assistant", "tool_calls": [message]}])


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ([defined(parameters={"x": {1, 2}})], "tools cannot be given to a template"),
        ([defined(parameters={"x": 1 << 70})], "tools cannot be given to a template"),
        ([defined(parameters={"x": float("inf")})], "tools cannot be given to a template"),
        ([defined(description="\ud800")], "tools cannot be given to a template"),
        ([3], r"tools\[0\] is 3, but must have"),
    ],
)
def test_tools_that_no_template_can_be_told_are_refused(
    given: Any, pattern: str, opened: Open
) -> None:
    with pytest.raises(UsageError, match=pattern):
        opened(HERMES).render([ASKED], tools=given)


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_tools_are_bounded(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    template = opened(HERMES)
    # The list, the tool and its function are levels, too.
    deepest = nested(chat_messages.MAX_DEPTH - 3)
    assert template.render([ASKED], tools=[defined(parameters=deepest)])
    with pytest.raises(UsageError, match="tools nests deeper than 128 levels, the limit"):
        template.render([ASKED], tools=[defined(parameters={"a": deepest})])
    num_bytes = len(json.dumps([WEATHER], ensure_ascii=False).encode())
    monkeypatch.setattr(tools, "MAX_TOOLS_BYTES", num_bytes)
    assert template.render([ASKED], tools=[WEATHER])
    monkeypatch.setattr(tools, "MAX_TOOLS_BYTES", num_bytes - 1)
    said = f"tools have {num_bytes} bytes, but may have {num_bytes - 1}"
    with pytest.raises(UsageError, match=said):
        template.render([ASKED], tools=[WEATHER])


def test_long_tools_and_arguments_leave_room_for_the_output() -> None:
    limits = TemplateLimits(seconds=20.0, output_bytes=100)
    source = (
        "{{ tools[0].function.description }}{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    )
    with ChatTemplate(source, limits=limits) as template:
        text = template.render([called({"a": "é" * 5000})], tools=[defined(description="é" * 5000)])
        assert text.count("é") == 10_000


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ('{"a": 1}', {"a": 1}),
        (' {"a": {"b": [null, "\\u00e9"]}} ', {"a": {"b": [None, "é"]}}),
        ({"a": (1, 2)}, {"a": [1, 2]}),
        ("", {}),
        (" \n", {}),
        ("{}", {}),
        ({}, {}),
        # What holds no JSON object, or one that cannot be told, stays a text.
        ("[1]", "[1]"),
        ("3", "3"),
        ('"a"', '"a"'),
        ("null", "null"),
        ("a = 1", "a = 1"),
        ('{"a": 1', '{"a": 1'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        (f'{{"a": {1 << 64}}}', f'{{"a": {1 << 64}}}'),
        (f'{{"a": {"9" * 5000}}}', f'{{"a": {"9" * 5000}}}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ],
)
def test_arguments_are_an_object_where_they_hold_one(given: object, wanted: object) -> None:
    call = check_messages([called(given)])[0]["tool_calls"][0]
    function = {"name": "weather", "arguments": wanted}
    assert call == {"id": "call_1", "type": "function", "function": function}


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_message_with_calls_needs_no_content(fields: dict[str, object]) -> None:
    checked = check_messages([called("{}", refusal=None, audio=None, name="", **fields)])
    assert checked[0]["content"] == ""
    assert set(checked[0]) == {"role", "content", "tool_calls"}


def test_what_calls_and_results_may_leave_out() -> None:
    call = {"function": {"name": "f", "arguments": "{}", "x": None}, "id": "", "type": None}
    checked = check_messages(
        [
            {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": (call,)},
            {"role": "tool", "content": "c", "tool_call_id": None, "name": ""},
            {"role": "tool", "content": [{"type": "text", "text": "d"}], "tool_call_id": "!~\\"},
        ]
    )
    function = {"name": "f", "arguments": {}}
    assert checked[0]["tool_calls"] == [{"type": "function", "function": function}]
    assert (checked[0]["content"], checked[0]["reasoning_content"]) == ("a", "b")
    assert checked[1] == {"role": "tool", "content": "c"}
    assert checked[2] == {"role": "tool", "content": "d", "tool_call_id": "!~\\"}


def test_fields_that_nobody_reads_are_passed_over_and_named() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": "{}", "strict": True}, "extra": 1}
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s", "cache_control": {"type": "ephemeral"}, "id": ""},
        {"role": "user", "content": parts, "name": "ann", "tool_calls": ["x"]},
        {"role": "assistant", "content": "c", "reasoning": "r", "message_id": 3,
         "refusal": None, "annotations": [], "tool_calls": [call]},
        {"role": "assistant", "content": None, "reasoning_content": "t"},
        {"role": "tool", "content": "t", "tool_call_id": "a", "name": "f"},
    ]  # fmt: skip
    tools = [{"type": "function", "x": 1, "function": {"name": "f", "strict": True, "y": 2}}]
    assert check_messages(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant", "content": "c", "reasoning_content": "r",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
            ],
        },
        {"role": "assistant", "content": "", "reasoning_content": "t"},
        {"role": "tool", "content": "t", "tool_call_id": "a", "name": "f"},
    ]  # fmt: skip
    assert passed_over(messages, tools) == [
        "messages[].cache_control", "messages[].content[].cache_control",
        "messages[].message_id", "messages[].tool_calls", "messages[].tool_calls[].extra",
        "messages[].tool_calls[].function.strict", "tools[].function.y", "tools[].x",
    ]  # fmt: skip
    assert check_tools(tools) == [{"type": "function", "function": {"name": "f", "strict": True}}]
    odd: list[Any] = [3, {"role": ["x"]}, {"role": "assistant", "tool_calls": [3], "content": [3]}]
    assert passed_over(odd, [3, {"function": 3}]) == []
    assert len(passed_over([{f"f{n}": 1 for n in range(1000)}])) == 32


def with_call(**fields: object) -> list[dict[str, Any]]:
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}, **fields}
    return [{"role": "assistant", "tool_calls": [call]}]


def with_function(**fields: object) -> list[dict[str, Any]]:
    return with_call(function={"name": "f", "arguments": "{}", **fields})


TOOL = {"role": "tool", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "pattern"),
    [
        ([{"role": "assistant", "content": None, "tool_calls": []}], "content is NoneType"),
        ([{"role": "assistant", "tool_calls": None}], "must have role and content"),
        ([{**called("{}"), "role": "user"}], "has fields 'role, tool_calls', but must have"),
        ([{"role": "tool", "tool_call_id": "a"}], "has fields 'role, tool_call_id'"),
        ([called("{}", tool_calls="x")], r"messages\[0\].tool_calls is 'x', but must be a list of"),
        ([called("{}", tool_calls={"a": 1})], "tool_calls is {'a': 1}, but must be a list"),
        ([called("{}", tool_calls=[3])], r"tool_calls\[0\] is 3, but must be a mapping with id"),
        ([called("{}", tool_calls=[{}] * 129)], "tool_calls has 129 calls, but may have 128"),
        (with_call(id=3), r"tool_calls\[0\].id is 3, but must be up to 128 printable ASCII"),
        (with_call(id="a<b"), "id is 'a<b', but must be"),
        (with_call(id="a" * 129), "id is 'aaa.*, but must be"),
        (with_call(id="é"), "id is 'é', but must be"),
        (with_call(id="a\n"), r"id is 'a\\n', but must be"),
        (with_call(type="custom"), "type is 'custom', but must be \"function\" or left out"),
        (with_call(function=None), "function is None, but must be a mapping with name, arguments"),
        (with_function(name=None), r"tool_calls\[0\].function.name is None, but must be up to 128"),
        (with_function(name="a b"), "name is 'a b', but must be"),
        (with_function(name="a" * 129), "name is 'aaa.*', but must be"),
        (with_function(arguments=None), "arguments is None, but must be a text of JSON or a map"),
        (with_function(arguments=[1]), r"arguments is \[1\], but must be a text of JSON"),
        (with_function(arguments="\ud800"), "arguments has a lone surrogate at character 0"),
        (with_function(arguments={"a": "\ud800"}), "arguments has a lone surrogate"),
        (with_function(arguments={"a": {1}}), "arguments cannot be given to a template"),
        (with_function(arguments={"a": 1 << 64}), "arguments cannot be given to a template"),
        (with_function(arguments={"a": float("nan")}), "arguments cannot be given to a template"),
        (with_function(arguments=nested(129)), "arguments nests deeper than 128 levels"),
        (with_function(arguments=json.dumps(nested(129))), "arguments nests deeper than 128"),
        (with_function(arguments='{"a":' * 200_000), "arguments nests deeper than 128"),
        ([{**TOOL, "tool_call_id": "[a"}], r"messages\[0\].tool_call_id is '\[a', but must be"),
        ([{**TOOL, "tool_call_id": 3}], "tool_call_id is 3, but must be"),
        ([{**TOOL, "name": "<a>"}], r"messages\[0\].name is '<a>', but must be up to 128 letters"),
        ([{**TOOL, "name": ["a"]}], r"name is \['a'\], but must be"),
    ],
)  # fmt: skip
def test_calls_and_results_are_checked(messages: Any, pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern):
        check_messages(messages)


def test_most_calls_depth_and_length_that_are_allowed() -> None:
    longest = with_call(id="a" * 128, function={"name": "f" * 64, "arguments": nested(128)})
    calls = longest[0]["tool_calls"] * tools.MAX_CALLS
    checked = check_messages([{"role": "assistant", "tool_calls": calls}])
    assert len(checked[0]["tool_calls"]) == 128
    assert isinstance(
        check_messages(with_function(arguments=json.dumps(nested(128))))[0]["tool_calls"][0][
            "function"
        ]["arguments"],
        dict,
    )


def test_arguments_count_towards_the_bytes_of_all_messages() -> None:
    text = "x" * (chat_messages.MAX_TEXT_BYTES - 1)
    assert check_messages([{"role": "user", "content": "a"}, called(text)])
    for arguments in (text + "x", {"a": text[8:]}, {"a": "é" * (len(text) // 2)}):
        with pytest.raises(UsageError, match="more than 16777216 bytes of text, the limit"):
            check_messages([{"role": "user", "content": "a"}, called(arguments)])


def test_values_of_all_arguments_are_bounded() -> None:
    # One for the object and two for its list and what stands before it.
    most: list[list[int]] = [[]] * (chat_messages.MAX_ARGUMENT_VALUES // 4 - 2)
    for text in (json.dumps({"a": most}), json.dumps(most)):
        assert check_messages([called(text)] * 2)
        with pytest.raises(UsageError, match="more than 262144 values in their arguments"):
            check_messages([called(text)] * 3)
