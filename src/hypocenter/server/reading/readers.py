"""The processes that read what clients send, and whose question they answer next.

A question waits here, and not in a pipe: a reader has one, and gets the next one when it has
answered. One reader takes short texts only, so that these never wait behind what takes seconds.
Everything here runs in the server's event loop.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hypocenter.server.reading.form_memory import FormMemory
from hypocenter.server.reading.reader_process import (
    CannotRead,
    ReaderAnswer,
    ReaderEnded,
    ReaderProcess,
)
from hypocenter.server.turns.fair_order import FairOrder
from hypocenter.wire.messages import Ask, Failed, FormRead, ReadForm, StartReader

log = logging.getLogger("hypocenter.server")

#: The first one takes short texts alone.
NUM_READERS = 2
#: Up to so many characters and entries a text is short: a tokenizer takes some milliseconds.
SMALL = 1 << 15
#: Characters and entries that may wait to be read, short texts aside: of all, and of one client.
MAX_WAITING, MAX_WAITING_OF_CLIENT = 16 << 20, 8 << 20
#: Readers that may end with one question, while nothing says that it was why.
MAX_TRIES = 4
_PAUSE_SECONDS = 5.0
#: How the server calls the errors of what cannot be read, and of readers that cannot be started.
UNREADABLE, NO_READER, READERS_BUSY = "Unreadable", "NoReader", "ReadersBusy"


class ReadingProcess(Protocol):
    """One process that reads, as `ReaderProcess` is one."""

    async def start(self) -> None: ...

    async def answer(self, question: Ask | ReadForm, /) -> ReaderAnswer: ...

    async def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class _Job:
    question: Ask | ReadForm
    client: str
    size: int
    is_small: bool
    answer: asyncio.Future[ReaderAnswer]
    num_tries: int = 0


@dataclass(eq=False, slots=True)
class _Seat:
    """One reader's place: the process in it changes when one ends."""

    takes_only_small: bool
    job: _Job | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Readers:
    """`make` gives a reader that takes forms or does not, not started yet."""

    def __init__(
        self, make: Callable[[bool], ReadingProcess], num_readers: int = NUM_READERS
    ) -> None:
        self._make = make
        self._waiting: list[_Job] = []
        self._changed = asyncio.Event()
        self._order = FairOrder()
        self._forms = FormMemory()
        self._seats = [_Seat(takes_only_small=n == 0 < num_readers - 1) for n in range(num_readers)]
        self._has_started = False

    def start(self) -> None:
        """Start the processes; returns at once."""
        for seat in self._seats:
            seat.task = asyncio.get_running_loop().create_task(self._work(seat))

    @property
    def num_left(self) -> int:
        """Questions that are being read though nobody waits for the answer any more."""
        return sum(seat.job is not None and seat.job.answer.done() for seat in self._seats)

    async def ask(
        self,
        question: Ask | ReadForm,
        client: str,
    ) -> ReaderAnswer:
        """What a reader says of it. Who stops waiting is not read, if that has not begun."""
        if (known := self._find_known(question)) is not None:
            return known
        answer: asyncio.Future[ReaderAnswer] = asyncio.get_running_loop().create_future()
        job = _Job(question, client, size_of(question), is_small(question), answer)
        if (busy := self._refuse_for_size(job)) is not None:
            return busy
        self._waiting.append(job)
        self._changed.set()
        try:
            return await answer
        finally:
            if job in self._waiting:
                self._waiting.remove(job)

    async def stop(self) -> None:
        """End the processes; who waits still is told so."""
        self._waiting += [seat.job for seat in self._seats if seat.job is not None]
        tasks = [seat.task for seat in self._seats if seat.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._refuse_all("the server is shutting down")

    async def _work(self, seat: _Seat) -> None:
        """The life of one seat: a process, and questions to it one after the other."""
        reader: ReadingProcess | None = None
        try:
            while True:
                if reader is None:
                    reader = await self._start_one(seat)
                job = await self._next(seat)
                began = time.monotonic()
                try:
                    told: ReaderAnswer | None = self._find_known(job.question)
                    told = told or await reader.answer(job.question)
                except ReaderEnded as ended:
                    reader = None
                    log.warning("a reader ended: %s", ended)
                    told = self._told_of_end(job, ended)
                finally:
                    seat.job = None
                    self._order.charge(job.client, time.monotonic() - began)
                if told is None:
                    self._waiting.insert(0, job)
                    self._changed.set()
                    continue
                self._remember(job.question, told)
                if not job.answer.done():
                    job.answer.set_result(told)
        finally:
            if reader is not None:
                await reader.close()

    async def _start_one(self, seat: _Seat) -> ReadingProcess:
        """A reader that is ready; none comes before one can be started."""
        while True:
            reader = self._make(not seat.takes_only_small)
            try:
                await reader.start()
            except (CannotRead, ReaderEnded) as error:
                if self._waiting or self._has_started:  # or the worker says the same of the file
                    log.error("no reader can be started: %s", error)
                self._refuse_all(f"no reader can be started: {error}")
                await asyncio.sleep(_PAUSE_SECONDS)
            except BaseException:
                await reader.close()
                raise
            else:
                self._has_started = True
                return reader

    async def _next(self, seat: _Seat) -> _Job:
        while True:
            waiting = [job for job in self._waiting if not job.is_small]
            if seat.takes_only_small or not waiting:
                waiting = [job for job in self._waiting if job.is_small]
            at_work = collections.Counter(other.job.client for other in self._seats if other.job)
            job = self._order.first(waiting, lambda job: job.client, at_work)
            if job is not None:
                self._waiting.remove(job)
                seat.job = job
                return job
            self._changed.clear()
            await self._changed.wait()

    def _find_known(self, question: Ask | ReadForm) -> ReaderAnswer | None:
        return self._forms.get(question) if isinstance(question, ReadForm) else None

    def _remember(self, question: Ask | ReadForm, told: ReaderAnswer) -> None:
        if isinstance(question, ReadForm) and isinstance(told, FormRead | Failed):
            self._forms.put(question, told)

    def _told_of_end(self, job: _Job, ended: ReaderEnded) -> ReaderAnswer | None:
        """What becomes of a question whose reader ended; None: another one tries."""
        job.num_tries += 1
        if ended.is_innocent and job.num_tries < MAX_TRIES and not job.answer.done():
            return None
        name = field_of(job.question)
        reason = f"{name} cannot be read: {ended}; make it smaller"
        return Failed(job.question.id, UNREADABLE, reason, name)

    def _refuse_for_size(self, job: _Job) -> Failed | None:
        """What a client is told while too much waits to be read; one text always may."""
        large = [] if job.is_small else [other for other in self._waiting if not other.is_small]
        own = [other for other in large if other.client == job.client]
        for jobs, most in ((large, MAX_WAITING), (own, MAX_WAITING_OF_CLIENT)):
            size = sum(other.size for other in jobs)
            if jobs and size + job.size > most:
                reason = f"{size} characters wait to be read, and at most {most} may; {job.size}"
                return Failed(
                    job.question.id, READERS_BUSY, f"{reason} are too many now; try again later"
                )
        return None

    def _refuse_all(self, reason: str) -> None:
        for job in self._waiting:
            if not job.answer.done():
                job.answer.set_result(Failed(job.question.id, NO_READER, reason))


def process_maker(start: Mapping[str, Any]) -> Callable[[bool], ReadingProcess]:
    """Makes processes by the fields of a `StartReader`, without `reads_forms`."""
    return lambda reads_forms: ReaderProcess(StartReader(reads_forms=reads_forms, **start))


def is_small(question: Ask | ReadForm) -> bool:
    """Whether reading it takes no longer than a step of the model does."""
    return isinstance(question, Ask) and size_of(question) <= SMALL


def size_of(question: Ask | ReadForm) -> int:
    """Characters and tokens, and the entries of messages and tools."""
    if isinstance(question, ReadForm):
        return len(question.text)
    size = len(question.text or "") + len(question.pair or "") + len(question.token_ids)
    size += sum(map(len, question.bad_words))
    return size + _size(question.messages) + _size(question.tools)


def _size(value: Any) -> int:
    """Characters of all texts in a JSON value, and its entries, which count as some."""
    size, left = 0, [] if value is None else [value]
    while left:
        one = left.pop()
        size += 16
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    return size


def field_of(question: Ask | ReadForm) -> str:
    """The client's field that is asked about."""
    if isinstance(question, ReadForm):
        return question.field
    if question.messages is not None:
        return "messages"
    if question.text is None:
        return "tokens"
    return "prompt" if question.is_prompt else "content"
