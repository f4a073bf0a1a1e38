"""Keeps workers alive and every open request with them: what a worker dies with, another one has.

There is a worker on each card, or group of cards (`fleet/replica.py`); `turns/places.py` says which
one a request goes to. A request is resumed from its prompt and the tokens that were sent, so its
client sees a pause and then what would have come anyway. One that several workers die with while
they get nowhere is tried alone, and then ended with an error of its own: the others are not to
suffer for it.

A request gives way to a client that has none with the worker, if its own has several there. It is
ended there, and goes on later just as one whose worker died.

Where others are ready, what a worker died with goes on there at once.

Everything here runs in the server's event loop.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from hypocenter.base.errors import BadLogits
from hypocenter.server.fleet.replica import (
    MAX_FAILED_STARTS,
    CannotStart,
    Replica,
    ReplicaNumbers,
    orders_of,
)
from hypocenter.server.fleet.twins import Twins
from hypocenter.server.generation import NOBODY, Generation
from hypocenter.server.operating.log import tell
from hypocenter.server.operating.succession import Taken
from hypocenter.server.reading.readers import Readers, ReadingProcess, process_maker
from hypocenter.server.reading.request_reading import RequestReading
from hypocenter.server.turns.places import Offer, Places
from hypocenter.server.worker_life import Orders, is_fault
from hypocenter.watch.child import Ended
from hypocenter.watch.prepared import drop
from hypocenter.wire.messages import (
    Accepted,
    Ask,
    Cancel,
    Dropped,
    Ending,
    EngineState,
    Failed,
    Loading,
    MovePrompt,
    News,
    Piece,
    PromptMoved,
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
#: What saving or restoring a prompt may take.
_MOVE_SECONDS = 120.0
#: How the server calls the error of a request that it gave up.
QUARANTINED, WORKER_GONE = "Quarantined", "WorkerGone"


class Supervisor:
    """`on_event` hears of what is counted: restarted, resumed, paused, quarantined, fault; and of
    which replica. There is one on each of `devices`, by default on that of the orders.

    `make_reader` gives a process that reads forms or does not (`readers.py`). `process_numbers` are
    those of its processes, shared where there are several models.
    """

    def __init__(
        self,
        orders: Orders,
        *,
        on_left: Callable[[Path, Ended], None],
        on_event: Callable[[str, int], None] = lambda what, replica: None,
        make_reader: Callable[[bool], ReadingProcess] | None = None,
        devices: tuple[str, ...] = (),
        process_numbers: Iterator[int] | None = None,
    ) -> None:
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._open: dict[int, Generation] = {}
        #: Cancelled ones that the worker has not said to be through with.
        self._leaving: dict[int, Generation] = {}
        self._num_questions = 0
        #: What was asked of workers beside requests, by its id, and of which replica.
        self._moving: dict[int, tuple[int, asyncio.Future[PromptMoved | Failed]]] = {}
        make_reader = make_reader or process_maker(
            {"model": orders.model, "config": orders.config, "limits": ReadingLimits()}
        )
        self._readers = Readers(make_reader)
        self._reading = RequestReading(self._readers, self.next_id)
        self._places = Places()
        self._keeps_prefixes = orders.config.prefix_cache
        self._twins = Twins()
        self.on_left = on_left
        numbers = itertools.count(1) if process_numbers is None else process_numbers
        all_orders = orders_of(orders, devices or (orders.config.device,))
        #: On each card one, in the order of `devices`.
        self.replicas = tuple(
            Replica(ReplicaNumbers(number, len(all_orders), numbers), own, self)
            for number, own in enumerate(all_orders)
        )
        self._facts: ServedModel | None = None
        self._is_stopping = False
        self._reading_tasks: dict[int, asyncio.Task[None]] = {}
        self._are_bad_logits_the_models = False

    # -- what others ask ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Start a worker of each replica, and wait until all are ready or lost.

        The others begin when the first one is ready, and find the weights and kernels that it has
        made. Raises CannotStart when none can be started.
        """
        self._readers.start()
        first_error: CannotStart | None = None
        waiting = list(self.replicas)
        while waiting:
            try:
                await waiting.pop(0).start()
                break
            except CannotStart as error:
                first_error = first_error or error
        else:
            assert first_error is not None
            raise first_error
        drop()  # of processes that were prepared, those that are not needed
        told = await asyncio.gather(
            *(replica.start() for replica in waiting), return_exceptions=True
        )
        for outcome in told:
            if outcome is not None and not isinstance(outcome, CannotStart):
                raise outcome

    @property
    def facts(self) -> ServedModel | None:
        """Of the model, once a worker has loaded it; places and blocks are of all replicas."""
        return self._facts

    @property
    def is_ready(self) -> bool:
        """Whether a worker takes requests now."""
        return not self._is_stopping and any(replica.is_ready for replica in self.replicas)

    @property
    def has_given_up(self) -> bool:
        """Whether no further worker is started."""
        return all(replica.is_lost for replica in self.replicas)

    @property
    def state(self) -> EngineState:
        """What all engines are at together."""
        return _sum(*(replica.state for replica in self.replicas))

    @property
    def loading(self) -> Loading:
        """What the first replica does that is not ready."""
        others = (r for r in self.replicas if not r.is_ready and not r.is_lost)
        return next(others, self.replicas[0]).loading

    @property
    def num_restarts(self) -> int:
        return sum(replica.num_restarts for replica in self.replicas)

    @property
    def generations(self) -> list[Generation]:
        """All that somebody waits for, the oldest first."""
        return list(self._open.values())

    @property
    def of_clients(self) -> list[Generation]:
        """All that is open and was asked by clients."""
        return [generation for generation in self._open.values() if not generation.is_canary]

    @property
    def num_left(self) -> int:
        """Requests and questions that are worked on though nobody waits for them any more."""
        return len(self._leaving) + self._readers.num_left

    @property
    def num_questions(self) -> int:
        """Questions beside requests, such as for the tokens of a text, that somebody waits for."""
        return self._num_questions

    def seconds_in_step(self) -> float | None:
        """How long the running step has taken of the worker that is the furthest on; None where a
        worker runs none."""
        now = time.monotonic()
        lives = [r.life for r in self.replicas if r.is_ready and r.life is not None]
        seconds = [life.seconds_in_step(now) for life in lives]
        known = [value for value in seconds if value is not None]
        return min(known) if known and len(known) == len(seconds) else None

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
            if generation.replica is not None:
                life = self.replicas[generation.replica].life
                if life is not None:
                    self._leaving[generation.id] = generation
                    life.send(Cancel(generation.id))
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

    async def move(self, replica: Replica, message: MovePrompt) -> PromptMoved | Failed:
        """Have a worker save, restore or erase a prompt; what it says of that."""
        if not replica.takes_requests or replica.life is None:
            return Failed(message.id, WORKER_GONE, "no worker is ready; try again in a moment")
        told = asyncio.get_running_loop().create_future()
        self._moving[message.id] = replica.number, told
        replica.life.send(message)
        try:
            return await asyncio.wait_for(told, _MOVE_SECONDS)
        except TimeoutError:
            return Failed(message.id, WORKER_GONE, f"it took more than {_MOVE_SECONDS:.0f} s")
        finally:
            self._moving.pop(message.id, None)

    def distrust_worker(self, replica: Replica) -> None:
        """End its worker, whose memory is in doubt, as one that died of a fault; the next one reads
        weights and prompts anew."""
        replica.line.forget_blocks()
        replica.line.forget_weights()
        if replica.life is not None:
            replica.life.abort()

    def fail_all(self, reason: str) -> None:
        """End all that is open with an error."""
        for generation in self.generations:
            self._give_up(generation, WORKER_GONE, reason)

    async def stop(self, seconds: float, reason: str = "the server is shutting down") -> None:
        """End the worker, and whatever is open, for that reason."""
        self._is_stopping = True
        self.fail_all(reason)
        stopping = [replica.stop(seconds) for replica in self.replicas]
        await asyncio.gather(*stopping, self._readers.stop())

    # -- what workers say --------------------------------------------------------------------------

    def hear(self, replica: Replica, message: ToServer) -> None:
        """A worker has said something of a request, or that it is ready."""
        match message:
            case Ready():
                self._note_facts()
                self._send_waiting()
            case News():
                frees = [self._hear_piece(piece, replica) for piece in message.pieces]
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
            case PromptMoved() | Failed() if message.id in self._moving:
                _, told = self._moving.pop(message.id)
                if not told.done():
                    told.set_result(message)
            case Failed():
                self._hear_of_failure(message, replica)
            case _:
                pass

    @property
    def num_waiting(self) -> int:
        """Requests of clients that no worker has."""
        return sum(not generation.is_with_worker for generation in self.of_clients)

    def _hear_piece(self, piece: Piece, replica: Replica) -> bool:
        """Whether another request may get a place now, or may be tried beside this one."""
        generation = self._open.get(piece.id) or self._leaving.get(piece.id)
        if generation is None:
            return False
        if self._is_pause(generation, piece):
            generation.take_back()  # what was held back of its text comes again, with its tokens
            return True
        frees = not generation.has_begun or piece.ending is not None or generation.num_blamed > 0
        had_begun = generation.has_begun
        num_prompt = 0 if had_begun else len(generation.prompt_ids or ())
        if not generation.is_canary:
            self._places.charge(generation.client, num_prompt, len(piece.token_ids))
        if piece.id in self._open:
            num_steps = replica.state.num_steps
            generation.steps = (generation.steps or (num_steps, 0))[0], num_steps
            generation.take(piece)
            if had_begun and piece.token_ids and generation.gap is not None:
                replica.note_gap(generation.gap)
                if len(self.replicas) > 1:
                    self._note_twins(replica)
            self._drop_if_done(generation)
        else:
            generation.has_begun = True
            if piece.ending is not None:
                del self._leaving[piece.id]
        return frees

    def _note_twins(self, replica: Replica) -> None:
        """Have it told where a card is much slower than another one."""
        gaps = {
            twin.name: twin.gap_seconds
            for twin in self.replicas
            if twin.is_ready and twin.gap_seconds is not None
        }
        if replica.name in gaps:
            self._twins.note(replica.name, gaps, time.monotonic())

    def _is_pause(self, generation: Generation, piece: Piece) -> bool:
        """Whether it ends only because another client was to have its place."""
        is_cancelled = piece.ending is not None and piece.ending.reason == "cancelled"
        return is_cancelled and generation.is_pausing and generation.id in self._open

    def _hear_of_failure(self, message: Failed, replica: Replica) -> None:
        self._leaving.pop(message.id, None)
        if (generation := self._open.get(message.id)) is not None:
            if self._is_workers_fault(generation, message, replica):
                return
            generation.take(message)
            self._drop_if_done(generation)
        self._send_waiting()

    def _is_workers_fault(self, generation: Generation, failed: Failed, replica: Replica) -> bool:
        """Whether logits that are no numbers may be the worker's, which then ends.

        Its memory may be damaged. Where the next worker finds the same, the model gives such
        numbers for that request; no worker ends for that again.
        """
        life = replica.life
        if failed.kind != BadLogits.__name__ or life is None:
            return False
        if generation.had_bad_logits:
            self._are_bad_logits_the_models = True
            return False
        generation.had_bad_logits = True
        if self._are_bad_logits_the_models:
            return False
        message = f"worker {life.pid} gave logits that are no numbers, and is replaced"
        tell(logging.WARNING, "bad_logits", message, pid=life.pid)
        replica.line.forget_blocks()
        life.abort()
        return True

    def _drop_if_done(self, generation: Generation) -> None:
        if generation.is_done:
            self._open.pop(generation.id, None)
            if generation.replica is not None and self._keeps_prefixes:
                self._note_prefix(generation, self.replicas[generation.replica])

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
        """Hand workers all that they may have now."""
        offers = self._offers()
        if not offers:
            return
        offered = {offer.replica for offer in offers}
        for canary in [g for g in self._open.values() if g.is_canary and not g.is_with_worker]:
            if canary.canary_of in offered:
                self._hand_over(canary, self.replicas[canary.canary_of])
        while (found := self._places.next(self._open, self._leaving, offers)) is not None:
            generation, offer = found
            self._hand_over(generation, self.replicas[offer.replica])
        paused = self._places.to_pause(self._open, self._leaving, offers)
        if paused is not None:
            assert paused.replica is not None
            replica = self.replicas[paused.replica]
            self._on_event("paused", replica.number)
            paused.is_pausing = True
            if replica.life is not None:
                replica.life.send(Cancel(paused.id))

    def _hand_over(self, generation: Generation, replica: Replica) -> None:
        assert replica.life is not None, "it takes requests"
        if self._keeps_prefixes and replica.facts is not None:
            self._places.hand_over(generation, Offer(replica.number, replica.facts))
        replica.life.send(generation.hand_over(replica.number))

    def _note_prefix(self, generation: Generation, replica: Replica) -> None:
        if (facts := replica.facts) is not None:
            block_size, num_blocks = facts.block_size, facts.num_blocks
            self._places.prefixes.note(replica.number, generation, block_size, num_blocks)

    def _offers(self) -> list[Offer]:
        """Replicas that take requests; one is kept from others while a suspect is tried there."""
        ready = [replica for replica in self.replicas if replica.takes_requests]
        if (tried := self._try_suspect(ready)) is not None:
            ready.remove(tried)
        return [Offer(r.number, r.facts, r.gap_seconds) for r in ready if r.facts is not None]

    def _try_suspect(self, ready: list[Replica]) -> Replica | None:
        """Where a suspect is tried, beside nothing new: where the fewest run when it begins."""
        suspects = [g for g in self._open.values() if g.num_blamed >= _SUSPECT and g.is_read]
        if not suspects or not ready:
            return None
        for suspect in suspects:
            if suspect.replica is not None:
                tried = self.replicas[suspect.replica]
                return tried if tried in ready else None
        there = collections.Counter(g.replica for g in self._open.values())
        chosen = min(ready, key=lambda one: (there[one.number], one.number))
        self._hand_over(suspects[0], chosen)
        return chosen

    def _note_facts(self) -> None:
        """What is served, by all replicas that are not lost."""
        known = [r.facts for r in self.replicas if r.facts is not None and not r.is_lost]
        if known:
            self._facts = msgspec.structs.replace(
                known[0],
                max_requests=sum(facts.max_requests for facts in known),
                num_blocks=sum(facts.num_blocks for facts in known),
            )

    # -- how workers end ---------------------------------------------------------------------------

    def note_late(self, replica: Replica) -> Taken:
        """A worker is past a deadline: what it had goes on elsewhere while it is ended."""
        return self._take_from(replica, was_fault=True)

    def note_end(self, replica: Replica, ended: Ended | Exception, *, was_first: bool) -> Taken:
        """A worker's process is gone: what it had goes on elsewhere, or waits for the next one."""
        if is_fault(ended):
            self._on_event("fault", replica.number)
        taken = self._take_from(replica, was_fault=is_fault(ended))
        if isinstance(ended, Ended) and ended.num_memory_kills:
            replica.line.forget_blocks()  # they were too much
        if not was_first and replica.num_failed_starts < MAX_FAILED_STARTS:
            self._on_event("restarted", replica.number)
        return taken

    def _take_from(self, replica: Replica, *, was_fault: bool) -> Taken:
        """What a worker had goes on elsewhere, or waits."""
        self._places.prefixes.forget(replica.number)
        for number, (where, told) in self._moving.items():
            if where == replica.number and not told.done():
                told.set_result(Failed(number, WORKER_GONE, "the worker ended meanwhile"))
        for number in [n for n, g in self._leaving.items() if g.replica == replica.number]:
            del self._leaving[number]
        had = [g for g in self.of_clients if g.replica == replica.number]
        self._blame(replica, was_fault=was_fault)
        if any(generation.num_blamed >= _SUSPECT for generation in self.generations):
            replica.line.forget_blocks()  # what it left of the KV cache may be why it died
        self._send_waiting()
        num_elsewhere = sum(generation.is_with_worker for generation in had)
        num_ended = sum(generation.is_done for generation in had)
        return Taken(num_elsewhere, len(had) - num_elsewhere - num_ended)

    def note_lost(self, replica: Replica, error: CannotStart, *, was_first: bool) -> None:
        """No worker is started there any more; when that is so everywhere, nothing is left."""
        self._note_facts()
        if self.has_given_up:
            self.fail_all(f"no worker can be started: {error}")
            if not was_first:  # else whoever starts the server is told
                tell(logging.ERROR, "given_up", f"no worker can be started: {error}")
            return
        num_others = sum(not other.is_lost for other in self.replicas)
        message = f"{replica.name} is left out, {num_others} of {len(self.replicas)} are not lost: "
        message += f"no worker can be started there: {error}"
        tell(logging.ERROR, "replica_lost", message, replica=replica.number)

    def _blame(self, replica: Replica, *, was_fault: bool) -> None:
        """Note of all that were with the worker that it died, and give up whom that says enough."""
        for generation in self.generations:
            if generation.replica != replica.number:
                continue
            generation.take_back()
            generation.num_resumed += 1
            generation.num_blamed += was_fault
            if generation.num_blamed >= MAX_BLAMED:
                self._on_event("quarantined", replica.number)
                self._give_up(
                    generation,
                    QUARANTINED,
                    f"{generation.num_blamed} workers died while they ran this request, which got "
                    "no further; it is not tried again",
                )
            else:
                self._on_event("resumed", replica.number)

    def _give_up(self, generation: Generation, kind: str, reason: str) -> None:
        self._open.pop(generation.id, None)
        if (task := self._reading_tasks.get(generation.id)) is not None:
            task.cancel()
        if not generation.is_done:
            generation.take(Failed(generation.id, kind, reason))


def _sum(*states: EngineState) -> EngineState:
    """All figures of several engines, added."""
    names = [field.name for field in msgspec.structs.fields(EngineState)]
    return EngineState(**{name: sum(getattr(s, name) for s in states) for name in names})
