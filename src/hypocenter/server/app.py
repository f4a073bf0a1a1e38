"""The application: which address is which route, who may ask, and how errors look."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hypocenter.base.package import version
from hypocenter.server import answers, routes, side_routes
from hypocenter.server.api_error import ApiError
from hypocenter.server.dialects import (
    messages_answers,
    messages_form,
    messages_routes,
    ollama_answers,
    ollama_routes,
    responses_answers,
    responses_routes,
)
from hypocenter.server.dialects.messages_body import MessagesBody
from hypocenter.server.dialects.ollama_body import OllamaChatBody, OllamaGenerateBody
from hypocenter.server.dialects.ollama_form import NDJSON
from hypocenter.server.dialects.responses_body import ResponsesBody
from hypocenter.server.fields import ChatBody, CompletionBody, LoraItem
from hypocenter.server.hosting import adapter_routes, model_routes, slot_routes
from hypocenter.server.hosting.hosting import Hosting
from hypocenter.server.intake.strangers import Strangers
from hypocenter.server.openapi import Endpoint, Query, document
from hypocenter.server.operating.access import AccessLog, Prefix
from hypocenter.server.pages import links, reports
from hypocenter.server.pages.pages import Pages, is_visit
from hypocenter.server.routes import ClientLeft
from hypocenter.server.vectors import routes as vector_routes
from hypocenter.server.vectors.answers import Embeddings, Ranking, ScoredText
from hypocenter.server.vectors.bodies import EmbeddingBody, RerankBody

#: Answered before a model is loaded.
EARLY_PATHS = frozenset(
    {"/health", "/ready", "/metrics", "/version", "/openapi.json", "/api/version"}
)
#: What only the admin key opens.
ADMIN_PATHS = ("/debug/", "/models/")
_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)


async def _openapi(request: Request) -> Response:
    return Response(_document(request.app.state.root_path), media_type="application/json")


@functools.cache
def _document(root_path: str) -> bytes:
    """The document of a server, which takes 10 ms to make and never changes."""
    return msgspec.json.encode(document(TABLE, version(), root_path))


_OF_MODEL = Query("model", "the name of a loaded model, where several are served")
_LINK = tuple(Query(name, "of the link", is_required=True) for name in ("until", "code"))

#: Every route there is.
TABLE = (
    Endpoint(
        "GET", "/health", model_routes.health, "whether it lives", answers.Status, None, None, True
    ),
    Endpoint(
        "GET",
        "/ready",
        model_routes.readiness,
        "whether it takes a request",
        answers.Status,
        None,
        None,
        True,
    ),
    Endpoint("GET", "/metrics", side_routes.metrics, "figures for Prometheus", "text/plain"),
    Endpoint("GET", "/version", side_routes.version_of, "its version", answers.Version),
    Endpoint("GET", "/openapi.json", _openapi, "this document", dict[str, Any]),
    Endpoint("GET", "/v1/models", model_routes.models, "models, by each name", answers.Models),
    Endpoint("GET", "/models", model_routes.models, "models, by each name", answers.Models),
    Endpoint("GET", "/v1/models/{name:path}", model_routes.model, "a model", answers.ModelCard),
    Endpoint(
        "POST",
        "/models/load",
        model_routes.load,
        "loads a model",
        answers.Done,
        model_routes.ModelBody,
    ),
    Endpoint(
        "POST",
        "/models/unload",
        model_routes.unload,
        "unloads a model",
        answers.Done,
        model_routes.ModelBody,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        routes.complete,
        "continues texts",
        answers.TextCompletion,
        CompletionBody,
        answers.TextCompletion,
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        routes.chat,
        "answers a conversation",
        answers.ChatCompletion,
        ChatBody,
        answers.ChatChunk,
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        responses_routes.create,
        "answers a conversation, and keeps it",
        responses_answers.ResponseObject,
        ResponsesBody,
        responses_answers.ResponseEvent,
        names_events=True,
    ),
    Endpoint(
        "GET",
        "/v1/responses/{name}",
        responses_routes.get,
        "a response that is kept or being made",
        responses_answers.ResponseObject,
        query=(Query("stream", "false alone is supported", ("true", "false", "1", "0")),),
    ),
    Endpoint(
        "GET",
        "/v1/responses/{name}/input_items",
        responses_routes.input_items,
        "what a response that is kept was asked with",
        responses_answers.InputItems,
        query=(
            Query("order", "which comes first, the last one else", responses_routes.ORDERS),
            Query("after", "the id of the item before the first"),
            Query("limit", "how many at most, from 1 to 100; 20 else"),
        ),
    ),
    Endpoint(
        "DELETE",
        "/v1/responses/{name}",
        responses_routes.delete,
        "forgets a response",
        responses_answers.Deleted,
    ),
    Endpoint(
        "POST",
        "/v1/responses/{name}/cancel",
        responses_routes.cancel,
        "ends a response with what it has",
        responses_answers.ResponseObject,
    ),
    Endpoint(
        "POST",
        "/v1/messages",
        messages_routes.create,
        "answers a conversation, as Anthropic has it",
        messages_answers.AnthropicMessage,
        MessagesBody,
        messages_answers.MessageEvent,
        names_events=True,
        error=messages_answers.MessageError,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        messages_routes.count_tokens,
        "the tokens of a conversation",
        messages_answers.TokenCount,
        MessagesBody,
        error=messages_answers.MessageError,
    ),
    *(
        Endpoint("POST", path, vector_routes.embed, "vectors of texts", Embeddings, EmbeddingBody)
        for path in ("/v1/embeddings", "/embeddings")
    ),
    *(
        Endpoint(
            "POST",
            path,
            vector_routes.rerank,
            "documents, the best first",
            Ranking | list[ScoredText],
            RerankBody,
        )
        for path in ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking")
    ),
    Endpoint(
        "POST",
        "/api/chat",
        ollama_routes.chat,
        "answers a conversation, as Ollama has it",
        ollama_answers.OllamaChatAnswer,
        OllamaChatBody,
        ollama_answers.OllamaChatAnswer,
        error=ollama_answers.OllamaError,
        stream_media=NDJSON,
    ),
    Endpoint(
        "POST",
        "/api/generate",
        ollama_routes.generate,
        "answers a prompt, as Ollama has it",
        ollama_answers.OllamaText,
        OllamaGenerateBody,
        ollama_answers.OllamaText,
        error=ollama_answers.OllamaError,
        stream_media=NDJSON,
    ),
    *(
        Endpoint(
            method, f"/api/{path}", endpoint, what, answer, body, error=ollama_answers.OllamaError
        )
        for method, path, endpoint, what, answer, body in (
            (
                "POST",
                "embed",
                ollama_routes.embed,
                "vectors of texts, as Ollama has it",
                ollama_answers.OllamaEmbeddings,
                ollama_routes.EmbedBody,
            ),
            (
                "POST",
                "embeddings",
                ollama_routes.embeddings,
                "the vector of a text",
                ollama_answers.OllamaEmbedding,
                ollama_routes.EmbeddingsBody,
            ),
            (
                "POST",
                "show",
                ollama_routes.show,
                "what the model is",
                ollama_answers.OllamaShown,
                ollama_routes.ShowBody,
            ),
            (
                "GET",
                "tags",
                ollama_routes.tags,
                "the model, under each name",
                ollama_answers.OllamaModels,
                None,
            ),
            (
                "GET",
                "ps",
                ollama_routes.running,
                "the model, which is loaded",
                ollama_answers.RunningModels,
                None,
            ),
            (
                "GET",
                "version",
                ollama_routes.version_of,
                "the version of Ollama that is spoken",
                ollama_answers.OllamaVersion,
                None,
            ),
        )
    ),
    Endpoint(
        "POST",
        "/tokenize",
        side_routes.tokenize,
        "the tokens of a text",
        answers.Tokens,
        side_routes.TokenizeBody,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        side_routes.detokenize,
        "the text of tokens",
        answers.Text,
        side_routes.DetokenizeBody,
    ),
    Endpoint(
        "GET",
        "/tokenizer_info",
        side_routes.tokenizer_info,
        "special tokens",
        answers.TokenizerInfo,
        query=(_OF_MODEL,),
    ),
    Endpoint(
        "POST",
        "/apply-template",
        side_routes.apply_template,
        "the prompt of a conversation",
        answers.FilledTemplate,
        side_routes.TemplateBody,
    ),
    Endpoint(
        "GET", "/props", side_routes.props, "what the server is", answers.Props, query=(_OF_MODEL,)
    ),
    Endpoint(
        "GET",
        "/slots",
        side_routes.slots,
        "what runs",
        list[answers.Slot],
        query=(_OF_MODEL, Query("fail_on_no_slot", "status 503 where none is free")),
    ),
    Endpoint(
        "GET",
        "/lora-adapters",
        adapter_routes.adapters,
        "its adapters",
        list[answers.Adapter],
        query=(_OF_MODEL,),
    ),
    Endpoint(
        "POST",
        "/lora-adapters",
        adapter_routes.change,
        "changes what they count",
        answers.Done,
        list[LoraItem],
        query=(_OF_MODEL,),
    ),
    Endpoint(
        "POST",
        "/slots/{number}",
        slot_routes.move,
        "saves, restores or erases a prompt",
        answers.SlotMoved,
        slot_routes.SlotBody,
        query=(
            Query("action", "what becomes of it", slot_routes.ACTIONS, is_required=True),
            _OF_MODEL,
        ),
    ),
    Endpoint(
        "GET",
        "/v1/requests/{name}",
        side_routes.one_request,
        "the state of a request",
        answers.RequestState,
    ),
    Endpoint(
        "POST",
        "/v1/requests/{name}/cancel",
        side_routes.cancel_request,
        "ends a request with what it has",
        answers.RequestState,
    ),
    Endpoint(
        "GET",
        "/debug/requests",
        side_routes.debug_requests,
        "what is open",
        answers.OpenRequests,
        query=(_OF_MODEL,),
    ),
    Endpoint("GET", "/debug/faults", side_routes.debug_faults, "reports of faults", answers.Faults),
    Endpoint(
        "GET", "/report/{name}", reports.report, "a report, as a page", "text/html", query=_LINK
    ),
)
#: Routes of its clients, who read a request's name under a name of their own.
ANTHROPICS = "/v1/messages"
#: Answered without a key.
OPEN_PATHS = frozenset(entry.path for entry in TABLE if entry.is_open)


def make_app(
    hosting: Hosting,
    *,
    api_keys: Sequence[str] = (),
    admin_key: str | None = None,
    cors_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    is_local: bool = False,
    root_path: str = "",
) -> Starlette:
    """The routes of a server's models, behind these keys; without `api_keys` everybody may ask.

    Keys may be changed later. `is_local`: only this machine can reach it;
    `allowed_hosts` are names that it has besides. `root_path` is what a proxy may leave before a
    path.
    """
    service = hosting.hosts[0].service  # that of the only model, or of any
    service.set_keys(tuple(api_keys))
    strangers = Strangers(is_local=is_local, hosts=allowed_hosts, origins=cors_origins)
    middleware = [
        Middleware(AccessLog),
        Middleware(_Outer, strangers),
    ]
    if root_path:
        middleware.insert(0, Middleware(Prefix, root_path))
    if service.has_pages:
        middleware.append(Middleware(Pages))
    if cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
            )
        )
    middleware.append(Middleware(_Guard, hosting, admin_key))
    app = Starlette(
        routes=[Route(entry.path, entry.endpoint, methods=[entry.method]) for entry in TABLE],
        middleware=middleware,
        exception_handlers={
            ApiError: _answer_api_error,
            ClientLeft: _answer_nobody,
            HTTPException: _answer_http_error,
            Exception: _answer_defect,
        },
    )
    app.router.redirect_slashes = False
    app.state.service, app.state.hosting = service, hosting
    app.state.choice = hosting if hosting.loads_on_demand else None
    app.state.root_path = root_path
    return app


class _Outer:
    """Gives each answer the id of its request, and refuses pages of other sites."""

    def __init__(self, app: ASGIApp, strangers: Strangers) -> None:
        self._app, self._strangers = app, strangers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        name = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(b"x-request-id", name.encode())]
                if scope["path"].startswith(ANTHROPICS):  # its clients read it there
                    own.append((b"request-id", name.encode()))
                message["headers"] = [*message["headers"], *own]
            await send(message)

        error = self._strangers.refusal(
            _header(scope, b"host"),
            _header(scope, b"origin"),
            "" if is_visit(scope) else _header(scope, b"sec-fetch-site"),
            is_open=scope["path"] in OPEN_PATHS,
        )
        app = self._app if error is None else _response(error, scope["path"])
        await app(scope, receive, send_with_id)


class _Guard:
    """Lets in who has a key, and nobody while there is no model to ask.

    What a route is told of who asks is in the request's `state`: `client`, by which requests of one
    are told from those of another; `key_digest`, where a key let it in; `may_see_all`, whether it
    may see what others ask; `body`, what its body holds of the memory for bodies; `until_answered`,
    what is to be done when it has been answered; `service`, once it is known which model it is for.
    """

    def __init__(self, app: ASGIApp, hosting: Hosting, admin_key: str | None) -> None:
        self._app, self._hosting, self._admin_key = app, hosting, admin_key
        self._service = hosting.hosts[0].service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = _key_of(scope)
        error = self._refusal(scope, key)
        if error is not None:
            await _response(error, scope["path"])(scope, receive, send)
            return
        is_admin = self._admin_key is not None and _is_one_of(key, (self._admin_key,))
        has_keys = bool(self._service.api_keys)
        client = _client_of(scope, key if has_keys else "")
        body = self._service.bodies.of(client)
        with contextlib.ExitStack() as until_answered:
            until_answered.callback(body.release)
            state = {
                "client": client,
                "may_see_all": is_admin or not has_keys,
                "body": body,
                "until_answered": until_answered,
            }
            if has_keys and key:
                state["key_digest"] = client
            scope.setdefault("state", {}).update(state)
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, key: str) -> ApiError | None:
        path, api_keys = scope["path"], self._service.api_keys
        if path in OPEN_PATHS or path.startswith(links.PATH):  # a report's link is its key
            return None
        if path.startswith(ADMIN_PATHS):
            if self._admin_key is None:
                return ApiError(403, "there is no admin key; start the server with --admin-key")
            if not _is_one_of(key, (self._admin_key,)):
                return _no_key("the admin key")
        elif api_keys and not _is_one_of(key, (*api_keys, self._admin_key or "")):
            return _no_key("a key")
        is_early = self._service.supervisor.facts is None and not self._hosting.loads_on_demand
        if is_early and path not in EARLY_PATHS:
            return ApiError(503, "Loading model", kind="unavailable_error", retry=True)
        return None


def _no_key(what: str) -> ApiError:
    return ApiError(401, f"{what} is needed: Authorization: Bearer KEY", code="invalid_api_key")


def _key_of(scope: Scope) -> str:
    """The key that a request brings, "" for none."""
    scheme, _, key = _header(scope, b"authorization").partition(" ")
    given = key.strip() if scheme.lower() == "bearer" else ""
    return given or _header(scope, b"x-api-key")


def _client_of(scope: Scope, key: str) -> str:
    """Who asks: a digest of its key; where there are no keys, the address that it has."""
    if key:
        return hashlib.sha256(key.encode()).hexdigest()
    peer = scope.get("client")
    return str(peer[0]) if peer else "local"


def _is_one_of(key: str, known: Sequence[str]) -> bool:
    """In a time that tells nothing of where they differ."""
    found = False
    for right in known:
        if right:
            found |= hmac.compare_digest(key.encode(), right.encode())
    return found


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return ""


#: Routes by which clients of other servers ask for the same.
_ELSEWHERE = frozenset({"/completion", "/infill"})
_OLLAMAS = "/api/"


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error, request.scope["path"])


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's number for a client that left


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    instead = "; OpenAI's /v1/chat/completions is" if path in _ELSEWHERE else ""
    what = {
        404: f"there is no {path} here{instead}",
        405: f"{request.method} is not for this route",
    }
    told = ApiError(error.status_code, what.get(error.status_code, error.detail))
    response = _response(told, path)
    response.headers.update(error.headers or {})  # what a route allows
    return response


async def _answer_defect(request: Request, defect: Exception) -> Response:
    """Starlette raises it again behind us, so that it is logged."""
    error = ApiError(
        500, "the server has a defect; its log says more", kind="server_error", retry=False
    )
    return _response(error, request.scope["path"])


def _response(error: ApiError, path: str) -> Response:
    """The answer that says what is wrong, in the form that clients of that path read."""
    if path.startswith(_OLLAMAS):
        return error.response(ollama_answers.OllamaError(error.message))
    is_message = path == messages_form.PATH or path.startswith(f"{messages_form.PATH}/")
    return error.response(messages_form.error_of(error) if is_message else None)
