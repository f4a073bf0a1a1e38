"""An answer as Ollama's clients read it: one JSON object, or a line of one for each piece."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET

from hypocenter.server.answers import AnswerTimings
from hypocenter.server.api_error import ApiError
from hypocenter.server.dialects.blocks import (
    BlockChange,
    BlockKind,
    SpokenBlock,
    SpokenBlocks,
    input_of,
)
from hypocenter.server.dialects.ollama_answers import (
    OllamaCall,
    OllamaChatAnswer,
    OllamaError,
    OllamaMessage,
    OllamaText,
    ToolCalled,
)
from hypocenter.server.forms import AnswerForm
from hypocenter.server.inquiry import Choice, Inquiry
from hypocenter.wire.messages import Piece

NDJSON = "application/x-ndjson"


def now_text() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaForm(AnswerForm):
    """A call is sent when it is whole; arguments that are no JSON object are a text.

    Of one that is cut off those members of its arguments are sent that are whole.
    """

    media_type = NDJSON

    def __init__(self, inquiry: Inquiry, model: str, *, is_chat: bool) -> None:
        self._inquiry, self._model, self._is_chat = inquiry, model, is_chat
        self._began = time.monotonic_ns()
        self._blocks = SpokenBlocks()
        #: Of an answer that is sent whole.
        self._whole: list[OllamaMessage] = []

    def note(self, choice: Choice, piece: Piece) -> None:
        self._whole += self._messages(choice, piece)

    def encode_whole(self, timings: AnswerTimings) -> bytes:
        thoughts = [part.thinking for part in self._whole if isinstance(part.thinking, str)]
        calls = [
            call
            for part in self._whole
            if isinstance(part.tool_calls, list)
            for call in part.tool_calls
        ]
        message = OllamaMessage(
            content="".join(part.content for part in self._whole),
            thinking="".join(thoughts) if thoughts else UNSET,
            tool_calls=calls or UNSET,
        )
        return msgspec.json.encode(self._part(message, timings))

    def begin(self) -> list[bytes]:
        return []

    def piece(self, choice: Choice, piece: Piece, *, is_first: bool) -> list[bytes]:
        return [_line(self._part(message)) for message in self._messages(choice, piece)]

    def end(self, timings: AnswerTimings, *, wants_usage: bool) -> list[bytes]:
        return [_line(self._part(OllamaMessage(), timings))]

    def failure(self, error: ApiError) -> bytes:
        return _line(OllamaError(error.message))

    def ping(self) -> bytes:
        return _line(self._part(OllamaMessage()))  # an empty line would be no JSON to its clients

    def _messages(self, choice: Choice, piece: Piece) -> list[OllamaMessage]:
        """What a piece says: each part of it is of one kind."""
        made = []
        for change, block, text in self._blocks.take(choice, piece):
            if block.kind is BlockKind.CALL:
                if change is BlockChange.ENDS:
                    made.append(_message_of_call(block, is_cut=choice.is_cut))
            elif change is BlockChange.GROWS:
                is_thought = block.kind is BlockKind.THOUGHT
                made.append(
                    OllamaMessage(thinking=text) if is_thought else OllamaMessage(content=text)
                )
        return made

    def _part(self, message: OllamaMessage, timings: AnswerTimings | None = None) -> Any:
        """One object; the last one has figures."""
        figures: dict[str, Any] = {"done": timings is not None}
        if timings is not None:
            usage, [choice] = self._inquiry.usage(), self._inquiry.choices
            assert choice.ending is not None, "it has ended"
            figures |= {
                "done_reason": "length" if choice.ending.reason == "length" else "stop",
                "total_duration": time.monotonic_ns() - self._began,
                "load_duration": 0,
                "prompt_eval_count": usage.prompt_tokens,
                "prompt_eval_duration": int(timings.prompt_ms * 1e6),
                "eval_count": usage.completion_tokens,
                "eval_duration": int(timings.predicted_ms * 1e6),
            }
        named: dict[str, Any] = {"model": self._model, "created_at": now_text(), **figures}
        if self._is_chat:
            return OllamaChatAnswer(**named, message=message)
        return OllamaText(**named, response=message.content, thinking=message.thinking)


def _message_of_call(block: SpokenBlock, *, is_cut: bool) -> OllamaMessage:
    given = input_of(block.text, is_cut=is_cut)
    if given is None:
        return OllamaMessage(content=f"{block.name} {block.text}")
    return OllamaMessage(tool_calls=[ToolCalled(OllamaCall(block.name, given))])


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"
