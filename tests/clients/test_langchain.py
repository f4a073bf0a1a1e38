"""LangChain's ChatOpenAI against `hypo serve`: invoke, stream, and answers in a form."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

from clients.conftest import KEY


class Thing(pydantic.BaseModel):
    """A thing."""

    colour: Literal["red", "blue"]
    is_big: bool


@pytest.fixture(scope="module")
def model_of(url: str) -> Any:
    def make(**more: Any) -> Any:
        given = {"model": "chat", "temperature": 0, "max_tokens": 12, **more}
        return ChatOpenAI(base_url=url, api_key=KEY, max_retries=0, **given)

    return make


def test_invoke(model_of: Any) -> None:
    answer = model_of().invoke([SystemMessage("Be brief."), HumanMessage("import os")])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.response_metadata["finish_reason"] == "length"
    assert len(model_of(logprobs=True).invoke("x").response_metadata["logprobs"]["content"]) == 12


def test_stream(model_of: Any) -> None:
    whole = model_of().invoke("import os")
    chunks = list(model_of(stream_usage=True).stream("import os"))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert sum((c.usage_metadata or {}).get("output_tokens", 0) for c in chunks) == 12


def test_batch_and_asynchronous(model_of: Any) -> None:
    prompts = ["import os", "class A", "def f("]
    one_by_one = [model_of().invoke(prompt).content for prompt in prompts]
    assert [answer.content for answer in model_of().batch(prompts)] == one_by_one
    answer = asyncio.run(model_of().ainvoke(prompts[0]))
    assert answer.content == one_by_one[0]


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_a_form(model_of: Any, method: str) -> None:
    model = model_of(temperature=1, seed=4, max_tokens=300)
    if method == "json_schema":
        assert isinstance(model.with_structured_output(Thing, method=method).invoke("x"), Thing)
        return
    found = model.with_structured_output(None, method=method, include_raw=True).invoke("x")
    is_whole = found["raw"].response_metadata["finish_reason"] == "stop"
    assert isinstance(found["parsed"], dict) or not is_whole


def test_the_text_model(url: str) -> None:
    model: Any = OpenAI(base_url=url, api_key=KEY, model="chat", temperature=0, max_tokens=6)
    assert model.invoke("import os") == "".join(model.stream("import os"))
