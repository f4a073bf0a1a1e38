"""Ollama's own client: chats whole and streamed, tools, forms, prompts, and what the model is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from outside.served import serving

from clients.conftest import KEY
from clients.test_tools import TEMPLATE

ASKED: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}
SCHEMA: Any = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(
    tmp_path_factory: pytest.TempPathFactory, python: str, model: Path
) -> Iterator[ollama.Client]:
    words = (str(model), "--api-key", KEY, "--chat-template", TEMPLATE)
    with serving(tmp_path_factory.mktemp("ollama"), *words, python=python) as one:
        host = f"http://127.0.0.1:{one.port}"
        with ollama.Client(host=host, headers={"Authorization": f"Bearer {KEY}"}) as client:
            yield client


@pytest.fixture(scope="module")
def name(client: ollama.Client) -> str:
    [one] = client.list().models
    assert one.model
    return str(one.model)


def test_a_chat_whole_and_streamed_is_one(client: ollama.Client, name: str) -> None:
    options = {"num_predict": 8, "seed": 3, "temperature": 0.7, "num_gpu": 1}
    whole = client.chat(name, ASKED, options=options)
    parts = list(client.chat(f"{name}:latest", ASKED, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    last = parts[-1]
    assert (last.done, last.done_reason) == (whole.done, whole.done_reason)
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, whole.eval_count)
    assert last.eval_count is not None
    assert 0 < last.eval_count <= 8
    assert last.total_duration is not None
    assert last.total_duration > 0


def test_a_form_holds_the_answer(client: ollama.Client, name: str) -> None:
    answer = client.chat(name, ASKED, format=SCHEMA, options={"num_predict": 40})
    assert json.loads(answer.message.content or "")["n"] in (1, 2)
    text = client.generate(name, "hi", format=SCHEMA, options={"num_predict": 40}, stream=False)
    assert json.loads(text.response)["n"] in (1, 2)


def test_a_turn_with_a_tool_goes_on(client: ollama.Client, name: str) -> None:
    call: Any = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    turn: Any = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ]
    answer = client.chat(name, turn, tools=[WEATHER], options={"num_predict": 4})
    assert answer.done


def test_a_prompt_and_a_text(client: ollama.Client, name: str) -> None:
    for raw in (False, True):
        parts = list(client.generate(name, "hi", raw=raw, stream=True, options={"num_predict": 4}))
        assert [part.done for part in parts].index(True) == len(parts) - 1
    assert client.generate(name).done_reason == "load"


def test_what_the_model_is(client: ollama.Client, name: str) -> None:
    shown = client.show(name)
    assert shown.details is not None
    assert shown.details.format == "gguf"
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == shown.details.family
    [running] = client.ps().models
    assert running.model == name


def test_errors_are_ollamas(client: ollama.Client, name: str) -> None:
    with pytest.raises(ollama.ResponseError, match="is not served here") as wrong:
        client.chat("another", ASKED)
    assert wrong.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="mirostat is not supported"):
        client.chat(name, ASKED, options={"mirostat": 2})
    with pytest.raises(ollama.ResponseError, match="writes text and gives no vectors"):
        client.embed(name, "hi")
