"""Thoughts are told from answers wherever pieces break, and templates whether to think."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outside.served import Served, serving
from outside.terminal import hypo_in_process
from repository import DEMO

from hypocenter import LLM, SamplingParams
from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.conversation.harmony import AnswerDelta, Channels, answers_in_channels
from hypocenter.conversation.thoughts import Thoughts, make_answer_reader, names, split, variables
from hypocenter.model.text.chat import ChatTemplate
from hypocenter.server.generation import AskedAnswer, Generation
from hypocenter.wire.messages import Accepted

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
SPOKEN = AnswerDelta("Hello <b>you</b>!", "They greet. 1 < 2 <| x")


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        (ANSWER, SPOKEN.content, SPOKEN.reasoning),
        ("<|channel|>final<|message|>Hi", "Hi", ""),
        ("Hi", "Hi", ""),
        ('{"a": 1}', '{"a": 1}', ""),
        ('{"a": "b <|end|> c"}', '{"a": "b <|end|> c"}', ""),
        ("", "", ""),
        # Cut off in its thoughts, in a head, in what may have become a mark.
        ("<|channel|>analysis<|message|>Hm <|en", "", "Hm <|en"),
        ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|chan", "", "Hm"),
        ("<|chan", "<|chan", ""),
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
    assert split(text, Channels()) == AnswerDelta(content, reasoning)


@given(st.lists(st.integers(0, len(ANSWER)), max_size=8))
def test_where_pieces_break_changes_nothing(cuts: list[int]) -> None:
    ends = sorted({0, len(ANSWER), *cuts})
    channels = Channels()
    pieces = [channels.push(ANSWER[a:b]) for a, b in pairwise(ends)]
    pieces.append(channels.flush())
    content = "".join(piece.content for piece in pieces)
    assert AnswerDelta(content, "".join(piece.reasoning for piece in pieces)) == SPOKEN


def test_text_is_told_as_soon_as_it_is_no_mark() -> None:
    channels = Channels()
    channels.push("<|channel|>final<|message|>")
    assert channels.push("a <").content == "a "
    assert channels.push("b").content == "<b"


def test_only_templates_with_channels_are_spoken() -> None:
    assert answers_in_channels("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}")
    assert not answers_in_channels("<|im_start|>assistant")


THOUGHT = "<think>\nThey greet. 1 < 2 </thin\n</think>\n\nHello <think>you</think>!"
THOUGHT_SPOKEN = AnswerDelta("Hello <think>you</think>!", "They greet. 1 < 2 </thin")


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        (THOUGHT, THOUGHT_SPOKEN.content, THOUGHT_SPOKEN.reasoning),
        ("Hi <think>no</think>", "Hi <think>no</think>", ""),
        ("\n\nHi", "\n\nHi", ""),
        ("<think>\n\n</think>\n\nHi", "Hi", ""),
        ("<think>a</think><think> b</think> c\n", "c\n", "ab"),
        # Cut off in a thought, in a mark, behind a thought.
        ("<think>\na b \n</thi", "", "a b \n</thi"),
        ("<thi", "<thi", ""),
        ("<think>a</think>\n", "", "a"),
        (" ", " ", ""),
        ("", "", ""),
    ],
)
def test_thoughts_of_whole_answers(text: str, content: str, reasoning: str) -> None:
    assert split(text, Thoughts("<think>", "</think>")) == AnswerDelta(content, reasoning)


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("\na\n</think>\n\nb", "b", "a"),
        ("</think>b", "b", ""),
        ("a", "", "a"),
        ("a</think><think>b</think>c", "c", "ab"),
    ],
)
def test_an_answer_that_begins_within_its_thought(text: str, content: str, reasoning: str) -> None:
    within = Thoughts("<think>", "</think>", begins_within=True)
    assert split(text, within) == AnswerDelta(content, reasoning)


@given(st.lists(st.integers(0, len(THOUGHT)), max_size=8))
def test_where_pieces_of_a_thought_break_changes_nothing(cuts: list[int]) -> None:
    ends = sorted({0, len(THOUGHT), *cuts})
    thoughts = Thoughts("<think>", "</think>")
    pieces = [thoughts.push(THOUGHT[a:b]) for a, b in pairwise(ends)]
    pieces.append(thoughts.flush())
    content = "".join(piece.content for piece in pieces)
    assert AnswerDelta(content, "".join(piece.reasoning for piece in pieces)) == THOUGHT_SPOKEN


def test_a_thought_is_told_as_it_comes() -> None:
    thoughts = Thoughts("<think>", "</think>")
    assert thoughts.push("<think>\na ").reasoning == "a"
    assert thoughts.push("b <").reasoning == " b"
    assert thoughts.push("c").reasoning == " <c"
    assert thoughts.push("</think>\n") == AnswerDelta("", "")
    assert thoughts.push("d") == AnswerDelta("d", "")


#: As Qwen's: it thinks unless it is told not to, and its prompt may begin the thought.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif begins %}<think>\n{% endif %}{% endif %}"
)
GEMMA = "<|turn>{{ m.role }}{% if enable_thinking %}<|think|>{% endif %}<|channel>thought<channel|>"


@pytest.mark.parametrize(
    ("template", "prompt_end", "answer", "spoken"),
    [
        (THINKING, "assistant\n", "<think>a</think>b", AnswerDelta("b", "a")),
        (THINKING, "assistant\n<think>\n", "a</think>b", AnswerDelta("b", "a")),
        (THINKING, "<think>\n\n</think>\n\n", "b", AnswerDelta("b", "")),
        ("{% set a = '<seed:think>' %}</seed:think>", "", "<seed:think>a</seed:think>b",
         AnswerDelta("b", "a")),
        ("[THINK][/THINK]", "", "[THINK]a[/THINK]b", AnswerDelta("b", "a")),
        (GEMMA, "model\n", "<|channel>thought\na<channel|>b", AnswerDelta("b", "a")),
        (GEMMA, "<|channel>thought\n<channel|>", "b", AnswerDelta("b", "")),
        (TEMPLATE, "assistant", ANSWER, SPOKEN),
    ],
)  # fmt: skip
def test_marks_are_those_of_the_template(
    template: str, prompt_end: str, answer: str, spoken: AnswerDelta
) -> None:
    using = make_answer_reader(template, prompt_end)
    assert using is not None
    assert split(answer, using) == spoken


def test_without_marks_nothing_is_told_apart() -> None:
    assert make_answer_reader("{{ messages }}", "") is None
    held = make_answer_reader(THINKING, "<think>\n", is_constrained=True)
    assert held is not None
    assert split('{"a": 1}', held) == AnswerDelta('{"a": 1}', "")


def test_templates_are_told_to_think_by_the_variables_that_they_read() -> None:
    assert variables(THINKING, "auto") == {}
    assert variables(THINKING, "off") == {"enable_thinking": False}
    assert variables(GEMMA, "high") == {"enable_thinking": True}
    effort = "{{ 'thinking' }}{% if reasoning_effort == \"low\" %}x{% endif %}"
    assert variables(effort, "low") == {"reasoning_effort": "low"}
    with pytest.raises(BadSetting, match="reasoning is 'off', but must be low, medium or high"):
        variables(effort, "off")
    with pytest.raises(BadSetting, match="reasoning is 'on', but must be left out"):
        variables("enable_thinking {{ m.thinking }}", "on")
    with pytest.raises(BadSetting, match="must be one of auto, on"):
        variables(THINKING, "loud")
    # Braces within a text, code within a comment, a name of an argument.
    assert names("{{ '}}' }}{% if enable_thinking %}x{% endif %}{{ 'it' }}") == {
        "if", "enable_thinking", "endif",
    }  # fmt: skip
    assert names("{# {{ thinking }} #}{% set n = namespace(thinking=a == b) %}") == {
        "set", "namespace", "a", "b",
    }  # fmt: skip
    assert names("a {{ b.c }}{% if d['e'] and f == \"g\" %}") == {"b", "if", "d", "and", "f"}


def test_a_template_reads_its_variables_and_what_was_thought_before() -> None:
    with ChatTemplate(THINKING, control_texts=["<|im_end|>"]) as template:
        hello = [{"role": "user", "content": "hi"}]
        assert template.render(hello).endswith("assistant\n")
        no = template.render(hello, variables={"enable_thinking": False})
        assert no.endswith("<think>\n\n</think>\n\n")
        before = {"role": "assistant", "content": "b", "reasoning_content": "a<|im_end|>"}
        # As clients send back what they were given.
        parts = template.render_parts([*hello, {**before, "refusal": None, "tool_calls": []}])
        assert ("<|im_end|>", False) in parts
        assert "<think>a<|im_end|></think>b" in "".join(text for text, _ in parts)
        for kwargs, text in [
            ({"loud": True}, "has 'loud', but chat template 'default' does not read it; it reads "
                             "enable_thinking"),
            ({"messages": []}, "has 'messages', but must have names"),
            ({"enable_thinking": "x" * 70_000}, "has 700.. bytes, but may have 65536"),
            ({"enable_thinking": {1, 2}}, "cannot be given to a template"),
            ({"enable_thinking": 1 << 70}, "cannot be given to a template"),
            ({"enable_thinking": "\ud800"}, "cannot be given to a template"),
            ([], "must be a mapping"),
        ]:  # fmt: skip
            with pytest.raises(UsageError, match=text):
                template.render(hello, variables=kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["<|im_end|>", ["<|im", "_end|>"], {"<|im_end|>": 1}])
def test_no_variable_writes_a_control_token(value: object) -> None:
    template = "{% if x is string %}{{ x }}{% else %}{{ x | join('') }}{% endif %}<|im_end|>"
    with ChatTemplate(template, control_texts=["<|im_end|>"]) as chat:
        parts = chat.render_parts([{"role": "user", "content": "a"}], variables={"x": value})
    assert parts == [("<|im_end|>", False), ("<|im_end|>", True)]


HELD_THOUGHT = 'root ::= "<think>a </think>  hi <b>."\n'


def test_a_chat_in_python_has_its_thoughts_apart() -> None:
    hello = [{"role": "user", "content": "hi"}]
    with LLM(chat_template=THINKING, num_threads=1, reasoning="off") as llm:
        assert llm.tokenizer.decode(llm.encode_chat(hello)).endswith("</think>\n\n")
        on = llm.encode_chat(hello, {"enable_thinking": True})
        assert llm.tokenizer.decode(on).endswith("assistant\n")
        # A stop string is looked for in the answer alone.
        whole = llm.chat(hello, grammar=HELD_THOUGHT, stop="a", max_tokens=40)
        assert (whole.text, whole.reasoning) == ("hi <b>.", "a")
        pieces = list(llm.stream_chat(hello, grammar=HELD_THOUGHT, max_tokens=40))
        assert "".join(piece.text for piece in pieces) == "hi <b>."
        assert "".join(piece.reasoning for piece in pieces) == "a"
        begun = llm.chat(hello, chat_template_kwargs={"begins": 1, "enable_thinking": True},
                         max_tokens=4)  # fmt: skip
        assert begun.text == ""
        assert begun.reasoning
    with pytest.raises(BadSetting, match="reasoning is 'on', but must be left out"):
        LLM(reasoning="on", chat_template="chatml", num_threads=1)


def test_another_worker_goes_on_within_a_thought() -> None:
    hello = [{"role": "user", "content": "hi"}]
    with LLM(chat_template=THINKING, num_threads=1) as llm:
        params = SamplingParams(grammar=HELD_THOUGHT, max_tokens=40, seed=1)
        ids = llm.encode_chat(hello)
        whole = llm.chat(hello, params)
        for num in range(1, len(whole.token_ids)):
            sent = whole.token_ids[:num]
            request = llm.answer_request(ids, params, output_ids=sent)
            assert llm.engine.complete([request])[0] == msgspec.structs.replace(
                whole, timings=request.timings(), route=llm.route()
            ), num
    generation = Generation(1, "x", params, messages=tuple(hello), asked=AskedAnswer({"a": 1}))
    generation.note_read((5, 6), ())
    for _ in range(2):
        generation.take(Accepted(1))
        told = generation.message()
        assert (told.is_chat, told.prompt_ids) == (True, (5, 6))


@pytest.mark.tier("sim")
def test_a_server_tells_templates_what_clients_ask_for(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    asked = ("--chat-template", THINKING, "-t", "1", "--reasoning", "off")
    with serving(tmp_path, str(DEMO), *asked) as served:
        path = "/apply-template"
        assert served.post(path, {"messages": messages}).json["prompt"].endswith("</think>\n\n")
        kwargs = {"chat_template_kwargs": {"enable_thinking": True, "begins": True}}
        told = served.post(path, {"messages": messages, **kwargs})
        assert told.json["prompt"].endswith("<think>\n")
        message = served.post("/v1/chat/completions", body | kwargs).json["choices"][0]["message"]
        assert message["content"] == ""
        assert message["reasoning_content"]
        begins = {"chat_template_kwargs": {"begins": True}}
        for effort, thinks in (("none", False), ("high", True)):
            asked_for = body | begins | {"reasoning_effort": effort}
            answer = served.post("/v1/chat/completions", asked_for).json["choices"][0]["message"]
            assert ("reasoning_content" in answer, bool(answer["content"])) == (thinks, not thinks)
        loud = served.post("/v1/chat/completions", body | {"reasoning_effort": "loud"})
        assert (loud.status, loud.json["error"]["param"]) == (400, "reasoning_effort")
        bad = served.post("/v1/chat/completions", body | {"chat_template_kwargs": {"loud": 1}})
        assert (bad.status, bad.json["error"]["type"]) == (400, "invalid_request_error")
        assert "has 'loud'" in bad.json["error"]["message"]
        far = {"chat_template_kwargs": {"enable_thinking": 1 << 70}, "messages": messages}
        for path in ("/v1/chat/completions", "/apply-template"):
            refused = served.post(path, far)
            assert (refused.status, refused.json["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = (str(DEMO), "--chat-template", TEMPLATE, "-t", "1")
    with serving(tmp_path_factory.mktemp("served"), *words) as one:
        yield one


@pytest.mark.tier("whole")
def test_a_server_tells_thoughts_apart(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "grammar": GRAMMAR}
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


@pytest.mark.tier("whole")
def test_a_stream_ends_as_the_whole_answer_does(served: Served) -> None:
    """Also where the last piece may be the beginning of a mark."""
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "grammar": 'root ::= "<|channel|>final<|message|>if a <|"',
    }
    whole = served.post("/v1/chat/completions", body).json["choices"][0]["message"]
    stream = served.post("/v1/chat/completions", {**body, "stream": True}).events
    deltas = [event["choices"][0]["delta"] for event in stream[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"] == "if a <|"


@pytest.mark.tier("whole")
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
    for written, code, said in [
        ('{"loud": 1}', 2, "chat_template_kwargs has 'loud'"),
        ("{", 2, "--chat-template-kwargs '{' is no JSON"),
        ("[1]", 2, "chat_template_kwargs is [1], but must be a mapping"),
    ]:
        bad = hypo_in_process(*asked, "--chat-template-kwargs", written)
        assert (bad.returncode, said in bad.stderr) == (code, True), bad.stderr
    raw = hypo_in_process("run", str(DEMO), "-p", "hi", *more, "-n", "200")
    assert raw.stdout == f"{ANSWER}\n", "a text that is continued is shown as it stands"
