"""A second, smaller model that writes ahead of requests; what it writes is tried, and no more.

It has a KV cache of its own, of as many tokens as the model's. Requests that draft in a step are
written for together. It draws by their settings and with the random numbers of the places, so where
it would say what the model says, it does. Nothing here decides a token of an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hypocenter.base.dtypes import Int32s
from hypocenter.base.errors import BadLogits, GrammarError, IntegrityError, NoTokenLeft
from hypocenter.base.tensor import Tensor
from hypocenter.device import devices, memory
from hypocenter.engine.batch import Batch, Chunk
from hypocenter.engine.drafting.ahead import ChainRow, DraftsAhead, WrittenDrafts
from hypocenter.engine.drafting.model_drafter import DraftRecord, ModelDrafter, needs_host
from hypocenter.engine.grammar import Matcher
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.request import Request
from hypocenter.engine.sampler import token_choice
from hypocenter.kernels.sampling.draw import TokenChoice, num_mask_words
from hypocenter.kernels.sampling.sampling import HostSampler, sample_later

if TYPE_CHECKING:
    from hypocenter.engine.drafting.chain import DraftChain
    from hypocenter.engine.runner import Runner
    from hypocenter.kernels.sampling.sampling_plan import DeviceSampler

_Outcomes = list[int | BadLogits]


@dataclass(slots=True, eq=False)
class _Draft:
    """What is written for a request: up to `num` tokens behind those it has."""

    request: Request
    num: int
    ids: list[int] = field(default_factory=list)
    matcher: Matcher | None = None
    is_over: bool = False
    num_run: int = 0  # of its tokens the draft model itself has read

    def take(self, outcome: int | BadLogits, num_ids: int) -> None:
        """Take a token; nothing follows one that the model has not, or that the form has not."""
        if isinstance(outcome, BadLogits) or outcome >= num_ids:
            self.is_over = True
            return
        self.ids.append(outcome)
        self.is_over = self.request.ends_with(outcome)
        try:
            if self.matcher is not None and self.matcher.accept(outcome):
                self.is_over = True
        except GrammarError:
            self.is_over = True


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens of a request that a step of the draft model reads, from position `start` on."""

    request: Request
    start: int
    token_ids: Sequence[int]
    #: Its row among those that were drawn for in the step before, behind which it goes on.
    row_before: int | None = None


class DraftModel:
    """Writes ahead of requests on `runner`. Not thread-safe.

    `num_ids` is how many tokens the model itself has logits for, and `record` what is known of how
    often this one is right.
    """

    def __init__(
        self,
        runner: Runner,
        record: DraftRecord,
        num_ids: int,
        launch_mode: str = "off",
        token_ids: Tensor | None = None,
        num_placed: int = 0,
    ) -> None:
        """A step of the model tries up to `num_placed` tokens, and has the ids of all its tokens in
        `token_ids` i32 [max_tokens], which is there on a GPU."""
        self.runner, self.record = runner, record
        self._num_ids, self._launch_mode = num_ids, launch_mode
        self._token_ids, self._num_placed = token_ids, num_placed
        self._chain: DraftChain | None = None
        self.cache = KVCache(runner.num_blocks, runner.block_size, growth=runner.growth)
        self._sampler: DeviceSampler | HostSampler | None = None
        #: What was written last for a request, behind how many of its tokens; nothing while only
        #: a device has it.
        self._written: dict[int, tuple[int, list[int]]] = {}
        #: No text is longer: context, and what is rotated as short texts are.
        self._most_tokens = min(
            runner.context_length, runner.longrope_threshold or runner.context_length
        )

    def write(
        self, wanted: Sequence[tuple[Request, int]], reading: Iterable[Chunk]
    ) -> WrittenDrafts:
        """Tokens that may follow each request's, up to the number that is wanted.

        On a GPU a device writes them for those that do not need the host between two tokens, and
        nothing is waited for. Of the prompts that the chunks of `reading` read it reads as much, as
        far as a step has room. Where a request has more to read than a step holds, nothing is
        written for it yet.
        """
        self.cache.look_at_memory()
        drafts: list[_Draft] = []
        spans: list[_Span] = []
        left = self.runner.max_batch_tokens
        for request, num in wanted:
            num = min(num, self._most_tokens - len(request.token_ids))
            span = self._next_span(request, len(request.token_ids), left, max(num - 1, 0))
            if span is None or num < 1:
                continue
            left -= len(span.token_ids)
            if span.start + len(span.token_ids) == len(request.token_ids):
                drafts.append(_draft_of(request, num))
            spans.append(span)
        for chunk in reading:
            stop = min(self._stop_in(chunk), self._most_tokens)
            if (span := self._next_span(chunk.request, stop, left)) is not None:
                left -= len(span.token_ids)
                spans.append(span)
        if spans:
            # Those that write most stand first: then those that go on keep their rows.
            drafts.sort(key=lambda draft: -draft.num)
            places = {id(draft.request): place for place, draft in enumerate(drafts)}
            spans.sort(key=lambda span: places.get(id(span.request), len(places)))
        chained = [d for d in drafts if self.runner.runs_ahead and not _passes_host(d.request)]
        requests = {id(draft.request) for draft in chained}
        of_chain = [span for span in spans if id(span.request) in requests]
        if by_host := [span for span in spans if id(span.request) not in requests]:
            drafts = [draft for draft in drafts if id(draft.request) not in requests]
            self._run(by_host, drafts)
        ahead = self._begin_chain(of_chain, chained) if chained else None
        return WrittenDrafts({draft.request.id: draft.ids for draft in drafts if draft.ids}, ahead)

    def note_step(self, chunks: Sequence[Chunk], seconds: float, launched: float | None) -> None:
        """A step took that since the one before; `launched` is what it took since it was, where
        that was not ahead of it."""
        if not all(chunk.is_answer for chunk in chunks):
            return
        num_rows = sum(chunk.num_tokens for chunk in chunks)
        ahead = next((chunk.ahead for chunk in chunks if chunk.ahead is not None), None)
        if ahead is not None:
            if ahead.work is not None:
                self.record.note_round(num_rows, ahead.work, seconds)
        elif launched is not None:
            self.record.note_step(num_rows, launched)
        elif self.record.is_chained:
            self.record.note_step(num_rows, seconds, is_ahead=True)

    def forget(self, request_id: int) -> None:
        """Give up what was read of a request; others that begin alike may find it."""
        self.cache.remove(request_id)
        self._written.pop(request_id, None)

    def check_integrity(self, running: set[int]) -> None:
        """Raises IntegrityError where the cache contradicts itself, or one that does not run has
        part of it."""
        self.cache.check_integrity()
        if owners := self.cache.owners() - running:
            raise IntegrityError(f"draft model: requests {sorted(owners)} own blocks, not running")

    def _next_span(self, request: Request, stop: int, most: int, num_more: int = 0) -> _Span | None:
        """What is to be read of a request's first `stop` tokens, up to `most`, with room for it and
        for `num_more` tokens; None where there is nothing, or no room."""
        cache, num_ids = self.cache, self.runner.vocab_size
        self._leave_right(request)
        if not cache.num_tokens(request.id):
            found = cache.find(request.digests_to_adopt(cache.block_size))
            cache.adopt(request.id, found)
        start = cache.num_tokens(request.id)
        token_ids = request.token_ids[start : min(stop, start + most)]
        room = cache.num_tokens_that_fit(request.id)
        if not token_ids or len(token_ids) + num_more > room or max(token_ids) >= num_ids:
            return None
        is_whole = start + len(token_ids) == stop
        cache.append(request.id, len(token_ids) + (num_more if is_whole else 0))
        return _Span(request, start, token_ids)

    def _leave_right(self, request: Request) -> None:
        """Take back what was written for a request and did not become its text, and what is left of
        it but its last token, which is to be read for its logits."""
        written = self._written.pop(request.id, None)
        num_tokens = self.cache.num_tokens(request.id)
        if not num_tokens:
            return
        num_right = num_tokens
        if written is not None:
            num_right = min(num_tokens, self._num_right(request, *written))
        num_right = min(num_right, len(request.token_ids) - 1)
        if num_right < num_tokens:
            self.cache.take_back(request.id, num_right)

    def _stop_in(self, chunk: Chunk) -> int:
        """How far it may read along with a chunk of a prompt, which the model reads now."""
        return chunk.stop

    def _num_right(self, request: Request, num_before: int, ids: Sequence[int]) -> int:
        """Tokens that it has read as they are, of `num_before` and what it wrote behind them."""
        became = request.token_ids[num_before:]
        num_same = 0
        while num_same < min(len(ids), len(became)) and ids[num_same] == became[num_same]:
            num_same += 1
        return num_before + num_same

    def _batch(self, spans: Sequence[_Span], num_drawn: int) -> Batch:
        """The spans as one batch, with logits behind each of the first `num_drawn`."""
        return _batch(spans, num_drawn, self.cache)

    def _begin_chain(self, spans: Sequence[_Span], drafts: list[_Draft]) -> DraftsAhead:
        """Have a device read, and write all drafts; nothing is waited for."""
        most = drafts[0].num
        logits = self.runner.run(self._batch(spans, len(drafts)))
        draws = [
            [self._draw(draft, link) for draft in drafts if draft.num > link]
            for link in range(most)
        ]
        num_read = sum(len(span.token_ids) for span in spans)
        costs = self.record.costs
        work = costs.of(num_read) + sum(costs.of(len(of_link)) for of_link in draws[1:])
        rows = [
            ChainRow(d.request.id, len(d.request.token_ids), d.num, self.cache.blocks(d.request.id))
            for d in drafts
        ]
        is_alike = num_read <= 2 * len(spans)  # or else it read a prompt
        ahead = self.chain().write(logits, rows, draws, work if is_alike else None)
        for span in spans:
            self._keep(span.request, span.start + len(span.token_ids))
        for draft in drafts:
            num_before, request_id = len(draft.request.token_ids), draft.request.id
            self._written[request_id] = num_before, ahead.ids_of(request_id)
        return ahead

    def chain(self) -> DraftChain:
        """What writes on a GPU."""
        if self._chain is None:
            from hypocenter.engine.drafting.chain import DraftChain, DraftTarget  # needs Triton

            assert self._token_ids is not None, "a model on a GPU has its token ids there"
            sampler = self._drawing(self.runner.config.device)
            assert not isinstance(sampler, HostSampler)
            target = DraftTarget(self._token_ids, self._num_ids, self._num_placed)
            self._chain = DraftChain(self.runner, sampler, target, self.runner.config.draft_max)
        return self._chain

    def compile(self) -> None:
        """Have ready what it launches beside the runner's steps."""
        if self.runner.runs_ahead:
            self.chain().compile()

    def capture(self) -> None:
        """Capture its steps, as `Runner.capture` does."""
        self.runner.capture()
        if self.runner.runs_ahead and devices.backend_captures(self.runner.config.device):
            self.chain().capture()

    def _run(self, spans: Sequence[_Span], drafts: list[_Draft]) -> None:
        """Read, and write token after token; those that want most stand first."""
        began = time.perf_counter()
        num_read = sum(len(span.token_ids) for span in spans)
        wait = self._step(spans, drafts)
        for span in spans:
            self._keep(span.request, span.start + len(span.token_ids))
        num_steps, going_on = 1, drafts
        while True:
            self._take(wait, going_on)
            rows = [
                row
                for row, draft in enumerate(going_on)
                if num_steps < draft.num and not draft.is_over
            ]
            if not rows:
                break
            going_on, following = [going_on[row] for row in rows], []
            for row, draft in zip(rows, going_on, strict=True):
                start = len(draft.request.token_ids) + draft.num_run
                following.append(_Span(draft.request, start, draft.ids[-1:], row))
                draft.num_run += 1
            wait = self._step(following, going_on, num_steps)
            num_steps += 1
        for draft in drafts:
            request = draft.request
            self.cache.take_back(request.id, len(request.token_ids) + draft.num_run)
            self._written[request.id] = len(request.token_ids), draft.ids
        # One step alone is mostly what the host takes to begin and to wait.
        if num_steps > 1 and num_read <= 2 * len(spans):
            seconds = time.perf_counter() - began
            self.record.note_own(len(spans), seconds / num_steps)

    def _take(self, wait: Callable[[], _Outcomes], drafts: Sequence[_Draft]) -> None:
        for draft, outcome in zip(drafts, wait(), strict=True):
            if not draft.is_over:
                draft.take(outcome, self._num_ids)

    def _step(
        self,
        spans: Sequence[_Span],
        drafts: Sequence[_Draft],
        num_before: int = 0,
    ) -> Callable[[], _Outcomes]:
        """Run the spans, of which the first ones are those of `drafts`, and draw behind these."""
        logits = self.runner.run(self._batch(spans, len(drafts)))
        draws = [self._draw(draft, num_before) for draft in drafts]
        return sample_later(memory.rows(logits, 0, len(draws)), draws, self._drawing(logits.device))

    def _drawing(self, device: str) -> DeviceSampler | HostSampler:
        if self._sampler is None:
            if device == "cpu":
                self._sampler = HostSampler()
            else:
                from hypocenter.kernels.sampling.sampling_plan import DeviceSampler  # needs Triton

                runner = self.runner
                sizes = runner.vocab_size, runner.drawn_rows
                self._sampler = DeviceSampler(device, *sizes, self._launch_mode, runner.token_ids)
        return self._sampler

    def _draw(self, draft: _Draft, num_before: int) -> TokenChoice:
        """What the choice of a draft depends on; where nothing may come, it is the last."""
        request, rules = draft.request, draft.request.rules
        form = draft.matcher.mask() if draft.matcher is not None else None
        if rules is not None:
            output_ids = [*request.output_ids, *draft.ids]
            try:
                form = rules.draft_mask(output_ids, len(request.output_ids) + num_before, form)
            except NoTokenLeft:
                draft.is_over = True
        position = len(request.token_ids) + num_before
        return token_choice(request, position, draft.ids, _mask_for(form, self.runner.vocab_size))

    def _keep(self, request: Request, num_tokens: int) -> None:
        """Leave full blocks of a request's own tokens to those that begin alike."""
        num_settled = min(num_tokens, len(request.token_ids) - 1)
        digests = request.digests_of(num_settled, self.cache.block_size)
        if len(digests) > self.cache.num_offered(request.id):
            self.cache.keep(request.id, digests)
        if isinstance(request.drafter, ModelDrafter):
            request.drafter.num_read = num_tokens


def _passes_host(request: Request) -> bool:
    return needs_host(request.params, request.matcher, request.rules)


def _draft_of(request: Request, num: int) -> _Draft:
    matcher = request.matcher.copy() if request.matcher is not None else None
    return _Draft(request, num, matcher=matcher)


def _mask_for(mask: Int32s | None, num_logits: int) -> Int32s | None:
    """A mask for so many logits: tokens that the model has not got may not come."""
    if mask is None:
        return None
    fitted = np.zeros(num_mask_words(num_logits), np.int32)
    num_words = min(len(fitted), len(mask))
    fitted[:num_words] = mask[:num_words]
    return fitted


def _batch(spans: Sequence[_Span], num_drawn: int, cache: KVCache) -> Batch:
    """The spans as one batch, with logits behind each of the first `num_drawn`."""
    tables = [np.array(cache.blocks(span.request.id), np.int32) for span in spans]
    block_tables = np.full((len(spans), max(map(len, tables))), -1, np.int32)
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    ends: list[int] = []
    for row, (span, table) in enumerate(zip(spans, tables, strict=True)):
        ids = span.token_ids
        stop = span.start + len(ids)
        block_tables[row, : len(table)] = table
        token_ids += ids
        positions += range(span.start, stop)
        slots += cache.retrieve(span.request.id, span.start, stop).slots
        rows += [row] * len(ids)
        ends.append(len(token_ids) - 1)
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        sequence_rows=np.array(rows, np.int32),
        block_tables=block_tables,
        logit_rows=np.array(ends[:num_drawn], np.int32),
    )
