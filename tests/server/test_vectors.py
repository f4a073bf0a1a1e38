"""Routes of vectors and scores, and Ollama's, without a worker: what is answered, what refused."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from test_strangers import FACTS, Fake

from hypocenter.base.results import CallPiece
from hypocenter.server.generation import Generation, QueryAndDocument
from hypocenter.server.intake.bodies import Bodies
from hypocenter.wire.messages import Accepted, Ending, Piece, ServedModel

MEAN = msgspec.structs.replace(FACTS, pooling="mean", embedding_size=4)
RANK = msgspec.structs.replace(FACTS, pooling="rank", embedding_size=1)
VECTOR = np.array([3.0, 4.0, 0.0, 12.0], np.float32)


class Embedding(Fake):
    """A supervisor that gives each text the same vector, or each document its length."""

    def __init__(self, facts: ServedModel) -> None:
        super().__init__()
        self.facts = facts
        self.service.max_open = 600
        self.asked: list[Generation] = []
        self.at_once = 0

    def submit(self, generation: Generation) -> None:
        self.asked.append(generation)
        self.at_once = max(self.at_once, self.service.num_open)
        found = VECTOR
        if isinstance(generation.prompt, QueryAndDocument):
            found = np.array([len(generation.prompt.document)], np.float32)
        ids = generation.prompt if isinstance(generation.prompt, tuple) else ()
        generation.note_read(tuple(one for one in ids if isinstance(one, int)) or (5, 6, 7), ())
        generation.take(Accepted(generation.id))
        piece = Piece(generation.id, "", (), ending=Ending("length"), vector=found.tobytes())
        asyncio.get_running_loop().call_soon(generation.take, piece)

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", path, body=[json.dumps(body).encode()])


def test_vectors_have_the_length_1_or_are_left_as_they_are() -> None:
    one = Embedding(MEAN)
    status, answer = one.post("/v1/embeddings", input=["a", "b"])
    assert (status, answer["object"], answer["model"]) == (200, "list", "m")
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    assert np.allclose(answer["data"][1]["embedding"], VECTOR / 13)
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert all(generation.embeds and generation.params.max_tokens == 0 for generation in one.asked)
    for raw in ({"embd_normalize": -1}, {"normalize": False}, {"use_activation": False}):
        assert one.post("/v1/embeddings", input="a", **raw)[1]["data"][0]["embedding"] == [
            *VECTOR.tolist()
        ]
    told = one.post("/embeddings", content="a", dimensions=2, encoding_format="base64")[1]
    short = np.frombuffer(base64.b64decode(told["data"][0]["embedding"]), "<f4")
    assert np.allclose(short, [0.6, 0.8])


def test_token_ids_are_taken_as_they_are() -> None:
    one = Embedding(MEAN)
    for given, asked in (([5, 6], [(5, 6)]), ([[5], [6, 7]], [(5,), (6, 7)])):
        one.asked.clear()
        assert one.post("/v1/embeddings", input=given)[0] == 200
        assert [generation.prompt_ids for generation in one.asked] == asked


def test_many_texts_take_turns() -> None:
    one = Embedding(MEAN)
    status, answer = one.post("/v1/embeddings", input=["a"] * 100)
    assert (status, len(answer["data"]), len(one.asked)) == (200, 100, 100)
    assert one.at_once <= 32
    assert not one.service.open


def test_a_long_text_loses_its_end_but_for_its_last_token() -> None:
    one = Embedding(MEAN)
    one.post("/v1/embeddings", input=[[1, 2, 3, 4, 5]], truncate_prompt_tokens=3)
    assert one.asked[-1].prompt_ids == (1, 2, 5)


def test_documents_come_best_first() -> None:
    one = Embedding(RANK)
    documents = ["a", "abc", {"text": "ab"}]
    status, answer = one.post("/v1/rerank", query="q", documents=documents)
    assert status == 200
    assert [(x["index"], x["relevance_score"]) for x in answer["results"]] == [
        (1, 3.0),
        (2, 2.0),
        (0, 1.0),
    ]
    assert "document" not in answer["results"][0]
    told = one.post("/v2/rerank", query="q", documents=documents, top_n=1, return_documents=True)
    assert told[1]["results"] == [{"index": 1, "relevance_score": 3.0, "document": {"text": "abc"}}]
    teis = one.post("/rerank", query="q", texts=["a", "ab"], return_text=True)[1]
    assert teis == [
        {"index": 1, "score": 2.0, "text": "ab"},
        {"index": 0, "score": 1.0, "text": "a"},
    ]


@pytest.mark.parametrize(
    ("facts", "path", "body", "says"),
    [
        (MEAN, "/v1/embeddings", {}, "give the texts as input"),
        (MEAN, "/v1/embeddings", {"input": []}, "input is empty"),
        (MEAN, "/v1/embeddings", {"input": ["a", 5]}, "mixes texts"),
        (MEAN, "/v1/embeddings", {"input": ["a"] * 2049}, "at most 2048"),
        (MEAN, "/v1/embeddings", {"input": "a", "dimensions": 5}, "must be from 1 to 4"),
        (MEAN, "/v1/embeddings", {"input": "a", "dimensions": 0}, "must be from 1 to 4"),
        (MEAN, "/v1/embeddings", {"input": "a", "embd_normalize": 0}, "must be 2"),
        (MEAN, "/v1/embeddings", {"input": "a", "encoding_format": "x"}, "Invalid enum value"),
        (MEAN, "/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 1}, "at least 2"),
        (MEAN, "/v1/embeddings", {"input": "a", "add_special_tokens": False}, "may be true"),
        (MEAN, "/v1/rerank", {"query": "q", "documents": ["a"]}, "gives vectors of texts"),
        (MEAN, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]},
         "writes none; ask it at /v1/embeddings"),
        (MEAN, "/v1/completions", {"prompt": "a"}, "writes none; ask it at /v1/embeddings"),
        (RANK, "/v1/embeddings", {"input": "a"}, "scores of documents at /v1/rerank"),
        (RANK, "/v1/rerank", {"query": "q", "documents": []}, "at least one document"),
        (RANK, "/v1/rerank", {"query": "q", "documents": [{"x": 1}]}, "text in its field text"),
        (RANK, "/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, ">= 1"),
        (RANK, "/v1/rerank", {"query": "q", "documents": ["a"], "use_activation": True}, "false"),
        (FACTS, "/v1/embeddings", {"input": "a"}, "writes text and gives no vectors"),
        (FACTS, "/v1/rerank", {"query": "q", "documents": ["a"]}, "a reranking model"),
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_refused_in_one_line(
    facts: ServedModel, path: str, body: dict[str, Any], says: str
) -> None:
    one = Embedding(facts)
    one.service.max_body_bytes, one.service.bodies = 1 << 20, Bodies(1 << 24)
    status, answer = one.post(path, **body)
    assert status == 400
    assert says in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]
    assert not one.asked


def test_ollamas_vectors() -> None:
    one = Embedding(MEAN)
    status, answer = one.post("/api/embed", model="m:latest", input=["a", "b"])
    assert status == 200
    assert np.allclose(answer["embeddings"], [VECTOR / 13] * 2)
    assert (answer["model"], answer["prompt_eval_count"]) == ("m", 6)
    assert one.post("/api/embeddings", model="m", prompt="a")[1] == {"embedding": VECTOR.tolist()}
    assert one.post("/api/show", model="m")[1]["capabilities"] == ["embedding"]


class Answering(Fake):
    """A supervisor whose worker thinks, says two words and calls a tool."""

    def submit(self, generation: Generation) -> None:
        generation.note_read((5, 6), ())
        generation.take(Accepted(generation.id))
        loop = asyncio.get_running_loop()
        for piece in (
            Piece(1, "", (1,), reasoning="hm"),
            Piece(1, "a ", (2,)),
            Piece(1, "b", (3,), ending=Ending("length", prompt_seconds=0.5)),
        ):
            loop.call_soon(generation.take, piece)

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", path, body=[json.dumps(body).encode()])


def test_ollamas_chat_whole_and_in_lines_is_one() -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    one = Answering()
    status, whole = one.post("/api/chat", **asked, stream=False)
    assert status == 200
    assert whole["message"] == {"role": "assistant", "content": "a b", "thinking": "hm"}
    assert (whole["done"], whole["done_reason"]) == (True, "length")
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (2, 3)
    assert whole["prompt_eval_duration"] == 500_000_000
    streamed = Answering().post("/api/chat", **asked)[1]
    lines = [json.loads(line) for line in streamed.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "a b"
    assert "".join(line["message"].get("thinking", "") for line in lines) == "hm"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["eval_count"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (['{"q": ', "1}"], {"tool_calls": [{"function": {"name": "find", "arguments": {"q": 1}}}]}),
        (['{"q": '], {"content": 'find {"q": '}),
    ],
)
def test_ollamas_calls_come_whole_or_are_a_text(arguments: list[str], said: Any) -> None:
    class Calling(Answering):
        def submit(self, generation: Generation) -> None:
            generation.note_read((5,), ())
            generation.take(Accepted(1))
            loop = asyncio.get_running_loop()
            for place, part in enumerate(arguments):
                call = CallPiece(0, "" if place else "find", part)
                loop.call_soon(generation.take, Piece(1, "", (place,), calls=(call,)))
            loop.call_soon(generation.take, Piece(1, "", (9,), ending=Ending("stop")))

    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    message = Calling().post("/api/chat", **asked)[1]["message"]
    assert message == {"role": "assistant", "content": "", **said}


def test_ollamas_prompt_and_what_only_loads() -> None:
    one = Answering()
    status, whole = one.post("/api/generate", model="m", prompt="hi", stream=False)
    assert (status, whole["response"], whole["thinking"]) == (200, "a b", "hm")
    for path, field in (("/api/generate", "response"), ("/api/chat", "message")):
        status, loaded = one.post(path, model="m")
        assert (status, loaded["done_reason"], field in loaded) == (200, "load", True)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/api/chat", {"messages": []}, 400, "model is missing"),
        ("/api/chat", {"model": "x"}, 404, "is not served here"),
        ("/api/chat", {"messages": [{"role": "x"}]}, 400, "role is 'x'"),
        ("/api/chat", {"messages": [{"role": "user", "content": 5}]}, 400, "must be a text"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, 400, "images: models"),
        (
            "/api/chat",
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            400,
            "no function",
        ),
        ("/api/chat", {"messages": [{"role": "user"}] * 4097}, 400, "more than 4096 items"),
        (
            "/api/chat",
            {"messages": [{"role": "user"}], "format": "yaml"},
            400,
            "'json' or a schema",
        ),
        ("/api/chat", {"messages": [{"role": "user"}], "logprobs": True}, 400, "logprobs"),
        ("/api/chat", {"messages": [{"role": "user"}], "options": {"seed": "x"}}, 400, "opti"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "/api/chat takes"),
        ("/api/generate", {"prompt": "a", "images": ["b"]}, 400, "read and write text"),
        ("/api/embed", {"input": "a"}, 400, "gives no vectors"),
        ("/api/none", {}, 404, "there is no /api/none here"),
    ],
)
def test_ollamas_errors_are_one_text(
    path: str, body: dict[str, Any], status: int, says: str
) -> None:
    one = Answering()
    one.service.max_body_bytes, one.service.bodies = 1 << 20, Bodies(1 << 24)
    if says != "model is missing":
        body = {"model": "m", **body}
    found, answer = one.post(path, **body)
    assert (found, list(answer)) == (status, ["error"])
    assert says in answer["error"]


def test_what_ollamas_clients_list() -> None:
    one = Answering()
    [model] = one.ask("GET", "/api/tags")[1]["models"]
    assert (model["name"], model["details"]["family"]) == ("m", "llama")
    [running] = one.ask("GET", "/api/ps")[1]["models"]
    assert (running["name"], running["size_vram"], running["context_length"]) == ("m", 0, 64)
    assert one.ask("GET", "/api/version")[1].keys() == {"version"}
    assert one.post("/api/show", model="m")[1]["capabilities"] == ["completion"]
