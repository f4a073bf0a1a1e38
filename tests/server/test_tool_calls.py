"""Tools: offered to the template, called in the answer, and told as OpenAI's clients want them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outside.served import Served, serving
from repository import DEMO

from hypocenter import LLM, SamplingParams
from hypocenter.base.errors import UsageError
from hypocenter.base.results import ToolCall, whole_calls
from hypocenter.conversation.calls_in_tags import CallsInTags
from hypocenter.conversation.harmony import NOTHING, AnswerDelta, Channels
from hypocenter.conversation.thoughts import AnswerReader, make_answer_reader, reads_calls_of, split
from hypocenter.conversation.tools import MAX_CALLS, MAX_TOOLS, check_tools
from hypocenter.engine.conversations import AnswerRules
from hypocenter.model.text.chat import CHATML
from hypocenter.server.api_error import ApiError
from hypocenter.server.bodies.chat_fields import asked_answer
from hypocenter.server.fields import ChatBody

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds things",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
HELLO = [{"role": "user", "content": "hi"}]
ARGUMENTS = '{"q": "a < b <|x"}'
#: As gpt-oss calls.
CALL = (
    "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary"
    f" to=functions.find <|constrain|>json<|message|>{ARGUMENTS}"
)
CHANNELS = (
    "{% if tools %}<|start|>developer<|message|>{% for tool in tools %}{{ tool.function.name }}: "
    "{{ tool.function.parameters | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ f.name }}<|message|>{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}{{ m.tool_call_id }}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{# <|channel|> #}{% endif %}"
)
#: As Qwen calls: several at once, behind a thought and words.
TAGGED = (
    "<think>Look.</think>\n\nI look.\n"
    '<tool_call>\n{"name": "find", "arguments": {"q": "a < b </tool"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>\n'
)
TAGS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{# <tool_call> </think> #}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}\n{% endfor %}"
)
#: Marks within the arguments, and an answer behind the call.
MARKED = (
    "<|channel|>commentary to=a<|message|>1<|end|>2<|call|> 3<|message|>4<|end|>"
    "<|start|>assistant<|channel|>final<|message|>5"
)
OTHER = '{"name": "a", "q": 1}'


def grammar(answer: str) -> str:
    """One that makes any model say this."""
    return f"root ::= {json.dumps(answer)}\n"


def whole(spoken: AnswerDelta) -> tuple[str, str, tuple[ToolCall, ...]]:
    return spoken.content, spoken.reasoning, whole_calls(spoken.calls)


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (CALL, "", "Look.", [("find", ARGUMENTS)]),
        (f"{CALL}<|call|>", "", "Look.", [("find", ARGUMENTS)]),
        # The recipient before the channel; a tool of the model's own; words before the call.
        (" to=functions.find<|channel|>commentary json<|message|>{}", "", "", [("find", "{}")]),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            "<|channel|>analysis to=browser.open code<|message|>{}",
            "", "I look.", [("browser.open", "{}")],
        ),
        # Two calls, and an answer behind them, of a model that was not stopped.
        (
            "<|channel|>commentary to=functions.a<|message|>1<|call|><|start|>assistant"
            "<|channel|>commentary to=functions.b<|message|>2<|call|>"
            "<|start|>assistant<|channel|>final<|message|>Done",
            "Done", "", [("a", "1"), ("b", "2")],
        ),
        # Cut off in the head, and in the arguments.
        ("<|channel|>commentary to=functions.find", "", "", []),
        ('<|channel|>commentary to=functions.find<|message|>{"q', "", "", [("find", '{"q')]),
        ("to=functions.find<|message|>x", "to=functions.find<|message|>x", "", []),
        (" to=the point, then", " to=the point, then", "", []),
        # No tools: the reader, whoever says so in the place of a tool, names that are none.
        ("<|channel|>final to=user<|message|>hi", "hi", "", []),
        ("<|channel|>final to=functions.find<|message|>hi", "hi", "", []),
        ("<|channel|>commentary to=user<|message|>hi", "", "hi", []),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>functions.find to=functions.count"
            "<|channel|>commentary<|message|>b",
            "", "ab", [],
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>functions.find to=assistant"
            "<|channel|>commentary<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c",
            "c", "ab", [],
        ),
        ("<|channel|>commentary to=functions.<|message|>x", "", "x", []),
        ("<|channel|>commentary to=a,b<|message|>x", "", "x", []),
        # Marks that are words of the arguments, and one behind which the answer ends.
        ("<|channel|>commentary to=a<|message|>1<|end|>2<|call|> 3<|message|>4<|end|><|call|>",
         "", "", [("a", "1<|end|>2<|call|> 3<|message|>4<|end|>")]),
        (
            "<|channel|>commentary to=a<|message|>1<|end|>"
            "<|start|>assistant<|channel|>final<|message|>2",
            "2", "", [("a", "1")],
        ),
        ("<|channel|>commentary to=a<|message|>1<|end|><|sta", "", "", [("a", "1")]),
        # A head without an end.
        (f"<|channel|>{'a' * 2000}", "", f"<|channel|>{'a' * 2000}", []),
    ],
)  # fmt: skip
def test_calls_in_channels(
    text: str, content: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    expected = tuple(ToolCall(*call) for call in calls)
    assert whole(split(text, Channels())) == (content, reasoning, expected)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (TAGGED.partition("\n\n")[2], "I look.",
         [("find", '{"q": "a < b </tool"}'), ("count", "{}")]),
        ('<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "", [("a", '"x"')]),
        ("Hi <tool_calls> <tool", "Hi <tool_calls> <tool", []),
        (" \n", " \n", []),
        ("", "", []),
        # No JSON, another JSON, cut off: text as it stands.
        ("<tool_call>a</tool_call>b", "<tool_call>a</tool_call>b", []),
        ('x <tool_call>["a"]</tool_call>', 'x <tool_call>["a"]</tool_call>', []),
        ("x\n\n <tool_call>\n y</tool_call>", "x\n\n <tool_call>\n y</tool_call>", []),
        # A tag in words; the text of a tag in an argument; what models write for other words.
        ('use <tool_call> so:\n<tool_call>{"name": "a"}</tool_call>', "use <tool_call> so:",
         [("a", "{}")]),
        ('<tool_call>{"name": "w", "arguments": {"t": "</tool_call>"}}</tool_call>', "",
         [("w", '{"t": "</tool_call>"}')]),
        ('<tool_call>{"name": "a", "parameters": {"q": 1}}</tool_call>', "", [("a", '{"q": 1}')]),
        ('<tool_call>{"name": "a", "arguments": null}</tool_call>', "", [("a", "{}")]),
        ('<tool_call>{"name": "a", "arguments": "{\\"q\\": 1}"}</tool_call>', "",
         [("a", '{"q": 1}')]),
        # Names that are none, and words that are not known.
        ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        ('<tool_call>{"name": "a b"}</tool_call>', '<tool_call>{"name": "a b"}</tool_call>', []),
        (f"<tool_call>{OTHER}</tool_call>", f"<tool_call>{OTHER}</tool_call>", []),
        ("<tool_call>{" + "</tool_call>" * 9, "<tool_call>{" + "</tool_call>" * 9, []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>",
         "<tool_call>" + "[" * 100_000 + "</tool_call>", []),
        ('a\n<tool_call>\n{"name"', 'a\n<tool_call>\n{"name"', []),
        ('<tool_call>{"name": "a"}</tool_call>\n\nb', "\n\nb", [("a", "{}")]),
    ],
)  # fmt: skip
def test_calls_in_tags(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    expected = tuple(ToolCall(*call) for call in calls)
    assert whole(split(text, CallsInTags())) == (content, "", expected)


@pytest.mark.parametrize(
    ("template", "answer"), [(CHANNELS, CALL), (CHANNELS, MARKED), (TAGS, TAGGED)]
)
@given(data=st.data())
def test_where_pieces_break_changes_no_call(
    template: str, answer: str, data: st.DataObject
) -> None:
    def reader() -> AnswerReader:
        found = make_answer_reader(template, "", offers_tools=True)
        assert found is not None
        return found

    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=8))
    using, spoken = reader(), NOTHING
    for start, stop in pairwise(sorted({0, len(answer), *cuts})):
        spoken += using.push(answer[start:stop])
    assert whole(spoken + using.flush()) == whole(split(answer, reader()))


def test_an_answer_has_so_many_calls_as_may_be_sent_back() -> None:
    tagged = split('<tool_call>{"name": "a"}</tool_call>' * (MAX_CALLS + 1), CallsInTags())
    spoken = split("<|channel|>commentary to=a<|message|>{}<|call|>" * (MAX_CALLS + 1), Channels())
    assert len(whole_calls(tagged.calls)) == len(whole_calls(spoken.calls)) == MAX_CALLS
    assert (tagged.content, spoken.reasoning) == ('<tool_call>{"name": "a"}</tool_call>', "{}")


@pytest.mark.parametrize(
    "text",
    [" " * 150_000, "<tool_call>{" + "a" * 60_000, "<|channel|>" + "a" * 60_000, "<" * 60_000],
)
def test_no_text_is_read_again_and_again(text: str) -> None:
    for reader in (CallsInTags(), Channels()):
        began = time.process_time()
        told = sum(len(reader.push(character).content) for character in text)
        assert told <= len(text)
        assert time.process_time() - began < 3


def test_text_that_is_no_call_is_told_before_the_answer_ends() -> None:
    for text in ("<tool_call> [", "<tool_call>{" + "</tool_call>" * 8):
        assert CallsInTags().push(text).content == text


def test_channels_tell_no_calls_where_no_tools_are_offered() -> None:
    using = make_answer_reader(CHANNELS, "")
    assert using is not None
    assert whole(split(CALL, using)) == ("", f"Look.{ARGUMENTS}", ())


def test_a_template_without_marks_of_calls_has_none() -> None:
    for template in ("{{ tools }}", "<|im_start|>{{ tools }}"):
        assert not reads_calls_of(template)
        assert make_answer_reader(template, "", offers_tools=True) is None
    assert reads_calls_of(TAGS)
    assert reads_calls_of(CHANNELS)


def test_tags_are_text_where_no_tools_are_offered() -> None:
    assert make_answer_reader("<tool_call>", "") is None
    found = make_answer_reader(TAGS, "")
    assert found is not None
    assert split(TAGGED, found).calls == ()


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("find", "must be a list of functions"),
        ([FIND, "x"], r"tools\[1\] is 'x', but must have the type"),
        ([{"type": "web_search"}], "must have the type"),
        ([{"type": "function"}], r"tools\[0\].function is None"),
        ([{"function": {"name": "a b"}}], r"function.name is 'a b', but must be up to 128"),
        ([{"function": {"name": "a" * 129}}], "must be up to 128"),
        ([{"function": {"name": "a", "description": 1}}], "description is 1, but must be a text"),
        ([{"function": {"name": "a", "parameters": []}}], "must be a JSON schema"),
        ([FIND, FIND], "two functions 'find'"),
        ([{"function": {"name": f"a{n}"}} for n in range(MAX_TOOLS + 1)], "may have 128"),
        ([{"function": {"name": "a", "description": "x" * (1 << 20)}}], "bytes, but may have"),
        ([{"function": {"name": "a", "parameters": {"x": {1}}}}], "cannot be given"),
        ([{"function": {"name": "a", "parameters": {"x": 1 << 70}}}], "cannot be given"),
    ],
)
def test_tools_that_are_none_are_named(tools: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_tools(tools)


def test_tools_are_copied_and_none_are_none() -> None:
    assert check_tools(None) is None
    assert check_tools([]) is None
    assert check_tools([FIND]) == [FIND]


def test_a_chat_in_python_calls_tools() -> None:
    with LLM(chat_template=CHANNELS, num_threads=1) as llm:
        prompt = llm.tokenizer.decode(llm.encode_chat(HELLO, tools=[FIND]), skip_special=False)
        assert 'developer<|message|>find: {"type": "object"' in prompt
        done = llm.chat(HELLO, tools=[FIND], grammar=grammar(CALL), max_tokens=200)
        assert (done.text, done.reasoning) == ("", "Look.")
        assert done.tool_calls == (ToolCall("find", ARGUMENTS),)
        pieces = list(llm.stream_chat(HELLO, tools=[FIND], grammar=grammar(CALL), max_tokens=200))
        told = whole_calls(call for piece in pieces for call in piece.calls)
        assert told == done.tool_calls
        # Another worker that goes on within the call tells the same.
        params = SamplingParams(grammar=grammar(CALL), max_tokens=200, seed=1)
        ids = llm.encode_chat(HELLO, tools=[FIND])
        for num in range(0, len(done.token_ids), 5):
            sent = done.token_ids[:num]
            request = llm.answer_request(ids, params, AnswerRules((FIND,)), output_ids=sent)
            assert llm.engine.complete([request])[0].tool_calls == done.tool_calls, num
    with LLM(chat_template=TAGS, num_threads=1) as llm:
        done = llm.chat(HELLO, tools=[FIND], grammar=grammar(TAGGED), max_tokens=200)
        assert [call.name for call in done.tool_calls] == ["find", "count"]
        assert llm.chat(HELLO, grammar=grammar(TAGGED), max_tokens=200).tool_calls == ()
    with LLM(chat_template="chatml", num_threads=1) as llm:
        for tools, said in (([FIND], "tools must be left out"), (5, "tools")):
            with pytest.raises(UsageError, match=said):
                llm.chat(HELLO, tools=tools)  # type: ignore[arg-type]


def call_of(choice: dict[str, Any]) -> tuple[str, str]:
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call-")
    return call["function"]["name"], call["function"]["arguments"]


def deltas_of(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    events = served.post("/v1/chat/completions", body | {"stream": True}).events
    return [event["choices"][0] for event in events[:-1]]


@pytest.mark.tier(
    "sim"
)  # tags are told by the server of the other tests, channels by readers alone
def test_a_server_tells_calls_in_channels(tmp_path: Path) -> None:
    path = "/v1/chat/completions"
    body = {"messages": HELLO, "tools": [FIND], "grammar": grammar(CALL)}
    with serving(tmp_path, str(DEMO), "--chat-template", CHANNELS, "-t", "1") as served:
        answer = served.post(path, body).json
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (
            None, "Look.",
        )  # fmt: skip
        assert call_of(choice) == ("find", ARGUMENTS)
        chunks = deltas_of(served, body)
        calls = [call for one in chunks for call in one["delta"].get("tool_calls", ())]
        assert {call["index"] for call in calls} == {0}
        begun = calls[0]
        assert (begun["type"], begun["function"]["name"]) == ("function", "find")
        assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
        assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
        assert chunks[-1]["finish_reason"] == "tool_calls"
        # The turn goes on with what the tool said, as a client sends it back.
        turn = [
            *HELLO,
            {key: value for key, value in choice["message"].items() if key != "refusal"},
            {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"],
             "content": "<|end|>found"},
        ]  # fmt: skip
        asked = {"messages": turn, "tools": [FIND]}
        told = served.post("/apply-template", asked).json["prompt"]
        assert served.post("/tokenize", asked).json["count"] == len(
            served.post("/apply-template", asked).json["tokens"]
        )
        assert f"to=functions.find<|message|>{ARGUMENTS}<|call|>" in told
        assert "<|message|><|end|>found<|end|>" in told
        # Cut off, it is no call that could be made.
        few = {"max_tokens": answer["usage"]["completion_tokens"] - 3}
        cut = served.post(path, body | few).json["choices"][0]
        assert cut["finish_reason"] == "length"
        name, arguments = call_of(cut)
        assert (name, ARGUMENTS.startswith(arguments), arguments != ARGUMENTS) == (
            "find", True, True,
        )  # fmt: skip
        two = served.post(path, body | {"n": 2}).json["choices"]
        assert [call_of(one) for one in two] == [("find", ARGUMENTS)] * 2
        assert len({one["message"]["tool_calls"][0]["id"] for one in two}) == 2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = (str(DEMO), "--chat-template", TAGS, "-t", "1")
    with serving(tmp_path_factory.mktemp("served"), *words) as one:
        yield one


@pytest.mark.tier("whole")
def test_a_server_tells_calls_in_tags(served: Served) -> None:
    body = {"messages": HELLO, "tools": [FIND], "grammar": grammar(TAGGED), "max_tokens": 200}
    [choice] = served.post("/v1/chat/completions", body).json["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Look.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "find", "arguments": '{"q": "a < b </tool"}'},
        {"name": "count", "arguments": "{}"},
    ]
    calls = [c for one in deltas_of(served, body) for c in one["delta"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == functions
    assert len({call["id"] for call in calls}) == 2
    one = {"parallel_tool_calls": False}
    [alone] = served.post("/v1/chat/completions", body | one).json["choices"]
    assert call_of(alone)[0] == "find"
    # Nothing is offered: the template hears of no tools, and tags are text.
    off = served.post("/v1/chat/completions", body | {"tool_choice": "none"}).json["choices"]
    assert "<tool_call>" in off[0]["message"]["content"]
    assert "tool_calls" not in off[0]["message"]


@pytest.mark.tier("whole")
def test_what_cannot_be_asked_of_tools_is_refused_by_name(served: Served) -> None:
    path = "/v1/chat/completions"
    body = {"messages": HELLO, "max_tokens": 4}
    for more, param, said in [
        ({"tools": [FIND], "tool_choice": "any"}, "tool_choice", "must be 'auto', 'none'"),
        ({"tools": [FIND], "tool_choice": {"type": "function"}}, "tool_choice", "names None"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
        ({"tools": [FIND] * 2}, "tools", "two functions"),
        ({"tools": "x"}, "tools", "Expected `array | null`"),
    ]:
        refused = served.post(path, body | more)  # type: ignore[operator]
        assert (refused.status, refused.json["error"]["param"]) == (400, param), more
        assert said in refused.json["error"]["message"]
    plain = {"prompt": "hi", "tools": [FIND]}
    assert served.post("/v1/completions", plain).json["error"]["param"] == "tools"
    empty = served.post(path, body | {"tools": [], "tool_choice": "auto"})
    assert empty.status == 200


def test_a_template_whose_calls_nobody_reads_is_offered_no_tools() -> None:
    with pytest.raises(ApiError, match="read are those of gpt-oss, Hermes") as refused:
        asked_answer(ChatBody(messages=HELLO, tools=[FIND]), CHATML)
    assert (refused.value.status, refused.value.param) == (400, "tools")
    off = asked_answer(ChatBody(messages=HELLO, tools=[FIND], tool_choice="none"), CHATML)
    assert off.tools is None
