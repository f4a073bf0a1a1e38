"""One step of an engine: launched, perhaps before the one before it is settled, and settled.

Where the runner runs ahead, the host does its part while the device works. What a request that has
ended does not want is thrown away.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import BadLogits, HypoError
from hypocenter.base.results import Route
from hypocenter.device import copies, memory
from hypocenter.engine.batch import Chunk, make_batch
from hypocenter.engine.logprobs import token_logprob
from hypocenter.engine.request import Request
from hypocenter.engine.sampler import Sampler
from hypocenter.engine.scheduler import Scheduler
from hypocenter.record.recorder import current, recording_defects

if TYPE_CHECKING:
    from hypocenter.engine.runner import Runner
    from hypocenter.model.text.tokenizer import Tokenizer

log = logging.getLogger("hypocenter.engine")

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


class Steps:
    """Launches steps on a runner and hands its requests what they brought.

    `path` is the model's file, for messages; `launch_mode` that of the sampler.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        path: Path | None,
        launch_mode: str,
    ) -> None:
        self._runner, self._scheduler, self._tokenizer = runner, scheduler, tokenizer
        self._path = path
        self.sampler = Sampler(runner.drawn_rows, launch_mode, runner.token_ids)
        self.ahead: StepInFlight | None = None  # launched, and not waited for

    def route(self) -> Route:
        """What runner and sampler have executed so far."""
        route = self._runner.route()
        return msgspec.structs.replace(
            route,
            kernels=route.kernels + self.sampler.kernels,
            num_graphs=route.num_graphs + self.sampler.num_graphs,
        )

    def launch(self, chunks: list[Chunk]) -> StepInFlight:
        """Have the device begin; nothing is waited for."""
        logits = self._runner.run(make_batch(chunks, self._scheduler.cache))
        sampled = [chunk for chunk in chunks if chunk.samples]
        num_drawn = sum(chunk.num_drawn for chunk in sampled)
        wait = self.sampler.sample(memory.rows(logits, 0, num_drawn), sampled)
        # Asked for now, since the step after this one may overwrite them before it is waited for.
        drawn, kept, start = {}, {}, 0
        for chunk in sampled:
            if chunk.request.params.logprobs is not None:
                rows = memory.rows(logits, start, start + chunk.num_drawn)
                drawn[chunk.request.id] = copies.to_host_later(rows)
            start += chunk.num_drawn
        for chunk in chunks:
            if chunk.num_kept:
                rows = memory.rows(logits, start, start + chunk.num_kept)
                kept[chunk.request.id] = copies.to_host_later(rows)
                start += chunk.num_kept
        return StepInFlight(chunks, wait, drawn, kept, current().current_step)

    def launch_ahead(self, step: StepInFlight) -> Exception | None:
        """Launch what follows `step`, if that can be told before its tokens are known.

        An error is returned: it may be of no concern to the requests that end with `step`.
        """
        following = self._scheduler.schedule_ahead(step.chunks) if self._runner.runs_ahead else []
        if following:
            try:
                self.ahead = self.launch(following)
            except Exception as error:
                return error
        return None

    def take_ahead(self) -> StepInFlight | None:
        """The step that was launched ahead; the record goes on in it."""
        step, self.ahead = self.ahead, None
        if step is not None:
            current().resume(step.number)
        return step

    def drop_unwanted(self) -> None:
        """Wait for the step ahead where all its requests have ended since."""
        if self.ahead is not None and all(chunk.request.done for chunk in self.ahead.chunks):
            self.drop_ahead()

    def drop_ahead(self) -> None:
        """Wait for a step that nobody wants any more, which has most often ended long ago."""
        step = self.take_ahead()
        if step is None:
            return
        try:
            step.wait()
        except HypoError as error:  # it is recorded, and there is nobody to tell
            log.warning("a step that was thrown away: %s", error)
        finally:
            current().end_step()

    def record_ids(self, step: StepInFlight, outcomes: list[int | BadLogits]) -> None:
        """The step ahead took its tokens from this one on the device: now they are known."""
        if self.ahead is not None:
            ids = [0 if isinstance(outcome, BadLogits) else outcome for outcome in outcomes]
            requests = [chunk.request for chunk in step.chunks]
            digests = tuple("" if request.done else request.digest() for request in requests)
            current().record_ids(self._runner.token_ids, np.array(ids, np.int32), digests)

    @contextlib.contextmanager
    def ending_on_errors(self, chunks: list[Chunk]) -> Iterator[None]:
        """Within, an error ends the requests of a step: nobody knows whose fault it is. Others go
        on. After an interruption everything runs again, for what ran is uncertain."""
        try:
            yield
        except Exception as error:
            current().record_failure(error)
            if not (left := [chunk.request for chunk in chunks if not chunk.request.done]):
                log.warning("a step failed when its requests had all ended: %s", error)
            for request in left:
                self._scheduler.fail(request, error)
        except BaseException:
            self.ahead = None
            for request in reversed(self._scheduler.running[:]):
                if request.done:  # interrupted before it was removed
                    self._scheduler.remove(request)
                else:
                    self._scheduler.preempt(request)
            raise
        finally:
            current().end_step()

    def settle(self, step: StepInFlight, outcomes: list[int | BadLogits]) -> None:
        """Hand each request what the step brought it: a token, logits, or its end."""
        drawn = iter(outcomes)
        for chunk in self._read_drafts(step.chunks):
            request = chunk.request
            chosen = list(itertools.islice(drawn, chunk.num_drawn))
            if request.done:  # it ended when this was launched already
                continue
            request.advance(chunk.num_new)
            waits = step.kept.get(request.id), step.drawn.get(request.id)
            # Copies are waited for out here: where one fails, the device has.
            rows, logits = (None if wait is None else wait() for wait in waits)
            with self._failing_alone(request), recording_defects():
                if rows is not None:
                    self._keep(chunk, rows)
                if chosen:
                    self._accept(chunk, chosen, logits)
            if request.error is None:
                self._scheduler.keep(request)
            if request.done:
                self._scheduler.remove(request)
            elif request.has_read_all:
                with self._failing_alone(request), recording_defects():
                    self._pool(request)
                if request.error is None:
                    self._scheduler.finish(request, "length")

    def _read_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks with the drafts that the device had, which it has written by now."""
        ahead = next((chunk.ahead for chunk in chunks if chunk.ahead is not None), None)
        if ahead is None:
            return chunks
        ahead.read()
        known = [chunk.knowing_drafts() for chunk in chunks]
        ids = list(itertools.chain(*(chunk.token_ids for chunk in known)))
        requests = [chunk.request for chunk in known]
        digests = tuple("" if request.done else request.digest() for request in requests)
        current().record_ids(self._runner.token_ids, np.array(ids, np.int32), digests)
        return known

    def _pool(self, request: Request) -> None:
        """Make the vector of what was kept of its prompt, where one is wanted."""
        if request.pooling is not None:
            rows = np.concatenate(request.logits)
            request.vector = self._runner.text_head.vector(rows)
            request.logits.clear()

    @contextlib.contextmanager
    def _failing_alone(self, request: Request) -> Iterator[None]:
        """Within, an error is the request's own; the others of the step keep their tokens."""
        try:
            yield
        except BadLogits as error:
            self._scheduler.fail(request, error.of_request(self._path, self._adapters_of(request)))
        except Exception as error:
            self._scheduler.fail(request, error)

    def _adapters_of(self, request: Request) -> tuple[str, ...]:
        """The names of the adapters that count for it."""
        adapters, scales = self._runner.adapters, request.adapter_scales
        if adapters is None or not scales:
            return ()
        named = zip(adapters.names, scales, strict=True)
        return tuple(name for name, scale in named if scale)

    def _keep(self, chunk: Chunk, logits: Array) -> None:
        """Take the logits of prompt tokens, f32 [chunk.num_kept, vocab_size]."""
        request = chunk.request
        if request.keeps_logits:
            request.logits.append(logits)
        if (num_top := request.params.prompt_logprobs) is not None:
            following = request.prompt_ids[chunk.start + 1 :]  # none after the last row of all
            request.prompt_logprobs += [
                token_logprob(row, token_id, num_top, self._tokenizer.shown_piece, row=position)
                for position, row, token_id in zip(
                    itertools.count(chunk.start), logits, following, strict=False
                )
            ]

    def _accept(self, chunk: Chunk, chosen: list[int | BadLogits], logits: Array | None) -> None:
        """Take a token, and what was chosen behind each draft as far as these were right.

        `logits` f32 [len(chosen), vocab_size] are those they were drawn from, where asked for.
        """
        request, num_right = chunk.request, 0
        try:
            for outcome, draft in itertools.zip_longest(chosen, chunk.drafts):
                if isinstance(outcome, BadLogits):
                    raise outcome
                row = None if logits is None else logits[num_right]
                self._take(request, outcome, row)
                if outcome != draft or request.done:
                    break
                num_right += 1
                request.advance(1)
        finally:
            if chunk.drafts:
                self._scheduler.take_back(chunk, num_right)

    def _take(self, request: Request, token_id: int, logits: Array | None) -> None:
        logprob, num_top = None, request.params.logprobs
        if logits is not None and num_top is not None:
            logprob = token_logprob(logits, token_id, num_top, self._tokenizer.shown_piece)
        request.accept(token_id, logprob)
