"""One HTTP request's share of the engine: its generations, and what comes of them in order."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from hypocenter.base.results import CallPiece
from hypocenter.server.answers import PromptTokensDetails, Usage
from hypocenter.server.api_error import ApiError, error_of
from hypocenter.server.generation import NOBODY, AnswerOrder, Generation, WorkerEvent
from hypocenter.server.intake.bodies import HeldBody
from hypocenter.server.intake.kept_answer import KeptAnswer
from hypocenter.server.supervisor import Supervisor
from hypocenter.settings.config import MAX_SEED, SamplingParams
from hypocenter.wire.messages import Accepted, Ending, Failed, Piece

#: After so long without a piece a stream says that it is alive, or proxies would end it.
PING_SECONDS = 15.0
#: Pieces that wait for their client are joined up to so many tokens; one by one they would take
#: more than 200 bytes a token.
JOINED_TOKENS = 64
#: News that are taken before others have a turn, where so many wait: some milliseconds of a stream.
NEWS_OF_A_TURN = 16


@dataclass(eq=False, slots=True)
class Choice:
    """What has become of one generation: `index` is its place among the choices."""

    index: int
    generation: Generation
    prompt_pieces: tuple[bytes, ...] = ()
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)
    #: The ids of its calls, in their order.
    call_ids: list[str] = field(default_factory=list)
    #: Packed, as they came (`wire/logprobs.py`).
    logprobs: bytearray = field(default_factory=bytearray)
    prompt_logprobs: bytes = b""
    was_told_of_prompt: bool = False
    ending: Ending | None = None
    #: What a text became in place of an answer, as a worker says it.
    vector: bytes = b""
    #: Characters sent so far, of prompt and answer.
    num_chars: int = 0
    #: Its news that came last, as long as nobody has taken it.
    newest: _News | None = None

    @property
    def finish_reason(self) -> str | None:
        if self.ending is None:
            return None
        return "tool_calls" if self.calls and self.ending.reason == "stop" else self.ending.reason

    @property
    def is_cut(self) -> bool:
        """Whether it has ended, and the model did not end it."""
        return self.ending is not None and self.ending.reason != "stop"


@dataclass(eq=False, slots=True)
class _News:
    choice: Choice
    event: WorkerEvent


class Inquiry:
    """The generations of one request; `name` is the id that its answer bears."""

    def __init__(
        self,
        supervisor: Supervisor,
        name: str,
        order: AnswerOrder,
        *,
        client: str = NOBODY,
        held: HeldBody | None = None,
    ) -> None:
        self.name, self.client = name, client
        #: Whether the logprobs of its tokens are needed once they have been told one by one.
        self.keeps_logprobs = True
        self.kept = KeptAnswer(held)
        #: Generations that had not ended when nobody waited for them any more.
        self.cancelled: list[Generation] = []
        #: Why no more of it is kept, once that is so.
        self._refusal: ApiError | None = None
        self.created = int(time.time())
        #: `completed`, `cancelled` or `failed`, once it is.
        self.outcome = "open"
        #: By W3C's Trace Context: the client's trace, of which this request is a part.
        self.trace_headers: dict[str, str] = {}
        self.num_choices = order.num_choices
        #: What the route makes of it, once that is known.
        self.form: object = None
        self.choices: list[Choice] = []
        #: Of the model that it is for.
        self.supervisor = supervisor
        self._events: deque[_News] = deque()
        self._changed = asyncio.Event()
        #: Rings when nothing has come since `_waits_since`, by the loop's clock, for so long.
        self._alarm: asyncio.TimerHandle | None = None
        self._waits_since, self._is_alarmed = 0.0, False
        self._num_taken = 0
        asked = order.asked
        self._max_calls = 1 if asked is not None and asked.calls.is_one_call else None
        own_params = [_params_of(order.params, number) for number in range(order.num_choices)]
        for prompt in order.prompts:
            for number in range(order.num_choices):
                is_chat = bool(prompt) and isinstance(prompt, tuple) and isinstance(prompt[0], dict)
                generation = Generation(
                    supervisor.next_id(),
                    name,
                    own_params[number],
                    prompt="" if is_chat else prompt,
                    messages=prompt if is_chat else None,
                    cache_salt=order.cache_salt,
                    asked=asked,
                    client=client,
                    max_prompt_tokens=order.max_prompt_tokens,
                    priority=order.priority,
                    output_ids=list(order.sent_ids),
                    embeds=order.embeds,
                )
                choice = Choice(len(self.choices), generation)
                generation.listener = self._listener(choice)
                self.choices.append(choice)

    def _listener(self, choice: Choice) -> Any:
        def listen(generation: Generation, event: WorkerEvent) -> None:
            if isinstance(event, Piece) and event.prompt_logprobs:
                if choice.was_told_of_prompt:  # it was resumed, and they are the same
                    event = msgspec.structs.replace(event, prompt_logprobs=b"")
                choice.was_told_of_prompt = True
            if self._refusal is not None or not self._keep(event):
                return
            newest = choice.newest
            joined = None if newest is None else _join(newest.event, event)
            if newest is None or joined is None:
                choice.newest = _News(choice, event)
                self._events.append(choice.newest)
            else:
                newest.event = joined
            self._changed.set()

        return listen

    def _keep(self, event: WorkerEvent) -> bool:
        """Count what came; where it is too much all end, and who waits is told so."""
        try:
            if isinstance(event, Piece):
                self.kept.add(event)
        except ApiError as error:
            self._refusal = error
            self._changed.set()
            asyncio.get_running_loop().call_soon(self.cancel)
        return self._refusal is None

    async def accept(self) -> None:
        """Submit one answer to each prompt, and wait until these were taken.

        The others to a prompt follow with its first piece, and find its beginning in the prefix
        cache. Raises ApiError for a prompt that is wrong.
        """
        first = self.choices[:: self.num_choices]
        for choice in first:
            self.supervisor.submit(choice.generation)
        num_waiting = len(first)
        pieces: deque[_News] = deque()
        while num_waiting:
            news = await self._next()
            if isinstance(news.event, Failed):
                raise error_of(news.event)
            if isinstance(news.event, Accepted):
                num_waiting -= 1
                news.choice.prompt_pieces = news.event.pieces
            else:
                pieces.append(news)
        self._events.extendleft(reversed(pieces))

    async def pieces(self) -> AsyncIterator[tuple[Choice, Piece] | None]:
        """Each piece of each choice up to the last end; None: nothing came for a while.

        Raises ApiError when one of them fails, and status 413 or 429 where too much is kept of it.
        """
        num_open = len(self.choices)
        try:
            while num_open:
                if (news := await self._next_or_alarm()) is None:
                    yield None
                    continue
                choice, event = news.choice, news.event
                if isinstance(event, Failed):
                    raise error_of(event)
                if isinstance(event, Accepted):
                    choice.prompt_pieces = event.pieces or choice.prompt_pieces
                if not isinstance(event, Piece):
                    continue
                if self._max_calls is not None and event.calls:
                    calls = tuple(piece for piece in event.calls if piece.index < self._max_calls)
                    event = msgspec.structs.replace(event, calls=calls)
                choice.prompt_logprobs = choice.prompt_logprobs or event.prompt_logprobs
                if not choice.text and choice.index % self.num_choices == 0:
                    self._submit_others(choice)
                _append(choice.text, event.text)
                _append(choice.reasoning, event.reasoning)
                choice.calls += event.calls
                choice.call_ids += [new_name("call") for piece in event.calls if piece.name]
                if self.keeps_logprobs:
                    choice.logprobs += event.logprobs
                else:
                    self.kept.drop_logprobs(event)
                choice.ending, choice.vector = event.ending, event.vector
                num_open -= event.ending is not None
                yield choice, event
        finally:
            if self._alarm is not None:
                self._alarm.cancel()

    def _submit_others(self, first: Choice) -> None:
        for choice in self.choices[first.index + 1 : first.index + self.num_choices]:
            if not choice.generation.is_done:  # it may have been cancelled meanwhile
                choice.generation.share_reading(first.generation)
                choice.prompt_pieces = first.prompt_pieces
                choice.prompt_logprobs = first.prompt_logprobs
                self.supervisor.submit(choice.generation)

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        for choice in self.choices:
            if not choice.generation.is_done:
                self.cancelled.append(choice.generation)
                self.supervisor.cancel(choice.generation)
            choice.generation.forget_who_waits()

    def end_early(self) -> None:
        """Have all end with what they have; who waits is told so."""
        for choice in self.choices:
            if not choice.generation.is_done:
                self.supervisor.end_early(choice.generation)

    def usage(self) -> Usage:
        """OpenAI's count of tokens: each prompt counts once, whatever the number of choices."""
        prompts = self.choices[:: self.num_choices]
        num_prompt = sum(len(choice.generation.prompt_ids or ()) for choice in prompts)
        num_cached = sum(choice.ending.num_cached_tokens for choice in prompts if choice.ending)
        num_generated = sum(len(choice.generation.output_ids) for choice in self.choices)
        return Usage(
            num_prompt, num_generated, num_prompt + num_generated, PromptTokensDetails(num_cached)
        )

    async def _next_or_alarm(self) -> _News | None:
        """The next news; None where there were none for a while.

        One timer serves many news: there are thousands a second, and each would need its own.
        """
        loop = asyncio.get_running_loop()
        self._waits_since, self._is_alarmed = loop.time(), False
        while not self._events and not self._is_alarmed and self._refusal is None:
            if self._alarm is None:
                self._alarm = loop.call_later(PING_SECONDS, self._ring)
            self._changed.clear()
            await self._changed.wait()
        return await self._next() if self._events or self._refusal is not None else None

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        left = self._waits_since + PING_SECONDS - loop.time()
        self._alarm = None
        if left > 0:
            self._alarm = loop.call_later(left, self._ring)
        else:
            self._is_alarmed = True
            self._changed.set()

    async def _next(self) -> _News:
        self._num_taken += 1
        if self._num_taken % NEWS_OF_A_TURN == 0:
            await asyncio.sleep(0)
        while not self._events and self._refusal is None:
            self._changed.clear()
            await self._changed.wait()
        if self._refusal is not None:
            raise self._refusal
        news = self._events.popleft()
        if news.choice.newest is news:  # nothing is added to it any more
            news.choice.newest = None
        return news


def _append(parts: list[str], text: str) -> None:
    """Add a part, and join the last two as long as the last is no shorter: a few long ones are
    left. One for each token would take ten times the memory of what it says."""
    parts.append(text)
    while len(parts) > 1 and len(parts[-2]) <= len(parts[-1]):
        parts[-2:] = [parts[-2] + parts[-1]]


def _params_of(params: SamplingParams, number: int) -> SamplingParams:
    """Those of the choice of that number: a prompt's logprobs are found once, for the first."""
    seed = ((params.seed or 0) + number) % (MAX_SEED + 1)
    return replace(params, seed=seed, prompt_logprobs=None if number else params.prompt_logprobs)


def _join(first: WorkerEvent, then: WorkerEvent) -> Piece | None:
    """Two pieces of one answer as one; None where they stay two, or are none."""
    if not (isinstance(first, Piece) and isinstance(then, Piece)) or first.ending is not None:
        return None
    if len(first.token_ids) + len(then.token_ids) > JOINED_TOKENS:
        return None
    if any(_kinds_of(first)) and any(_kinds_of(then)) and _kinds_of(first) != _kinds_of(then):
        return None  # a piece does not tell which of these came first
    return Piece(
        first.id,
        first.text + then.text,
        first.token_ids + then.token_ids,
        first.logprobs + then.logprobs,
        first.prompt_logprobs or then.prompt_logprobs,
        then.ending,
        first.reasoning + then.reasoning,
        first.calls + then.calls,
    )


def _kinds_of(piece: Piece) -> tuple[bool, bool, bool]:
    """Whether it has a thought, text, and calls."""
    return bool(piece.reasoning), bool(piece.text), bool(piece.calls)


def new_name(prefix: str) -> str:
    """An id that nobody guesses: whoever knows it may cancel the request."""
    return f"{prefix}-{secrets.token_hex(12)}"
