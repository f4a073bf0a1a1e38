"""One card, or group of cards, and the workers that have it one after the other.

It starts the next worker when one has ended. A card whose workers end before they are ready, so
many times in a row, is lost: nothing is started there any more, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from hypocenter.base.errors import EXIT_ERROR, HypoError
from hypocenter.server.operating.succession import Succession, Taken, how
from hypocenter.server.worker_life import Orders, WorkerLife
from hypocenter.server.worker_line import WorkerLine
from hypocenter.watch.child import Ended
from hypocenter.wire.messages import (
    NO_REQUEST,
    EngineState,
    Failed,
    Loading,
    News,
    Ready,
    ServedModel,
    ToServer,
)

#: Workers in a row that may end before they are ready, and the pauses between them in seconds.
MAX_FAILED_STARTS = 5
_PAUSES = (0.0, 0.0, 1.0, 5.0, 15.0)
#: Part that a new gap has in what is known of the time between two pieces.
_NEWEST_PART = 0.05
#: A gap counts at most so many times what was known before: a step that compiles says nothing.
_MOST_GAPS = 4.0

Condition = Literal["loading", "ready", "lost"]


class CannotStart(HypoError):
    """Workers end before they are ready; `exit_code` is the last one's, `kind` the class of the
    error that it told, if it did."""

    def __init__(
        self, exit_code: int, reason: str, settings: tuple[str, ...] = (), kind: str = ""
    ) -> None:
        self.exit_code, self.settings, self.kind = exit_code, settings, kind
        super().__init__(reason)


class Owner(Protocol):
    """Who has replicas, and the requests that they run."""

    def hear(self, replica: Replica, message: ToServer) -> None:
        """A worker has said something of a request, or that it is ready."""
        ...

    def note_late(self, replica: Replica) -> Taken:
        """Its worker is past a deadline, and is being ended; what has become of its requests."""
        ...

    def note_end(self, replica: Replica, ended: Ended | Exception, *, was_first: bool) -> Taken:
        """Its worker is gone; `was_first`: none was ready there before. What has become of its
        requests."""
        ...

    def note_lost(self, replica: Replica, error: CannotStart, *, was_first: bool) -> None:
        """No worker is started there any more; `was_first`: nobody heard of it being ready."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests of clients that no worker has."""
        ...

    def on_left(self, folder: Path, ended: Ended) -> None:
        """In a thread of its own: what a worker left that has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaNumbers:
    """Which replica this is of how many, and the numbers that all their processes share."""

    number: int
    num_replicas: int
    process_numbers: Iterator[int]


class Replica:
    """`orders` are those of its workers, with the device of this one."""

    def __init__(self, numbers: ReplicaNumbers, orders: Orders, owner: Owner) -> None:
        self.number, self.device = numbers.number, orders.config.device
        self._numbers, self._owner, self._label = numbers, owner, orders.label
        self.line = WorkerLine(
            orders,
            self._hear,
            self._note_late,
            self._note_end,
            owner.on_left,
            numbers.process_numbers,
        )
        self.facts: ServedModel | None = None
        self.is_ready = self.is_lost = False
        #: Whether its worker was ready, and is being ended since it is past a deadline.
        self._is_late = False
        self.loading = Loading("starting", 0.0)
        self.state = EngineState()
        #: How the worker ended that no other one follows yet.
        self.last_ended: Ended | Exception | None = None
        self.num_restarts = self.num_failed_starts = 0
        #: Seconds between two pieces of an answer, lately; None before there were any.
        self.gap_seconds: float | None = None
        self._first: asyncio.Future[None] | None = None
        self._load_error: Failed | None = None
        self._succession = Succession(self.name)
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """As the log calls it; empty where there is only one, of one model."""
        is_one_of_many = self._numbers.num_replicas > 1
        replica = f"replica {self.number} ({self.device})" if is_one_of_many else ""
        return " of ".join(filter(None, (replica, self._label)))

    @property
    def life(self) -> WorkerLife | None:
        """Its worker that is ready, or about to be."""
        return self.line.current

    @property
    def takes_requests(self) -> bool:
        """Whether its worker may be handed a request now."""
        return self.is_ready and self.life is not None and self.last_ended is None

    @property
    def condition(self) -> Condition:
        """What an operator is told of it."""
        return "lost" if self.is_lost else "ready" if self.is_ready else "loading"

    async def start(self) -> None:
        """Start the first worker and wait until it is ready. Raises CannotStart; it is lost then.

        Raises whatever starting a process raises.
        """
        self._first = asyncio.get_running_loop().create_future()
        await self._start_next()
        await self._first

    async def stop(self, seconds: float) -> None:
        """End its workers."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await self.line.stop(seconds)

    def note_gap(self, seconds: float) -> None:
        """So long it was between two pieces of an answer."""
        before = self.gap_seconds
        if before is None:
            self.gap_seconds = seconds
        else:
            counted = min(seconds, _MOST_GAPS * before)
            self.gap_seconds = before + _NEWEST_PART * (counted - before)

    async def _start_next(self) -> None:
        self.last_ended = None
        await self.line.start_next()

    def _hear(self, message: ToServer) -> None:
        match message:
            case Loading():
                self.loading = message
                return
            case Ready():
                self.facts = message.facts
                self.is_ready = True
                self.num_failed_starts = 0
                pid = self.life.pid if self.life else None
                self._succession.tell_ready(pid, message.seconds, self._owner.num_waiting)
                if self._first is not None and not self._first.done():
                    self._first.set_result(None)
            case News():
                self.state = message.state
            case Failed() if message.id == NO_REQUEST:
                self._load_error = message
            case _:
                pass
        self._owner.hear(self, message)
        if isinstance(message, Ready):
            self.line.start_spare()

    def _note_late(self, seconds: float) -> None:
        """Others go on with its requests at once; it may take seconds to write where it stands."""
        if self.is_ready and not self._is_stopping:
            self.is_ready, self._is_late = False, True
            pid = self.life.pid if self.life else None
            self._succession.tell_late(pid, seconds, self._owner.note_late(self))

    def _note_end(self, ended: Ended | Exception) -> None:
        """The worker's process is gone."""
        was_ready = self.is_ready or self._is_late
        self.is_ready = self._is_late = False
        self.state = EngineState()
        if self._is_stopping:
            return
        self.last_ended = ended
        is_first = self._first is not None and not self._first.done()
        if not was_ready:
            self.num_failed_starts += 1
        taken = self._owner.note_end(self, ended, was_first=is_first)
        if not is_first:  # of a start that failed its reason is told, and nothing else
            self._succession.tell_lost(ended, taken)
        if is_first or self.num_failed_starts >= MAX_FAILED_STARTS:
            self._stop_trying(ended)
            return
        self.num_restarts += 1
        task = asyncio.get_running_loop().create_task(self._start_again())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_again(self) -> None:
        await asyncio.sleep(_PAUSES[min(self.num_failed_starts, len(_PAUSES) - 1)])
        if not self._is_stopping:
            await self._start_next()

    def _stop_trying(self, ended: Ended | Exception) -> None:
        is_error = isinstance(ended, Exception)
        reason = str(ended) if is_error else f"the worker {how(ended)} while it loaded"
        settings, kind = tuple[str, ...](), ""
        if (told := self._load_error) is not None:
            reason, settings, kind = told.message, told.settings, told.kind
        code = getattr(ended, "exit_code", None)  # of a process, or of a HypoError
        error = CannotStart(code or EXIT_ERROR, reason, settings, kind)
        self.is_lost = True
        was_first = self._first is not None and not self._first.done()
        self._owner.note_lost(self, error, was_first=was_first)
        if self._first is not None and was_first:
            self._first.set_exception(error)


def orders_of(orders: Orders, devices: tuple[str, ...]) -> list[Orders]:
    """The orders of one replica on each device."""
    return [replace(orders, config=replace(orders.config, device=device)) for device in devices]
