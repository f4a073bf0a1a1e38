"""OpenAI's responses: their bodies become chats, and what is kept of them has bounds."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from hypocenter.server.api_error import ApiError
from hypocenter.server.dialects import response_store, responses_body
from hypocenter.server.dialects.response_store import ResponseStore
from hypocenter.server.dialects.responses_body import ResponsesBody, chat_of, seal
from hypocenter.server.fields import ChatBody

ITEMS = {"msg-1": b'{"type": "message", "role": "assistant", "content": "kept"}'}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}', "id": "fc1"}


def chat(
    earlier: list[dict[str, Any]] | None = None, /, **fields: Any
) -> tuple[ChatBody, list[dict[str, Any]], list[str]]:
    body = msgspec.convert({"input": "hi", **fields}, ResponsesBody)
    return chat_of(body, earlier or [], ITEMS.get)


def texts(*said: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in said]


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"type": "message", "role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        CALL,
        {**CALL, "call_id": "c2", "internal": 1},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {"type": "message", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "d", "annotations": []}]},
        {"type": "item_reference", "id": "msg-1"},
    ]  # fmt: skip
    told, kept, ignored = chat([{"role": "user", "content": "before"}], input=items,
                               instructions="Be good.")  # fmt: skip
    assert told.messages == [{"role": "system", "content": "Be good."}, *kept]
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        for name in ("c1", "c2")
    ]
    assert kept == [
        {"role": "user", "content": "before"},
        {"role": "developer", "content": texts("be brief")},
        {"role": "user", "content": texts("a")},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "b\nc"},
        {"role": "assistant", "content": "dkept"},
    ]
    assert ignored == ["input[].internal"]


def test_a_sealed_thought_comes_back() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": seal("hm ñ")}
    _, kept, ignored = chat(input=[{"role": "user", "content": "a"}, item])
    assert kept[-1] == {"role": "assistant", "content": "", "reasoning_content": "hm ñ"}
    assert ignored == []
    # One of another server says nothing here.
    item["encrypted_content"] = "gAAAA"
    _, kept, ignored = chat(input=[{"role": "user", "content": "a"}, item])
    assert [message["role"] for message in kept] == ["user"]
    assert ignored == ["input[].encrypted_content"]


def test_tools_choices_and_forms() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    told, _, ignored = chat(
        tools=[{"type": "function", **function}, {"type": "web_search", "external_web_access": 0}],
        tool_choice={"type": "allowed_tools", "mode": "auto",
                     "tools": [{"type": "function", "name": "f"}]},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}},
              "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content", "file_search_call.results"],
        truncation="auto", max_output_tokens=7, parallel_tool_calls=False,
    )  # fmt: skip
    assert told.tools == [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "f"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    assert told.tool_choice == allowed
    assert chat(tool_choice={"type": "function", "name": "f"})[0].tool_choice == named
    assert told.response_format is not None
    assert told.response_format.json_schema is not None
    assert told.response_format.json_schema.schema == {"type": "integer"}
    assert (told.max_tokens, told.reasoning_effort, told.parallel_tool_calls) == (7, "low", False)
    assert ignored == ["include[file_search_call.results]", "reasoning.summary", "text.verbosity",
                       "tools[web_search]", "truncation"]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": []}, "input is empty"),
        ({"n": 3}, "n is 3"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call', which is not read: it may be"),
        ({"input": [{"x": 1}]}, "input\\[0\\].type is None"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role is 'tool', but must be user"),
        ({"input": [{"role": "user"}]}, "content is None, but must be a text or parts"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "no image"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "no file"),
        ({"input": [{"type": ["x"]}]}, "which is not read"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'x', which is not kept"),
        ({"input": [{**CALL, "arguments": {}}]}, "arguments is {}, but must be a text"),
        ({"input": [{"type": "reasoning", "content": 1}]}, "content must be a list"),
        ({"input": [{"type": "reasoning", "encrypted_content": "thought:é"}]}, "not as it was"),
        ({"tools": [{"type": "mcp"}]}, "tools\\[0\\].type is 'mcp'"),
        ({"tools": [{"type": "code_interpreter"}]}, "that are run here are not offered"),
        ({"text": {"format": {"type": "xml"}}}, "text.format is"),
        ({"text": {"format": 1}}, "text.format is 1, but must be an object"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort is 1"),
        ({"max_tokens": 1, "max_output_tokens": 2}, "both max_tokens and max_output_tokens"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        chat(**fields)
    assert refused.value.status == 400


def test_references_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_body, "MAX_REFERENCES", 2)
    body = msgspec.convert(
        {"input": [{"type": "item_reference", "id": f"i{n}"} for n in (0, 1, 0, 1, 2)]},
        ResponsesBody,
    )
    looked_up = []

    def find(name: str) -> bytes:
        looked_up.append(name)
        return ITEMS["msg-1"]

    with pytest.raises(ApiError, match="more than 2 items"):
        chat_of(body, [], find)
    assert looked_up == ["i0", "i1", "i2"]  # each once


# -- the store ------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def put(store: ResponseStore, client: str, name: str, num_bytes: int = 10) -> None:
    messages = [{"role": "user", "content": "x" * num_bytes}]
    store.put(client, name, json.dumps({"id": name}).encode(), messages, {f"i-{name}": b"{}"})


def test_a_response_is_its_clients_own() -> None:
    store = ResponseStore()
    put(store, "ann", "r1")
    kept = store.get("ann", "r1", sees_all=False)
    assert kept is not None
    assert json.loads(kept.messages)[0]["content"] == "x" * 10
    assert store.get("bob", "r1", sees_all=False) is None
    assert store.get("bob", "r1", sees_all=True) is kept
    assert store.find_item("ann", "i-r1", sees_all=False) == b"{}"
    assert store.find_item("bob", "i-r1", sees_all=False) is None
    store.delete("r1")
    assert store.get("ann", "r1", sees_all=True) is None
    assert store.find_item("ann", "i-r1", sees_all=True) is None
    assert store.num_bytes == 0


def test_who_keeps_most_loses_the_oldest() -> None:
    store = ResponseStore(max_bytes=100_000)
    put(store, "bob", "b1", 10_000)
    for number in range(20):
        put(store, "ann", f"a{number}", 10_000)
        assert store.num_bytes <= 100_000
    assert store.get("bob", "b1", sees_all=False) is not None
    held = [n for n in range(20) if store.get("ann", f"a{n}", sees_all=False)]
    assert held == list(range(12, 20))
    put(store, "bob", "b2", 60_000)  # larger than half
    assert store.get("bob", "b2", sees_all=False) is None
    assert store.get("bob", "b1", sees_all=False) is not None


def test_a_response_is_forgotten_in_time() -> None:
    clock = Clock()
    store = ResponseStore(clock=clock)
    put(store, "ann", "r1")
    clock.now += response_store.KEPT_SECONDS / 2
    put(store, "ann", "r2")
    clock.now += response_store.KEPT_SECONDS / 2
    assert store.get("ann", "r1", sees_all=False) is None
    assert store.get("ann", "r2", sees_all=False) is not None
    clock.now += response_store.KEPT_SECONDS
    assert store.find_item("ann", "i-r2", sees_all=False) is None
    assert store.num_bytes == 0
