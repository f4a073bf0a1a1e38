"""Ollama's routes below `/api`: many editors speak nothing else. https://docs.ollama.com/api"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hypocenter.conversation.thoughts import has_thoughts, reads_calls_of
from hypocenter.server.api_error import ApiError, json_response
from hypocenter.server.bodies.orders import order_of_chat, served_name
from hypocenter.server.dialects import ollama_answers as said
from hypocenter.server.dialects.ollama_body import (
    OllamaChatBody,
    OllamaGenerateBody,
    chat_of,
    chat_of_prompt,
    order_of_text,
)
from hypocenter.server.dialects.ollama_form import OllamaForm, now_text
from hypocenter.server.fields import read_body
from hypocenter.server.generation import AnswerOrder
from hypocenter.server.hosting.host import Host
from hypocenter.server.hosting.model_routes import hosting_of
from hypocenter.server.routes import Service, inquire, order_of, respond, service_of
from hypocenter.server.vectors.bodies import EmbeddingBody, VectorOrder, order_of_embeddings
from hypocenter.server.vectors.routes import vectors_of
from hypocenter.wire.messages import ServedModel

#: Clients compare it with the version that a route came with: these are that version's routes.
SPOKEN_VERSION = "0.13.0"
#: It stays for as long as the server does, which nobody knows.
_NEVER = "9999-12-31T23:59:59Z"
_LARGE = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


class ShowBody(msgspec.Struct, kw_only=True):
    model: str = ""
    name: str = ""
    verbose: bool | None = None


class EmbedBody(msgspec.Struct, kw_only=True):
    input: str | list[str]
    model: str = ""
    #: Whether a text that is too long loses its end, or is refused.
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """Of the older route."""

    prompt: str
    model: str = ""
    options: dict[str, Any] | None = None


async def chat(request: Request) -> Response:
    """POST /api/chat"""

    async def read(data: bytes, model: ServedModel, names: Sequence[str]) -> AnswerOrder | str:
        body, unknown = await read_body(data, OllamaChatBody)
        body.model = name = _name_among(body.model, names)
        if not body.messages:
            return name
        asked, ignored = chat_of(body, model.chat_template)
        return order_of_chat(asked, [*unknown, *ignored], model, names)

    return await _answer(request, await order_of(request, read), is_chat=True)


async def generate(request: Request) -> Response:
    """POST /api/generate"""

    async def read(data: bytes, model: ServedModel, names: Sequence[str]) -> AnswerOrder | str:
        body, unknown = await read_body(data, OllamaGenerateBody)
        body.model = name = _name_among(body.model, names)
        if not body.prompt:
            return name
        if body.raw or not model.chat_template:
            return order_of_text(body, name, unknown)
        asked, ignored = chat_of_prompt(body, model.chat_template)
        return order_of_chat(asked, [*unknown, *ignored], model, names)

    return await _answer(request, await order_of(request, read), is_chat=False)


async def _answer(request: Request, order: AnswerOrder | str, *, is_chat: bool) -> Response:
    """The answer; a model's name alone asks that it be loaded, which it is."""
    if isinstance(order, str):
        fields: dict[str, Any] = {"model": order, "created_at": now_text()}
        fields |= {"done": True, "done_reason": "load"}
        if is_chat:
            return json_response(said.OllamaChatAnswer(**fields, message=said.OllamaMessage()))
        return json_response(said.OllamaText(**fields, response=""))
    inquiry = inquire(request, "ollama", order)
    form, manner = OllamaForm(inquiry, order.model, is_chat=is_chat), order.manner
    del order  # it may be large
    return await respond(request, inquiry, form, manner)


async def embed(request: Request) -> Response:
    """POST /api/embed"""
    began = time.monotonic_ns()

    async def read(data: bytes, model: ServedModel, names: Sequence[str]) -> VectorOrder:
        body, unknown = await read_body(data, EmbedBody)
        asked = EmbeddingBody(
            input=body.input if isinstance(body.input, str) else [*body.input],
            model=_name_among(body.model, names),
            dimensions=body.dimensions,
            truncate_prompt_tokens=None if body.truncate is False else -1,
        )
        return order_of_embeddings(asked, unknown, model, names)

    asked = await order_of(request, read)
    vectors, usage = await vectors_of(request, asked)
    return json_response(
        said.OllamaEmbeddings(
            model=asked.order.model,
            embeddings=[vector.tolist() for vector in vectors],
            total_duration=time.monotonic_ns() - began,
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
        )
    )


async def embeddings(request: Request) -> Response:
    """POST /api/embeddings"""

    async def read(data: bytes, model: ServedModel, names: Sequence[str]) -> VectorOrder:
        body, unknown = await read_body(data, EmbeddingsBody)
        asked = EmbeddingBody(
            input=body.prompt,
            model=_name_among(body.model, names),
            truncate_prompt_tokens=-1,
            embd_normalize=-1,
        )
        return order_of_embeddings(asked, unknown, model, names)

    [vector], _ = await vectors_of(request, await order_of(request, read))
    return json_response(said.OllamaEmbedding(vector.tolist()))


async def tags(request: Request) -> Response:
    """GET /api/tags"""
    hosts = hosting_of(request).hosts
    listed = [_model(host, name) for host in hosts for name in host.service.names]
    return json_response(said.OllamaModels(listed))


async def running(request: Request) -> Response:
    """GET /api/ps"""
    loaded = [host for host in hosting_of(request).hosts if host.is_loaded]
    listed = [_running(host.service, name) for host in loaded for name in host.service.names]
    return json_response(said.RunningModels(listed))


async def show(request: Request) -> Response:
    """POST /api/show"""

    async def read(data: bytes, model: ServedModel, names: Sequence[str]) -> str:
        body, _ = await read_body(data, ShowBody)
        return _name_among(body.model or body.name, names)

    name = await order_of(request, read)
    facts = service_of(request).facts
    arch = facts.architecture
    shown = said.OllamaShown(
        modelfile=f"FROM {name}\n",
        parameters="",
        template=facts.chat_template,
        details=_details(facts),
        model_info={
            "general.architecture": arch,
            "general.parameter_count": facts.num_parameters,
            f"{arch}.context_length": facts.trained_length,
            **({f"{arch}.embedding_length": facts.embedding_size} if facts.pooling else {}),
        },
        capabilities=_capabilities(facts),
        modified_at=_start_time(service_of(request)),
    )
    return json_response(shown)


async def version_of(request: Request) -> Response:
    """GET /api/version"""
    return json_response(said.OllamaVersion(SPOKEN_VERSION))


def _name_among(name: str, names: Sequence[str]) -> str:
    """The name that is served. Raises ApiError."""
    if not name:
        raise ApiError(400, "model is missing", param="model")
    return served_name(name, names)


def _model(host: Host, name: str) -> said.OllamaModel:
    """What is told of a model; of one that was never loaded nothing is known but its name."""
    facts = host.facts or host.service.supervisor.facts
    return said.OllamaModel(
        name=name,
        model=name,
        modified_at=_start_time(host.service),
        size=0 if facts is None else facts.file_bytes,
        details=said.ModelDetails() if facts is None else _details(facts),
    )


def _running(service: Service, name: str) -> said.RunningModel:
    facts = service.facts
    return said.RunningModel(
        name=name,
        model=name,
        size=facts.file_bytes,
        details=_details(facts),
        expires_at=_NEVER,
        size_vram=0 if facts.device == "cpu" else facts.file_bytes,
        context_length=facts.context_length,
    )


def _details(facts: ServedModel) -> said.ModelDetails:
    arch = facts.architecture
    return said.ModelDetails(
        family=arch,
        families=[arch],
        parameter_size=_size_text(facts.num_parameters),
        quantization_level=facts.quantisation,
    )


def _capabilities(facts: ServedModel) -> list[str]:
    if facts.pooling:
        return ["rerank" if facts.pooling == "rank" else "embedding"]
    found = {"tools": reads_calls_of, "thinking": has_thoughts}
    template = facts.chat_template
    return ["completion", *(name for name, has in found.items() if template and has(template))]


def _size_text(num_parameters: int) -> str:
    size, unit = next((pair for pair in _LARGE if num_parameters >= pair[0]), (1.0, ""))
    return f"{num_parameters / size:.1f}{unit}"


def _start_time(service: Service) -> str:
    return datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z")
