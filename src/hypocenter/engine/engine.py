"""The engine: `step()` is schedule, run, sample, settle; any thread may drive it.

Whoever holds the lock steps for all requests. Their owners take what they yield without the lock.

Where the runner runs ahead, a step is launched before the one before it is settled: the host does
its part while the device works. What a request that has ended does not want is thrown away.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import BadLogits, ContextOverflow, HypoError, OutOfBlocks, UsageError
from hypocenter.base.results import Completion, Delta, Route
from hypocenter.device import copies, memory
from hypocenter.engine.answer_text import AnswerText
from hypocenter.engine.arguments import require_in_vocabulary
from hypocenter.engine.batch import Chunk, make_batch
from hypocenter.engine.grammar import Grammars
from hypocenter.engine.kv_cache import BlockDigests, KVCache
from hypocenter.engine.logprobs import token_logprob
from hypocenter.engine.request import Request
from hypocenter.engine.sampler import Sampler
from hypocenter.engine.scheduler import Scheduler
from hypocenter.engine.token_rules import token_rules
from hypocenter.record.recorder import current, recording_defects
from hypocenter.settings.config import SamplingParams

if TYPE_CHECKING:
    from hypocenter.conversation.thoughts import AnswerReader
    from hypocenter.engine.runner import Runner
    from hypocenter.model.text.tokenizer import Tokenizer

log = logging.getLogger("hypocenter.engine")
_CLOSED = "the model is closed; open it anew"

WaitForLogits = Callable[[], Array]  # f32 [num_rows, vocab_size]


@dataclass(frozen=True, slots=True, eq=False)
class StepInFlight:
    """A step that was launched: `wait` gives the outcome of each row that a token is chosen from.

    `drawn` and `kept` wait for logits that the host wants, by the id of their request: the row of a
    token that is chosen, and the rows of prompt tokens. `number` is that of the step in the record.
    """

    chunks: list[Chunk]
    wait: Callable[[], list[int | BadLogits]]
    drawn: dict[int, WaitForLogits]
    kept: dict[int, WaitForLogits]
    number: int


class Engine:
    """Runs any number of requests together on one runner. All methods are thread-safe.

    `path` is the model's file, for messages; `launch_mode` that of the sampler. With `prefix_cache`
    a request reads what earlier ones left in the cache of the same first tokens.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        path: Path | None = None,
        *,
        launch_mode: str = "off",
        prefix_cache: bool = True,
    ) -> None:
        self._path, self._has_prefix_cache = path, prefix_cache
        self.runner, self.tokenizer = runner, tokenizer
        slots = runner.num_state_slots, runner.num_checkpoints
        size = runner.num_blocks, runner.block_size
        self.cache = KVCache(*size, runner.page_watch, runner.archive, *slots)
        self.scheduler = Scheduler(
            self.cache,
            max_batch_tokens=runner.max_batch_tokens,
            max_batch_requests=runner.max_batch_requests,
        )
        self._grammars = Grammars(tokenizer, runner.vocab_size)
        self._sampler = Sampler(runner.max_batch_requests, launch_mode, runner.token_ids)
        self._ahead: StepInFlight | None = None  # launched, and not waited for
        self._lock, self._turn_ended = threading.Lock(), threading.Condition()
        self._num_turns, self._closed = 0, False
        self._inbox: deque[Request] = deque()  # submitted, not yet with the scheduler
        self._request_ids = itertools.count()
        self.num_steps, self._process = 0, os.getpid()  # steps that have run
        self._stepping: int | None = None  # the thread that has the lock

    @property
    def is_of_this_process(self) -> bool:
        """Whether no fork lies between: threads stay in the parent, and locks as they were."""
        return os.getpid() == self._process

    def require_usable(self) -> None:
        """Raises UsageError when the engine is closed, or was built by another process."""
        self.require_own_process()
        if self._closed:
            raise UsageError(_CLOSED)

    def require_own_process(self) -> None:
        """Raises UsageError in the child of a fork."""
        if not self.is_of_this_process:
            raise UsageError(
                f"the model was opened by process {self._process}, and this is {os.getpid()}, "
                "forked from it; open the model in each process"
            )

    def step(self) -> int:
        """One step for all requests: schedule, run, sample, settle.

        Returns the number of tokens that ran; 0 means that there is nothing to do.
        """
        with self._turn():
            return self._step()

    @recording_defects()
    def _step(self) -> int:
        self._admit()
        self._drop_unwanted_step()
        step = self._take_ahead()
        chunks = step.chunks if step else self.scheduler.schedule()
        if chunks:
            self.num_steps += 1
            with self._ending_on_errors(chunks):
                step = step or self._launch(chunks)
                failure = self._launch_ahead(step)  # the device goes on while the host settles
                outcomes = step.wait()
                self.runner.require_ranks()  # what a step without one of them gives is nothing
                self._settle(step, outcomes)
                if failure is not None:
                    raise failure
                self._record_ids(step, outcomes)
            self.cache.end_step()
        return sum(chunk.num_tokens for chunk in chunks)

    def _launch(self, chunks: list[Chunk]) -> StepInFlight:
        logits = self.runner.run(make_batch(chunks, self.cache))
        sampled = [chunk for chunk in chunks if chunk.samples]
        wait = self._sampler.sample(memory.rows(logits, 0, len(sampled)), sampled)
        # Asked for now, since the step after this one may overwrite them before it is waited for.
        drawn = {
            chunk.request.id: copies.to_host_later(memory.rows(logits, row, row + 1))
            for row, chunk in enumerate(sampled)
            if chunk.request.params.logprobs is not None
        }
        kept, start = {}, len(sampled)
        for chunk in chunks:
            if chunk.num_kept:
                rows = memory.rows(logits, start, start + chunk.num_kept)
                kept[chunk.request.id] = copies.to_host_later(rows)
                start += chunk.num_kept
        return StepInFlight(chunks, wait, drawn, kept, current().current_step)

    def _launch_ahead(self, step: StepInFlight) -> Exception | None:
        """Launch what follows `step`, if that can be told before its tokens are known.

        An error is returned: it may be of no concern to the requests that end with `step`.
        """
        following = self.scheduler.schedule_ahead(step.chunks) if self.runner.runs_ahead else []
        if following:
            try:
                self._ahead = self._launch(following)
            except Exception as error:
                return error
        return None

    def _take_ahead(self) -> StepInFlight | None:
        """The step that was launched ahead; the record goes on in it."""
        step, self._ahead = self._ahead, None
        if step is not None:
            current().resume(step.number)
        return step

    def _drop_unwanted_step(self) -> None:
        """Wait for the step ahead where all its requests have ended since."""
        if self._ahead is not None and all(chunk.request.done for chunk in self._ahead.chunks):
            self._drop_ahead()

    def _drop_ahead(self) -> None:
        """Wait for a step that nobody wants any more, which has most often ended long ago."""
        step = self._take_ahead()
        if step is None:
            return
        try:
            step.wait()
        except HypoError as error:  # it is recorded, and there is nobody to tell
            log.warning("a step that was thrown away: %s", error)
        finally:
            current().end_step()

    def _record_ids(self, step: StepInFlight, outcomes: list[int | BadLogits]) -> None:
        """The step ahead took its tokens from this one on the device: now they are known."""
        if self._ahead is not None:
            ids = [0 if isinstance(outcome, BadLogits) else outcome for outcome in outcomes]
            requests = [chunk.request for chunk in step.chunks]
            digests = tuple("" if request.done else request.digest() for request in requests)
            current().record_ids(self.runner.token_ids, np.array(ids, np.int32), digests)

    @contextlib.contextmanager
    def _ending_on_errors(self, chunks: list[Chunk]) -> Iterator[None]:
        """Within, an error ends the requests of a step: nobody knows whose fault it is. Others go
        on. After an interruption everything runs again, for what ran is uncertain."""
        try:
            yield
        except Exception as error:
            current().record_failure(error)
            if not (left := [chunk.request for chunk in chunks if not chunk.request.done]):
                log.warning("a step failed when its requests had all ended: %s", error)
            for request in left:
                self._fail(request, error)
        except BaseException:
            self._ahead = None
            for request in reversed(self.scheduler.running[:]):
                if request.done:  # interrupted before it was removed
                    self.scheduler.remove(request)
                else:
                    self.scheduler.preempt(request)
            raise
        finally:
            current().end_step()

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        keeps_logits: bool = False,
        cache_salt: str = "",
        output_ids: Sequence[int] = (),
        apart: AnswerReader | None = None,
        call_form: str | None = None,
        turn_ids: frozenset[int] = frozenset(),
        form: str = "",
        bad_word_ids: Sequence[Sequence[int]] | None = None,
    ) -> Request:
        """A request for `submit`, checked. Only those of one `cache_salt` read each other's blocks.

        Calls are held to `call_form`; `turn_ids` end the answer too. With `output_ids` it goes on
        behind an answer begun elsewhere. `form` and `bad_word_ids` are what `Grammars.read` and
        `spellings` said elsewhere. Raises ContextOverflow and OutOfBlocks for a long prompt,
        UsageError for an empty one, an unknown id, no token left, or a form that is none.
        """
        self.require_usable()
        vocab_size, context_length = self.runner.vocab_size, self.runner.context_length
        if not prompt_ids:
            raise UsageError("the prompt has no tokens; give it at least one")
        if (num_tokens := len(prompt_ids) + len(output_ids)) > context_length:
            raise ContextOverflow(num_tokens, context_length, self.runner.facts.context_length)
        num_needed, num_blocks = -(-num_tokens // self.cache.block_size), self.cache.num_blocks
        if num_needed > num_blocks:
            raise OutOfBlocks(num_needed, num_blocks, num_blocks)
        require_in_vocabulary("prompt", prompt_ids, vocab_size)
        require_in_vocabulary("output", output_ids, vocab_size)
        digests = BlockDigests(self.cache.block_size, cache_salt)
        return Request(
            next(self._request_ids),
            prompt_ids,
            params,
            text=AnswerText(self.tokenizer.detokenizer(at_start=False), params, apart),
            end_ids=self.tokenizer.end_ids | turn_ids,
            context_length=context_length,
            keeps_logits=keeps_logits,
            block_digests=digests if self._has_prefix_cache else None,
            matcher=self._grammars.matcher(params, output_ids, call_form, form),
            rules=token_rules(params, self.tokenizer, vocab_size, bad_word_ids),
            output_ids=output_ids,
            long_from=self.runner.long_from,
        )

    def submit(self, request: Request) -> None:
        """Queue a request for the coming steps; returns at once."""
        self.require_own_process()
        self._inbox.append(request)

    def cancel(self, request: Request) -> None:
        """End a submitted request with what it has so far, at the latest after one more step."""
        request.cancel_requested = True
        # Python may end a forgotten stream in the middle of a step: the next one then hears of it.
        while self.is_of_this_process and not self._is_within_step and not request.done:
            self._take_turn(self._admit)

    def follow(
        self, request: Request, before_step: Callable[[], None] = lambda: None
    ) -> Generator[Delta, None, Completion]:
        """Submit a request and drive it to its end, piece by piece; left early, it is cancelled.

        `before_step` is called before each step, and may cancel the request. The generator returns
        the completion. Raises the request's own error.
        """
        self.submit(request)
        try:
            done = False
            while not done:
                done = request.done  # read first: what came before it lies in `deltas` by now
                while request.deltas:
                    yield request.deltas.popleft()
                if not done:
                    before_step()
                    self._take_turn(self._step)
        finally:
            self.cancel(request)
        return self.result(request)

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit requests, drive them together to their ends; in order.

        Raises the error of the first that failed, after all have ended.
        """
        for request in requests:
            self.submit(request)
        try:
            while not all(request.done for request in requests):
                self._take_turn(self._step)
        finally:
            for request in requests:
                self.cancel(request)
        return [self.result(request) for request in requests]

    def result(self, request: Request) -> Completion:
        """What became of a request that is done. Raises the request's own error."""
        if request.error:
            raise request.error
        return request.completion(self.route())

    def fail(self, requests: Iterable[Request], error: Exception) -> None:
        """End submitted requests with an error that is none of theirs."""
        with self._turn():
            for request in requests:
                if not request.done:
                    self._fail(request, error)

    def check_integrity(self) -> None:
        """Raises IntegrityError when requests, tables and blocks contradict each other."""
        with self._turn():
            self.scheduler.check_integrity(self._ahead.chunks if self._ahead else ())

    def close(self) -> None:
        """Fail whatever is still open; every later request fails too. Waits for a running step.

        In the child of a fork it does nothing: all is the parent's.
        """
        if not self.is_of_this_process:
            return
        self._require_outside_step()
        self._closed = True
        with self._turn():
            self._admit()
            self._drop_ahead()

    def route(self) -> Route:
        """What runner and sampler have executed so far."""
        route, sampler = self.runner.route(), self._sampler
        return msgspec.structs.replace(
            route,
            kernels=route.kernels + sampler.kernels,
            num_graphs=route.num_graphs + sampler.num_graphs,
        )

    def _admit(self) -> None:
        """Take in what was submitted, and end what was cancelled or outlived the engine."""
        while self._inbox:
            request = self._inbox.popleft()
            if not request.done:
                self.scheduler.add(request)
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if self._closed:
                self._fail(request, UsageError(_CLOSED))
            elif request.cancel_requested:
                self._finish(request, "cancelled")
            elif request.has_read_all:
                self._finish(request, "length")

    def _settle(self, step: StepInFlight, outcomes: list[int | BadLogits]) -> None:
        """Hand each request what the step brought it: a token, logits, or its end."""
        drawn = iter(outcomes)
        for chunk in step.chunks:
            request = chunk.request
            outcome = next(drawn) if chunk.samples else None
            if request.done:  # it ended when this was launched already
                continue
            request.advance(chunk.num_tokens)
            kept, row = step.kept.get(request.id), step.drawn.get(request.id)
            # Copies are waited for out here: where one fails, the device has.
            rows = None if kept is None else kept()
            logits = None if row is None else row()[0]
            with self._failing_alone(request), recording_defects():
                if rows is not None:
                    self._keep(chunk, rows)
                if outcome is not None:
                    self._accept(request, outcome, logits)
            if request.error is None:
                self.scheduler.keep(request)
            if request.done:
                self.scheduler.remove(request)
            elif request.has_read_all:
                self._finish(request, "length")

    @contextlib.contextmanager
    def _failing_alone(self, request: Request) -> Iterator[None]:
        """Within, an error is the request's own; the others of the step keep their tokens."""
        try:
            yield
        except BadLogits as error:
            self._fail(request, error.of_model(self._path) if self._path else error)
        except Exception as error:
            self._fail(request, error)

    def _keep(self, chunk: Chunk, logits: Array) -> None:
        """Take the logits of prompt tokens, f32 [chunk.num_kept, vocab_size]."""
        request = chunk.request
        if request.keeps_logits:
            request.logits.append(logits)
        if (num_top := request.params.prompt_logprobs) is not None:
            following = request.prompt_ids[chunk.start + 1 :]  # none after the last row of all
            request.prompt_logprobs += [
                token_logprob(row, token_id, num_top, self.tokenizer.shown_piece, row=position)
                for position, row, token_id in zip(
                    itertools.count(chunk.start), logits, following, strict=False
                )
            ]

    def _accept(self, request: Request, outcome: int | BadLogits, logits: Array | None) -> None:
        """Take a token; `logits` f32 [vocab_size] are those it was drawn from, where asked for."""
        if isinstance(outcome, BadLogits):
            raise outcome
        logprob, num_top = None, request.params.logprobs
        if logits is not None and num_top is not None:
            logprob = token_logprob(logits, outcome, num_top, self.tokenizer.shown_piece)
        request.accept(outcome, logprob)

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.remove(request)
        request.finish(reason)

    def _fail(self, request: Request, error: Exception) -> None:
        """What the request has in the cache may be wrong: nobody else gets to read it."""
        self.scheduler.remove(request, forget=True)
        request.fail(error)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Within, this thread steps, and others wait."""
        self.require_own_process()
        self._require_outside_step()
        self._lock.acquire()
        self._stepping = threading.get_ident()
        try:
            yield
        finally:
            self._end_turn()

    def _take_turn(self, work: Callable[[], object]) -> None:
        """Do `work` under the lock, or wait until the thread that has the lock gives it back.

        Waiting for the end of a turn instead of the lock keeps one busy thread from starving the
        others: each gets to its own pieces after every step.
        """
        self.require_own_process()
        self._require_outside_step()
        seen = self._num_turns
        if self._lock.acquire(blocking=False):
            self._stepping = threading.get_ident()
            try:
                work()
            finally:
                self._end_turn()
        else:
            with self._turn_ended:
                self._turn_ended.wait_for(lambda: self._num_turns != seen)

    @property
    def _is_within_step(self) -> bool:
        return self._stepping == threading.get_ident()

    def _require_outside_step(self) -> None:
        if self._is_within_step:  # and would wait for itself
            asked = "the engine was asked within its own step, by on_news or a signal handler"
            raise UsageError(f"{asked}; ask it from another place")

    def _end_turn(self) -> None:
        self._stepping = None
        self._lock.release()
        with self._turn_ended:
            self._num_turns += 1
            self._turn_ended.notify_all()
