"""What the routes of vectors and scores answer, field by field.

Names are those of OpenAI's embeddings, of Jina's and Cohere's rerank as llama-server has it, and of
text-embeddings-inference. A field that is UNSET is left out.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class TextUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingEntry(msgspec.Struct, kw_only=True):
    """`embedding` is a list of numbers, or base64 of f32 little-endian."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    model: str
    data: list[EmbeddingEntry]
    usage: TextUsage


class RankedText(msgspec.Struct):
    text: str


class RankedDocument(msgspec.Struct, kw_only=True):
    """`relevance_score` is by the model's own scale, the more the better."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(msgspec.Struct, kw_only=True):
    """The best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RankedDocument]
    usage: TextUsage


class ScoredText(msgspec.Struct, kw_only=True):
    """As text-embeddings-inference tells it."""

    index: int
    score: float
    text: str | UnsetType = UNSET
