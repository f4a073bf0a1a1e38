"""The harmony format: channels are told apart wherever pieces break, and nothing is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository import DEMO
from served import serving
from terminal import hypo_in_process

from hypocenter.harmony import Channels, Spoken, is_spoken_by, split

ANSWER = (
    "<|channel|>analysis<|message|>They greet. 1 < 2 <| x<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Hello <b>you</b>!"
)
#: As the model's own template, but for tools and dates.
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{# <|channel|> #}{% endif %}"
)
#: Makes any model say it.
GRAMMAR = f'root ::= "{ANSWER}"\n'
SPOKEN = Spoken("Hello <b>you</b>!", "They greet. 1 < 2 <| x")


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        (ANSWER, SPOKEN.content, SPOKEN.reasoning),
        ("<|channel|>final<|message|>Hi", "Hi", ""),
        ("Hi", "Hi", ""),
        ('{"a": 1}', '{"a": 1}', ""),
        ("", "", ""),
        # Cut off in its thoughts, in a head, in what may have become a mark.
        ("<|channel|>analysis<|message|>Hm <|en", "", "Hm <|en"),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|chan", "", "Hm"),
        ("<|chan", "<|chan", ""),
        # A call of a tool, and words before it, are not for the reader.
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
            ' to=functions.find <|constrain|>json<|message|>{"q": 1}',
            "",
            'I look.{"q": 1}',
        ),
        (" to=functions.find<|channel|>commentary<|message|>{}", "", "{}"),
        # Two thoughts; a channel without the end of the one before; several final messages.
        (
            "<|channel|>analysis<|message|>a<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|>c<|end|>"
            "<|start|>assistant<|channel|>final<|message|>d",
            "cd",
            "ab",
        ),
    ],
)
def test_channels_of_whole_answers(text: str, content: str, reasoning: str) -> None:
    assert split(text) == Spoken(content, reasoning)


@given(st.lists(st.integers(0, len(ANSWER)), max_size=8))
def test_where_pieces_break_changes_nothing(cuts: list[int]) -> None:
    ends = sorted({0, len(ANSWER), *cuts})
    channels = Channels()
    pieces = [channels.push(ANSWER[a:b]) for a, b in pairwise(ends)]
    pieces.append(channels.flush())
    content = "".join(piece.content for piece in pieces)
    assert Spoken(content, "".join(piece.reasoning for piece in pieces)) == SPOKEN


def test_text_is_told_as_soon_as_it_is_no_mark() -> None:
    channels = Channels()
    channels.push("<|channel|>final<|message|>")
    assert channels.push("a <").content == "a "
    assert channels.push("b").content == "<b"


def test_only_templates_with_channels_are_spoken() -> None:
    assert is_spoken_by("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}")
    assert not is_spoken_by("<|im_start|>assistant")


def test_a_server_tells_thoughts_apart(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "grammar": GRAMMAR}
    with serving(tmp_path, str(DEMO), "--chat-template", TEMPLATE, "-t", "1") as served:
        whole = served.post("/v1/chat/completions", body).json["choices"][0]
        stream = served.post("/v1/chat/completions", {**body, "stream": True}).events
        plain = {"prompt": "hi", "grammar": GRAMMAR, "max_tokens": 200}
        raw = served.post("/v1/completions", plain).json["choices"][0]
    assert whole["message"]["content"] == SPOKEN.content
    assert whole["message"]["reasoning_content"] == SPOKEN.reasoning
    assert whole["finish_reason"] == "stop"
    deltas = [event["choices"][0]["delta"] for event in stream[:-1]]
    for name, text in (("content", SPOKEN.content), ("reasoning_content", SPOKEN.reasoning)):
        assert "".join(delta.get(name, "") for delta in deltas) == text
    assert raw["text"] == ANSWER, "a completion is the text as it stands"


def test_a_stream_ends_as_the_whole_answer_does(tmp_path: Path) -> None:
    """Also where the last piece may be the beginning of a mark."""
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "grammar": 'root ::= "<|channel|>final<|message|>if a <|"',
    }
    with serving(tmp_path, str(DEMO), "--chat-template", TEMPLATE, "-t", "1") as served:
        whole = served.post("/v1/chat/completions", body).json["choices"][0]["message"]
        stream = served.post("/v1/chat/completions", {**body, "stream": True}).events
    deltas = [event["choices"][0]["delta"] for event in stream[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"] == "if a <|"


def test_hypo_run_puts_the_answer_alone_on_stdout(tmp_path: Path) -> None:
    (tmp_path / "answer.gbnf").write_text(GRAMMAR)
    grammar = str(tmp_path / "answer.gbnf")
    more = ("--chat-template", TEMPLATE, "-t", "1", "--grammar", grammar)
    asked = ("run", str(DEMO), "hi", *more)
    done = hypo_in_process(*asked)
    assert done.stdout == f"{SPOKEN.content}\n"
    assert f"{SPOKEN.reasoning}\n" in done.stderr
    assert SPOKEN.reasoning not in hypo_in_process(*asked, "-q").stderr
    answer = json.loads(hypo_in_process(*asked, "--json").stdout)
    assert (answer["text"], answer["reasoning"]) == (SPOKEN.content, SPOKEN.reasoning)
    raw = hypo_in_process("run", str(DEMO), "-p", "hi", *more, "-n", "200")
    assert raw.stdout == f"{ANSWER}\n", "a text that is continued is shown as it stands"
