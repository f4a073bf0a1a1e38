"""Keeps one worker alive and every open request with it: what a worker dies with, the next one has.

A request is resumed from its prompt and the tokens that were sent, so its client sees a pause and
then what would have come anyway. One that several workers die with while they get nowhere is tried
alone, and then ended with an error of its own: the others are not to suffer for it.

A request gives way to a client that has none with the worker, if its own has several there. It is
ended there, and goes on later just as one whose worker died.

Everything here runs in the server's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path

from hypocenter.base.errors import EXIT_ERROR, BadLogits, HypoError
from hypocenter.server.generation import NOBODY, Generation
from hypocenter.server.operating.log import tell
from hypocenter.server.operating.succession import Succession, how
from hypocenter.server.reading.readers import Readers, ReadingProcess, process_maker
from hypocenter.server.reading.request_reading import RequestReading
from hypocenter.server.turns.places import Places
from hypocenter.server.worker_life import Orders, WorkerLife, is_fault
from hypocenter.server.worker_line import WorkerLine
from hypocenter.watch.child import Ended
from hypocenter.wire.messages import (
    NO_REQUEST,
    Accepted,
    Ask,
    Cancel,
    Dropped,
    Ending,
    EngineState,
    Failed,
    Loading,
    News,
    Piece,
    ReadingLimits,
    Ready,
    ServedModel,
    Told,
    ToServer,
)

log = logging.getLogger("hypocenter.server")

#: Workers that may die with a request that gets nowhere, before it is given up.
MAX_BLAMED = 3
#: From this death on a request is tried alone.
_SUSPECT = 2
#: Workers in a row that may end before they are ready, and the pauses between them in seconds.
MAX_FAILED_STARTS = 5
_PAUSES = (0.0, 0.0, 1.0, 5.0, 15.0)
#: How the server calls the error of a request that it gave up.
QUARANTINED, WORKER_GONE = "Quarantined", "WorkerGone"


class CannotStart(HypoError):
    """Workers end before they are ready; `exit_code` is the last one's."""

    def __init__(self, exit_code: int, reason: str, settings: tuple[str, ...] = ()) -> None:
        self.exit_code, self.settings = exit_code, settings
        super().__init__(reason)


class Supervisor:
    """`on_event` hears of what is counted: restarted, resumed, paused, quarantined, fault.

    `make_reader` gives a process that reads forms or does not (`readers.py`).
    """

    def __init__(
        self,
        orders: Orders,
        *,
        on_left: Callable[[Path, Ended], None],
        on_event: Callable[[str], None] = lambda what: None,
        make_reader: Callable[[bool], ReadingProcess] | None = None,
    ) -> None:
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._open: dict[int, Generation] = {}
        #: Cancelled ones that the worker has not said to be through with.
        self._leaving: dict[int, Generation] = {}
        self._num_questions = 0
        make_reader = make_reader or process_maker(
            {"model": orders.model, "config": orders.config, "limits": ReadingLimits()}
        )
        self._readers = Readers(make_reader)
        self._reading = RequestReading(self._readers, self.next_id)
        self._places = Places()
        self.line = WorkerLine(orders, self._hear, self._note_end, on_left)
        self._facts: ServedModel | None = None
        self._is_ready = False
        self._is_stopping = False
        self._num_failed_starts = 0
        self._last_ended: Ended | Exception | None = None
        self._first_ready: asyncio.Future[ServedModel] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading_tasks: dict[int, asyncio.Task[None]] = {}
        self._load_error: Failed | None = None
        self._succession = Succession()
        self._are_bad_logits_the_models = False
        self.num_restarts = 0
        self.loading = Loading("starting", 0.0)
        self.state = EngineState()

    # -- what others ask ---------------------------------------------------------------------------

    async def start(self) -> ServedModel:
        """Start the first worker and wait until it is ready. Raises CannotStart."""
        self._first_ready = asyncio.get_running_loop().create_future()
        self._readers.start()
        await self._start_next()
        return await self._first_ready

    @property
    def facts(self) -> ServedModel | None:
        """Of the model, once a worker has loaded it."""
        return self._facts

    @property
    def is_ready(self) -> bool:
        """Whether a worker takes requests now."""
        return self._is_ready and not self._is_stopping

    @property
    def has_given_up(self) -> bool:
        """Whether no further worker is started."""
        return self._num_failed_starts >= MAX_FAILED_STARTS

    @property
    def generations(self) -> list[Generation]:
        """All that somebody waits for, the oldest first."""
        return list(self._open.values())

    @property
    def num_left(self) -> int:
        """Requests and questions that are worked on though nobody waits for them any more."""
        return len(self._leaving) + self._readers.num_left

    @property
    def num_questions(self) -> int:
        """Questions beside requests, such as for the tokens of a text, that somebody waits for."""
        return self._num_questions

    @property
    def worker_pid(self) -> int | None:
        """The process of the worker that is ready or about to be."""
        return self._life.pid if self._life else None

    @property
    def _life(self) -> WorkerLife | None:
        return self.line.current

    def seconds_in_step(self) -> float | None:
        """How long the worker's running step has taken, if one runs."""
        return self._life.seconds_in_step(time.monotonic()) if self._life else None

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, generation: Generation) -> None:
        """Have it read and run; what comes of it, it is told. While no worker is ready it waits."""
        self._open[generation.id] = generation
        if generation.is_read:
            self._send_waiting()
            return
        task = asyncio.get_running_loop().create_task(self._read(generation))
        self._reading_tasks[generation.id] = task
        task.add_done_callback(lambda task: self._note_read(generation, task))

    def cancel(self, generation: Generation) -> None:
        """Whatever becomes of it, nobody waits for that any more."""
        if self._open.pop(generation.id, None) is not None:
            generation.leave()
            if (task := self._reading_tasks.get(generation.id)) is not None:
                task.cancel()
            if generation.is_with_worker and self._life is not None:
                self._leaving[generation.id] = generation
                self._life.send(Cancel(generation.id))
            self._send_waiting()  # it may have been tried alone

    def end_early(self, generation: Generation) -> None:
        """Have it end with what it has, which whoever waits is told."""
        self.cancel(generation)
        generation.is_done = False
        generation.take(Piece(generation.id, "", (), ending=Ending("cancelled")))

    async def ask(self, question: Ask, client: str = NOBODY) -> Told | Failed:
        """What a reader says of a text, a conversation or tokens."""
        self._num_questions += 1
        try:
            told = await self._readers.ask(question, client)
        finally:
            self._num_questions -= 1
        assert isinstance(told, Told | Failed), "no form was asked for"
        return told

    def distrust_worker(self) -> None:
        """End the worker, whose memory is in doubt, as one that died of a fault; the next one reads
        weights and prompts anew."""
        self.line.forget_blocks()
        self.line.forget_weights()
        if self._life is not None:
            self._life.abort()

    def fail_all(self, reason: str) -> None:
        """End all that is open with an error."""
        for generation in self.generations:
            self._give_up(generation, WORKER_GONE, reason)

    async def stop(self, seconds: float) -> None:
        """End the worker, and whatever is open."""
        self._is_stopping = True
        self.fail_all("the server is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self.line.stop(seconds), self._readers.stop())

    # -- what the worker says ----------------------------------------------------------------------

    def _hear(self, message: ToServer) -> None:
        match message:
            case Loading():
                self.loading = message
            case Ready():
                self._facts = message.facts
                self._is_ready = True
                self._num_failed_starts = 0
                self._succession.tell_ready(self.worker_pid, message.seconds, len(self._open))
                if self._first_ready is not None and not self._first_ready.done():
                    self._first_ready.set_result(message.facts)
                self._send_waiting()
                self.line.start_spare()
            case News():
                self.state = message.state
                frees = [self._hear_piece(piece) for piece in message.pieces]
                if any(frees):
                    self._send_waiting()
            case Accepted(number):
                if (leaving := self._leaving.get(number)) is not None:
                    leaving.is_accepted = True
                if (generation := self._open.get(number)) is not None:
                    generation.take(message)
                self._send_waiting()
            case Dropped(number):
                self._leaving.pop(number, None)
                if (paused := self._open.get(number)) is not None:
                    paused.take_back()
                self._send_waiting()
            case Failed():
                self._hear_of_failure(message)

    def _hear_piece(self, piece: Piece) -> bool:
        """Whether another request may get a place now, or may be tried beside this one."""
        generation = self._open.get(piece.id) or self._leaving.get(piece.id)
        if generation is None:
            return False
        if self._is_pause(generation, piece):
            generation.take_back()  # what was held back of its text comes again, with its tokens
            return True
        frees = not generation.has_begun or piece.ending is not None or generation.num_blamed > 0
        num_prompt = 0 if generation.has_begun else len(generation.prompt_ids or ())
        if not generation.is_canary:
            self._places.charge(generation.client, num_prompt, len(piece.token_ids))
        if piece.id in self._open:
            generation.take(piece)
            self._drop_if_done(generation)
        else:
            generation.has_begun = True
            if piece.ending is not None:
                del self._leaving[piece.id]
        return frees

    def _is_pause(self, generation: Generation, piece: Piece) -> bool:
        """Whether it ends only because another client was to have its place."""
        is_cancelled = piece.ending is not None and piece.ending.reason == "cancelled"
        return is_cancelled and generation.is_pausing and generation.id in self._open

    def _hear_of_failure(self, message: Failed) -> None:
        if message.id == NO_REQUEST:
            self._load_error = message
        self._leaving.pop(message.id, None)
        if (generation := self._open.get(message.id)) is not None:
            if self._is_workers_fault(generation, message):
                return
            generation.take(message)
            self._drop_if_done(generation)
        self._send_waiting()

    def _is_workers_fault(self, generation: Generation, failed: Failed) -> bool:
        """Whether logits that are no numbers may be the worker's, which then ends.

        Its memory may be damaged. Where the next worker finds the same, the model gives such
        numbers for that request; no worker ends for that again.
        """
        if failed.kind != BadLogits.__name__ or self._life is None:
            return False
        if generation.had_bad_logits:
            self._are_bad_logits_the_models = True
            return False
        generation.had_bad_logits = True
        if self._are_bad_logits_the_models:
            return False
        message = f"worker {self._life.pid} gave logits that are no numbers, and is replaced"
        tell(logging.WARNING, "bad_logits", message, pid=self._life.pid)
        self.line.forget_blocks()
        self._life.abort()
        return True

    def _drop_if_done(self, generation: Generation) -> None:
        if generation.is_done:
            self._open.pop(generation.id, None)

    # -- who runs ----------------------------------------------------------------------------------

    async def _read(self, generation: Generation) -> None:
        """Have it read; then it waits for its place, or is refused."""
        assert self._facts is not None, "a model was loaded before requests came"
        failed = await self._reading.read(generation, self._facts)
        if failed is not None:
            self._open.pop(generation.id, None)
            generation.take(failed)
            return
        generation.is_read = True
        self._send_waiting()

    def _note_read(self, generation: Generation, task: asyncio.Task[None]) -> None:
        """Nothing is left of its reading; a defect in that is told like any other error."""
        self._reading_tasks.pop(generation.id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request was not read, by a defect", exc_info=error)
            self._give_up(generation, type(error).__name__, "the server has a defect; see its log")

    def _send_waiting(self) -> None:
        """Hand the worker all that it may have now; while a suspect is tried, no other one."""
        life, facts = self._life, self._facts
        if not self._is_ready or life is None or facts is None or self._last_ended is not None:
            return
        if suspects := [g for g in self._open.values() if g.num_blamed >= _SUSPECT]:
            if not any(g.is_with_worker for g in suspects):
                life.send(suspects[0].hand_over())
            return
        for canary in [g for g in self._open.values() if g.is_canary and not g.is_with_worker]:
            life.send(canary.hand_over())
        while (generation := self._places.next(self._open, self._leaving, facts)) is not None:
            life.send(generation.hand_over())
        if (generation := self._places.to_pause(self._open, self._leaving, facts)) is not None:
            self._on_event("paused")
            generation.is_pausing = True
            life.send(Cancel(generation.id))

    # -- how workers end ---------------------------------------------------------------------------

    async def _start_next(self) -> None:
        self._last_ended = None
        await self.line.start_next()

    def _note_end(self, ended: Ended | Exception) -> None:
        """The worker's process is gone."""
        was_ready, self._is_ready = self._is_ready, False
        self.state = EngineState()
        self._leaving.clear()
        if self._is_stopping:
            return
        self._last_ended = ended
        if is_fault(ended):
            self._on_event("fault")
        is_first = self._first_ready is not None and not self._first_ready.done()
        if not is_first:  # of a start that failed its reason is told, and nothing else
            self._succession.tell_lost(ended, len(self._open))
        if not was_ready:
            self._num_failed_starts += 1
        self._blame(is_fault(ended))
        if self._is_memory_in_doubt(ended):
            self.line.forget_blocks()
        if self.has_given_up or is_first:
            self._stop_trying(ended)
            return
        self._on_event("restarted")
        self.num_restarts += 1
        task = asyncio.get_running_loop().create_task(self._start_again())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_again(self) -> None:
        await asyncio.sleep(_PAUSES[min(self._num_failed_starts, len(_PAUSES) - 1)])
        if not self._is_stopping:
            await self._start_next()

    def _blame(self, was_fault: bool) -> None:
        """Note of all that were with the worker that it died, and give up whom that says enough."""
        for generation in self.generations:
            if not generation.is_with_worker:
                continue
            generation.take_back()
            generation.num_resumed += 1
            generation.num_blamed += was_fault
            if generation.num_blamed >= MAX_BLAMED:
                self._on_event("quarantined")
                self._give_up(
                    generation,
                    QUARANTINED,
                    f"{generation.num_blamed} workers died while they ran this request, which got "
                    "no further; it is not tried again",
                )
            else:
                self._on_event("resumed")

    def _is_memory_in_doubt(self, ended: Ended | Exception) -> bool:
        """Whether what the worker left of the KV cache may be why it died, or was too much."""
        was_too_much = isinstance(ended, Ended) and bool(ended.num_memory_kills)
        return was_too_much or any(g.num_blamed >= _SUSPECT for g in self.generations)

    def _give_up(self, generation: Generation, kind: str, reason: str) -> None:
        self._open.pop(generation.id, None)
        if (task := self._reading_tasks.get(generation.id)) is not None:
            task.cancel()
        if not generation.is_done:
            generation.take(Failed(generation.id, kind, reason))

    def _stop_trying(self, ended: Ended | Exception) -> None:
        is_error = isinstance(ended, Exception)
        reason = str(ended) if is_error else f"the worker {how(ended)} while it loaded"
        settings: tuple[str, ...] = ()
        if self._load_error is not None:
            reason, settings = self._load_error.message, self._load_error.settings
        code = getattr(ended, "exit_code", None)  # of a process, or of a HypoError
        self.fail_all(f"no worker can be started: {reason}")
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(CannotStart(code or EXIT_ERROR, reason, settings))
        else:
            tell(logging.ERROR, "given_up", f"no worker can be started: {reason}")
        self._num_failed_starts = MAX_FAILED_STARTS
