"""Which tokens of which requests run in the next step; runs nothing itself.

Requests are served in the order in which they came. So a step takes one token of every request
that generates, then a chunk of the prompt that is being read, and then lets waiting requests in
(a later request only starts when the earlier ones have all their prompt in the step). When the
cache is full, the newest running request gives its blocks back and starts anew later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypocenter.engine.batch import Chunk
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.request import Request, State
from hypocenter.errors import IntegrityError, OutOfBlocks


class Scheduler:
    """The queue of waiting requests and the list of running ones. Not thread-safe."""

    def __init__(self, cache: KVCache, *, max_batch_tokens: int, max_batch_requests: int) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_requests = max_batch_requests
        # Both in order of arrival, and all that run came before all that wait.
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request behind all others."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it stands, and free its blocks."""
        self.cache.remove(request.id)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, with room in the cache for each; at most one a request.

        A request that cannot get a single block although it runs alone fails with OutOfBlocks.
        """
        chunks: list[Chunk] = []

        # who runs; taking room for the one may preempt those behind it, never those before it
        for request in self.running[:]:
            if request.state is State.RUNNING:
                self._take(request, chunks)

        # who waits, without overtaking
        while self.waiting and self._may_enter(self.waiting[0], chunks):
            request = self.waiting.popleft()
            request.state = State.RUNNING
            self.running.append(request)
            self._take(request, chunks)
        return chunks

    def schedule_ahead(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks of the step after `chunks`, which runs now; empty where that must be awaited.

        It can be told where each of them draws a token, no request waits, and the cache has room.
        """
        requests = [chunk.request for chunk in chunks]
        if (
            self.waiting
            or not all(chunk.samples and chunk.request.goes_on for chunk in chunks)
            or self._num_blocks_for_each(requests) > self.cache.num_free_blocks
        ):
            return []
        for request in requests:
            self.cache.append(request.id, 1)
        return [
            Chunk(chunk.request, chunk.stop, chunk.stop + 1, samples=True, ids_on_device=True)
            for chunk in chunks
        ]

    def _num_blocks_for_each(self, requests: list[Request]) -> int:
        """Blocks that one more token of each request takes."""
        return sum(self.cache.num_blocks_to_append(request.id, 1) for request in requests)

    def preempt(self, request: Request) -> None:
        """Take the blocks of a running request; it starts anew before all that wait."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.cache.remove(request.id)
        request.restart()

    def check_integrity(self, ahead: Sequence[Chunk] = ()) -> None:
        """Cache and requests agree, between steps; raises IntegrityError where they do not.

        Chunks that were launched `ahead` have room that their requests do not count yet.
        """
        self.cache.check_integrity()
        stops = {chunk.request.id: chunk.stop for chunk in ahead}
        for request in [*self.running, *self.waiting]:
            held = self.cache.num_tokens(request.id)
            if held != stops.get(request.id, request.num_computed):
                raise IntegrityError(
                    f"scheduler: request {request.id} has computed {request.num_computed} tokens, "
                    f"but has room for {held}"
                )
        ids = [request.id for request in [*self.running, *self.waiting]]
        if ids != sorted(set(ids)):
            raise IntegrityError(f"scheduler: requests are out of order or doubled: {ids}")
        if owners := self.cache.owners() - {request.id for request in self.running}:
            raise IntegrityError(f"scheduler: requests {sorted(owners)} own blocks and do not run")

    def _take(self, request: Request, chunks: list[Chunk]) -> None:
        """Append a chunk of the request, as large as budget and cache allow."""
        wanted = min(request.num_pending, self._num_tokens_left(chunks))
        if wanted == 0:
            return
        num_tokens = self._make_room(request, wanted)
        if num_tokens > 0:
            self.cache.append(request.id, num_tokens)
            request.mark_started()
            chunks.append(Chunk.next_of(request, num_tokens))
        elif self.running == [request]:
            self.remove(request)
            request.fail(OutOfBlocks(1, 0, self.cache.num_blocks))

    def _make_room(self, request: Request, wanted: int) -> int:
        """How many of the tokens wanted have room, once newer requests gave theirs up."""
        while self.cache.num_tokens_that_fit(request.id) < wanted:
            newest = self.running[-1]
            if newest is request:
                break
            self.preempt(newest)
        return min(wanted, self.cache.num_tokens_that_fit(request.id))

    def _may_enter(self, request: Request, chunks: list[Chunk]) -> bool:
        """Whether there is room for all of the request's tokens, and some for the others to grow.

        Without the spare blocks it would be thrown out in the very next step.
        """
        if len(self.running) >= self.max_batch_requests or self._num_tokens_left(chunks) == 0:
            return False
        needed = self.cache.num_blocks_to_append(request.id, request.num_pending)
        return not self.running or needed + len(self.running) <= self.cache.num_free_blocks

    def _num_tokens_left(self, chunks: list[Chunk]) -> int:
        return self.max_batch_tokens - sum(chunk.num_tokens for chunk in chunks)
