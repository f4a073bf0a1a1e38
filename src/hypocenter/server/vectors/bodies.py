"""The bodies that ask for vectors and for scores, and the orders that these become.

Fields are those of OpenAI's embeddings, vLLM's and llama-server's, and of Jina's and Cohere's
rerank; `texts` in place of documents is that of text-embeddings-inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from hypocenter.server.api_error import ApiError
from hypocenter.server.bodies.orders import served_name
from hypocenter.server.fields import TokenId, read_body
from hypocenter.server.generation import AnswerOrder, Manner, QueryAndDocument
from hypocenter.settings.config import SamplingParams
from hypocenter.wire.messages import ServedModel

#: Texts of one body, as many as OpenAI takes.
MAX_INPUTS = 2048
#: What is asked of the engine: to read a text, and to write nothing.
_READ = SamplingParams(max_tokens=0, seed=0)
GivenTexts = str | list[str | TokenId | list[TokenId]]


class EmbeddingBody(msgspec.Struct, kw_only=True):
    #: A text, texts, token ids, or lists of those.
    input: GivenTexts | None = None
    #: llama-server's other name of it.
    content: GivenTexts | None = None
    model: str = ""
    encoding_format: Literal["float", "base64"] | None = None
    #: So many numbers of a vector are kept, its first ones.
    dimensions: int | None = None
    #: llama-server's: 2 divides a vector by its length, -1 leaves it as it is.
    embd_normalize: int | None = None
    #: The same as vLLM has it, under its older name and its newer one.
    normalize: bool | None = None
    use_activation: bool | None = None
    #: What begins and ends a text is always there.
    add_special_tokens: bool | None = None
    #: vLLM's: a longer text loses its end; -1: what the model has no room for.
    truncate_prompt_tokens: int | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] | None = None


class RerankBody(msgspec.Struct, kw_only=True):
    query: str
    #: Texts, or objects with a field `text`.
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    model: str = ""
    #: So many of the best are told.
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    #: vLLM's: scores between 0 and 1; they are the model's own.
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] | None = None


@dataclass(frozen=True, slots=True)
class VectorOrder:
    """What is asked of vectors, beside which texts they are of."""

    order: AnswerOrder
    is_base64: bool = False
    num_columns: int = 0
    normalises: bool = True


@dataclass(frozen=True, slots=True)
class RerankOrder:
    """What is asked of scores: how many of the best documents are told, and with their texts."""

    order: AnswerOrder
    documents: list[str] = field(default_factory=list)
    top_n: int = 0
    tells_texts: bool = False
    #: Whether the body is that of text-embeddings-inference, and so is to be the answer.
    is_teis: bool = False


async def read_embeddings(data: bytes, model: ServedModel, names: Sequence[str]) -> VectorOrder:
    """What a body of /v1/embeddings asks for. Raises ApiError."""
    body, unknown = await read_body(data, EmbeddingBody)
    return order_of_embeddings(body, unknown, model, names)


def order_of_embeddings(
    body: EmbeddingBody, unknown: Sequence[str], model: ServedModel, names: Sequence[str]
) -> VectorOrder:
    """What is asked of vectors; `unknown` are fields that were passed over. Raises ApiError."""
    name = served_name(body.model, names)
    _require_kind(model, name, wants_scores=False)
    given = body.input if body.content is None else body.content
    if given is None or (body.input is not None and body.content is not None):
        raise ApiError(400, "give the texts as input", param="input")
    if body.embd_normalize not in (None, -1, 2):
        raise ApiError(
            400,
            f"embd_normalize is {body.embd_normalize}, but must be 2, or -1 for vectors as they "
            "are",
            param="embd_normalize",
        )
    if body.add_special_tokens is False:
        message = "add_special_tokens is not supported by this server; it may be true"
        raise ApiError(400, message, param="add_special_tokens")
    size = model.embedding_size
    if body.dimensions is not None and not 1 <= body.dimensions <= size:
        message = f"dimensions is {body.dimensions}, but must be from 1 to {size}"
        raise ApiError(400, message, param="dimensions")
    order = AnswerOrder(
        _prompts(given),
        _READ,
        model=name,
        max_prompt_tokens=_most_tokens(body.truncate_prompt_tokens, model),
        priority=body.priority or 0,
        embeds=True,
        manner=Manner(ignored=unknown),
    )
    return VectorOrder(
        order,
        is_base64=body.encoding_format == "base64",
        num_columns=body.dimensions or size,
        normalises=body.embd_normalize != -1
        and body.normalize is not False
        and body.use_activation is not False,
    )


async def read_rerank(data: bytes, model: ServedModel, names: Sequence[str]) -> RerankOrder:
    """What a body of /v1/rerank asks for. Raises ApiError."""
    body, unknown = await read_body(data, RerankBody)
    name = served_name(body.model, names)
    _require_kind(model, name, wants_scores=True)
    given: Sequence[str | dict[str, Any]] | None = body.documents
    is_teis = given is None
    if given is None:
        given = body.texts
    if not given or (body.documents is not None and body.texts is not None):
        raise ApiError(400, "give at least one document", param="documents")
    documents = [_text_of(document) for document in given]
    _require_few(len(documents), "documents")
    if body.use_activation:
        message = "use_activation is not supported by this server; it may be false"
        raise ApiError(400, message, param="use_activation")
    if body.truncate_prompt_tokens is not None:
        # What is cut off would be the document's end, of which nothing says where it is.
        message = "truncate_prompt_tokens is not supported for scores; cut the documents"
        raise ApiError(400, message, param="truncate_prompt_tokens")
    order = AnswerOrder(
        [QueryAndDocument(body.query, document) for document in documents],
        _READ,
        model=name,
        priority=body.priority or 0,
        embeds=True,
        manner=Manner(ignored=unknown),
    )
    return RerankOrder(
        order,
        documents,
        min(body.top_n or len(documents), len(documents)),
        bool(body.return_documents or body.return_text),
        is_teis,
    )


def _prompts(given: GivenTexts) -> list[str | tuple[int, ...]]:
    """Each text, or its token ids. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    kinds = {type(part) for part in given}
    if len(kinds) != 1:
        problem = "mixes texts, token ids and lists; give one kind" if kinds else "is empty"
        raise ApiError(400, f"input {problem}", param="input")
    if kinds == {int}:
        return [tuple(part for part in given if isinstance(part, int))]
    _require_few(len(given), "input")
    return [tuple(part) if isinstance(part, list) else str(part) for part in given]


def _require_few(num_given: int, name: str) -> None:
    if num_given > MAX_INPUTS:
        message = f"{name} has {num_given} texts, but at most {MAX_INPUTS} are taken at once"
        raise ApiError(400, message, param=name)


def _text_of(document: str | dict[str, Any]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        message = "a document is a text, or an object with a text in its field text"
        raise ApiError(400, message, param="documents")
    return text


def _most_tokens(given: int | None, model: ServedModel) -> int:
    """How many tokens of a text are kept; 0: all. Raises ApiError."""
    if given is None:
        return 0
    if given == -1:
        return model.context_length
    if given < 2:
        message = f"truncate_prompt_tokens is {given}, but must be at least 2, or -1"
        raise ApiError(400, message, param="truncate_prompt_tokens")
    return given


def _require_kind(model: ServedModel, name: str, *, wants_scores: bool) -> None:
    """Raises ApiError where the model gives something else."""
    kind, found = "scores" if wants_scores else "vectors", model.pooling
    if not found:
        way_out = "start the server with an embedding model, or with --pooling mean or last"
        if wants_scores:
            way_out = "start the server with a reranking model"
        raise ApiError(400, f"{name} writes text and gives no {kind}; {way_out}", param="model")
    if found == "none":
        message = f"{name} was started with pooling none; start it with mean, cls or last"
        raise ApiError(400, message, param="model")
    if (found == "rank") != wants_scores:
        gives = "scores of documents at /v1/rerank" if found == "rank" else "vectors of texts"
        raise ApiError(400, f"{name} gives {gives}, and no {kind}", param="model")
