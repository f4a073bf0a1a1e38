"""The answers of `/v1/completions` and `/v1/chat/completions`, whole and in chunks.

The fields are those of OpenAI's reference: https://platform.openai.com/docs/api-reference. An
`AnswerForm` is what any route makes of the pieces of an answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from hypocenter.base.results import CallPiece, TokenLogprob, TopLogprob, join_calls, whole_calls
from hypocenter.server.answers import (
    AnswerTimings,
    CallDelta,
    CalledFunction,
    CallOfTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    FunctionDelta,
    LogprobEntry,
    TextCompletion,
    TopLogprobEntry,
)
from hypocenter.server.api_error import ApiError
from hypocenter.server.inquiry import Choice, Inquiry
from hypocenter.wire.logprobs import unpack_logprobs
from hypocenter.wire.messages import Piece


class AnswerForm(ABC):
    """What a route makes of an answer, whole or as the lines of a stream.

    Each piece is told to either `note` or `piece`, in order.
    """

    #: Of its stream.
    media_type = "text/event-stream"
    #: Whether the end of a stream tells the logprobs of all tokens once more.
    keeps_logprobs = False

    @abstractmethod
    def note(self, choice: Choice, piece: Piece) -> None:
        """Hear of a piece of an answer that is sent whole."""

    @abstractmethod
    def encode_whole(self, timings: AnswerTimings) -> bytes:
        """All of it as JSON, once it has ended."""

    @abstractmethod
    def begin(self) -> list[bytes]:
        """What is sent before the first piece."""

    @abstractmethod
    def piece(self, choice: Choice, piece: Piece, *, is_first: bool) -> list[bytes]:
        """What is sent of a piece; `is_first` of its choice."""

    @abstractmethod
    def end(self, timings: AnswerTimings, *, wants_usage: bool) -> list[bytes]:
        """What is sent behind the last piece."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """What is sent when a stream breaks off."""

    def ping(self) -> bytes:
        """What is sent where nothing else was for a while."""
        return b": still here\n\n"


class _ChunkForm(AnswerForm):
    """A stream of chunks without names, `[DONE]` behind them."""

    def __init__(self, inquiry: Inquiry, model: str, *, has_ids: bool) -> None:
        self._inquiry, self._model, self._has_ids = inquiry, model, has_ids

    def note(self, choice: Choice, piece: Piece) -> None:
        """A choice has its pieces itself."""

    def encode_whole(self, timings: AnswerTimings) -> bytes:
        # Choice by choice: each holds Python's lock, and takes more memory than its JSON.
        answer = self.answer(timings)
        encoded: Any = [_as_json(self.whole_choice(choice)) for choice in self._inquiry.choices]
        answer.choices = encoded
        return msgspec.json.encode(answer)

    def end(self, timings: AnswerTimings, *, wants_usage: bool) -> list[bytes]:
        usage = [_line(self.usage_chunk(timings))] if wants_usage else []
        return [*usage, b"data: [DONE]\n\n"]

    def failure(self, error: ApiError) -> bytes:
        return _line(error.body)

    @abstractmethod
    def answer(self, timings: AnswerTimings) -> TextCompletion | ChatCompletion:
        """All but the choices."""

    @abstractmethod
    def whole_choice(self, choice: Choice) -> CompletionChoice | ChatChoice:
        """A choice as it ended."""

    @abstractmethod
    def usage_chunk(self, timings: AnswerTimings) -> TextCompletion | ChatChunk:
        """The figures of all choices."""


class CompletionForm(_ChunkForm):
    """Text completions; with `echo` each answer begins with its prompt's text."""

    def __init__(
        self, inquiry: Inquiry, model: str, echoed: Sequence[str] | None, *, has_ids: bool = False
    ) -> None:
        super().__init__(inquiry, model, has_ids=has_ids)
        self._echoed = echoed

    def answer(self, timings: AnswerTimings) -> TextCompletion:
        whole = self._chunk([])
        whole.usage, whole.timings = self._inquiry.usage(), timings
        return whole

    def begin(self) -> list[bytes]:
        return []

    def piece(self, choice: Choice, piece: Piece, *, is_first: bool) -> list[bytes]:
        prompt = self._prompt(choice) if is_first else ""
        found = self._logprobs(choice, piece.logprobs, is_first=is_first)
        said = self._choice(choice, prompt + piece.text, found)
        if self._has_ids:
            said.token_ids = piece.token_ids
            if is_first:
                said.prompt_token_ids = choice.generation.prompt_ids or ()
        return [_line(self._chunk([said]))]

    def usage_chunk(self, timings: AnswerTimings) -> TextCompletion:
        chunk = self._chunk([])
        chunk.usage, chunk.timings = self._inquiry.usage(), timings
        return chunk

    def _chunk(self, choices: list[CompletionChoice]) -> TextCompletion:
        inquiry = self._inquiry
        return TextCompletion(
            id=inquiry.name, created=inquiry.created, model=self._model, choices=choices
        )

    def whole_choice(self, choice: Choice) -> CompletionChoice:
        whole = self._choice(
            choice,
            self._prompt(choice) + "".join(choice.text),
            self._logprobs(choice, choice.logprobs, is_first=True),
        )
        if self._has_ids:
            whole.token_ids = choice.generation.output_ids
            whole.prompt_token_ids = choice.generation.prompt_ids or ()
        return whole

    def _prompt(self, choice: Choice) -> str:
        if self._echoed is None:
            return ""
        return self._echoed[choice.index // self._inquiry.num_choices]

    def _choice(
        self, choice: Choice, text: str, logprobs: CompletionLogprobs | None
    ) -> CompletionChoice:
        return CompletionChoice(choice.index, text, logprobs, choice.finish_reason)

    def _logprobs(
        self, choice: Choice, packed: bytes | bytearray, *, is_first: bool
    ) -> CompletionLogprobs | None:
        if choice.generation.params.logprobs is None:
            return None
        said = CompletionLogprobs([], [], [], [])
        tables: list[Any] = said.top_logprobs  # one after the other is made, and encoded at once
        echoes = is_first and self._echoed is not None
        of_prompt = unpack_logprobs(choice.prompt_logprobs if echoes else b"")
        of_answer = ((token.piece, token) for token in unpack_logprobs(packed) if token)
        for piece, token in chain(zip(choice.prompt_pieces, of_prompt, strict=False), of_answer):
            said.tokens.append(token_text(piece))
            said.token_logprobs.append(None if token is None else token.logprob)
            tables.append(None if token is None else _as_json(_as_table(token)))
            said.text_offset.append(choice.num_chars)
            choice.num_chars += len(said.tokens[-1])
        return said


class ChatForm(_ChunkForm):
    """Answers of a conversation, with what the model thought beside them.

    Each begins with what is `echoed`.
    """

    def __init__(
        self, inquiry: Inquiry, model: str, echoed: str = "", *, has_ids: bool = False
    ) -> None:
        super().__init__(inquiry, model, has_ids=has_ids)
        self._echoed = echoed

    def answer(self, timings: AnswerTimings) -> ChatCompletion:
        inquiry = self._inquiry
        return ChatCompletion(
            id=inquiry.name,
            created=inquiry.created,
            model=self._model,
            choices=[],
            usage=inquiry.usage(),
            prompt_token_ids=self._prompt_ids(),
            timings=timings,
        )

    def whole_choice(self, choice: Choice) -> ChatChoice:
        return ChatChoice(
            choice.index,
            self._message(choice),
            self._logprobs(choice, choice.logprobs),
            choice.finish_reason,
            choice.generation.output_ids if self._has_ids else UNSET,
        )

    def begin(self) -> list[bytes]:
        delta = ChatDelta(role="assistant", content=self._echoed)
        chunks = [self._chunk([self._choice(c, delta)]) for c in self._inquiry.choices]
        chunks[0].prompt_token_ids = self._prompt_ids()
        return [*map(_line, chunks)]

    def piece(self, choice: Choice, piece: Piece, *, is_first: bool) -> list[bytes]:
        says = piece.text or piece.reasoning or piece.calls or piece.logprobs
        lines = []
        if says or is_first or not piece.ending or (self._has_ids and piece.token_ids):
            lines.append(_line(self._chunk_of(choice, piece)))
        if piece.ending:
            last = self._choice(choice, ChatDelta())
            last.finish_reason = choice.finish_reason
            lines.append(_line(self._chunk([last])))
        return lines

    def _chunk_of(self, choice: Choice, news: Piece) -> ChatChunk:
        delta = ChatDelta(content=news.text)
        if news.reasoning or news.calls:
            calls = [_call_delta(choice, call) for call in join_calls(news.calls)]
            delta = ChatDelta(
                content=news.text or UNSET,
                reasoning_content=news.reasoning or UNSET,
                tool_calls=calls or UNSET,
            )
        piece = self._choice(choice, delta)
        piece.logprobs = self._logprobs(choice, news.logprobs)
        if self._has_ids:
            piece.token_ids = news.token_ids
        return self._chunk([piece])

    def _prompt_ids(self) -> Sequence[int] | UnsetType:
        return (self._inquiry.choices[0].generation.prompt_ids or ()) if self._has_ids else UNSET

    def usage_chunk(self, timings: AnswerTimings) -> ChatChunk:
        chunk = self._chunk([])
        chunk.usage, chunk.timings = self._inquiry.usage(), timings
        return chunk

    def _message(self, choice: Choice) -> ChatMessage:
        thought, text = "".join(choice.reasoning), "".join((self._echoed, *choice.text))
        calls = [
            CallOfTool(name, CalledFunction(call.name, call.arguments))
            for name, call in zip(choice.call_ids, whole_calls(choice.calls), strict=True)
        ]
        return ChatMessage(
            "assistant",
            text or (None if calls else ""),
            reasoning_content=thought or UNSET,
            tool_calls=calls or UNSET,
        )

    def _choice(self, choice: Choice, delta: ChatDelta) -> ChatChunkChoice:
        return ChatChunkChoice(choice.index, delta, None, None)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        inquiry = self._inquiry
        return ChatChunk(
            id=inquiry.name, created=inquiry.created, model=self._model, choices=choices
        )

    def _logprobs(self, choice: Choice, packed: bytes | bytearray) -> ChatLogprobs | None:
        if choice.generation.params.logprobs is None:
            return None
        return ChatLogprobs(logprob_entries(packed))


def _line(value: dict[str, Any] | msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _as_json(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def logprob_entries(packed: bytes | bytearray) -> list[LogprobEntry]:
    """Log probabilities as OpenAI's chats and responses have them, each encoded already."""
    entries: list[Any] = [
        _as_json(LogprobEntry(*_entry(token), [TopLogprobEntry(*_entry(top)) for top in token.top]))
        for token in unpack_logprobs(packed)
        if token is not None
    ]
    return entries


def _call_delta(choice: Choice, piece: CallPiece) -> CallDelta:
    if not piece.name:
        return CallDelta(piece.index, FunctionDelta(arguments=piece.arguments))
    begun = FunctionDelta(piece.name, piece.arguments)
    return CallDelta(piece.index, begun, choice.call_ids[piece.index], "function")


def token_text(piece: bytes) -> str:
    """A token's bytes as a text; of those that are no whole characters OpenAI's spelling."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _as_table(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens of a place; the chosen one is always among them.

    Of two tokens with one text the likelier is kept.
    """
    table: dict[str, float] = {}
    for other in (*token.top, token):
        table.setdefault(token_text(other.piece), other.logprob)
    return table


def _entry(token: TopLogprob) -> tuple[str, float, list[int]]:
    return token_text(token.piece), token.logprob, list(token.piece)
