"""The engine: `step()` is schedule, run, sample, settle; any thread may drive it.

Whoever has the turn steps for all requests (`turns.py`). Their owners take what they yield without
a turn. `admission.py` makes the requests, and `step.py` launches and settles what they run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hypocenter.base.errors import UsageError
from hypocenter.base.results import Completion, Delta, Route
from hypocenter.engine.admission import CLOSED, PLAIN, Admission, RequestTerms
from hypocenter.engine.batch import Chunk
from hypocenter.engine.drafting.head_model import HeadModel
from hypocenter.engine.kv_cache import BlockDigests, KVCache
from hypocenter.engine.page_bytes import SavedPrompt, load_prompt, save_prompt
from hypocenter.engine.request import Request
from hypocenter.engine.scheduler import Scheduler
from hypocenter.engine.state_slots import StateSlots
from hypocenter.engine.step import Steps
from hypocenter.engine.turns import SteppingTurns
from hypocenter.record.recorder import recording_defects
from hypocenter.settings.adapters import Scales
from hypocenter.settings.config import SamplingParams

if TYPE_CHECKING:
    from hypocenter.engine.drafting.draft_model import DraftModel
    from hypocenter.engine.runner import Runner
    from hypocenter.model.text.tokenizer import Tokenizer


class Engine(SteppingTurns):
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
        draft_model: DraftModel | None = None,
    ) -> None:
        super().__init__()
        #: What writes ahead of requests, if another model does.
        self.draft_model = draft_model
        self.runner, self.tokenizer = runner, tokenizer
        size = runner.num_blocks, runner.block_size
        self.cache = KVCache(
            *size, runner.page_watch, runner.archive, _state_slots(runner), runner.growth
        )
        self.cache.disk = runner.disk if prefix_cache else None
        if isinstance(draft_model, HeadModel):
            draft_model.read_from(self.cache)
        self._pace = runner.pace
        self.scheduler = Scheduler(
            self.cache,
            max_batch_tokens=runner.max_batch_tokens,
            max_batch_requests=runner.max_batch_requests,
            pace=self._pace,
            reads_whole=runner.arch.family.sees_all,
            drawn_rows=runner.drawn_rows,
            draft_model=draft_model,
        )
        self._last_end = 0.0  # of a step, by the clock of the machine
        self._goes_on = False  # whether that step left something to do
        # What a token is there depends on those behind it.
        self._has_prefix_cache = has_cache = prefix_cache and not runner.arch.family.sees_all
        self._admission = Admission(
            runner,
            tokenizer,
            self.cache,
            has_prefix_cache=has_cache,
            draft_record=draft_model.record if draft_model is not None else None,
        )
        self._steps = Steps(runner, self.scheduler, tokenizer, path, launch_mode)
        self.num_steps = 0  # that have run
        self._closed = False

    def require_usable(self) -> None:
        """Raises UsageError when the engine is closed, or was built by another process."""
        self.require_own_process()
        if self._closed:
            raise UsageError(CLOSED)

    def step(self) -> int:
        """One step for all requests: schedule, run, sample, settle.

        Returns the number of tokens that ran; 0 means that there is nothing to do.
        """
        with self._turn():
            return self._step()

    @recording_defects()
    def _step(self) -> int:
        steps = self._steps
        self._admit()
        self.cache.look_at_memory()
        steps.drop_unwanted()
        step = steps.take_ahead()
        goes_on = step is not None or self._goes_on
        began = self._last_end if step else time.perf_counter()
        before = self._last_end if goes_on else began
        chunks = step.chunks if step else self.scheduler.schedule()
        launched: float | None = None
        if chunks:
            self.num_steps += 1
            with steps.ending_on_errors(chunks):
                if step is None:
                    chunks = self.scheduler.with_drafts(chunks)
                    launched = time.perf_counter()
                    step = steps.launch(chunks)
                failure = steps.launch_ahead(step)  # the device goes on while the host settles
                outcomes = step.wait()
                self._note_pace(chunks, began)
                if self.draft_model is not None:
                    since = None if launched is None else self._last_end - launched
                    self.draft_model.note_step(chunks, self._last_end - before, since)
                self.runner.require_ranks()  # what a step without one of them gives is nothing
                steps.settle(step, outcomes)
                if failure is not None:
                    raise failure
                steps.record_ids(step, outcomes)
            self.cache.end_step()
        self._goes_on = bool(self.scheduler.running)
        return sum(chunk.num_tokens for chunk in chunks)

    def _note_pace(self, chunks: Sequence[Chunk], began: float) -> None:
        """A step ends now that began then: one that was launched ahead, with the end of the last
        one."""
        self._last_end = time.perf_counter()
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        num_generating = sum(chunk.num_tokens for chunk in chunks if chunk.is_answer)
        if self._pace is not None:
            self._pace.note(num_tokens, num_generating, self._last_end - began)
        if self.cache.disk is not None and num_tokens - num_generating >= self.cache.block_size:
            self.cache.disk.note_computed(num_tokens - num_generating, self._last_end - began)

    def inherit_blocks(self, path: str) -> None:
        """Keep what the process before left in the KV cache, of which the file at `path` tells, and
        have the next one find what this one leaves. No request may have run yet."""
        with self._turn():
            if self._has_prefix_cache and (found := self.runner.resident_blocks(path)) is not None:
                self.cache.inherit(found)

    def capture(self) -> None:
        """Capture the steps of the model, and those of the one that drafts, as `Runner` does."""
        self.runner.capture()
        if self.draft_model is not None:
            self.draft_model.capture()

    def save_prompt(
        self, path: Path, token_ids: Sequence[int], salt: str, lora: Scales | None = None
    ) -> tuple[int, int]:
        """Write the blocks that the cache keeps of these tokens; returns how many tokens those are,
        and the bytes of the file. `lora` is as in SamplingParams. Raises UsageError."""
        self._require_blocks_to_save()
        digests = self._digests_of(token_ids, salt, lora)
        with self._turn():
            kept = self.cache.find_kept(digests)
            blocks = tuple(self.runner.page_bytes.copy_of(block_id) for block_id in kept)
        prompt = SavedPrompt(tuple(token_ids), blocks)
        num_bytes = save_prompt(path, self._fingerprint_of(lora), prompt)
        return len(blocks) * self.cache.block_size, num_bytes

    def restore_prompt(
        self, path: Path, salt: str, lora: Scales | None = None
    ) -> tuple[tuple[int, ...], int, int]:
        """Have the cache keep what `save_prompt` wrote with that `lora`, for requests of that salt.

        Returns the tokens, how many of them are kept, and the bytes of the file. Raises UsageError.
        """
        self._require_blocks_to_save()
        pages = self.runner.page_bytes
        prompt, num_bytes = load_prompt(path, self._fingerprint_of(lora), pages.num_bytes)
        digests = self._digests_of(prompt.token_ids, salt, lora)[: len(prompt.blocks)]
        with self._turn():
            num_kept = self.cache.bring_back(
                digests, lambda block_id, number: pages.put(block_id, prompt.blocks[number])
            )
        return prompt.token_ids, num_kept * self.cache.block_size, num_bytes

    def erase_prompt(self, token_ids: Sequence[int], salt: str, lora: Scales | None = None) -> int:
        """Keep no blocks of these tokens any longer; returns how many tokens were kept."""
        with self._turn():
            num_kept = self.cache.erase(self._digests_of(token_ids, salt, lora))
            return num_kept * self.cache.block_size

    def _digests_of(self, token_ids: Sequence[int], salt: str, lora: Scales | None) -> list[bytes]:
        size, adapters = self.cache.block_size, self._adapters_of(lora)
        return BlockDigests(size, salt, adapters).first(len(token_ids) // size, token_ids)

    def _adapters_of(self, lora: Scales | None) -> bytes:
        adapters = self.runner.adapters
        return adapters.digest(adapters.scales(lora)) if adapters is not None else b""

    def _fingerprint_of(self, lora: Scales | None) -> bytes:
        """What stands for all that blocks of these adapters depend on besides tokens and salt."""
        own, adapters = self.runner.fingerprint, self._adapters_of(lora)
        return hashlib.blake2b(own + adapters, digest_size=len(own)).digest() if adapters else own

    def _require_blocks_to_save(self) -> None:
        if not self.runner.has_blocks_to_save or not self._has_prefix_cache:
            raise UsageError(
                "prompts are saved on the CPU, of models whose layers carry no state, and with a "
                "prefix cache; this one is not"
            )

    def request(
        self, prompt_ids: Sequence[int], params: SamplingParams, terms: RequestTerms = PLAIN
    ) -> Request:
        """A request for `submit`, checked.

        Raises ContextOverflow and OutOfBlocks for a long prompt, UsageError for an empty one, an
        unknown id, no token left, or a form that is none.
        """
        self.require_usable()
        return self._admission.request(prompt_ids, params, terms)

    def submit(self, request: Request) -> None:
        """Queue a request for the coming steps; returns at once."""
        self.require_own_process()
        self._admission.submit(request)

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
                    self.scheduler.fail(request, error)

    def check_integrity(self) -> None:
        """Raises IntegrityError when requests, tables and blocks contradict each other."""
        with self._turn():
            ahead = self._steps.ahead
            self.scheduler.check_integrity(ahead.chunks if ahead else ())

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
            self._steps.drop_ahead()
            if self.cache.disk is not None:
                self.cache.disk.close()
                self.cache.disk = None

    def route(self) -> Route:
        """What runner and sampler have executed so far."""
        return self._steps.route()

    def _admit(self) -> None:
        self._admission.admit(self.scheduler, is_closed=self._closed)


def _state_slots(runner: Runner) -> StateSlots | None:
    """Where layers carry a state; with drafts each request has two."""
    if not runner.num_state_slots:
        return None
    has_spares = runner.config.tries_tokens
    return StateSlots(runner.num_state_slots, runner.num_checkpoints, has_spares=has_spares)
