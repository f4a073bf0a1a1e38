"""The Ray Serve application: an entrance that speaks HTTP, and replicas that have the model.

    serve run hypocenter.ray.application:application model=model.gguf

`application` has the settings. The entrance passes requests on, and when a replica is lost with an
open stream another one goes on with it. Whom a key lets in, each replica's server decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hypocenter.base.errors import MissingPackage, UsageError

try:
    from ray import serve
except ImportError as error:
    raise MissingPackage("hypocenter.ray.application", "ray") from error
import msgspec
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hypocenter.ray.broken_streams import (
    AnswerStream,
    as_object,
    is_of_lost_server,
    prefix_of,
    with_seed,
)
from hypocenter.ray.own_server import OwnServer, ServerEnded
from hypocenter.ray.prefix_router import PrefixRouter

#: Replicas that may be lost in a row before an answer is given up.
_MAX_LOST = 5
_PAUSE_SECONDS = 0.5
#: Headers that are passed on, to the server and back.
_TO_SERVER = ("authorization", "x-api-key", "content-type", "x-request-id", "traceparent")
_TO_CLIENT = ("content-type", "x-ignored-fields", "x-should-retry", "retry-after", "x-request-id")
#: Said by a server that ends, before anything of an answer was sent.
_GOING = 503
_LOST = (RayError, ServerEnded)


class Head(msgspec.Struct, array_like=True):
    """The beginning of an answer, as it goes from a replica to the entrance."""

    status: int
    headers: dict[str, str]


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """What `serve run` is given as KEY=VALUE. `options` are words of `hypo serve`.

    A replica takes so many `gpus` and `cpus` of a machine. There are `min_replicas` of them, and
    up to `max_replicas` while each has more than `open_requests` open for `upscale_seconds`; after
    `downscale_seconds` with fewer one goes. One that is to go has
    `drain_seconds` for what is open there.
    """

    model: str
    options: str = ""
    gpus: float = 0
    cpus: float = 1
    min_replicas: int = 1
    max_replicas: int = 1
    open_requests: int = 16
    upscale_seconds: float = 30.0
    downscale_seconds: float = 600.0
    drain_seconds: float = 120.0
    entrances: int = 1


@serve.deployment
class ModelReplica:
    """One server with the model, on the machine where Ray puts it."""

    def __init__(self, settings: Settings) -> None:
        self._seconds = settings.drain_seconds
        self._server = OwnServer(settings.model, settings.options.split())
        self._ready = asyncio.get_running_loop().create_task(self._server.wait_ready())

    async def ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes, prefix: bytes = b""
    ) -> AsyncIterator[bytes]:
        """The `Head` of the answer, then its parts. `prefix` is for the choice of a replica."""
        await asyncio.shield(self._ready)
        async for part in self._server.ask(method, path, headers, body):
            yield part if isinstance(part, bytes) else msgspec.msgpack.encode(Head(*part))

    async def server_pid(self) -> int:
        """The process of its server."""
        return self._server.pid

    async def check_health(self) -> None:
        """Raises what is wrong; Ray then starts another replica."""
        if self._ready.done():
            await self._ready
            async with asyncio.timeout(20):
                await self._server.status_of("/version")  # a model that loads again is no fault

    async def __del__(self) -> None:
        await self._server.stop(self._seconds)


@serve.deployment
class Entrance:
    """Speaks HTTP: it passes requests on, and mends streams that break off."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._ask = replicas.options(stream=True).ask

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        headers = {name: request.headers[name] for name in _TO_SERVER if name in request.headers}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        asked = as_object(body) if request.method == "POST" else None
        if asked is not None and asked.get("stream") is True:
            stream = AnswerStream(asked)
            exchange = _Exchange(self._ask, request.method, path, headers, prefix_of(asked), stream)
        else:
            if asked is not None and ("prompt" in asked or "messages" in asked):
                body = msgspec.json.encode(with_seed(asked))
            prefix = b"" if asked is None else prefix_of(asked)
            exchange = _Exchange(self._ask, request.method, path, headers, prefix, None, body)
        head, parts = await exchange.begin()
        shown = {name: head.headers[name] for name in _TO_CLIENT if name in head.headers}
        return StreamingResponse(parts, head.status, shown)


class _Exchange:
    """One request of a client, with as many replicas as it takes."""

    def __init__(
        self,
        ask: Any,
        method: str,
        path: str,
        headers: dict[str, str],
        prefix: bytes,
        stream: AnswerStream | None,
        body: bytes = b"",
    ) -> None:
        self._call = (method, path, headers)
        self._ask, self._prefix, self._stream, self._body = ask, prefix, stream, body
        self._num_lost = 0

    async def begin(self) -> tuple[Head, AsyncIterator[bytes]]:
        """The head of the answer, and the rest of it. Raises what a replica was lost by."""
        while True:
            try:
                head, parts = await self._try()
                if self._stream is not None and head.status == 200:
                    return head, self._mend(self._stream, parts)
                whole = b"".join([part async for part in parts])
            except _LOST as error:
                await self._note_lost(error)
                continue
            is_going = head.status == _GOING and self._call[1].startswith("/v1/")
            if not is_going or self._num_lost >= _MAX_LOST:
                return head, _only(whole)
            self._num_lost += 1
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _try(self) -> tuple[Head, AsyncIterator[bytes]]:
        """Ask a replica; Ray chooses it by the prefix."""
        body = self._body if self._stream is None else self._stream.body()
        parts = self._ask.remote(*self._call, body, prefix=self._prefix)
        first = await anext(aiter(parts))
        return msgspec.msgpack.decode(first, type=Head), parts

    async def _mend(
        self, stream: AnswerStream, parts: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """The events of a stream, from one replica after the other."""
        while True:
            try:
                async for lines in parts:
                    if stream.can_go_on and is_of_lost_server(lines):
                        raise ServerEnded("its server ends")
                    self._num_lost = 0  # it gets on
                    yield stream.take(lines)
                if stream.is_over:
                    return
                raise ServerEnded("the stream ended without its end")
            except _LOST as error:
                if not stream.can_go_on:
                    yield _error_event("the server of this answer was lost")
                    return
                await self._note_lost(error)
            try:
                head, parts = await self._try()
                if head.status == _GOING:
                    raise ServerEnded("its server ends")
            except _LOST as error:
                await self._note_lost(error)
                parts = _only(b"")
                continue
            if head.status != 200:
                said = b"".join([part async for part in parts])
                yield _error_event(f"the answer could not be gone on with: {said[:500]!r}")
                return

    async def _note_lost(self, error: BaseException) -> None:
        """Raises it once too many replicas were lost in a row."""
        self._num_lost += 1
        if self._num_lost > _MAX_LOST:
            raise error
        await asyncio.sleep(_PAUSE_SECONDS)


async def _only(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data


def _error_event(message: str) -> bytes:
    error = {"message": message, "type": "server_error", "param": None, "code": "replica_lost"}
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


def application(given: dict[str, str]) -> Application:
    """The application with these settings, as `serve run` hands them over. Raises UsageError."""
    try:
        settings = msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise UsageError(f"hypocenter.ray: {error}; settings are {known}") from error
    if not 1 <= settings.min_replicas <= settings.max_replicas:
        raise UsageError(
            f"min_replicas is {settings.min_replicas}, but must be from 1 to max_replicas, "
            f"{settings.max_replicas}"
        )
    replicas = ModelReplica.options(  # type: ignore[attr-defined] # what Ray makes of it
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.open_requests,
            upscale_delay_s=settings.upscale_seconds,
            downscale_delay_s=settings.downscale_seconds,
        ),
        max_ongoing_requests=64 * settings.open_requests,  # those that wait are the server's
        graceful_shutdown_timeout_s=settings.drain_seconds + 20,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    ).bind(settings)
    return Entrance.options(  # type: ignore[attr-defined] # what Ray makes of it
        num_replicas=settings.entrances,
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    ).bind(replicas)
