"""What coding agents and Open WebUI send, in its shape: turns with calls, and the one behind them.

The bodies are written here, with the fields and headers that each program sends and texts of our
own. Codex's is in `test_responses.py`. A field that is passed over is named in `x-ignored-fields`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outside.served import Reply, Served, serving

from clients.conftest import KEY
from clients.test_tools import TEMPLATE

BEARER = {"Authorization": f"Bearer {KEY}"}
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
FORCED = {"grammar": f"root ::= {json.dumps(CALL)}\n"}
SCHEMA: Any = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"path": {"type": "string", "description": "A path"}},
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION: Any = {
    "type": "function",
    "function": {"name": "read", "description": "Reads a file.", "parameters": SCHEMA},
}
SYSTEM: Any = {"role": "system", "content": "You write code."}
ASKED: Any = {"role": "user", "content": "What is in a.py?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, python: str, model: Path) -> Iterator[Served]:
    words = (str(model), "--api-key", KEY, "--chat-template", TEMPLATE)
    with serving(tmp_path_factory.mktemp("agents"), *words, python=python) as one:
        yield one


#: opencode, by the AI SDK's provider of compatible servers.
OPENCODE: Any = {
    "model": "chat",
    "max_tokens": 32000,
    "temperature": 0,
    "top_p": 1,
    "messages": [SYSTEM, ASKED],
    "tools": [FUNCTION],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
#: Continue, by its adapter of OpenAI's client.
CONTINUE: Any = {
    "model": "chat",
    "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": ASKED["content"]}]}],
    "tools": [FUNCTION],
    "parallel_tool_calls": False,
    "max_tokens": 4096,
    "max_completion_tokens": 4096,
    "stop": ["<|eot|>"],
    "stream": True,
    "stream_options": {"include_usage": True},
}
#: Open WebUI with tools that the server calls.
OPEN_WEBUI: Any = {
    "stream": True,
    "model": "chat",
    "messages": [ASKED],
    "tools": [{**FUNCTION, "function": {**FUNCTION["function"], "strict": False}}],
    "temperature": 0.7,
    "top_k": 40,
    "user": {"name": "Ada", "id": "0b", "email": "ada@example.org", "role": "admin"},
}
#: aider, by LiteLLM, with the edit as a function.
AIDER: Any = {
    "model": "chat",
    "messages": [SYSTEM, ASKED, {"role": "assistant", "content": "Ok."}, ASKED],
    "temperature": 0,
    "stream": True,
    "tools": [FUNCTION],
    "tool_choice": {"type": "function", "function": {"name": "read"}},
    "extra_headers": {"User-Agent": "Aider"},
}
CHATS = {"opencode": OPENCODE, "Continue": CONTINUE, "Open WebUI": OPEN_WEBUI, "aider": AIDER}
#: Fields of theirs that change nothing here and are told of.
IGNORED = {"Open WebUI": "", "aider": "extra_headers"}


@pytest.mark.parametrize("agent", CHATS)
def test_a_chat_with_a_call_goes_on(server: Served, agent: str) -> None:
    body, messages = CHATS[agent], list(CHATS[agent]["messages"])
    forced = {} if "function" in str(body.get("tool_choice")) else FORCED
    ids = set()
    for content in (None, "I look."):  # of the assistant, beside its call
        asked = {**body, **forced, "messages": messages}
        reply = server.post("/v1/chat/completions", asked, headers=BEARER)
        assert reply.status == 200, reply.body
        told = reply.headers.get("x-ignored-fields", "")
        assert set(told.split(", ")) == {IGNORED.get(agent, "")}
        call = streamed_call(reply)
        assert call["function"]["name"] == "read"
        assert "path" in json.loads(call["function"]["arguments"])
        ids.add(call["id"])
        messages += [
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "x = 1"},
        ]
    assert len(ids) == 2
    then = {**body, "messages": messages, "tool_choice": "auto"}
    if "max_completion_tokens" not in then:
        then |= {"max_tokens": 4}
    reply = server.post("/v1/chat/completions", then | short(then), headers=BEARER)
    assert reply.status == 200, reply.body
    assert reply.events[-1] == "[DONE]"
    reasons = [choice["finish_reason"] for one in reply.events[:-1] for choice in one["choices"]]
    assert reasons[-1] in ("stop", "length", "tool_calls")


def short(body: Any) -> Any:
    """The same fields of its length, with few tokens."""
    return {name: 4 for name in ("max_tokens", "max_completion_tokens") if name in body}


def streamed_call(reply: Reply) -> Any:
    """The one call of a stream, put together from its pieces as clients do."""
    *events, last = reply.events
    assert last == "[DONE]"
    pieces = [
        piece
        for event in events
        for choice in event["choices"]
        for piece in choice["delta"].get("tool_calls") or ()
    ]
    assert {piece["index"] for piece in pieces} == {0}
    [first] = [piece for piece in pieces if piece.get("id")]
    arguments = "".join(piece["function"].get("arguments") or "" for piece in pieces)
    name = first["function"]["name"]
    return {"id": first["id"], "type": "function",
            "function": {"name": name, "arguments": arguments}}  # fmt: skip


def test_open_webui_asks_for_a_title(server: Served) -> None:
    body = {"model": "chat", "stream": False, "max_completion_tokens": 8,
            "messages": [{"role": "user", "content": "### Task:\nName this chat."}]}  # fmt: skip
    reply = server.post("/v1/chat/completions", body, headers=BEARER)
    assert reply.status == 200, reply.body
    assert reply.json["choices"][0]["message"]["content"]
    models = server.get("/v1/models", headers=BEARER).json
    assert "chat" in [one["id"] for one in models["data"]]


def test_continue_completes_a_line(server: Served) -> None:
    body = {"model": "chat", "prompt": "def f(x):\n    return", "max_tokens": 8, "temperature": 0,
            "stop": ["\n\n", "<|endoftext|>"], "stream": True}  # fmt: skip
    reply = server.post("/v1/completions", body, headers=BEARER)
    assert reply.status == 200, reply.body
    assert reply.events[-1] == "[DONE]"


#: Claude Code: blocks that are marked for the cache, thoughts, tools, and betas by their names.
CLAUDE_CODE: Any = {
    "model": "chat",
    "max_tokens": 32000,
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>Be kind.</system-reminder>"},
            {"type": "text", "text": ASKED["content"], "cache_control": {"type": "ephemeral"}},
        ]},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b;"},
        {"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}],
    "metadata": {"user_id": '{"device_id": "0b", "session_id": "1c"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}  # fmt: skip
CLAUDE_HEADERS = {
    "x-api-key": KEY,
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
    "User-Agent": "claude-cli/2.1 (external, cli)",
}


def test_as_claude_code_asks(server: Served) -> None:
    path = "/v1/messages?beta=true"
    reply = server.post(path, {**CLAUDE_CODE, **FORCED}, headers=CLAUDE_HEADERS)
    assert reply.status == 200, reply.body
    events = reply.events
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    blocks = [one["content_block"] for one in events if one["type"] == "content_block_start"]
    [call] = [block for block in blocks if block["type"] == "tool_use"]
    deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    text = "".join(one["partial_json"] for one in deltas if one["type"] == "input_json_delta")
    given = json.loads(text)
    assert (call["name"], given) == ("read", {"path": "a.py"})
    turn = [
        {"role": "assistant", "content": [{**call, "input": given}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "x = 1",
             "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "<system-reminder>Go on.</system-reminder>"},
        ]},
    ]  # fmt: skip
    then = {**CLAUDE_CODE, "messages": [*CLAUDE_CODE["messages"], *turn], "max_tokens": 4}
    reply = server.post(path, then, headers=CLAUDE_HEADERS)
    assert reply.status == 200, reply.body
    assert reply.events[-1]["type"] == "message_stop"
    counted = {name: then[name] for name in ("model", "messages", "system", "tools", "thinking")}
    reply = server.post("/v1/messages/count_tokens?beta=true", counted, headers=CLAUDE_HEADERS)
    assert reply.status == 200, reply.body
    assert reply.json["input_tokens"] > 0
