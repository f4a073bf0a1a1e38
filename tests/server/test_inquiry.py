"""One HTTP request's share of the engine: what is asked for once, and what all its choices have."""

from __future__ import annotations

import asyncio
import gc
import itertools
import tracemalloc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from hypocenter.base.results import CallPiece, TokenLogprob, TopLogprob
from hypocenter.server import routes
from hypocenter.server.api_error import ApiError
from hypocenter.server.generation import AnswerOrder, Generation
from hypocenter.server.inquiry import (
    NEWS_OF_A_TURN,
    Inquiry,
)
from hypocenter.server.intake.bodies import Bodies
from hypocenter.server.intake.kept_answer import PACKED_TIMES, TOKEN_BYTES, UNCOUNTED_BYTES
from hypocenter.server.routes import Service
from hypocenter.settings.config import SamplingParams
from hypocenter.wire.logprobs import pack_logprobs
from hypocenter.wire.messages import Accepted, Ending, Piece

TOP = (TopLogprob(5, b"a", -0.5), TopLogprob(6, b"b", -1.0))
OF_PROMPT = pack_logprobs((None, TokenLogprob(5, b"a", -0.5, TOP)))


class Answering:
    """A supervisor whose worker answers each request with one piece at once."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.submitted: list[Generation] = []

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, generation: Generation) -> None:
        self.submitted.append(generation)
        wants = generation.params.prompt_logprobs is not None
        generation.take(Accepted(generation.id, (b"x", b"y") if wants else ()))
        told = OF_PROMPT if wants else b""
        piece = Piece(generation.id, "z", (7,), prompt_logprobs=told, ending=Ending("stop"))
        asyncio.get_running_loop().call_soon(generation.take, piece)


def test_logprobs_of_a_prompt_are_asked_for_once_and_told_with_each_choice() -> None:
    async def work() -> None:
        supervisor = Answering()
        params = SamplingParams(seed=3, logprobs=2, prompt_logprobs=2)
        inquiry = Inquiry(cast(Any, supervisor), "one", AnswerOrder([(5, 6), (5, 6)], params, 3))
        await inquiry.accept()
        seen = [news[0] async for news in inquiry.pieces() if news is not None]
        assert len(seen) == 6
        wants = [one.params.prompt_logprobs for one in supervisor.submitted]
        assert sorted(map(str, wants)) == ["2"] * 2 + ["None"] * 4
        assert sorted(cast(int, one.params.seed) for one in supervisor.submitted) == [
            3,
            3,
            4,
            4,
            5,
            5,
        ]
        for choice in inquiry.choices:
            assert choice.prompt_logprobs is OF_PROMPT
            assert choice.prompt_pieces == (b"x", b"y")
        counted = 6 * TOKEN_BYTES + 2 * PACKED_TIMES * len(OF_PROMPT)  # once for each prompt
        assert inquiry.kept.num_bytes == counted

    asyncio.run(asyncio.wait_for(work(), 20))


class Resuming(Answering):
    """One whose worker says some of it, and its heir again what is of the prompt."""

    def submit(self, generation: Generation) -> None:
        generation.take(Accepted(generation.id, (b"x", b"y")))
        for ending in (None, Ending("stop")):
            piece = Piece(generation.id, "z", (7,), prompt_logprobs=OF_PROMPT, ending=ending)
            asyncio.get_running_loop().call_soon(generation.take, piece)


def test_logprobs_of_a_prompt_count_once_where_an_answer_is_resumed() -> None:
    async def work() -> None:
        params = SamplingParams(seed=3, prompt_logprobs=2)
        inquiry = Inquiry(cast(Any, Resuming()), "one", AnswerOrder([(5, 6)], params, 1))
        await inquiry.accept()
        async for _ in inquiry.pieces():
            pass
        assert inquiry.choices[0].prompt_logprobs == OF_PROMPT
        assert inquiry.kept.num_bytes == 2 * TOKEN_BYTES + PACKED_TIMES * len(OF_PROMPT)

    asyncio.run(asyncio.wait_for(work(), 20))


def test_others_have_their_turn_while_much_is_told() -> None:
    async def work() -> None:
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        params = SamplingParams(seed=3)
        inquiry = Inquiry(cast(Any, Answering()), "one", AnswerOrder([(5,)] * 200, params))
        await inquiry.accept()
        await asyncio.sleep(0)
        counting = asyncio.create_task(count())
        assert len([news async for news in inquiry.pieces()]) == 200
        counting.cancel()
        assert num_turns >= 200 // NEWS_OF_A_TURN

    asyncio.run(asyncio.wait_for(work(), 20))


def test_logprobs_are_no_work_for_the_collector() -> None:
    """Of a hundred answers there are a million; looking through them holds up everybody."""
    token = TokenLogprob(5, b"a", -0.5, TOP)
    assert not gc.is_tracked(token)
    assert not gc.is_tracked(TOP[0])


@pytest.mark.parametrize("leaves", [False, True])
def test_what_was_answered_goes_without_the_collector(leaves: bool) -> None:
    """A hundred answers with logprobs are as many megabytes, and the collector seldom comes by."""

    async def work() -> weakref.ref[Inquiry]:
        supervisor: Any = SilentOrNot(leaves)
        inquiry = Inquiry(supervisor, "one", AnswerOrder([(5,), (5,)], SamplingParams(seed=3)))
        inquiry.form = SimpleNamespace(inquiry=inquiry)
        for choice in inquiry.choices:
            choice.generation.watcher = lambda generation, event, held=inquiry: None
        await inquiry.accept()
        if leaves:
            inquiry.cancel()
        else:
            assert len([news async for news in inquiry.pieces()]) == 2
        service: Any = SimpleNamespace(open={}, ended={}, slots=None, traces=None)
        Service.remember(service, inquiry, "cancelled" if leaves else "completed")
        supervisor.submitted.clear()
        return weakref.ref(inquiry)

    gc.disable()
    try:
        assert asyncio.run(asyncio.wait_for(work(), 20))() is None
    finally:
        gc.enable()


def test_what_is_kept_of_answers_is_counted_and_bounded() -> None:
    """A hundred long answers with logprobs in one request would be gigabytes of the server's."""
    packed = pack_logprobs([TokenLogprob(5, b"a", -0.5, TOP)] * 2)
    piece = Piece(1, "zz", (7, 7), packed)

    async def kept(bodies: Bodies, *, keeps_logprobs: bool) -> int:
        supervisor, held = Silent(), bodies.of("client")
        order = AnswerOrder([(5,)], SamplingParams(seed=3))
        inquiry = Inquiry(cast(Any, supervisor), "one", order, held=held)
        inquiry.keeps_logprobs = keeps_logprobs
        await inquiry.accept()
        [generation] = supervisor.submitted
        most = 0
        try:
            for number in range(1000):
                ending = Ending("stop") if number == 999 else None
                generation.take(msgspec.structs.replace(piece, ending=ending))
                if number == 249 and not keeps_logprobs:  # a client that reads
                    pieces = inquiry.pieces()
                    for _ in range(8):
                        await anext(pieces)
                most = max(most, bodies.num_bytes)
            async for _ in inquiry.pieces() if keeps_logprobs else pieces:
                pass
            assert keeps_logprobs or most < num_bytes
            return bodies.num_bytes
        finally:
            held.release()
            assert bodies.num_bytes <= 1

    def of(max_bytes: int, *, keeps_logprobs: bool = True) -> int:
        return asyncio.run(kept(Bodies(max_bytes), keeps_logprobs=keeps_logprobs))

    num_bytes = 2000 * TOKEN_BYTES + 1000 * PACKED_TIMES * len(packed) - UNCOUNTED_BYTES
    assert of(2 * num_bytes) == num_bytes
    with pytest.raises(ApiError, match="ask for fewer choices, tokens or logprobs") as refused:
        of(2 * num_bytes - 2)
    assert (refused.value.status, refused.value.code) == (413, "answer_too_large")
    (full := Bodies(2 * num_bytes)).take("client", 1)
    with pytest.raises(ApiError, match="your requests and their answers hold") as refused:
        asyncio.run(kept(full, keeps_logprobs=True))
    assert (refused.value.status, refused.value.code) == (429, "bodies_full")
    streamed = 2000 * TOKEN_BYTES - UNCOUNTED_BYTES
    assert of(2 * num_bytes, keeps_logprobs=False) == streamed
    with pytest.raises(ApiError, match="or read a stream"):  # nor does one who reads too slowly
        of(num_bytes, keeps_logprobs=False)


def test_an_answer_that_is_too_large_counts_as_aborted() -> None:
    """It is cancelled before whoever waits for it hears of that."""
    aborted: list[Generation] = []
    metrics = SimpleNamespace(count_aborted=aborted.extend, count=lambda name: None)

    async def work() -> list[Generation]:
        supervisor, held = Silent(), Bodies(1 << 10).of("client")
        order = AnswerOrder([(5,)], SamplingParams(seed=3))
        inquiry = Inquiry(cast(Any, supervisor), "one", order, held=held)
        await inquiry.accept()
        [generation] = supervisor.submitted
        generation.take(Piece(generation.id, "z", (7,) * UNCOUNTED_BYTES))
        await asyncio.sleep(0)
        assert generation.is_done
        with pytest.raises(ApiError) as refused:
            await anext(inquiry.pieces())
        service = SimpleNamespace(metrics=metrics, remember=lambda inquiry, how: None)
        routes._abandon(cast(Any, service), inquiry, refused.value)
        return supervisor.submitted

    assert asyncio.run(work()) == aborted


def test_what_is_kept_of_a_token_takes_no_more_than_is_counted() -> None:
    """Of a long answer that is read token by token, with and without parts of a call."""
    num = 4000

    async def taken(calls: tuple[CallPiece, ...]) -> tuple[int, int]:
        supervisor = Silent()
        inquiry = Inquiry(cast(Any, supervisor), "one", AnswerOrder([(5,)], SamplingParams(seed=3)))
        await inquiry.accept()
        [generation] = supervisor.submitted
        pieces = inquiry.pieces()
        read = [Piece(1, " word", (1000,), calls=calls)] * num
        told = [msgspec.msgpack.encode(one) for one in read]
        tracemalloc.start()
        try:
            for one in told:
                generation.take(msgspec.msgpack.decode(one, type=Piece))
                await anext(pieces)
            num_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert "".join(inquiry.choices[0].text) == " word" * num
        return num_bytes, inquiry.kept.num_bytes

    for calls in ((), (CallPiece(0, "", "argument"),)):
        num_bytes, counted = asyncio.run(asyncio.wait_for(taken(calls), 20))
        assert counted / 3 < num_bytes < counted


class Silent(Answering):
    """Its worker says what the test has it say."""

    def submit(self, generation: Generation) -> None:
        self.submitted.append(generation)
        generation.take(Accepted(generation.id))

    def cancel(self, generation: Generation) -> None:
        generation.leave()

    def say(self, ending: Ending | None = None) -> None:
        [generation] = self.submitted
        generation.take(Piece(generation.id, "z", (7,), ending=ending))


class SilentOrNot(Silent):
    def __init__(self, is_silent: bool) -> None:
        super().__init__()
        self._submit = Silent.submit if is_silent else Answering.submit

    def submit(self, generation: Generation) -> None:
        self._submit(self, generation)


def test_a_stream_says_once_for_each_while_that_nothing_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hypocenter.server.inquiry.PING_SECONDS", 0.02)

    async def work() -> None:
        supervisor = Silent()
        order = AnswerOrder([(5,)], SamplingParams(seed=3))
        inquiry = Inquiry(cast(Any, supervisor), "one", order)
        await inquiry.accept()
        seen: list[bool] = []
        async for news in inquiry.pieces():
            seen.append(news is not None)
            if seen == [False, False]:
                supervisor.say()
            elif seen == [False, False, True, False]:
                supervisor.say(Ending("stop"))
        assert seen == [False, False, True, False, True]
        assert inquiry._alarm is None or inquiry._alarm.cancelled()

    asyncio.run(asyncio.wait_for(work(), 20))


def test_what_came_meanwhile_puts_the_alarm_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        supervisor = Silent()
        order = AnswerOrder([(5,)], SamplingParams(seed=3))
        inquiry = Inquiry(cast(Any, supervisor), "one", order)
        await inquiry.accept()
        pieces = inquiry.pieces()
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        inquiry._ring()  # set for an earlier piece, fifteen seconds ago
        assert not inquiry._is_alarmed
        supervisor.say(Ending("stop"))
        assert await waiting is not None
        monkeypatch.setattr("hypocenter.server.inquiry.PING_SECONDS", 0.0)
        inquiry._ring()
        assert inquiry._is_alarmed
        await pieces.aclose()

    asyncio.run(asyncio.wait_for(work(), 20))
