"""`POST /v1/embeddings` and `POST /v1/rerank`: vectors of texts, and scores of documents."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from hypocenter.base.dtypes import Float32s
from hypocenter.server.generation import AnswerOrder
from hypocenter.server.inquiry import new_name
from hypocenter.server.routes import (
    headers_of_ignored,
    inquire,
    order_of,
    run_whole,
    service_of,
)
from hypocenter.server.vectors.answers import (
    EmbeddingEntry,
    Embeddings,
    RankedDocument,
    RankedText,
    Ranking,
    ScoredText,
    TextUsage,
)
from hypocenter.server.vectors.bodies import VectorOrder, read_embeddings, read_rerank

#: Texts of one client that are open at once: others are to have their turns.
_AT_ONCE = 32
#: Numbers of vectors that are encoded between two others' turns: some milliseconds.
_FEW_NUMBERS = 1 << 15


async def embed(request: Request) -> Response:
    """POST /v1/embeddings"""
    asked = await order_of(request, read_embeddings)
    vectors, usage = await vectors_of(request, asked)
    model = asked.order.model

    def encode_all() -> bytes:
        entries = [
            EmbeddingEntry(index=index, embedding=_encode(vector, in_base64=asked.is_base64))
            for index, vector in enumerate(vectors)
        ]
        return msgspec.json.encode(Embeddings(model=model, data=entries, usage=usage))

    few = len(vectors) * asked.num_columns <= _FEW_NUMBERS
    answer = encode_all() if few else await asyncio.to_thread(encode_all)
    return _json(request, answer, asked.order)


async def rerank(request: Request) -> Response:
    """POST /v1/rerank"""
    asked = await order_of(request, read_rerank)
    found, usage = await run_texts(request, asked.order)
    scores = [float(score[0]) for score in found]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    texts = asked.documents if asked.tells_texts else None
    answer: Any
    if asked.is_teis:
        answer = [
            ScoredText(index=n, score=scores[n], text=UNSET if texts is None else texts[n])
            for n in best
        ]
    else:
        results = [
            RankedDocument(
                index=n,
                relevance_score=scores[n],
                document=UNSET if texts is None else RankedText(texts[n]),
            )
            for n in best
        ]
        name = new_name("rank")
        answer = Ranking(id=name, model=asked.order.model, results=results, usage=usage)
    return _json(request, msgspec.json.encode(answer), asked.order)


async def vectors_of(request: Request, asked: VectorOrder) -> tuple[list[Float32s], TextUsage]:
    """The vectors as they are asked for, in order. Raises ApiError, and ClientLeft."""
    found, usage = await run_texts(request, asked.order)
    return [_cut(vector, asked) for vector in found], usage


async def run_texts(request: Request, order: AnswerOrder) -> tuple[list[Float32s], TextUsage]:
    """What became of each text, some at a time, and how many tokens these had."""
    service, prompts = service_of(request), order.prompts
    found: list[Float32s] = []
    num_tokens, size = 0, max(min(_AT_ONCE, service.max_open), 1)
    for first in range(0, len(prompts), size):
        some = replace(order, prompts=prompts[first : first + size])
        inquiry = inquire(request, "embd", some)
        await run_whole(request, inquiry)
        found += [np.frombuffer(choice.vector, "<f4") for choice in inquiry.choices]
        num_tokens += inquiry.usage().prompt_tokens
    return found, TextUsage(num_tokens, num_tokens)


def _cut(vector: Float32s, asked: VectorOrder) -> Float32s:
    vector = vector[: asked.num_columns]
    if not asked.normalises:
        return vector
    length = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
    return vector if length == 0 else (vector / length).astype(np.float32)


def _encode(vector: Float32s, *, in_base64: bool) -> list[float] | str:
    if in_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _json(request: Request, answer: bytes, order: AnswerOrder) -> Response:
    headers = headers_of_ignored(service_of(request), order.manner.ignored)
    return Response(answer, headers=headers, media_type="application/json")
