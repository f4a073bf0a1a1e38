"""What each address answers. `app.py` says who may ask, and turns an ApiError into its answer."""

from __future__ import annotations

import asyncio
import logging
import reprlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from hypocenter.messages import Ask, Failed, ServedModel, Told
from hypocenter.package import version
from hypocenter.server.answers import AnswerTimings, ChoiceState, RequestState
from hypocenter.server.api_error import ApiError, error_of, json_response
from hypocenter.server.bodies.chat_fields import messages_of, read_chat
from hypocenter.server.bodies.sampling_fields import chat_params, completion_params
from hypocenter.server.fields import ChatBody, CompletionBody, num_choices, prompts_of, read_body
from hypocenter.server.forms import AnswerForm, ChatForm, CompletionForm
from hypocenter.server.generation import AskedAnswer
from hypocenter.server.inquiry import Inquiry, new_name
from hypocenter.server.metrics import Metrics
from hypocenter.server.supervisor import Supervisor

log = logging.getLogger("hypocenter.server")
_Result = TypeVar("_Result")
#: A step that takes longer than this is no sign of health; the first ones compile.
STEP_SECONDS = 30.0
#: Ended requests that are remembered, for who asks after them.
_MAX_REMEMBERED = 1000
_SSE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_MAX_SALT_CHARS = 256
#: So many names of fields that are passed over are told of in the log.
_MAX_TOLD = 64


@dataclass
class Service:
    """All that routes share."""

    supervisor: Supervisor
    metrics: Metrics
    names: tuple[str, ...]
    model_path: str
    max_body_bytes: int
    max_open: int
    bundles: Path | None
    started: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    open: dict[str, Inquiry] = field(default_factory=dict)
    #: As JSON, which takes half the memory, and that in one piece.
    ended: OrderedDict[str, msgspec.Raw] = field(default_factory=OrderedDict)
    #: Fields of which the log has told that they are passed over.
    told_of: set[str] = field(default_factory=set)

    @property
    def facts(self) -> ServedModel:
        facts = self.supervisor.facts
        assert facts is not None, "the server answers once a worker was ready"
        return facts

    def require_model(self, name: str) -> str:
        """The name that answers bear. Raises ApiError for one that is not served."""
        if not name or name in self.names:
            return name or self.names[0]
        raise ApiError(
            404,
            f"the model {name[:200]!r} is not served here; name one of: {', '.join(self.names)}",
            code="model_not_found",
            param="model",
        )

    @property
    def num_open(self) -> int:
        """Answers that are being made, or that their clients have not taken yet."""
        return sum(len(inquiry.choices) for inquiry in self.open.values())

    def require_room(self, num_more: int) -> None:
        """Raises ApiError when so many more generations are too many, or nobody could run them."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", kind="unavailable_error")
        if self.supervisor.has_given_up:
            raise ApiError(503, "no worker can be started", kind="unavailable_error")
        num_open = self.num_open
        if num_open + num_more > self.max_open:
            self.metrics.count("refused")
            down = not self.supervisor.is_ready
            raise ApiError(
                503 if down else 429,
                f"{num_open} answers are being made or were not taken yet; {num_more} more were "
                f"asked for, but at most {self.max_open} may be open; try again in a moment",
                kind="unavailable_error" if down else "rate_limit_error",
                code="queue_full",
                retry=True,
            )

    def tell_of_ignored(self, names: Sequence[str]) -> None:
        """Say once in the log which fields are passed over; a stranger chooses their names."""
        new = [name for name in names if name not in self.told_of][: _MAX_TOLD - len(self.told_of)]
        self.told_of.update(new)
        if new:
            shown = ", ".join(reprlib.repr(name) for name in new)
            log.warning("requests have fields that are passed over: %s", shown)

    def remember(self, inquiry: Inquiry, status: str) -> None:
        """Note how a request ended."""
        self.open.pop(inquiry.name, None)
        self.ended[inquiry.name] = msgspec.Raw(msgspec.json.encode(describe(inquiry, status)))
        while len(self.ended) > _MAX_REMEMBERED:
            self.ended.popitem(last=False)


def describe(inquiry: Inquiry, status: str) -> RequestState:
    """What is told of a request."""
    return RequestState(
        id=inquiry.name,
        created=inquiry.created,
        status=status,
        usage=inquiry.usage(),
        choices=[
            ChoiceState(choice.index, choice.finish_reason, choice.generation.num_resumed)
            for choice in inquiry.choices
        ],
    )


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


# -- answers --------------------------------------------------------------------------------------


async def complete(request: Request) -> Response:
    """POST /v1/completions"""
    service = service_of(request)
    body, unknown = read_body(await body_of(request), CompletionBody)
    model = service.require_model(body.model)
    prompts = prompts_of(body, service.facts)
    params = completion_params(body)
    inquiry = _inquire(service, "cmpl", list(prompts), params, body)
    echoed = await _texts(service, prompts) if body.echo else None
    form = CompletionForm(inquiry, model, echoed)
    return await _respond(request, service, inquiry, form, body, unknown)


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions"""
    service = service_of(request)
    body, unknown = read_body(await body_of(request), ChatBody)
    model = service.require_model(body.model)
    if not body.messages:
        raise ApiError(400, "messages is empty; give at least one", param="messages")
    params = chat_params(body)
    asked = read_chat(body, service.facts.chat_template)
    messages = [messages_of(body.messages)]
    inquiry = _inquire(service, "chatcmpl", messages, params, body, asked)
    form = ChatForm(inquiry, model, asked.echoed)
    return await _respond(request, service, inquiry, form, body, [*unknown, *asked.ignored])


def _inquire(
    service: Service,
    prefix: str,
    prompts: list[Any],
    params: Any,
    body: CompletionBody | ChatBody,
    asked: AskedAnswer | None = None,
) -> Inquiry:
    salt = body.cache_salt or ""
    if len(salt) > _MAX_SALT_CHARS:
        raise ApiError(
            400, f"cache_salt has more than {_MAX_SALT_CHARS} characters", param="cache_salt"
        )
    num = num_choices(body)
    if len(prompts) * num > service.max_open:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with n {num} ask for {len(prompts) * num} answers, but at "
            f"most {service.max_open} may be open; ask for fewer at once",
            param="n",
        )
    service.require_room(len(prompts) * num)
    name, supervisor = new_name(prefix), service.supervisor
    return Inquiry(supervisor, name, prompts, params, num, salt, asked)


async def _respond(
    request: Request,
    service: Service,
    inquiry: Inquiry,
    form: AnswerForm,
    body: CompletionBody | ChatBody,
    unknown: list[str],
) -> Response:
    """Run it: whole, or in pieces once its prompt was accepted."""
    # Clients choose these names: nothing in them ends a header, or is what none may hold.
    named = ", ".join(unknown).encode("unicode_escape")[:500].decode().strip()
    headers = {"x-ignored-fields": named} if unknown else {}
    service.tell_of_ignored(unknown)
    service.open[inquiry.name] = inquiry
    wants_usage = bool(body.stream_options and body.stream_options.include_usage)
    try:
        if not body.stream:
            return await until_left(request, _answer_whole(service, inquiry, form, headers))
        await until_left(request, inquiry.accept())
    except BaseException as error:
        _abandon(service, inquiry, error)
        raise
    lines = _stream(service, inquiry, form, wants_usage=wants_usage)
    return StreamingResponse(lines, headers={**_SSE, **headers}, media_type="text/event-stream")


async def _answer_whole(
    service: Service, inquiry: Inquiry, form: AnswerForm, headers: dict[str, str]
) -> Response:
    await inquiry.accept()
    async for news in inquiry.pieces():
        if news is not None and news[1].ending:
            _count(service, inquiry, news[0].index)
    service.remember(inquiry, "completed")
    return json_response(form.answer(_timings(inquiry)), headers=headers)


async def _stream(
    service: Service, inquiry: Inquiry, form: AnswerForm, *, wants_usage: bool
) -> AsyncIterator[bytes]:
    """The lines of a stream; an error within it is sent, and never just its end."""
    try:
        for choice in inquiry.choices:
            if (opening := form.opening(choice)) is not None:
                yield _line(opening)
        begun: set[int] = set()
        async for news in inquiry.pieces():
            if news is None:
                yield b": still here\n\n"
                continue
            choice, piece = news
            is_first = choice.index not in begun
            begun.add(choice.index)
            # A completion's last piece says itself how it ended.
            closing = form if piece.ending and isinstance(form, ChatForm) else None
            says = piece.text or piece.reasoning or piece.calls or piece.logprobs
            if says or is_first or closing is None:
                yield _line(form.chunk(choice, piece, is_first=is_first))
            if closing is not None:
                yield _line(closing.closing(choice))
            if piece.ending:
                _count(service, inquiry, choice.index)
        if wants_usage:
            yield _line(form.usage_chunk(_timings(inquiry)))
        service.remember(inquiry, "completed")
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        _abandon(service, inquiry, error)
        yield _line(error.body)
    except BaseException as error:  # the client left, most often
        _abandon(service, inquiry, error)
        raise


def _abandon(service: Service, inquiry: Inquiry, error: BaseException) -> None:
    inquiry.cancel()
    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit | ClientLeft)
    if is_cancelled:
        service.metrics.count("cancelled")
    service.remember(inquiry, "cancelled" if is_cancelled else "failed")


def _count(service: Service, inquiry: Inquiry, index: int) -> None:
    is_first = index % inquiry.num_choices == 0
    service.metrics.count_end(inquiry.choices[index], is_first_of_prompt=is_first)


def _timings(inquiry: Inquiry) -> AnswerTimings:
    """Of the first choice, as the engine measured it."""
    choice = inquiry.choices[0]
    ending = choice.ending
    assert ending is not None, "all choices have ended"
    num_prompt = len(choice.generation.prompt_ids or ()) - ending.num_cached_tokens
    num_out = len(choice.generation.output_ids)
    return AnswerTimings(
        cache_n=ending.num_cached_tokens,
        prompt_n=num_prompt,
        prompt_ms=ending.prompt_seconds * 1e3,
        prompt_per_second=_rate(num_prompt, ending.prompt_seconds),
        predicted_n=num_out,
        predicted_ms=ending.generation_seconds * 1e3,
        predicted_per_second=_rate(num_out - 1, ending.generation_seconds),
        resumed=choice.generation.num_resumed,
    )


def _rate(num: int, seconds: float) -> float:
    return num / seconds if seconds > 0 and num > 0 else 0.0


def _line(value: dict[str, Any] | msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


# -- what is behind every route -------------------------------------------------------------------


class ClientLeft(Exception):
    """The connection is closed; there is nobody to answer."""


async def body_of(request: Request) -> bytes:
    """The body, within its limit. Raises ApiError, status 413, and ClientLeft."""
    limit = service_of(request).max_body_bytes
    told = request.headers.get("content-length", "0")
    too_long = ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
    if int(told) > limit:  # h11 has seen to it that it is a number
        raise too_long
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > limit:
                raise too_long
    except ClientDisconnect as error:
        raise ClientLeft from error
    return bytes(data)


async def until_left(request: Request, work: Awaitable[_Result]) -> _Result:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientLeft then."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(leave())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def ask_worker(service: Service, **question: Any) -> Told:
    """The worker's answer. Raises ApiError."""
    answer = await service.supervisor.ask(Ask(service.supervisor.next_id(), **question))
    if isinstance(answer, Failed):
        raise error_of(answer)
    return answer


async def _texts(service: Service, prompts: list[str | tuple[int, ...]]) -> list[str]:
    """What each prompt says, for who wants it repeated."""
    texts = []
    for prompt in prompts:
        if isinstance(prompt, str):
            texts.append(prompt)
        else:
            told = await ask_worker(service, token_ids=prompt)
            texts.append(told.text)
    return texts


def build_info() -> str:
    return f"hypocenter-{version()}"
