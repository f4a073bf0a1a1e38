"""Calls that are held to a form: which answers a form allows, byte by byte and in tokens."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from hypocenter import LLM
from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.base.results import whole_calls
from hypocenter.conversation.call_forms import FREE, CallRules, call_form, read_choice
from hypocenter.conversation.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from hypocenter.conversation.thoughts import make_answer_reader, split
from hypocenter.conversation.tools import check_tools
from hypocenter.engine.grammar_worker import Unreadable, read_form


def tool(name: str, *, strict: bool | None = None, **parameters: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "parameters": {"type": "object", **parameters}}
    return {
        "type": "function",
        "function": function | ({} if strict is None else {"strict": strict}),
    }


Q = {"q": {"type": "integer"}}
EXACT: dict[str, Any] = {"properties": Q, "required": ["q"], "additionalProperties": False}
FIND, LOOSE = tool("find", strict=True, **EXACT), tool("go", **EXACT)
TAGS = "{{ tools }}<tool_call>"
THINKS = "{{ tools }}<tool_call><think></think>"
CHANNELS = "{{ tools }}<|channel|><|message|>"
MUST = CallRules(must_call=True)
ONE = CallRules(must_call=True, is_one_call=True)


def call(name: str = "find", arguments: str = '{"q": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def harmony(name: str = "find", arguments: str = '{"q": 1}') -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


SAID = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant"


def compiled(
    template: str,
    tools: list[dict[str, Any]],
    rules: CallRules,
    ids: dict[str, int] | None = None,
    *,
    begins: bool = False,
) -> str:
    form = call_form(template, tools, rules, begins_in_thought=begins)
    assert form is not None
    return read_form("tools", json.dumps({"form": json.loads(form), "ids": ids or {}}))


def verdict(grammar: str, answer: str) -> str:
    """`whole`, `open` where more must follow, or the text before the first byte that may not be."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    data = answer.encode()
    for place, byte in enumerate(data):
        if not matcher.consume_token(byte):
            return data[:place].decode()
    assert not matcher.is_error(), matcher.get_error()
    return "whole" if matcher.is_accepting() else "open"


@pytest.mark.parametrize(
    ("template", "tools", "rules", "begins", "answer", "expected"),
    [
        # Asked for: nothing but calls, to the schema though the tool is not strict.
        (TAGS, [FIND, LOOSE], MUST, False, call(), "whole"),
        (TAGS, [FIND, LOOSE], MUST, False, call("go"), "whole"),
        (TAGS, [FIND, LOOSE], MUST, False, call() + "\n" + call("go"), "whole"),
        (TAGS, [FIND, LOOSE], ONE, False, call() + "\n" + call("go"), call()),
        (TAGS, [FIND, LOOSE], MUST, False, "", "open"),
        (TAGS, [FIND, LOOSE], MUST, False, "I", ""),
        (TAGS, [LOOSE], MUST, False, call("go", '{"q": "x"}'),
         '<tool_call>\n{"name": "go", "arguments": {"q": '),
        (TAGS, [FIND, LOOSE], CallRules(True, ("go",), True), False, call("go"), "whole"),
        (TAGS, [FIND, LOOSE], CallRules(True, ("go",), True), False, call(),
         '<tool_call>\n{"name": "'),
        # A thought may stand before, and must where the prompt has begun it.
        (THINKS, [FIND], MUST, False, "<think>a <tool_call> b</think>\n\n" + call(), "whole"),
        (THINKS, [FIND], MUST, False, call(), "whole"),
        (THINKS, [FIND], MUST, True, "so.</think>\n\n" + call(), "whole"),
        (THINKS, [FIND], MUST, True, "so.</think>no", "so.</think>"),
        # Of its own accord: text is free, and a strict tool's call is not.
        (TAGS, [FIND, LOOSE], FREE, False, "a < b <tool", "whole"),
        (TAGS, [FIND, LOOSE], FREE, False, "I look.\n" + call() + "\n" + call() + " done", "whole"),
        (TAGS, [FIND, LOOSE], FREE, False, "<tool_call>x", "<tool_call>"),
        (TAGS, [FIND, LOOSE], FREE, False, call("no"), '<tool_call>\n{"name": "'),
        (TAGS, [FIND, LOOSE], FREE, False, "\n" + call("go", '{"x": [null]}'), "whole"),
        (TAGS, [FIND], CallRules(is_one_call=True), False, call() + call(), call() + "<tool_call"),
        (THINKS, [FIND], FREE, False, "<think>a <tool_call> b</think>\n\nYes", "whole"),
        (THINKS, [FIND], FREE, True, "a <tool_call> b</think>" + call(), "whole"),
        (THINKS, [FIND], FREE, True, "a</think> <tool_call>b", "a</think> <tool_call>"),
        # Only some may be called.
        (TAGS, [tool("a"), tool("b")], CallRules(names=("b",)), False, call("b", "{}"), "whole"),
        (TAGS, [tool("a"), tool("b")], CallRules(names=("b",)), False, call("a", "{}"),
         '<tool_call>\n{"name": "'),
        # In channels.
        (CHANNELS, [FIND], MUST, False, harmony(), "whole"),
        (CHANNELS, [FIND], MUST, False, SAID + harmony(), "whole"),
        (CHANNELS, [FIND], MUST, False, SAID + "<|channel|>final", SAID + "<|channel|>"),
        (CHANNELS, [FIND, LOOSE], FREE, False, SAID + harmony("go", '{"x": 1}'), "whole"),
        (CHANNELS, [FIND], FREE, False, SAID + "<|channel|>final<|message|>Yes", "whole"),
        (CHANNELS, [FIND], FREE, False, harmony(arguments='{"x'), harmony(arguments='{"')),
    ],
)  # fmt: skip
def test_what_a_form_of_calls_allows(
    template: str, tools: list[Any], rules: CallRules, begins: bool, answer: str, expected: str
) -> None:
    assert verdict(compiled(template, tools, rules, begins=begins), answer) == expected
    if expected == "whole" and "name" in answer and not begins:
        reader = make_answer_reader(template, "", offers_tools=True)
        assert reader is not None
        assert whole_calls(split(answer, reader).calls), "what is allowed is read"


@pytest.mark.parametrize(
    ("template", "rules", "begins"),
    [(THINKS, MUST, False), (THINKS, MUST, True), (THINKS, FREE, False), (THINKS, FREE, True),
     (TAGS, FREE, False), (CHANNELS, MUST, False), (CHANNELS, FREE, False)],
)  # fmt: skip
def test_marks_that_are_tokens_are_named_by_their_ids(
    template: str, rules: CallRules, begins: bool
) -> None:
    """A mark of its own is written by its token alone, whichever marks of a model are such."""
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>", START, CHANNEL, MESSAGE, END,
             CONSTRAIN)  # fmt: skip
    for chosen in (marks, marks[:2], marks[2:4], marks[3:4]):
        ids = {mark: 256 + n for n, mark in enumerate(marks) if mark in chosen}
        grammar = compiled(template, [FIND], rules, ids, begins=begins)
        if template is CHANNELS and chosen is not marks:
            continue
        thought = ["so ", "</think>"] if begins else ["<think>", "so ", "</think>"]
        answer = (
            [CHANNEL, "commentary to=functions.find ", CONSTRAIN, "json", MESSAGE, '{"q": 1}']
            if template is CHANNELS
            else [*(thought if template is THINKS else []), "<tool_call>",
                  '\n{"name": "find", "arguments": {"q": 1}}\n', "</tool_call>"]
        )  # fmt: skip
        matcher = llguidance.LLMatcher(with_tokens(marks), grammar, log_level=0)
        for text in answer:
            tokens = [ids[text]] if text in ids else list(text.encode())
            for token in tokens:
                assert matcher.consume_token(token), (chosen, text, token, matcher.get_error())
        assert matcher.is_accepting()


class _Bytes:
    """A vocabulary of bytes, and of marks behind them."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = 300, None

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in marks]
        self.tokens += [b"<e%d>" % n for n in range(301 - len(self.tokens))]
        self.special_token_ids = list(range(256, 301))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def with_tokens(marks: tuple[str, ...]) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(_Bytes(marks), eos_token=[300])  # type: ignore[arg-type]


def test_choices_of_tools_are_read_and_refused_by_name() -> None:
    tools = [FIND, LOOSE]
    by_name = {"type": "function", "function": {"name": "go"}}
    several = {"mode": "auto", "tools": [by_name, by_name]}
    assert read_choice(None, tools) == read_choice("auto", None) == FREE
    assert read_choice("required", tools, one_call=True) == CallRules(True, None, True)
    assert read_choice(by_name, tools) == CallRules(True, ("go",), True)
    assert read_choice({"type": "allowed_tools", "allowed_tools": several}, tools) == CallRules(
        False, ("go",)
    )
    must = several | {"mode": "required"}
    assert read_choice({"type": "allowed_tools", "allowed_tools": must}, tools).must_call
    for choice, said in (
        ("any", "must be 'auto', 'none', 'required', a function's name or allowed_tools"),
        (3, "is 3, but must be"),
        ({"type": "function", "function": {"name": "x"}}, "names 'x', but the tools are find, go"),
        ({"type": "function"}, "names None"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [by_name]}}, "a mode"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "and tools"),
        ({"type": "custom"}, "but must be"),
    ):
        with pytest.raises(UsageError, match=said):
            read_choice(choice, tools)
    with pytest.raises(UsageError, match="there are no tools"):
        read_choice("required", None)
    with pytest.raises(UsageError, match="strict is 'x', but must be true or false"):
        check_tools([tool("a", strict="x")])  # type: ignore[arg-type]


def test_schemas_that_no_call_can_have_are_named() -> None:
    bad: dict[str, Any] = {"properties": {"q": {"type": "foo"}}}
    with pytest.raises(Unreadable, match="the parameters of find: #/properties/q"):
        compiled(TAGS, [tool("find", strict=True, **bad)], FREE)
    # What is not strict is then an object, whatever is in it.
    assert (
        verdict(compiled(TAGS, [tool("find", **bad)], MUST), call("find", '{"q": "x"}')) == "whole"
    )
    nothing = {"type": "function", "function": {"name": "find"}}
    assert verdict(compiled(TAGS, [nothing], MUST), call("find", "{}")) == "whole"
    assert verdict(compiled(TAGS, [nothing], MUST), call("find", '{"a')).endswith("{")
    long = tool("find", strict=True, enum=["x" * (1 << 18)])
    with pytest.raises(UsageError, match="but calls are held to at most 262144"):
        compiled(TAGS, [long], FREE)
    with pytest.raises(UsageError, match="read are those of gpt-oss, Hermes"):
        compiled("{{ tools }}", [FIND], FREE)
    assert call_form(TAGS, [LOOSE], FREE, begins_in_thought=False) is None
    assert call_form(TAGS, None, FREE, begins_in_thought=False) is None


def test_a_chat_in_python_must_call() -> None:
    hello = [{"role": "user", "content": "hi"}]
    bounded = {"properties": {"to": {"enum": ["a", "b"]}}, "required": ["to"]}
    go = tool("go", strict=True, additionalProperties=False, **bounded)
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{# <tool_call> #}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with LLM(chat_template=template, num_threads=1) as llm:
        ids = llm.encode_chat(hello, tools=[go])
        assert "strict" not in llm.tokenizer.decode(ids)
        by_name = {"type": "function", "function": {"name": "go"}}
        for choice in ("required", by_name):
            done = llm.chat(hello, tools=[go], tool_choice=choice, max_tokens=400, temperature=1.0)
            assert {made.name for made in done.tool_calls} == {"go"}
            assert json.loads(done.tool_calls[0].arguments)["to"] in "ab"
        assert (len(done.tool_calls), done.text, done.finish_reason) == (1, "", "stop")
        stream = llm.stream_chat(
            hello, tools=[go], tool_choice=by_name, max_tokens=400, temperature=1.0, seed=done.seed
        )
        assert whole_calls(piece for delta in stream for piece in delta.calls) == done.tool_calls
        none = llm.chat(hello, tools=[go], tool_choice="none", max_tokens=4)
        assert none.prompt_token_ids == tuple(llm.encode_chat(hello))
        with pytest.raises(UsageError, match="regex holds the answer to a form, so it cannot be"):
            llm.chat(hello, tools=[go], tool_choice="required", regex="a")
        wrong = tool("go", strict=True, properties={"x": {"type": "foo"}})
        with pytest.raises(BadSetting, match=r"tools is .* the parameters of go: #/properties/x"):
            llm.chat(hello, tools=[wrong], max_tokens=4)
