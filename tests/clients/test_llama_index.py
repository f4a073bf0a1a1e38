"""LlamaIndex by its LiteLLM and Ollama classes: answers, streams, tools, forms, and an index."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.litellm import LiteLLMEmbedding
from llama_index.llms.litellm import LiteLLM
from llama_index.llms.ollama import Ollama
from outside.served import Served, serving

from clients.conftest import KEY, OURS
from clients.test_tools import CALLS, TEMPLATE

HEADERS = {"Authorization": f"Bearer {KEY}"}
ASKED = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi.")]
#: As the random model that embeds has its words.
TEXTS = ["the king", "hello world"]


class Thing(pydantic.BaseModel):
    """A thing."""

    colour: Literal["red", "blue"]
    is_big: bool


def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"rain in {city}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, python: str, model: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([python, OURS, "vectors", folder], check=True)
    words = (str(model), f"{folder}/vectors.gguf", "--api-key", KEY, "--chat-template", TEMPLATE)
    with serving(folder, *words, python=python) as one:
        yield one


@pytest.fixture(scope="module")
def openais(server: Served) -> Any:
    def make(**more: Any) -> LiteLLM:
        given = {"temperature": 0, "max_tokens": 12, "max_retries": 0, **more}
        url = f"http://127.0.0.1:{server.port}/v1"
        return LiteLLM("openai/chat", api_base=url, api_key=KEY, **given)

    return make


@pytest.fixture(scope="module")
def ollamas(server: Served) -> Any:
    def make(**options: Any) -> Ollama:
        given = {"num_predict": 12, "seed": 3, **options}
        url = f"http://127.0.0.1:{server.port}"
        return Ollama("chat", base_url=url, headers=HEADERS, additional_kwargs=given)

    return make


@pytest.mark.parametrize("route", ["openais", "ollamas"])
def test_an_answer_whole_and_streamed_is_one(route: str, request: Any) -> None:
    llm = request.getfixturevalue(route)()
    whole = llm.chat(ASKED).message.content
    assert whole
    parts = list(llm.stream_chat(ASKED))
    assert "".join(part.delta or "" for part in parts) == whole
    assert parts[-1].message.content == whole


def test_a_tool_is_called_and_its_answer_read(openais: Any) -> None:
    llm = openais(max_tokens=64, additional_kwargs={"extra_body": CALLS})
    tool = FunctionTool.from_defaults(weather, name="Weather")
    answer = llm.chat_with_tools([tool], user_msg="Weather?")
    [call] = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("Weather", {"city": "Oslo"})
    result = ChatMessage(
        role="tool", content=str(tool(**call.tool_kwargs)),
        additional_kwargs={"tool_call_id": call.tool_id},
    )  # fmt: skip
    turn = [ChatMessage(role="user", content="Weather?"), answer.message, result]
    assert openais().chat(turn).message.content


def test_a_form_holds_the_answer(ollamas: Any) -> None:
    made = ollamas(num_predict=80).structured_predict(Thing, PromptTemplate("A thing."))
    assert isinstance(made, Thing)


def test_an_index_finds_and_answers(server: Served, openais: Any) -> None:
    url = f"http://127.0.0.1:{server.port}/v1"
    embedding = LiteLLMEmbedding(model_name="openai/vectors", api_base=url, api_key=KEY)
    body = {"model": "vectors", "input": TEXTS}
    told = server.post("/v1/embeddings", body, headers=HEADERS).json["data"]
    found = embedding.get_text_embedding_batch(TEXTS)
    assert found == [pytest.approx(entry["embedding"], abs=1e-6) for entry in told]
    index = VectorStoreIndex.from_documents(
        [Document(text=text) for text in TEXTS], embed_model=embedding
    )
    answer = index.as_query_engine(llm=openais(), similarity_top_k=1).query(TEXTS[1])
    assert [node.text for node in answer.source_nodes] == [TEXTS[1]]
    assert str(answer)
