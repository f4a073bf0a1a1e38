"""How coroutines wait for requests that a Driver steps; holds no model and no thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from hypocenter.base.errors import UsageError
from hypocenter.base.results import Completion, Delta
from hypocenter.engine.driver import Driver
from hypocenter.engine.request import Request


async def complete(driver: Driver, requests: Sequence[Request]) -> list[Completion]:
    """Submit requests and wait until all have ended; in order.

    Raises the error of the first that failed. Cancelled itself, it cancels them.
    """
    ended = asyncio.Event()
    try:
        for request in requests:
            _submit(driver, request, ended, at_end_only=True)
        while not all(request.done for request in requests):
            await ended.wait()
            ended.clear()
    finally:
        for request in requests:
            driver.cancel(request)
    return [driver.engine.result(request) for request in requests]


class AsyncStream:
    """The pieces of one answer as they come: `async for piece in stream`, in one coroutine.

    `make` gives the request; it is called in a thread when the first piece is asked for. The
    request is cancelled when the coroutine that waits for a piece is, by `aclose`, and when the
    stream is let go. So whoever leaves the loop early and keeps the stream calls `aclose`, or takes
    `contextlib.aclosing`.
    """

    def __init__(self, driver: Driver, make: Callable[[], Request]) -> None:
        self._driver = driver
        self._make = make
        self._request: Request | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._is_read = False  # some coroutine waits for a piece
        self._is_closed = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        """The next piece. Raises what the request raises, and UsageError for a second reader."""
        if self._is_closed:
            raise StopAsyncIteration
        self._loop = self._loop or asyncio.get_running_loop()
        if self._loop is not asyncio.get_running_loop():
            raise UsageError(
                "this stream began in another event loop, and goes on in none; ask for a new one"
            )
        if self._is_read:
            raise UsageError(
                "another coroutine reads this stream; take a stream of its own for each"
            )
        self._is_read = True
        try:
            return await self._next(self._request or await self._begin())
        except asyncio.CancelledError:
            self._cancel()
            raise
        finally:
            self._is_read = False

    async def _begin(self) -> Request:
        request = await asyncio.to_thread(self._make)
        if self._is_closed:  # meanwhile
            raise StopAsyncIteration
        _submit(self._driver, request, self._news)
        self._request = request
        return request

    async def _next(self, request: Request) -> Delta:
        while True:
            done = request.done  # read first: what came before it lies in `deltas` by now
            if request.deltas:
                return request.deltas.popleft()
            if done:
                self._driver.engine.result(request)  # raises the request's error
                raise StopAsyncIteration
            await self._news.wait()
            self._news.clear()

    @property
    def completion(self) -> Completion:
        """The whole answer. Raises UsageError before its end, and the request's own error."""
        if self._request is None or not self._request.done:
            raise UsageError("the answer has not ended; take its pieces first")
        return self._driver.engine.result(self._request)

    async def aclose(self) -> None:
        """Cancel what still runs; no further piece comes."""
        self._is_closed = True
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if self._request is not None:
            self._driver.cancel(self._request)


def _submit(
    driver: Driver, request: Request, news: asyncio.Event, *, at_end_only: bool = False
) -> None:
    """Submit a request that sets `news` in the running loop after each piece, or at its end."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        if loop.is_closed():  # nobody waits any more
            driver.cancel(request)
        elif request.done or not at_end_only:
            with contextlib.suppress(RuntimeError):  # it was closed this moment
                loop.call_soon_threadsafe(news.set)

    driver.submit(request, tell)
