"""Logprobs stay packed, as a worker says them, until an answer is written token by token."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any, cast

import msgspec
import pytest
from test_inquiry import Silent

from hypocenter.base.results import TokenLogprob, TopLogprob
from hypocenter.server.answers import AnswerTimings
from hypocenter.server.forms import ChatForm, CompletionForm
from hypocenter.server.generation import AnswerOrder
from hypocenter.server.inquiry import Inquiry
from hypocenter.settings.config import SamplingParams
from hypocenter.wire.logprobs import pack_logprobs, unpack_logprobs
from hypocenter.wire.messages import Ending, EngineState, News, Piece, ToServer

TIMINGS = AnswerTimings(0, 1, 1.0, 1.0, 1, 1.0, 1.0, 0)
PIECES = (b"a", b" import", "é€".encode(), b"\xe2\x82", b'"\\\n\0', b"")


def some_tokens(num: int, num_top: int) -> list[TokenLogprob]:
    def one(number: int) -> TopLogprob:
        return TopLogprob(number, PIECES[number % len(PIECES)], -number / 7)

    return [
        TokenLogprob(n, PIECES[n % len(PIECES)], -n / 7, tuple(one(n + k) for k in range(num_top)))
        for n in range(num)
    ]


@pytest.mark.parametrize("num_top", [0, 20])
def test_packed_tokens_come_back_as_they_were(num_top: int) -> None:
    tokens = [None, *some_tokens(50, num_top), TokenLogprob(1 << 20, b"x" * 300, -0.0, ())]
    packed = pack_logprobs(tokens[:20]) + pack_logprobs(tokens[20:])
    found = unpack_logprobs(bytearray(packed))
    for one, token in zip(found, tokens, strict=True):
        assert (one is None) == (token is None)
        if one is not None and token is not None:
            assert fields_of(one) == fields_of(token)
            assert list(map(fields_of, one.top)) == list(map(fields_of, token.top))
    assert pack_logprobs(None) == b""
    assert not list(unpack_logprobs(b""))


def fields_of(one: TopLogprob) -> tuple[int, bytes, float]:
    return one.token_id, one.piece, one.logprob


def told(of_prompt: bytes, packed: bytes, num_tokens: int) -> Piece:
    """A piece as it comes over a socket."""
    ending = Ending("length")
    piece = Piece(1, "text", (7,) * num_tokens, packed, of_prompt, ending=ending)
    frame = msgspec.msgpack.encode(News((piece,), EngineState()))
    news = msgspec.msgpack.decode(frame, type=ToServer)
    assert isinstance(news, News)
    return news.pieces[0]


def answered(inquiry_of: SamplingParams, piece: Piece) -> Inquiry:
    async def work() -> Inquiry:
        inquiry = Inquiry(cast(Any, Silent()), "one", AnswerOrder([(5,)], inquiry_of))
        await inquiry.accept()
        [generation] = cast(Silent, inquiry.supervisor).submitted
        inquiry.choices[0].prompt_pieces = (b"x", b"y", b"z")
        generation.take(piece)
        async for _ in inquiry.pieces():
            pass
        return inquiry

    return asyncio.run(asyncio.wait_for(work(), 20))


def spelled(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{one:02x}" for one in piece)


def test_a_completion_says_what_was_packed() -> None:
    prompt, tokens = [None, *some_tokens(2, 3)], some_tokens(30, 3)
    piece = told(pack_logprobs(prompt), pack_logprobs(tokens), 30)
    inquiry = answered(SamplingParams(logprobs=3, prompt_logprobs=3), piece)
    answer = json.loads(CompletionForm(inquiry, "m", ["xyz"]).encode_whole(TIMINGS))
    found = answer["choices"][0]["logprobs"]
    every = [*prompt, *tokens]
    names = [b"x", b"y", b"z", *(token.piece for token in tokens)]
    assert found["tokens"] == list(map(spelled, names))
    assert found["token_logprobs"] == [one and one.logprob for one in every]
    for table, one in zip(found["top_logprobs"], every, strict=True):
        expected: dict[str, float] = {}
        for top in () if one is None else (*one.top, one):
            expected.setdefault(spelled(top.piece), top.logprob)
        assert table == (None if one is None else expected)
    lengths = [0, *(len(name) for name in found["tokens"])]
    assert found["text_offset"] == [sum(lengths[: n + 1]) for n in range(len(every))]


def test_a_chat_says_what_was_packed() -> None:
    tokens = some_tokens(30, 3)
    inquiry = answered(SamplingParams(logprobs=3), told(b"", pack_logprobs(tokens), 30))
    answer = json.loads(ChatForm(inquiry, "m").encode_whole(TIMINGS))

    def entry(one: TopLogprob) -> dict[str, Any]:
        return {"token": spelled(one.piece), "logprob": one.logprob, "bytes": list(one.piece)}

    assert answer["choices"][0]["logprobs"]["content"] == [
        {**entry(one), "top_logprobs": list(map(entry, one.top))} for one in tokens
    ]


@pytest.mark.parametrize("form", [CompletionForm, ChatForm])
def test_a_large_answer_never_takes_more_than_is_counted(form: Any) -> None:
    """20 logprobs of each token: kept, and at the moment in which it is written."""
    num = 1500
    packed = pack_logprobs(some_tokens(num, 20))
    echoed: Any = None if form is CompletionForm else ""
    tracemalloc.start()
    try:
        inquiry = answered(SamplingParams(logprobs=20), told(b"", packed, num))
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        answer = form(inquiry, "m", echoed).encode_whole(TIMINGS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1.5 * len(packed) + 64 * num
    # Twice while it is encoded (`Bodies.decoding`); no object is left of 30,000.
    assert peak < inquiry.kept.num_bytes + 2 * len(answer)
    assert len(answer) < inquiry.kept.num_bytes
