"""Calls of answers that were cut off: the same in pieces, and the beginning of what they become."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import msgspec
import pytest

from hypocenter.base.results import ToolCall, whole_calls
from hypocenter.conversation import harmony
from hypocenter.conversation.call_formats import FORMATS
from hypocenter.conversation.call_shapes import SHAPES, CallShape
from hypocenter.conversation.cut_calls import CUT_READERS
from hypocenter.conversation.cut_json import (
    read_cut_string,
    read_value,
    whole_members,
    without_cut_number,
)
from hypocenter.conversation.harmony import NOTHING, AnswerDelta
from hypocenter.conversation.thoughts import AnswerReader, make_answer_reader, split
from hypocenter.server.dialects.blocks import input_of

#: Answers of each format, each of which is cut at some places. By hand: COUNT=1000.
NUM_ANSWERS = int(os.environ.get("COUNT", "12"))
NUM_CUTS = 12
TYPES = {"f": ("s", "t")}
#: By shape, what its template holds.
TEMPLATES = {
    "hermes": "<tool_call>",
    "qwen_coder": "<tool_call><function=",
    "glm": "<tool_call><arg_key>",
    "mistral": "[TOOL_CALLS][ARGS]",
    "mistral_list": "[TOOL_CALLS]",
    "kimi": "<|tool_calls_section_begin|>",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "deepseek_fence": "<｜tool▁calls▁begin｜>```json",
    "minimax": "<minimax:tool_call>",
    "gemma": "<|tool_call>",
    "granite": "<|tool_call|>",
    "lfm2": "<|tool_call_start|>",
    "llama": "<|python_tag|>",
    "harmony": "<|channel|><|message|>",
}
#: What texts are made of: marks, quotes, escapes, and letters of several bytes.
PARTS = (
    '"', "\\", "{", "}", "[", "<", ">", "'", "\n", "é", "😀", "a", "b c", ": ", ", ", "</tool",
    "<|", "<|tool_call", "</param", "</parameter>", "</arg_value>", "1.", "\\u00", "{x:1,",
)  # fmt: skip


def random_text(rng: random.Random, *, plain: bool) -> str:
    parts = PARTS[11:15] if plain else PARTS
    return "".join(rng.choice(parts) for _ in range(rng.randrange(12)))


def random_arguments(rng: random.Random, shape: str) -> dict[str, Any]:
    """Some texts, a number and a list, in any order."""
    # What ends a text of Gemma's and Python's is written by no escape that is read.
    plain = shape == "gemma"
    choices: dict[str, Any] = {
        "s": random_text(rng, plain=plain),
        "n": rng.choice([0, -12, 3.5, True, None]),
        "t": random_text(rng, plain=plain),
        "list": [random_text(rng, plain=True), 12, {"k": [False]}],
    }
    names = rng.sample(list(choices), rng.randrange(len(choices) + 1))
    if shape == "minimax" or shape in ("glm", "qwen_coder"):
        # A line break at the end of a value belongs to its tags, and a tag ends it where it can.
        choices = {k: v.strip("\n") if isinstance(v, str) else v for k, v in choices.items()}
    return {name: choices[name] for name in names}


def write_arguments(shape: CallShape, arguments: dict[str, Any], rng: random.Random) -> str:
    how = shape.parameters
    if how is None:
        return json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
    written = []
    for name, value in arguments.items():
        is_text = isinstance(value, str)
        said = value if is_text else json.dumps(value)
        if how.quoted:
            said = python_text(value, rng) if is_text else repr(value)
        text = f"{how.quote}{said}{how.quote}" if is_text and not how.quoted else said
        text += how.before_end + how.end + how.behind
        written.append(how.key.replace("{name}", name) + text)
    return how.between.join(written)


def python_text(value: str, rng: random.Random) -> str:
    """One of the ways in which Python writes a text."""
    return rng.choice([repr(value), ascii(value), json.dumps(value)])


def write_answer(shape: str, calls: list[tuple[str, dict[str, Any]]], rng: random.Random) -> str:
    if shape == "harmony":
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            + json.dumps(arguments, ensure_ascii=False)
            + "<|call|>"
            for name, arguments in calls
        )
    how = SHAPES[shape]
    written = [
        how.head.replace("{name}", name).replace("{number}", str(number))
        + write_arguments(how, arguments, rng)
        + how.tail
        for number, (name, arguments) in enumerate(calls)
    ]
    return how.form.begin + how.opening + how.between.join(written) + how.closing


def reader_of(shape: str, *, must_call: bool = False) -> AnswerReader:
    found = make_answer_reader(
        TEMPLATES[shape], "", offers_tools=True, types=TYPES, must_call=must_call
    )
    assert found is not None
    return found


def in_pieces(shape: str, answer: str, rng: random.Random, *, must_call: bool) -> AnswerDelta:
    reader, spoken, at = reader_of(shape, must_call=must_call), NOTHING, 0
    while at < len(answer):
        step = rng.choice([1, 1, 2, 3, 7, 30])
        spoken += reader.push(answer[at : at + step])
        at += step
    return spoken + reader.flush(is_cut=True)


def told(spoken: AnswerDelta) -> tuple[str, str, tuple[ToolCall, ...]]:
    return spoken.content, spoken.reasoning, whole_calls(spoken.calls)


def test_each_format_has_a_reader_and_each_shape_a_case() -> None:
    assert CUT_READERS.keys() == {one.name for one in FORMATS}
    assert TEMPLATES.keys() == SHAPES.keys() | {"harmony"}


@pytest.mark.parametrize("shape", TEMPLATES)
def test_a_call_that_is_cut_begins_as_it_would_go_on(shape: str) -> None:
    rng = random.Random(f"cut {shape}")
    num_partial = 0
    for _ in range(NUM_ANSWERS):
        calls = [("f", random_arguments(rng, shape)) for _ in range(rng.choice([1, 1, 2]))]
        answer = write_answer(shape, calls, rng)
        content, _, whole = told(split(answer, reader_of(shape)))
        assert (content.strip(), len(whole)) == ("", len(calls)), answer
        assert [json.loads(call.arguments) for call in whole] == [given for _, given in calls]
        assert told(split(answer, reader_of(shape), is_cut=True))[2] == whole, answer
        for _ in range(NUM_CUTS):
            cut = answer[: rng.randrange(len(answer) + 1)]
            content, reasoning, found = told(
                split(cut, reader_of(shape, must_call=True), is_cut=True)
            )
            assert told(in_pieces(shape, cut, rng, must_call=True)) == (content, reasoning, found)
            assert (content, reasoning) == ("", ""), cut
            assert len(found) <= len(whole), cut
            for place, (one, all_of_it) in enumerate(zip(found, whole, strict=False)):
                assert one.name == all_of_it.name, cut
                assert all_of_it.arguments.startswith(one.arguments), (cut, one)
                given = calls[place][1]
                assert whole_members(one.arguments).items() <= given.items() or any(
                    isinstance(value, list) for value in given.values()
                ), (cut, one)
                num_partial += one.arguments != all_of_it.arguments
            free = split(cut, reader_of(shape), is_cut=True)
            assert whole_calls(free.calls) == found, cut
            if not found and shape != "harmony":
                assert free.content == cut, (
                    "what has no name yet is text, where none must be called"
                )
    assert num_partial > NUM_ANSWERS, "most are cut within a call"


@pytest.mark.parametrize("shape", TEMPLATES)
def test_an_answer_that_ended_by_itself_is_read_as_before(shape: str) -> None:
    """What only looks like a call stays text where the model said no more."""
    rng = random.Random(shape)
    answer = write_answer(shape, [("f", {"s": "x", "n": 1})], rng)
    if shape == "harmony":
        return  # its calls are told as they come
    at = answer.index("f", len(SHAPES[shape].form.begin)) + 3
    content, reasoning, calls = told(split(answer[:at], reader_of(shape)))
    assert (content, reasoning, calls) == (answer[:at], "", ())


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {oops'),
        ("hermes", '<tool_call>{"name": "f", "other": {"a'),
        ("hermes", '<tool_call>{"name": "f"} and'),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {'),
        ("hermes", "<tool_call>[1"),
        ("qwen_coder", "<tool_call><function=f>x"),
        ("qwen_coder", "<tool_call><function=f><parameter=s>1</parameter></function> so"),
        ("glm", "<tool_call>two words"),
        ("glm", "<tool_call>f\n<arg_key>s</arg_key>x"),
        ("mistral", "[TOOL_CALLS]f[ARGS]no"),
        ("mistral", "[TOOL_CALLS]f g{"),
        ("mistral_list", '[TOOL_CALLS][{"name": "f", "arguments": {}}] so'),
        ("kimi", "<|tool_calls_section_begin|>f"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b<｜tool▁sep｜>{"),
        ("gemma", "<|tool_call>call:f{s:1 2"),
        ("granite", '<|tool_call|>["f"'),
        ("lfm2", "<|tool_call_start|>[f(s=1 2"),
        ("lfm2", '<|tool_call_start|>[f("s"'),
        ("llama", '{"name": "f", "answer'),
        ("llama", '{"name": "f"'),
        ("llama", '{"answer": {"name": "f", "parameters": {'),
    ],
)  # fmt: skip
def test_what_is_no_beginning_of_a_call_is_text(shape: str, text: str) -> None:
    content, _, calls = told(split(text, reader_of(shape), is_cut=True))
    assert (content, calls) == (text, ())


def test_arguments_that_are_json_in_a_text_are_told_as_json() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"s\\": \\"a\\\\u00e9\\\\'
    [call] = told(split(text, reader_of("hermes"), is_cut=True))[2]
    assert call == ToolCall("f", '{"s": "a\\u00e9\\')
    assert input_of(call.arguments, is_cut=True) == {}
    assert input_of(call.arguments, is_cut=False) is None


def test_the_thought_before_a_forced_call_is_no_text() -> None:
    template = "<tool_call></think>"
    for text, thought in (("<thi", ""), ("<think>Look", "Look"), ("<think>a</think>\n<tool", "a")):
        reader = make_answer_reader(template, "", offers_tools=True, must_call=True)
        assert reader is not None
        assert told(split(text, reader, is_cut=True)) == ("", thought, ())


def test_marks_at_the_end_of_a_cut_call_are_no_arguments() -> None:
    text = f'<|channel|>commentary to=functions.f<|message|>{{"s": 1}}{harmony.END[:4]}'
    assert told(split(text, reader_of("harmony"), is_cut=True))[2] == (ToolCall("f", '{"s": 1}'),)


# -- JSON -----------------------------------------------------------------------------------------

VALUE: Any = {
    "a": [1, -2.5e3, "x\n\"\\😀", {"b": None, "c": [], "d": {}}], "é": True, "z": [[["deep"]]],
}  # fmt: skip


@pytest.mark.parametrize("written", [json.dumps(VALUE), json.dumps(VALUE, indent=1)])
def test_each_beginning_of_an_object_may_go_on(written: str) -> None:
    for at in range(1, len(written)):
        value = read_value(written[:at])
        assert value is not None, written[:at]
        assert value.end is None
        part = msgspec.json.decode(value.whole)
        assert is_part(part, VALUE), written[:at]
        assert whole_members(written[:at]) == part
    whole = read_value(written + " x")
    assert whole is not None
    assert (whole.end, json.loads(whole.whole)) == (len(written), VALUE)


def is_part(part: Any, whole: Any) -> bool:
    """Whether `part` lacks nothing but what comes last in each object and list."""
    if isinstance(whole, dict):
        return list(part) == list(whole)[: len(part)] and all(
            is_part(part[name], whole[name]) for name in part
        )
    if isinstance(whole, list):
        return all(map(is_part, part, whole)) and len(part) <= len(whole)
    return bool(part == whole)


@pytest.mark.parametrize(
    "text",
    ["{a", '{"a" 1', '{"a": 01', '{"a": 1 2', '{"a": tru}', '{"a": "\x01', '{,', '{"a",', "[1,,",
     '{"a": 1]', "x", "]", '{"a": [1}', '{"a": +', '{"a": "\\q', "[" * 300, '{1', '{"a": 1, 2'],
)  # fmt: skip
def test_what_no_text_would_mend_is_told(text: str) -> None:
    assert read_value(text) is None
    assert whole_members(text) == {}


def test_a_number_at_the_end_is_not_whole() -> None:
    for text in ('{"a": 1, "b": ', '{"a": 1', '{"a": [1, -', '{"a": "1', '{"a": 12}', "1 x"):
        kept = text if text[-1] not in "1-" or '"1' in text else text[:-1]
        assert without_cut_number(text) == kept
    assert whole_members('{"a": 1, "b": 12') == {"a": 1}
    assert whole_members('{"a": 1, "b": 12 ') == {"a": 1, "b": 12}


def test_half_a_character_is_none() -> None:
    assert read_cut_string('"a\\ud83d') == "a"
    assert read_cut_string('"a\\ud83d\\ude00') == "a😀"
    assert read_cut_string('"a\\ud83d\\ude00"') == "a😀"
    assert read_cut_string('"a\\\\') == "a\\"
    assert read_cut_string("a") == ""
