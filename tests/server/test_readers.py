"""Who is read when, and what becomes of readers that end, with readers that are only pretended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from test_supervisor import FACTS, PretendedReader

from hypocenter import SamplingParams
from hypocenter.server.generation import Generation
from hypocenter.server.reading import readers as module
from hypocenter.server.reading.form_memory import FormMemory
from hypocenter.server.reading.reader_process import CannotRead, ReaderAnswer, ReaderEnded
from hypocenter.server.reading.readers import (
    MAX_TRIES,
    NO_READER,
    READERS_BUSY,
    SMALL,
    UNREADABLE,
    Readers,
    is_small,
)
from hypocenter.server.reading.request_reading import RequestReading
from hypocenter.wire.messages import Ask, Failed, FormRead, ReadForm, Told


class Reader(PretendedReader):
    """Answers when the test says so, or ends; `asked` is what it has, in order."""

    def __init__(self, reads_forms: bool) -> None:
        self.reads_forms = reads_forms
        self.asked: list[Ask | ReadForm] = []
        self.next: asyncio.Future[ReaderAnswer] | None = None
        self.is_closed = False

    async def answer(self, question: Ask | ReadForm) -> ReaderAnswer:
        self.asked.append(question)
        self.next = asyncio.get_running_loop().create_future()
        return await self.next

    async def close(self) -> None:
        self.is_closed = True

    async def say(self, told: ReaderAnswer | ReaderEnded | None = None) -> None:
        assert self.next is not None, "it was asked nothing"
        if isinstance(told, ReaderEnded):
            self.next.set_exception(told)
        else:
            self.next.set_result(told or Told(self.asked[-1].id))
        await settle()


class Pool:
    """`Readers` of pretended ones; `made` are these, the first one for short texts alone."""

    def __init__(self) -> None:
        self.made: list[Reader] = []
        self.readers = Readers(self._make)

    def _make(self, reads_forms: bool) -> Reader:
        self.made.append(Reader(reads_forms))
        return self.made[-1]

    def ask(self, number: int, text: str, client: str = "ann") -> asyncio.Task[ReaderAnswer]:
        return asyncio.ensure_future(self.readers.ask(Ask(number, text=text), client))

    def ask_form(self, number: int, client: str = "ann") -> asyncio.Task[ReaderAnswer]:
        form = ReadForm(number, "grammar", f"form {number}")
        return asyncio.ensure_future(self.readers.ask(form, client))


def test_the_end_of_the_server_leaves_nobody_waiting() -> None:
    async def work() -> None:
        pool, *_ = await started()
        tasks = [pool.ask_form(1), pool.ask_form(2)]
        await settle()
        await pool.readers.stop()
        for told in await asyncio.gather(*tasks):
            assert isinstance(told, Failed)
            assert (told.kind, told.message) == (NO_READER, "the server is shutting down")

    run(work())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def started() -> tuple[Pool, Reader, Reader]:
    """A pool whose readers are there: that of short texts, and the other one."""
    pool = Pool()
    pool.readers.start()
    await settle()
    small, large = pool.made
    assert (small.reads_forms, large.reads_forms) == (False, True)
    return pool, small, large


def ids(reader: Reader) -> list[int]:
    return [question.id for question in reader.asked]


LONG = "x" * (SMALL + 1)


def test_a_short_text_never_waits_behind_forms_and_long_texts() -> None:
    async def work() -> None:
        pool, small, large = await started()
        tasks = [pool.ask_form(1), pool.ask(2, LONG), pool.ask_form(3)]
        await settle()
        short = pool.ask(4, "short")
        await settle()
        assert (ids(large), ids(small)) == ([1], [4])
        await small.say()
        assert await short == Told(4)
        for _ in tasks:
            await large.say()
        assert ids(large) == [1, 2, 3]
        assert ids(small) == [4], "the others are not for this one"
        await pool.readers.stop()
        assert large.is_closed

    run(work())


def test_a_reader_has_one_question_at_a_time_and_who_left_is_never_asked() -> None:
    async def work() -> None:
        pool, _small, large = await started()
        first, second, third = pool.ask_form(1), pool.ask_form(2), pool.ask_form(3)
        await settle()
        second.cancel()
        await settle()
        assert pool.readers.num_left == 0, "it was dropped, not begun"
        first.cancel()
        await settle()
        assert pool.readers.num_left == 1, "it is being read still"
        assert ids(large) == [1]
        await large.say()
        assert ids(large) == [1, 3]
        assert pool.readers.num_left == 0
        await large.say()
        assert await third == Told(3)
        await pool.readers.stop()

    run(work())


def test_the_other_client_is_next() -> None:
    async def work() -> None:
        pool, _small, large = await started()
        tasks = [pool.ask_form(number) for number in (1, 2, 3, 4)]
        await settle()
        tasks += [pool.ask_form(number, "bob") for number in (5, 6)]
        await asyncio.sleep(0.02)
        for _ in tasks:
            await large.say()
        assert ids(large)[:2] == [1, 5], "and not in the order in which they came"
        assert sorted(ids(large)) == [1, 2, 3, 4, 5, 6]
        await pool.readers.stop()

    run(work())


def test_what_waits_to_be_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(module, "MAX_WAITING", 4 * len(LONG))
        monkeypatch.setattr(module, "MAX_WAITING_OF_CLIENT", 2 * len(LONG))
        pool, small, _large = await started()
        tasks = [pool.ask(1, LONG)]
        await settle()
        tasks += [pool.ask(number, LONG) for number in (2, 3)]
        await settle()
        told = await pool.ask(4, LONG)
        assert isinstance(told, Failed)
        assert (told.id, told.kind) == (4, READERS_BUSY), "half of it is for others"
        tasks += [pool.ask(number, LONG, "bob") for number in (5, 6)]
        await settle()
        full = await pool.ask(7, LONG, "eve")
        assert isinstance(full, Failed)
        assert f"{4 * len(LONG)} characters wait" in full.message
        short = pool.ask(8, "short")
        await settle()
        await small.say()
        assert await short == Told(8)
        for task in tasks:
            task.cancel()
        await pool.readers.stop()

    run(work())


def test_one_text_may_always_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(module, "MAX_WAITING", 1)
        monkeypatch.setattr(module, "MAX_WAITING_OF_CLIENT", 1)
        pool, _small, large = await started()
        first = pool.ask(1, LONG)
        await settle()
        second = pool.ask(2, LONG)
        for task in (first, second):
            await settle()
            await large.say()
            assert isinstance(await task, Told)
        await pool.readers.stop()

    run(work())


def test_only_the_question_that_ends_a_reader_is_refused() -> None:
    async def work() -> None:
        pool, _small, large = await started()
        bad, good = pool.ask_form(1), pool.ask_form(2)
        await settle()
        await large.say(ReaderEnded("it takes more than 2 s of processor time"))
        told = await bad
        assert isinstance(told, Failed)
        assert (told.id, told.kind, told.field) == (1, UNREADABLE, "grammar")
        assert told.message == (
            "grammar cannot be read: it takes more than 2 s of processor time; make it smaller"
        )
        other = pool.made[-1]
        assert other is not large
        await other.say()
        assert await good == Told(2)
        await pool.readers.stop()

    run(work())


def test_a_reader_that_is_killed_by_hand_costs_nobody_an_answer() -> None:
    async def work() -> None:
        pool, *_ = await started()

        def asked(number: int) -> Reader:
            """Whoever has that question now: any reader may."""
            return next(one for one in reversed(pool.made) if number in ids(one))

        by_hand = ReaderEnded("signal 9", is_innocent=True)
        short = pool.ask(1, "short")
        await settle()
        first = asked(1)
        await first.say(by_hand)
        second = next(one for one in pool.made if one is not first and 1 in ids(one))
        await second.say()
        assert await short == Told(1)
        again = pool.ask_form(2)
        await settle()
        for _ in range(MAX_TRIES):
            await asked(2).say(by_hand)
        told = await again
        assert isinstance(told, Failed)
        assert told.kind == UNREADABLE, "so many in a row are no chance"
        await pool.readers.stop()

    run(work())


def test_where_no_reader_can_be_started_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: Reader) -> None:
        raise CannotRead("no such file")

    async def work() -> None:
        monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.02)
        pool = Pool()
        monkeypatch.setattr(Reader, "start", refuse)
        asking = pool.ask(1, "short")
        await settle()
        pool.readers.start()
        told = await asking
        assert isinstance(told, Failed)
        assert (told.kind, told.message) == (NO_READER, "no reader can be started: no such file")
        monkeypatch.undo()
        again = pool.ask(2, "short")
        await asyncio.sleep(0.05)
        await next(one for one in pool.made if one.asked).say()
        assert await again == Told(2)
        await pool.readers.stop()

    run(work())


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (Ask(1, text="x" * SMALL), True),
        (Ask(1, text=LONG), False),
        (Ask(1, token_ids=(1,) * SMALL), True),
        (Ask(1, token_ids=(1,) * (SMALL + 1)), False),
        (Ask(1, messages=({"role": "user", "content": "hi"},)), True),
        (Ask(1, messages=({"role": "user", "content": [{"type": "text", "text": LONG}]},)), False),
        (Ask(1, messages=({"role": "user", "content": ""},) * 2000), False),
        (Ask(1, messages=({"role": "user", "content": ""},), tools=({"a": LONG},)), False),
        (Ask(1, text="", bad_words=("x" * 256,) * 128), True),
        (Ask(1, text="x", bad_words=("x" * 256,) * 128), False),
        (ReadForm(1, "grammar", "x"), False),
    ],
)
def test_what_counts_as_short(question: Ask | ReadForm, expected: bool) -> None:
    assert is_small(question) is expected


class Counting(PretendedReader):
    """Answers at once, refuses forms that are `bad`, and counts its questions."""

    num_asked = 0

    async def answer(self, question: Ask | ReadForm) -> Told | FormRead | Failed:
        type(self).num_asked += 1
        if isinstance(question, ReadForm) and question.text == "bad":
            return Failed(question.id, "BadSetting", "grammar is bad", "grammar")
        return await super().answer(question)


def test_a_form_is_read_once_and_so_is_a_refusal() -> None:
    async def work() -> None:
        Counting.num_asked = 0
        pool = Readers(lambda reads_forms: Counting())
        pool.start()
        reading = RequestReading(pool, lambda: 7)
        ones = [
            Generation(number, "x", SamplingParams(grammar=form), prompt=(1,))
            for number, form in enumerate(["good", "bad"] * 4)
        ]
        told = await asyncio.gather(*(reading.read(one, FACTS) for one in ones))
        assert Counting.num_asked == 2, "also of those that came while it was being read"
        assert [failed and (failed.id, failed.field) for failed in told] == [
            (one.id, "grammar") if one.params.grammar == "bad" else None for one in ones
        ]
        assert [one.form for one in ones] == ["good", ""] * 4
        await pool.stop()

    run(work())


@pytest.mark.parametrize("num_over", [0, 1])
def test_a_text_that_cannot_fit_is_refused_unread(num_over: int) -> None:
    async def work() -> None:
        Counting.num_asked = 0
        pool = Readers(lambda reads_forms: Counting())
        pool.start()
        most = FACTS.context_length * FACTS.longest_token_bytes
        one = Generation(5, "x", SamplingParams(), prompt="x" * (most + num_over))
        failed = await RequestReading(pool, lambda: 7).read(one, FACTS)
        assert (failed is not None) == bool(num_over)
        if failed is not None:
            assert (failed.id, failed.kind, failed.field) == (5, "TooMuchText", "prompt")
        assert Counting.num_asked == 1 - num_over
        long = Generation(6, "x", SamplingParams(), prompt=(1,) * (FACTS.context_length + num_over))
        failed = await RequestReading(pool, lambda: 7).read(long, FACTS)
        assert (failed is not None and failed.kind) == (bool(num_over) and "ContextOverflow")
        await pool.stop()

    run(work())


def test_forms_that_are_remembered_are_bounded() -> None:
    def form(number: int, field: str = "grammar") -> ReadForm:
        return ReadForm(9, field, str(number))

    forms = FormMemory(max_forms=3, max_bytes=100)
    for number in range(3):
        forms.put(form(number), FormRead(1, "x" * 10))
    assert forms.get(form(0)) is not None
    forms.put(form(3), Failed(1, "x", "y" * 10))
    assert forms.get(form(1)) is None, "it was used last longest ago"
    assert forms.get(form(0)) is not None
    assert forms.get(form(0, "json_schema")) is None
    forms.put(form(4), FormRead(1, "x" * 85))
    assert [forms.get(form(n)) is not None for n in range(5)] == [True, False, False, False, True]
