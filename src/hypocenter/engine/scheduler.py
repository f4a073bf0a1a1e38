"""Which tokens of which requests run in the next step; runs nothing itself.

Requests are let in in the order in which they came, as soon as the cache has room for all of
their tokens. A step takes one token of every request that generates, and then chunks of prompts in
the same order; next to a prompt of many steps there is room for short ones. When the cache is full,
the newest running request gives its blocks back and starts anew later.

What the cache keeps of a request's first tokens, the request reads instead of computing it: when it
enters, and before each step in which it would read more of its prompt. So of several requests that
come together and begin alike, the first computes that beginning, and the others follow it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypocenter.base.errors import IntegrityError
from hypocenter.engine.batch import Chunk
from hypocenter.engine.drafting.draft_model import DraftModel
from hypocenter.engine.drafting.drafter import StepLoad
from hypocenter.engine.drafting.tried import with_drafts
from hypocenter.engine.form_turns import FormTurns
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.pace import StepPace
from hypocenter.engine.request import Request, State

#: A prompt's last tokens open the answer. The next prompt of a conversation often has others there.
NUM_OPENING = 8
#: An answer that drafts leaves states for others so many blocks apart: in such a step none is left
#: to go back to, and so nothing is tried.
_BLOCKS_APART = 4


class Scheduler:
    """The queue of waiting requests and the list of running ones. Not thread-safe."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_batch_tokens: int,
        max_batch_requests: int,
        pace: StepPace | None = None,
        reads_whole: bool = False,
        drawn_rows: int | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`reads_whole`: a prompt is not cut, for which a step has room. `drawn_rows`: the most
        tokens that a step chooses; None: one of each request."""
        self.cache, self.draft_model = cache, draft_model
        self._reads_whole = reads_whole
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_requests = max_batch_requests
        self._drawn_rows = drawn_rows or max_batch_requests
        self._pace = pace  # of steps in which prompts are read beside answers
        # Both in order of arrival, and all that run came before all that wait.
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._took_long = False  # the last step of two kinds of texts
        self._form_turns = FormTurns()

    def add(self, request: Request) -> None:
        """Queue a request behind all others."""
        self.waiting.append(request)
        request.record_entry()

    def keep(self, request: Request) -> None:
        """Leave the request's full blocks to those that begin with the same tokens."""
        digests = request.digests_to_keep(self.cache.block_size)
        if len(digests) > (offered := self.cache.num_offered(request.id)):
            self.cache.keep(request.id, digests)
            request.record_blocks(self.cache, offered, len(digests))

    def remove(self, request: Request, *, forget: bool = False) -> None:
        """Forget a request, wherever it stands, and free its blocks; `forget` what they hold."""
        self._give_back(request, forget=forget)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request with what it has."""
        self.remove(request)
        request.finish(reason)

    def fail(self, request: Request, error: Exception) -> None:
        """What the request has in the cache may be wrong: nobody else gets to read it."""
        self.remove(request, forget=True)
        request.fail(error)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, with room in the cache for each; at most one a request.

        A request that cannot get a single block although it runs alone fails with OutOfBlocks, or
        NoHostMemory where there are blocks.
        """
        chunks: list[Chunk] = []
        while not chunks:
            while self.waiting and self._may_enter(self.waiting[0]):
                self._enter(self.waiting.popleft())
            for request in self.running:
                if request.has_outgrown:
                    self.cache.remove(request.id)
                    request.begin_anew()
                if request.num_pending > 1:
                    self._catch_up(request)
            num_waiting = 0  # for their turn
            for kind in self._kinds():
                requests = self._form_turns.take_turns(kind, self.max_batch_tokens)
                num_waiting += len(kind) - len(requests)
                # In order of arrival: room for one may preempt those behind it, never those before.
                left = self.max_batch_tokens
                for request, num_tokens in self._shares(requests):
                    if request.state is State.RUNNING and request.num_again < left:
                        num_tokens = min(num_tokens, left - request.num_again)
                        left -= self._take(request, num_tokens, chunks)
                if chunks:
                    break
            if not self.waiting and not num_waiting:
                break
        return chunks

    def with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks that `schedule` gave, each with the tokens that its request tries."""
        left = self.max_batch_tokens - sum(chunk.num_tokens for chunk in chunks)
        return with_drafts(chunks, self.cache, left, self._drawn_rows, self.draft_model)

    def _give_back(self, request: Request, *, forget: bool = False) -> None:
        self.cache.remove(request.id, forget=forget)
        if self.draft_model is not None:
            self.draft_model.forget(request.id)

    def schedule_ahead(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks of the step after `chunks`, which runs now; empty where that must be awaited.

        It can be told where all that run draw a token, no request waits, and the cache has room.
        """
        requests = [chunk.request for chunk in chunks]
        if (
            self.waiting
            or len(chunks) < len(self.running)
            or not all(
                chunk.samples and not chunk.drafts and chunk.request.goes_on for chunk in chunks
            )
            or self._num_blocks_for_each(requests) > self.cache.num_free_blocks
            or self._is_better_awaited(requests)
        ):
            return []
        for request in requests:
            self.cache.append(request.id, 1)
        following = [
            Chunk(chunk.request, chunk.stop, chunk.stop + 1, samples=True, ids_on_device=True)
            for chunk in chunks
        ]
        return [chunk.leaving(self._checkpoint(chunk, chunk.stop)) for chunk in following]

    def _is_better_awaited(self, requests: list[Request]) -> bool:
        """Whether several tokens may be tried once the next ones are known."""
        num_writing = 1 if self.draft_model is None else len(requests)
        load = StepLoad(len(requests), len(requests), num_writing)
        return any(request.is_awaited(load) for request in requests)

    def take_back(self, chunk: Chunk, num_right: int) -> None:
        """Leave nothing of the drafts of a chunk that ran, but for the first `num_right` of them,
        which are the request's tokens."""
        request = chunk.request
        if request.drafter is not None:
            request.drafter.settle(len(chunk.drafts), num_right)
        if self.cache.states is not None and num_right < len(chunk.drafts):
            self.cache.states.go_back(request.id)
            request.num_again = num_right
        self.cache.take_back(request.id, request.num_computed)

    def _num_blocks_for_each(self, requests: list[Request]) -> int:
        """Blocks that one more token of each request takes."""
        return sum(self.cache.num_blocks_to_append(request.id, 1) for request in requests)

    def preempt(self, request: Request) -> None:
        """Take the blocks of a running request; it starts anew before all that wait."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        self._give_back(request)
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
            own = request.digests_to_keep(self.cache.block_size)
            for number, digest in enumerate(self.cache.digests(request.id)):
                if digest is not None and digest not in own[number : number + 1]:
                    raise IntegrityError(
                        f"scheduler: block {number} of request {request.id} is kept under the "
                        "digest of other tokens than its own"
                    )
        ids = [request.id for request in [*self.running, *self.waiting]]
        if ids != sorted(set(ids)):
            raise IntegrityError(f"scheduler: requests are out of order or doubled: {ids}")
        running = {request.id for request in self.running}
        if owners := self.cache.owners() - running:
            raise IntegrityError(f"scheduler: requests {sorted(owners)} own blocks and do not run")
        if self.draft_model is not None:
            self.draft_model.check_integrity(running)

    def _kinds(self) -> list[list[Request]]:
        """The running requests that one step can run together, those first whose turn it is.

        Short and long texts are rotated by different tables, and a step has one.
        """
        of_long = [request for request in self.running if request.uses_long_factors]
        if not of_long or len(of_long) == len(self.running):
            return [self.running[:]]
        of_short = [request for request in self.running if not request.uses_long_factors]
        self._took_long = not self._took_long
        return [of_long, of_short] if self._took_long else [of_short, of_long]

    def _shares(self, running: list[Request]) -> list[tuple[Request, int]]:
        """How many tokens of each of these requests fit into a step, in order of arrival.

        Each that generates has its one, and where there is a pace it cuts the step. Then prompts
        are read in order; but of the first that needs more than a whole step, half a step goes to
        shorter ones behind it, so that they do not wait for all of it.
        """
        is_reading = [request.num_pending > 1 for request in running]
        budget = self.max_batch_tokens
        if self._reads_whole:
            return _whole_shares(running, budget)
        if self._pace is not None and any(is_reading):
            pending = zip(running, is_reading, strict=True)
            num_pending = sum(request.num_pending for request, reading in pending if reading)
            budget = self._pace.room(is_reading.count(False), num_pending)
        num_again = sum(request.num_again for request in running)
        left = budget - min(budget, is_reading.count(False) + num_again)
        num_behind = sum(
            request.num_pending
            for request, reading in zip(running, is_reading, strict=True)
            if reading and request.num_pending <= budget
        )
        num_kept_back: int | None = None
        shares: list[tuple[Request, int]] = []
        for request, reading in zip(running, is_reading, strict=True):
            num_tokens = request.num_pending
            if reading:
                if num_tokens <= budget:
                    num_behind -= num_tokens
                else:
                    most = left // 2 if num_kept_back is None else left
                    num_kept_back = min(most, num_behind)
                    num_tokens = left - num_kept_back
                num_tokens = min(num_tokens, left)
                left -= num_tokens
            shares.append((request, num_tokens))
        return shares

    def _take(self, request: Request, num_tokens: int, chunks: list[Chunk]) -> int:
        """Append a chunk of the request of at most `num_tokens`, as large as the cache allows.

        Returns how many tokens run for it.
        """
        if num_tokens == 0:
            return 0
        num_fitting = self._make_room(request, num_tokens)
        if num_fitting > 0:
            chunk = self._next_chunk(request, num_fitting)
            self.cache.append(request.id, chunk.num_new)
            request.mark_started()
            chunks.append(chunk)
            return chunk.num_tokens
        if self.running == [request]:
            self.remove(request)
            request.fail(self.cache.shortage(1))
        return 0

    def _next_chunk(self, request: Request, num_tokens: int) -> Chunk:
        """The next tokens of a request; less than asked for where two states are to be left.

        In the middle of a text one is left where the next chunk begins, for others that read the
        same, and for the request itself, should it be preempted.
        """
        whole = Chunk.next_of(request, num_tokens)
        if self.cache.states is None:
            return whole
        if request.num_pending == 1:
            return whole.leaving(self._checkpoint(whole, whole.stop))
        last = min(whole.stop, len(request.token_ids) - NUM_OPENING)
        parting = self._num_known(request)
        if whole.start < parting < last // self.cache.block_size * self.cache.block_size:
            whole = Chunk.next_of(request, parting - whole.start)
        is_parting = whole.start < parting <= whole.stop
        return whole.leaving(self._checkpoint(whole, parting if is_parting else last, is_parting))

    def _num_known(self, request: Request) -> int:
        """So many of its tokens others have read, too: there a state is of use to the next one."""
        digests = request.digests_to_adopt(self.cache.block_size)
        return len(self.cache.find_kept(digests)) * self.cache.block_size

    def _checkpoint(
        self, chunk: Chunk, position: int, is_parting: bool = False
    ) -> tuple[int, int] | None:
        """A slot for the state that `chunk` leaves before the last block's end up to `position`,
        and where that is; None where it passes none."""
        states, size = self.cache.states, self.cache.block_size
        num_blocks = _BLOCKS_APART if chunk.request.drafter and chunk.is_answer else 1
        at = position // (num_blocks * size) * num_blocks * size
        if states is None or at <= chunk.start or not chunk.request.shares_blocks:
            return None
        asked = (len(chunk.request.prompt_ids) - NUM_OPENING) // size * size
        slot = states.reserve(chunk.request.id, at, lasts=is_parting or at == asked)
        return None if slot is None else (slot, at)

    def _make_room(self, request: Request, wanted: int) -> int:
        """How many of the tokens wanted have room, once newer requests gave theirs up."""
        while self.cache.num_tokens_that_fit(request.id) < wanted:
            newest = self.running[-1]
            if newest is request:
                break
            self.preempt(newest)
        return min(wanted, self.cache.num_tokens_that_fit(request.id))

    def _may_enter(self, request: Request) -> bool:
        """Whether there is room for all of the request's tokens, and some for the others to grow.

        Without the spare blocks it would be thrown out in the very next step.
        """
        if not self.running:
            return True
        if len(self.running) >= self.max_batch_requests:
            return False
        cache = self.cache
        found = cache.find(request.digests_to_adopt(cache.block_size))
        num_new = cache.num_blocks_to_append(request.id, request.num_pending) - len(found)
        num_promised = sum(
            cache.num_blocks_to_append(other.id, other.num_pending) for other in self.running
        )
        num_spare = len(self.running)
        needed = num_new + cache.num_unread(found) + num_promised + num_spare
        return needed <= cache.num_free_blocks

    def _enter(self, request: Request) -> None:
        request.state = State.RUNNING
        self.running.append(request)
        self._catch_up(request)

    def _catch_up(self, request: Request) -> None:
        """Have the request go on behind all that the cache keeps of its tokens by now."""
        cache = self.cache
        digests = request.digests_to_adopt(cache.block_size)
        following = request.num_computed // cache.block_size
        if not cache.find_kept(digests[following : following + 1]):  # most often, quickly told
            return
        found = cache.find(digests)
        if len(found) * cache.block_size > request.num_computed:
            cache.remove(request.id)  # what it computed itself is kept, or kept already
            request.adopt(cache.adopt(request.id, found))
            request.record_blocks(cache, 0, len(found))


def _whole_shares(running: list[Request], budget: int) -> list[tuple[Request, int]]:
    """The whole prompts that fit into a step, in order of arrival."""
    shares = []
    for request in running:
        if request.num_pending <= budget:
            shares.append((request, request.num_pending))
            budget -= request.num_pending
    return shares
