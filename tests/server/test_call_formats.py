"""Calls as each format writes them: read whole and in pieces, held to schemas, else text."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import llguidance
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypocenter.base.results import whole_calls
from hypocenter.conversation.call_formats import format_of, needs_types, text_parameters
from hypocenter.conversation.call_forms import CallForm, call_form, read_choice
from hypocenter.conversation.call_grammar import grammar_of
from hypocenter.conversation.call_shapes import SHAPES, shape_of
from hypocenter.conversation.harmony import NOTHING, AnswerDelta
from hypocenter.conversation.thoughts import make_answer_reader, split
from hypocenter.conversation.tools import MAX_CALLS, check_tools

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "side": {"enum": ["left", "right"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["n", "side"],
    "additionalProperties": False,
}
#: Without the text, whose end no random bytes find.
NO_TEXT = {**SCHEMA, "properties": {k: v for k, v in SCHEMA["properties"].items() if k != "s"}}


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = check_tools([tool("f", SCHEMA), tool("g-2", {"type": "object", "properties": {}})])
assert TOOLS is not None
TYPES = text_parameters(TOOLS)
#: By shape: what its template holds, and an answer with two calls where a format has several.
FORMATS = {
    "hermes": (
        "<tool_call>",
        'Hi\n<tool_call>\n{"name": "f", "arguments": {"s": "1", "n": 2, "side": "left"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "g-2", "arguments": {}}\n</tool_call>',
    ),
    "qwen_coder": (
        "<tool_call><function=",
        "Hi\n<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n<parameter=n>\n2\n"
        "</parameter>\n<parameter=side>\nleft\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g-2>\n</function>\n</tool_call>",
    ),
    "glm": (
        "<tool_call><arg_key>",
        "Hi\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>2</arg_value>\n<arg_key>side</arg_key>\n<arg_value>left</arg_value>\n"
        "</tool_call>\n<tool_call>g-2\n</tool_call>",
    ),
    "mistral": (
        "[TOOL_CALLS][ARGS]",
        'Hi[TOOL_CALLS]f[ARGS]{"s": "1", "n": 2, "side": "left"}[TOOL_CALLS]g-2[ARGS]{}',
    ),
    "mistral_list": (
        "[TOOL_CALLS]",
        'Hi[TOOL_CALLS][{"name": "f", "arguments": {"s": "1", "n": 2, "side": "left"}}, '
        '{"name": "g-2", "arguments": {}}]',
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        "Hi<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"s": "1", "n": 2, "side": "left"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.g-2:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        '{"s": "1", "n": 2, "side": "left"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g-2<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_fence": (
        "<｜tool▁calls▁begin｜>```json",
        "Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"s": "1", "n": 2, "side": "left"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>g-2\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "minimax": (
        "<minimax:tool_call>",
        'Hi\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">1</parameter>\n'
        '<parameter name="n">2</parameter>\n<parameter name="side">left</parameter>\n</invoke>\n'
        '<invoke name="g-2">\n</invoke>\n</minimax:tool_call>',
    ),
    "gemma": (
        "<|tool_call>",
        'Hi<|tool_call>call:f{s:<|"|>1<|"|>,n:2,side:<|"|>left<|"|>}<tool_call|>'
        "<|tool_call>call:g-2{}<tool_call|>",
    ),
    "granite": (
        "<|tool_call|>",
        'Hi<|tool_call|>[{"name": "f", "arguments": {"s": "1", "n": 2, "side": "left"}}, '
        '{"name": "g-2", "arguments": {}}]',
    ),
    "lfm2": (
        "<|tool_call_start|>",
        'Hi<|tool_call_start|>[f(s="1", n=2, side="left"), g-2()]<|tool_call_end|>',
    ),
    "llama": (
        "<|python_tag|>",
        '{"name": "f", "parameters": {"s": "1", "n": 2, "side": "left"}}; '
        '{"name": "g-2", "parameters": {}}',
    ),
}  # fmt: skip
ARGUMENTS = {"s": "1", "n": 2, "side": "left"}


def read(template: str, answer: str) -> AnswerDelta:
    reader = make_answer_reader(template, "", offers_tools=True, types=TYPES)
    assert reader is not None
    return split(answer, reader)


def told(spoken: AnswerDelta) -> tuple[str, list[tuple[str, Any]]]:
    calls = whole_calls(spoken.calls)
    return spoken.content, [(call.name, json.loads(call.arguments)) for call in calls]


def test_each_shape_has_a_case() -> None:
    assert FORMATS.keys() == SHAPES.keys()
    for shape, (template, _) in FORMATS.items():
        assert shape_of(template) == shape
    assert format_of("{{ messages }}") is None


@pytest.mark.parametrize("shape", FORMATS)
def test_two_calls_are_read(shape: str) -> None:
    template, answer = FORMATS[shape]
    content = "" if shape == "llama" else "Hi"
    assert told(read(template, answer)) == (content, [("f", ARGUMENTS), ("g-2", {})])


@pytest.mark.parametrize("shape", FORMATS)
@given(data=st.data())
def test_where_pieces_break_changes_nothing(shape: str, data: st.DataObject) -> None:
    """Also of answers that are long, cut off, or spoiled at some place."""
    template, answer = FORMATS[shape]
    if data.draw(st.booleans()):
        answer = answer.replace("1", "1" * 300, 1)
    kind = data.draw(st.sampled_from(["whole", "cut", "spoiled"]))
    at = data.draw(st.integers(0, len(answer)))
    if kind == "cut":
        answer = answer[:at]
    elif kind == "spoiled":
        answer = answer[:at] + data.draw(st.sampled_from(["{", "<", "\n", "</", '"'])) + answer[at:]
    near_an_end = st.integers(max(len(answer) - 80, 0), len(answer))
    cuts = data.draw(st.lists(st.integers(0, len(answer)) | near_an_end, max_size=8))
    reader = make_answer_reader(template, "", offers_tools=True, types=TYPES)
    assert reader is not None
    spoken = NOTHING
    for start, stop in pairwise(sorted({0, len(answer), *cuts})):
        spoken += reader.push(answer[start:stop])
    spoken += reader.flush()
    whole = read(template, answer)
    assert (spoken.content, whole_calls(spoken.calls)) == (whole.content, whole_calls(whole.calls))
    if not whole.calls:  # all of it is text
        assert spoken.content == answer


@pytest.mark.parametrize(
    ("shape", "answer"),
    [
        ("qwen_coder", "<tool_call>\n<function=f\n</function>\n</tool_call>"),
        ("qwen_coder", "<tool_call>\n<function=f>\nx\n</function>\n</tool_call>"),
        ("qwen_coder", '<tool_call>\n{"name": "f"}\n</tool_call>'),
        ("glm", "<tool_call>two words</tool_call>"),
        ("glm", "<tool_call>f\n<arg_key>s</arg_key>1</tool_call>"),
        ("mistral", "[TOOL_CALLS] are marks."),
        ("mistral", "[TOOL_CALLS]f[ARGS]{1}"),
        ("mistral_list", '[TOOL_CALLS][{"name": "f"}'),
        ("kimi", "<|tool_calls_section_begin|>f<|tool_calls_section_end|>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜>"),
        ("minimax", "<minimax:tool_call><invoke name='f'></invoke></minimax:tool_call>"),
        ("gemma", "<|tool_call>f{}<tool_call|>"),
        ("gemma", '<|tool_call>call:f{s:<|"|>1}<tool_call|>'),
        ("granite", '<|tool_call|>{"name": "f"}'),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a=g(b=1))]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>f()<|tool_call_end|>"),
        ("llama", '{"name": "f"}'),
        ("llama", '{"answer": 42}'),
        ("llama", 'So: {"name": "f", "parameters": {}}'),
    ],
)
def test_what_only_looks_like_a_call_is_text(shape: str, answer: str) -> None:
    assert told(read(FORMATS[shape][0], answer)) == (answer, [])


def test_values_have_the_types_of_the_schema() -> None:
    template = FORMATS["qwen_coder"][0]
    assert needs_types(template)
    values = {"s": "  [1]\n", "n": "7", "list": "[true]", "other": "a: b", "none": "None"}
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    answer = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    assert told(read(template, answer))[1] == [
        ("f", {"s": "  [1]\n", "n": 7, "list": [True], "other": "a: b", "none": None})
    ]
    # The text of a tag in a value.
    tag = "<tool_call>\n<function=f>\n<parameter=s>\n</parameter> </tool_call>\n</parameter>\n"
    assert told(read(template, f"{tag}</function>\n</tool_call>"))[1] == [
        ("f", {"s": "</parameter> </tool_call>"})
    ]


def test_an_answer_has_so_many_calls_as_may_be_sent_back() -> None:
    one = "<|tool_call>call:f{}<tool_call|>"
    spoken = read(FORMATS["gemma"][0], one * (MAX_CALLS + 1))
    assert (len(whole_calls(spoken.calls)), spoken.content) == (MAX_CALLS, one)


# -- held to a schema -----------------------------------------------------------------------------


def form_of(template: str, choice: Any, tools: Any, *, one_call: bool = False) -> CallForm:
    rules = read_choice(choice, tools, one_call=one_call)
    text = call_form(template, tools, rules, begins_in_thought=False)
    assert text is not None
    return msgspec.json.decode(text, type=CallForm)


def matcher_of(form: CallForm) -> llguidance.LLMatcher:
    schemas = [json.dumps(one.schema) for one in form.tools]
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), grammar_of(form, schemas, {}), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(form: CallForm, answer: str) -> bool:
    matcher = matcher_of(form)
    data = list(answer.encode())
    return (
        matcher.validate_tokens(data) == len(data)
        and matcher.consume_tokens(data)
        and (matcher.is_accepting())
    )


@pytest.mark.parametrize("shape", FORMATS)
def test_a_call_is_held_to_its_schema(shape: str) -> None:
    template, answer = FORMATS[shape]
    call = answer.removeprefix("Hi").lstrip("\n")
    required = form_of(template, "required", TOOLS)
    assert accepts(required, call), call
    assert not accepts(required, "Hi" + call)
    assert not accepts(required, call.replace("left", "up"))
    assert not accepts(required, call.replace("2", "222", 1))
    assert not accepts(required, call.replace("f", "h", 1))
    assert not accepts(form_of(template, "required", TOOLS, one_call=True), call)
    by_name = {"type": "function", "function": {"name": "g-2"}}
    assert not accepts(form_of(template, by_name, TOOLS), call)


@pytest.mark.parametrize("shape", FORMATS)
def test_under_auto_text_is_free_up_to_a_call(shape: str) -> None:
    template, answer = FORMATS[shape]
    strict = check_tools([tool("f", SCHEMA), tool("g-2", {"type": "object"})])
    assert strict is not None
    strict[0]["function"]["strict"] = True
    form = form_of(template, "auto", strict)
    assert accepts(form, answer), answer
    assert accepts(form, "Hello there")
    assert not accepts(form, answer.replace("left", "up"))


def random_answer(form: CallForm, seed: int) -> str:
    """One that the grammar allows, byte by byte at random."""
    matcher, rng, said = matcher_of(form), random.Random(seed), bytearray()
    while not (matcher.is_accepting() and rng.random() < 0.5) and not matcher.is_stopped():
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(256) if bits[token // 8] >> token % 8 & 1]
        if not allowed:
            break
        said.append(rng.choice(allowed))
        assert matcher.consume_token(said[-1])
        assert len(said) < 5000
    return said.decode()


@pytest.mark.parametrize("shape", FORMATS)
@pytest.mark.tier("sim", fast=lambda case: case.shape == "glm")
def test_what_is_forced_is_read_and_valid(shape: str) -> None:
    tools = check_tools([tool("f", NO_TEXT)])
    template = FORMATS[shape][0]
    form = form_of(template, "required", tools, one_call=True)
    for seed in range(80):
        answer = random_answer(form, seed)
        reader = make_answer_reader(template, "", offers_tools=True, types=text_parameters(tools))
        assert reader is not None
        content, calls = told(split(answer, reader))
        assert content == "", answer
        [(name, arguments)] = calls
        assert name == "f"
        assert 0 <= arguments["n"] <= 99, answer
        assert arguments["side"] in ("left", "right"), answer
        assert arguments.keys() <= NO_TEXT["properties"].keys()
        assert all(isinstance(one, bool) for one in arguments.get("list", []))
