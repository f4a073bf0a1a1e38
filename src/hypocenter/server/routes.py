"""What each address answers. `app.py` says who may ask, and turns an ApiError into its answer."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import reprlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from hypocenter.base.package import version
from hypocenter.server.answers import AnswerTimings, ChoiceState, RequestState
from hypocenter.server.api_error import ApiError, error_of
from hypocenter.server.bodies.orders import read_chat, read_completion, served_name
from hypocenter.server.canary import Canary
from hypocenter.server.dialects.response_store import ResponseStore
from hypocenter.server.faults import FaultKeeper
from hypocenter.server.fleet.slot_memory import SlotMemory
from hypocenter.server.forms import AnswerForm, ChatForm, CompletionForm
from hypocenter.server.generation import NOBODY, AnswerOrder, Manner
from hypocenter.server.hosting.adapters import ServedAdapters, no_adapters
from hypocenter.server.inquiry import PING_SECONDS, Inquiry, new_name
from hypocenter.server.intake.bodies import Bodies, HeldBody
from hypocenter.server.intake.json_bounds import BodyShape
from hypocenter.server.intake.kept_answer import PACKED_TIMES
from hypocenter.server.metrics import Metrics
from hypocenter.server.operating.traces import Traces, trace_headers
from hypocenter.server.pages.links import ReportLinks
from hypocenter.server.supervisor import Supervisor
from hypocenter.wire.messages import Ask, Failed, ServedModel, Told

log = logging.getLogger("hypocenter.server")
_Result = TypeVar("_Result")
_Order = TypeVar("_Order")
#: A step that takes longer than this is no sign of health; the first ones compile.
STEP_SECONDS = 30.0
#: Ended requests that are remembered, for who asks after them.
_MAX_REMEMBERED = 1000
_SSE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
#: What is kept of an answer that is encoded between two others' turns: some milliseconds.
_FEW_BYTES = 512 << 10
#: So many names of fields that are passed over are told of in the log.
_MAX_TOLD = 64


@dataclass
class Common:
    """What is so of a whole server, however many models it has."""

    api_keys: tuple[str, ...] = ()
    is_draining: bool = False
    #: Requests for answers, in all.
    num_asked: int = 0


class ModelChoice(Protocol):
    """Which of several models a request is for."""

    async def choose(self, request: Request, name: str) -> Service:
        """That of a model by one of its names, loaded; it stays so until the request is answered.

        Raises ApiError for a name that is unknown, and for a model that cannot be loaded.
        """
        ...

    def require_loaded(self, name: str) -> Service:
        """That of a model that is loaded already. Raises ApiError."""
        ...


@dataclass
class Service:
    """All that routes share of one model; `beside` makes that of another model of the server."""

    supervisor: Supervisor
    metrics: Metrics
    names: tuple[str, ...]
    model_path: str
    max_body_bytes: int
    max_open: int
    bodies: Bodies
    faults: FaultKeeper
    common: Common = field(default_factory=Common)
    #: Whose last word `/health` tells; None: none is asked.
    canary: Canary | None = None
    adapters: ServedAdapters = field(default_factory=no_adapters)
    #: People may look at it in a browser.
    has_pages: bool = True
    started: int = field(default_factory=lambda: int(time.time()))
    #: Prompts that clients may save and restore; None: none are.
    slots: SlotMemory | None = None
    #: Where requests are told of once they have ended; None: nowhere.
    traces: Traces | None = None
    open: dict[str, Inquiry] = field(default_factory=dict)
    #: As JSON, which takes half the memory, and that in one piece.
    ended: OrderedDict[str, msgspec.Raw] = field(default_factory=OrderedDict)
    #: Of requests that are open or remembered: which client asked.
    clients: dict[str, str] = field(default_factory=dict)
    responses: ResponseStore = field(default_factory=ResponseStore)
    links: ReportLinks = field(default_factory=lambda: ReportLinks(secrets.token_bytes(32)))
    #: Fields of which the log has told that they are passed over.
    told_of: set[str] = field(default_factory=set)

    @property
    def facts(self) -> ServedModel:
        """What is told of the model. Raises ApiError, status 503, where it was unloaded by then."""
        facts = self.supervisor.facts
        if facts is None:
            message = f"the model {self.names[0]} was unloaded meanwhile; try again"
            raise ApiError(503, message, kind="unavailable_error", retry=True)
        return facts

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Those that are let in; empty: everybody is."""
        return self.common.api_keys

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is taken, since the server ends."""
        return self.common.is_draining

    def set_keys(self, keys: tuple[str, ...]) -> None:
        """From now on these are let in, and no others."""
        self.common.api_keys = keys

    @property
    def asked_names(self) -> tuple[str, ...]:
        """What a request may name: the model, or an adapter of it."""
        return (*self.names, *self.adapters.names)

    def beside(
        self, supervisor: Supervisor, metrics: Metrics, names: tuple[str, ...], path: str, most: int
    ) -> Service:
        """That of another model of this server, of which `most` answers may be open."""
        return replace(
            self,
            supervisor=supervisor,
            metrics=metrics,
            names=names,
            model_path=path,
            max_open=most,
            canary=None,
            adapters=no_adapters(),
        )

    def require_model(self, name: str) -> str:
        """The name that answers bear. Raises ApiError for one that is not served."""
        return served_name(name, self.asked_names)

    @property
    def num_open(self) -> int:
        """Answers that are being made, or that their clients have not taken yet; questions, too.

        What nobody waits for any more counts until readers and worker are through with it.
        """
        here = self.supervisor
        own = [inquiry for inquiry in self.open.values() if inquiry.supervisor is here]
        asked = sum(len(inquiry.choices) for inquiry in own)
        return asked + self.supervisor.num_left + self.supervisor.num_questions

    def room_for(self, client: str, num_more: int) -> int:
        """How many answers of this model may be open, with so many more of this client's.

        Where there are keys a quarter is kept for those who have less than their share of it.
        """
        if not self.api_keys:
            return self.max_open
        held = collections.Counter({client: num_more})
        for inquiry in self.open.values():
            if inquiry.supervisor is self.supervisor:
                held[inquiry.client] += len(inquiry.choices)
        kept = self.max_open // 4
        return self.max_open - (kept if held[client] > max(kept // len(held), 1) else 0)

    def require_room(self, num_more: int, client: str) -> None:
        """Raises ApiError when so many more generations are too many, or nobody could run them."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", kind="unavailable_error")
        if self.supervisor.has_given_up:
            raise ApiError(503, "no worker can be started", kind="unavailable_error")
        num_open, most = self.num_open, self.room_for(client, num_more)
        if num_open + num_more > most:
            self.metrics.count("refused")
            down = not self.supervisor.is_ready
            raise ApiError(
                503 if down else 429,
                f"{num_open} answers are being made or were not taken yet; {num_more} more were "
                f"asked for, but at most {most} may be open; try again in a moment",
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
        inquiry.outcome = status
        inquiry.form = None  # the form has it, and both would stay for long
        if self.slots is not None and status == "completed":
            self.slots.note(inquiry.choices[0].generation)
        if self.traces is not None:
            self.traces.note(inquiry, status)
        self.ended[inquiry.name] = msgspec.Raw(msgspec.json.encode(describe(inquiry, status)))
        while len(self.ended) > _MAX_REMEMBERED:
            name, _ = self.ended.popitem(last=False)
            self.clients.pop(name, None)

    def is_own(self, request: Request, name: str) -> bool:
        """Whether who asks may see that request: its own, or any with the admin key."""
        return request.state.may_see_all or self.clients.get(name) == client_of(request)


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
    """That of the model that the request is for, as far as that is known."""
    chosen = request.scope.get("state", {}).get("service")
    service = chosen or request.app.state.service
    assert isinstance(service, Service)
    return service


def client_of(request: Request) -> str:
    """Who asks: the digest of a key, or an address where there are no keys."""
    return str(request.scope.get("state", {}).get("client", NOBODY))


# -- answers --------------------------------------------------------------------------------------


async def complete(request: Request) -> Response:
    """POST /v1/completions"""
    order = await order_of(request, read_completion)
    inquiry = inquire(request, "cmpl", order)
    echoed = await _texts(request, order.prompts) if order.is_echoed else None
    manner = order.manner
    form = CompletionForm(inquiry, order.model, echoed, has_ids=manner.has_ids)
    del order  # what is read need not be kept as long as the answer takes
    return await respond(request, inquiry, form, manner)


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions"""
    order = await order_of(request, read_chat)
    inquiry = inquire(request, "chatcmpl", order)
    echoed = "" if order.asked is None else order.asked.echoed
    manner = order.manner
    form = ChatForm(inquiry, order.model, echoed, has_ids=manner.has_ids)
    del order  # it may be large
    return await respond(request, inquiry, form, manner)


async def order_of(
    request: Request, read: Callable[[bytes, ServedModel, Sequence[str]], Awaitable[_Order]]
) -> _Order:
    """What the body asks for. Raises ApiError."""
    if model_choice_of(request) is None:  # else the body says whose room it is
        service_of(request).require_room(1, client_of(request))
    data = await body_of(request)
    service = service_of(request)
    async with service.bodies.decoding(len(data)):
        return await read(data, service.facts, service.asked_names)


def inquire(request: Request, prefix: str, order: AnswerOrder) -> Inquiry:
    """The request of this client for that. Raises ApiError where there is no room for it, or the
    model writes nothing."""
    service, client = service_of(request), client_of(request)
    if service.facts.pooling and not order.embeds:
        gives = "scores of documents" if service.facts.pooling == "rank" else "vectors of texts"
        route = "/v1/rerank" if service.facts.pooling == "rank" else "/v1/embeddings"
        message = f"{order.model} gives {gives} and writes none; ask it at {route}"
        raise ApiError(400, message, param="model")
    if order.num_answers > service.max_open:
        raise ApiError(
            400,
            f"{len(order.prompts)} prompts with n {order.num_choices} ask for {order.num_answers} "
            f"answers, but at most {service.max_open} may be open; ask for fewer at once",
            param="n",
        )
    service.require_room(order.num_answers, client)
    order = service.adapters.apply(order)
    if service.api_keys:  # nobody learns what others have in the prefix cache
        order = replace(order, cache_salt=f"{client}:{order.cache_salt}")
    held = service.bodies.of(client)  # the body's own is given back once the worker has it
    request.state.until_answered.callback(held.release)
    return Inquiry(service.supervisor, new_name(prefix), order, client=client, held=held)


async def respond(request: Request, inquiry: Inquiry, form: AnswerForm, manner: Manner) -> Response:
    """Run it: whole, or in pieces once its prompt was accepted."""
    service = service_of(request)
    headers = headers_of_ignored(service, manner.ignored)
    inquiry.form = form
    _enter(request, inquiry)
    try:
        if not manner.is_stream:
            answering = _answer_whole(service, inquiry, form, headers, request.state.body)
            return await until_left(request, answering)
        await until_left(request, inquiry.accept())
        request.state.body.release()
    except BaseException as error:
        _abandon(service, inquiry, error)
        raise
    lines = _stream(service, inquiry, form, wants_usage=manner.wants_usage)
    return StreamingResponse(lines, headers={**_SSE, **headers}, media_type=form.media_type)


def headers_of_ignored(service: Service, ignored: Sequence[str]) -> dict[str, str]:
    """The header that names fields that were passed over; the log does so once."""
    service.tell_of_ignored(ignored)
    # Clients choose these names: nothing in them ends a header, or is what none may hold.
    named = ", ".join(ignored).encode("unicode_escape")[:500].decode().strip()
    return {"x-ignored-fields": named} if ignored else {}


def _enter(request: Request, inquiry: Inquiry) -> None:
    """It is open from now on, and counts."""
    service = service_of(request)
    service.open[inquiry.name] = inquiry
    service.clients[inquiry.name] = client_of(request)
    service.common.num_asked += 1
    request.state.inquiry = inquiry
    if service.traces is not None:
        inquiry.trace_headers = trace_headers(request.headers)
    for choice in inquiry.choices:
        choice.generation.watcher = service.metrics.note


async def run_whole(request: Request, inquiry: Inquiry) -> None:
    """Run it to its end. Raises ApiError, and ClientLeft."""

    async def run() -> None:
        await inquiry.accept()
        async for _ in inquiry.pieces():
            pass

    _enter(request, inquiry)
    try:
        await until_left(request, run())
    except BaseException as error:
        _abandon(service_of(request), inquiry, error)
        raise
    service_of(request).remember(inquiry, "completed")


async def _answer_whole(
    service: Service,
    inquiry: Inquiry,
    form: AnswerForm,
    headers: dict[str, str],
    body: HeldBody,
) -> Response:
    await inquiry.accept()
    body.release()
    async for news in inquiry.pieces():
        if news is not None:
            form.note(*news)
    timings = _timings(inquiry)
    if (num_bytes := inquiry.kept.num_bytes) <= _FEW_BYTES:
        encoded = form.encode_whole(timings)
    else:
        async with service.bodies.decoding(num_bytes):
            encoded = await asyncio.to_thread(form.encode_whole, timings)
    service.remember(inquiry, "completed")
    return Response(encoded, headers=headers, media_type="application/json")


async def _stream(
    service: Service, inquiry: Inquiry, form: AnswerForm, *, wants_usage: bool
) -> AsyncIterator[bytes]:
    """The lines of a stream; an error within it is sent, and never just its end."""
    inquiry.keeps_logprobs = form.keeps_logprobs
    try:
        for line in form.begin():
            yield line
        last = time.monotonic()
        begun: set[int] = set()
        async for news in inquiry.pieces():
            lines: list[bytes] = []
            if news is not None:
                choice, piece = news
                is_first = choice.index not in begun
                begun.add(choice.index)
                told = choice.prompt_logprobs if is_first else b""
                if PACKED_TIMES * len(told) <= _FEW_BYTES:
                    lines = form.piece(choice, piece, is_first=is_first)
                else:
                    lines = await asyncio.to_thread(form.piece, choice, piece, is_first=is_first)
            if not lines and time.monotonic() - last >= PING_SECONDS:
                lines = [form.ping()]
            for line in lines:
                last = time.monotonic()
                yield line
        ending = form.end(_timings(inquiry), wants_usage=wants_usage)
        service.remember(inquiry, "completed")
        for line in ending:
            yield line
    except ApiError as error:
        _abandon(service, inquiry, error)
        yield form.failure(error)
    except BaseException as error:  # the client left, most often
        _abandon(service, inquiry, error)
        raise


def _abandon(service: Service, inquiry: Inquiry, error: BaseException) -> None:
    inquiry.cancel()  # where too much came it was already
    service.metrics.count_aborted(g for g in inquiry.cancelled if g.prompt_ids is not None)
    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit | ClientLeft)
    if is_cancelled:
        service.metrics.count("cancelled")
    service.remember(inquiry, "cancelled" if is_cancelled else "failed")


def _timings(inquiry: Inquiry) -> AnswerTimings:
    """Of the first choice, as the engine measured it."""
    choice = inquiry.choices[0]
    ending = choice.ending
    assert ending is not None, "all choices have ended"
    num_prompt = len(choice.generation.prompt_ids or ()) - ending.num_cached_tokens
    num_out = len(choice.generation.output_ids)
    drafts: dict[str, int] = {}
    if ending.num_drafted:
        drafts = {"draft_n": ending.num_drafted, "draft_n_accepted": sum(ending.accepted_at)}
    return AnswerTimings(
        **drafts,
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


# -- what is behind every route -------------------------------------------------------------------


class ClientLeft(Exception):
    """The connection is closed; there is nobody to answer."""


async def body_of(request: Request) -> bytes:
    """The body, within its limits. Where there are several models, the one that it names is loaded
    then, and `service_of` has it.

    Raises as `raw_body_of`, and ApiError for a model that cannot be had.
    """
    data = await raw_body_of(request)
    if (choice := model_choice_of(request)) is not None:
        name = await asyncio.to_thread(_name_in, data)
        request.state.service = await until_left(request, choice.choose(request, name))
    return data


async def raw_body_of(request: Request) -> bytes:
    """The body, within its limits. Raises ApiError, status 413, 429 or 400, and ClientLeft."""
    limit = service_of(request).max_body_bytes
    told = request.headers.get("content-length", "0")
    too_long = ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
    if int(told) > limit:  # h11 has seen to it that it is a number
        raise too_long
    # Parts, since an array that grows is copied again and again, and leaves holes in memory.
    parts, num_bytes, shape = list[bytes](), 0, BodyShape()
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > limit:
                raise too_long
            request.state.body.take(len(part))
            shape.add(part)
            parts.append(part)
        request.state.body.settle(shape.memory_bytes(num_bytes))
        return b"".join(parts)
    except ClientDisconnect as error:
        raise ClientLeft from error
    finally:
        parts.clear()  # an error holds this frame for as long as somebody holds the error


class _Named(msgspec.Struct):
    model: Any = ""


def _name_in(data: bytes) -> str:
    """The model that a body names; "" where it names none or is none, which is told of later."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        name = msgspec.json.decode(data, type=_Named).model
        return name if isinstance(name, str) else ""
    return ""


def model_choice_of(request: Request) -> ModelChoice | None:
    """What chooses between models; None where there is only one."""
    choice: ModelChoice | None = request.app.state.choice
    return choice


def service_by_query(request: Request) -> Service:
    """That of the model that `?model=` names, which must be loaded. Raises ApiError."""
    choice = model_choice_of(request)
    name = request.query_params.get("model", "")
    return service_of(request) if choice is None else choice.require_loaded(name)


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


async def ask_reader(request: Request, **question: Any) -> Told:
    """A reader's answer; it counts as an open request. Raises ApiError, and ClientLeft."""
    service = service_of(request)
    service.require_room(1, client_of(request))
    asked = Ask(service.supervisor.next_id(), **question)
    answer = await until_left(request, service.supervisor.ask(asked, client_of(request)))
    if isinstance(answer, Failed):
        raise error_of(answer)
    return answer


async def _texts(request: Request, prompts: Sequence[str | tuple[int, ...]]) -> list[str]:
    """What each prompt says, for who wants it repeated."""
    texts = []
    for prompt in prompts:
        if isinstance(prompt, str):
            texts.append(prompt)
        else:
            told = await ask_reader(request, token_ids=prompt)
            texts.append(told.text)
    return texts


def build_info() -> str:
    return f"hypocenter-{version()}"
