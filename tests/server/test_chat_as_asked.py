"""A chat gets the answer that was asked for: prefills, calls, forms, names; the rest is told of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFValueType
from models.demo_variants import demo_with
from outside.served import Reply, Served, serving, texts
from repository import DEMO

from hypocenter import LLM
from hypocenter.conversation.thoughts import without_needless
from hypocenter.server.bodies.chat_fields import asked_answer
from hypocenter.server.fields import ChatBody

CHAT, COMPLETE, APPLY = "/v1/chat/completions", "/v1/completions", "/apply-template"
TEMPLATE = (
    "{# <tool_call> #}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: {{ m.content }};\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKS = "{{ messages[0].content }}<think></think>"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "def f("}]
GO = {
    "type": "function",
    "function": {
        "name": "go",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["a", "b"]}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = (str(DEMO), "--chat-template", TEMPLATE, "-t", "1", "--no-spare")
    with serving(tmp_path_factory.mktemp("served"), *words) as one:
        yield one


def asked(served: Served, messages: list[dict[str, Any]] = HELLO, **more: Any) -> Reply:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **more}
    return served.post(CHAT, body)


def content(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    said: str = reply.json["choices"][0]["message"]["content"]
    return said


def test_an_answer_goes_on_with_the_last_message(served: Served) -> None:
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    told = served.post(APPLY, {"messages": BEGUN, **goes_on}).json["prompt"]
    assert told.removeprefix("<|bos|>").endswith("user: hi;\nassistant: def f(")
    raw = served.post(COMPLETE, {"prompt": told.removeprefix("<|bos|>"), "max_tokens": 8,
                                 "temperature": 0})  # fmt: skip
    whole = asked(served, BEGUN, **goes_on)
    assert content(whole) == raw.json["choices"][0]["text"]
    assert "x-ignored-fields" not in whole.headers
    assert content(asked(served, BEGUN, continue_final_message=True)) == content(whole)
    assert content(asked(served, BEGUN)) != content(whole)
    # `echo` repeats what was begun, whole and in pieces.
    echoed = asked(served, BEGUN, echo=True, **goes_on)
    assert content(echoed) == "def f(" + content(whole)
    assert texts(asked(served, BEGUN, echo=True, stream=True, **goes_on).events) == content(echoed)
    open_end = served.post(APPLY, {"messages": HELLO, "add_generation_prompt": False}).json
    assert open_end["prompt"].endswith("user: hi;\n")
    closed = asked(served, add_generation_prompt=False)
    assert closed.json["usage"]["prompt_tokens"] == len(open_end["tokens"])
    for more, param, said in (
        ({"messages": HELLO}, "messages", "the last message is not the assistant's"),
        ({"messages": BEGUN, "add_generation_prompt": True}, "continue_final_message", "both true"),
    ):
        for path in (CHAT, APPLY):
            refused = served.post(path, {"continue_final_message": True, **more})
            assert (refused.status, refused.json["error"]["param"]) == (400, param)
            assert said in refused.json["error"]["message"]


def test_names_are_told_and_other_fields_are_named(served: Served) -> None:
    ann = [{"role": "user", "content": "hi", "name": "ann"}]
    assert "user ann: hi;" in served.post(APPLY, {"messages": ann}).json["prompt"]
    sent: list[dict[str, Any]] = [
        {**ann[0], "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": "x", "reasoning": "r", "message_id": "m", "refusal": None},
        *HELLO,
    ]
    for _ in range(2):
        reply = asked(served, sent, frob=1, reasoning_effort="low", verbosity="low")
        named = "frob, verbosity, reasoning_effort, messages[].cache_control, messages[].message_id"
        assert (reply.status, reply.headers["x-ignored-fields"]) == (200, named)
    told = [line for line in served.stderr if "passed over" in line and "'frob'" in line]
    assert len(told) == 1, served.stderr
    for name in ("a<|x|>", "a\nsystem", "<|im_end|>"):
        refused = asked(served, [{**HELLO[0], "name": name}])
        assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")


def test_calls_are_made_where_they_are_asked_for(served: Served) -> None:
    by_name = {"type": "function", "function": {"name": "go"}}
    more: dict[str, Any] = {"tools": [GO], "max_tokens": 400, "temperature": 1, "seed": 5}
    for choice, is_one in (("required", False), (by_name, True)):
        whole = asked(served, **more, tool_choice=choice).json["choices"][0]
        calls = [call["function"] for call in whole["message"]["tool_calls"]]
        assert {call["name"] for call in calls} == {"go"}
        assert len(calls) == 1 or not is_one
        assert json.loads(calls[0]["arguments"])["to"] in "ab"
        events = asked(served, **more, tool_choice=choice, stream=True).events[:-1]
        streamed = [
            call["function"]
            for event in events
            for call in event["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert streamed == calls
        assert whole["finish_reason"] == events[-1]["choices"][0]["finish_reason"]
    assert whole["finish_reason"] == "tool_calls"
    both = asked(
        served, tools=[GO], tool_choice="required", response_format={"type": "json_object"}
    )
    assert both.status == 400
    assert "json_object holds the answer to a form" in both.json["error"]["message"]
    bad = {"type": "function", "function": {**GO["function"], "parameters": {"type": "foo"}}}  # type: ignore[dict-item]
    refused = asked(served, tools=[bad])
    assert (refused.status, refused.json["error"]["param"]) == (400, "tools")


def test_forms_and_bounds_under_their_other_names(served: Served) -> None:
    choice = content(asked(served, structured_outputs={"choice": ["alpha", "beta/\n"]}))
    assert choice in ("alpha", "beta/\n")
    assert content(asked(served, guided_regex="[0-9]{3}")).isdigit()
    assert asked(served, max_tokens=None, n_predict=3).json["usage"]["completion_tokens"] == 3
    free = content(asked(served, max_tokens=40))
    stop = free[5:8]
    cut: dict[str, Any] = {"stop": [stop], "max_tokens": 40}
    assert content(asked(served, **cut)) == free[: free.index(stop)]
    shown = asked(served, **cut, include_stop_str_in_output=True)
    assert content(shown) == free[: free.index(stop) + len(stop)]
    streamed = asked(served, **cut, include_stop_str_in_output=True, stream=True)
    assert texts(streamed.events) == content(shown)
    wrong = asked(served, structured_outputs={"regex": "(("})
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "regex")
    assert asked(served, temperature=3).status == 200


def test_a_long_prompt_loses_its_beginning(served: Served) -> None:
    body = {"prompt": "import os, sys, re\n", "max_tokens": 4, "temperature": 0,
            "return_token_ids": True}  # fmt: skip
    whole = served.post(COMPLETE, body).json["choices"][0]
    cut = served.post(COMPLETE, {**body, "truncate_prompt_tokens": 3}).json
    assert cut["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"][-3:]
    assert cut["usage"]["prompt_tokens"] == 3
    by_ids = {**body, "prompt": whole["prompt_token_ids"], "truncate_prompt_tokens": 3}
    assert served.post(COMPLETE, by_ids).json["choices"][0]["text"] == cut["choices"][0]["text"]
    wide = {**body, "prompt": "x = 1\n" * 3000, "truncate_prompt_tokens": -1}
    fits = served.post(COMPLETE, wide)
    assert fits.status == 200, fits.body
    for wrong in (0, -2):
        refused = served.post(COMPLETE, {**body, "truncate_prompt_tokens": wrong})
        assert refused.json["error"]["param"] == "truncate_prompt_tokens"


def test_the_ids_of_an_answer_are_told(served: Served) -> None:
    told = asked(served, return_token_ids=True, logprobs=True).json
    [choice] = told["choices"]
    assert len(choice["token_ids"]) == told["usage"]["completion_tokens"]
    assert len(told["prompt_token_ids"]) == told["usage"]["prompt_tokens"]
    events = asked(served, return_token_ids=True, stream=True).events[:-1]
    assert events[0]["prompt_token_ids"] == told["prompt_token_ids"]
    pieces = [event["choices"][0].get("token_ids", []) for event in events]
    assert [one for piece in pieces for one in piece] == choice["token_ids"]
    assert "token_ids" not in asked(served).json["choices"][0]


def test_what_is_not_here_is_told_with_what_is(served: Served) -> None:
    message = served.post("/infill", {}).json["error"]["message"]
    assert message == "there is no /infill here; OpenAI's /v1/chat/completions is"
    assert served.get("/v1/other").json["error"]["message"] == "there is no /v1/other here"
    wrong = asked(served, model="qwen:latest")
    assert wrong.status == 404
    assert "'qwen:latest' is not served here; name one of: " in wrong.json["error"]["message"]


def test_no_thought_is_no_error_where_there_is_none() -> None:
    def ignored(template: str, **more: Any) -> list[str]:
        return list(asked_answer(ChatBody(messages=HELLO, **more), template).ignored)

    assert ignored(TEMPLATE, reasoning_effort="none") == []
    assert ignored(TEMPLATE, reasoning_effort="high") == ["reasoning_effort"]
    assert ignored("{{ reasoning_effort }}", reasoning_effort="high") == []
    with pytest.raises(Exception, match="reasoning_effort is 'none', but must be"):
        ignored(THINKS, reasoning_effort="none")
    off = {"enable_thinking": False, "thinking": False}
    assert without_needless(TEMPLATE, off) == {}
    assert without_needless(TEMPLATE, {"enable_thinking": True}) == {"enable_thinking": True}
    assert without_needless(THINKS, off) == off
    assert without_needless("{{ thinking }}", off) == {"thinking": False}


def test_a_token_that_opens_a_turn_ends_an_answer(tmp_path: Path) -> None:
    fields = GGUFReader(DEMO).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    mark = len(tokens) - 1
    # Typed as a word, in place of one that the last merge made.
    changed = {"tokens": [*tokens[:mark], "<|im_start|>"], "merges": merges[:-1]}
    words = {
        f"tokenizer.ggml.{name}": (value, GGUFValueType.ARRAY) for name, value in changed.items()
    }
    path = demo_with(tmp_path / "turns.gguf", words)
    with LLM(path, chat_template=TEMPLATE, num_threads=1) as llm:
        assert mark in llm.tokenizer.turn_ids
        done = llm.chat(HELLO, allowed_token_ids=[mark], max_tokens=5)
        assert (done.text, done.finish_reason, len(done.token_ids)) == ("", "stop", 1)
        assert llm.chat(HELLO, allowed_token_ids=[mark], max_tokens=5, ignore_eos=True).token_ids
        raw = llm.generate("hi", allowed_token_ids=[mark], max_tokens=5)
        assert (raw.finish_reason, len(raw.token_ids)) == ("length", 5), "a text may have turns"


@pytest.mark.parametrize("route", [COMPLETE, CHAT])
def test_an_answer_goes_on_behind_tokens_that_another_server_sent(
    served: Served, route: str
) -> None:
    begun = {"prompt": "def f("} if route == COMPLETE else {"messages": BEGUN}
    body = {**begun, "max_tokens": 40, "seed": 5, "temperature": 0.9, "return_token_ids": True}
    whole = served.post(route, body).json["choices"][0]
    with served.stream(route, body) as stream:
        pieces = [event["choices"][0] for event in stream if event != "[DONE]"]
    ids = [token_id for piece in pieces for token_id in piece.get("token_ids", ())]
    assert ids == whole["token_ids"]
    assert len(ids) > 8

    def said(some: list[Any]) -> str:
        return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in some)

    num_sent = 1 + next(i for i, piece in enumerate(pieces) if piece.get("token_ids"))
    sent = pieces[:num_sent]
    sent_ids = [token_id for piece in sent for token_id in piece.get("token_ids", ())]
    with served.stream(route, {**body, "resume_token_ids": sent_ids}) as stream:
        others = [event["choices"][0] for event in stream if event != "[DONE]"]
    other_ids = [token_id for piece in others for token_id in piece.get("token_ids", ())]
    assert sent_ids + other_ids == ids
    assert said(sent) + said(others) == said(pieces)
    for more, why in (
        ({"n": 2}, "one prompt with n 1"),
        ({"stream": False}, "set stream"),
        ({"max_tokens": len(sent_ids)}, "nothing is left to generate"),
        ({"resume_token_ids": [1 << 30]}, "output"),
    ):
        given = {**body, "resume_token_ids": sent_ids, "stream": True, **more}
        refused = served.post(route, given)
        assert refused.status == 400
        assert why in refused.json["error"]["message"]
