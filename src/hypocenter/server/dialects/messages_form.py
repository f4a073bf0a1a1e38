"""An answer as Anthropic's clients read it: a message of blocks, whole or as named events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hypocenter.conversation.cut_json import without_cut_number
from hypocenter.server.answers import AnswerTimings
from hypocenter.server.api_error import ApiError
from hypocenter.server.dialects import messages_answers as said
from hypocenter.server.dialects.blocks import (
    BlockChange,
    BlockKind,
    SpokenBlock,
    SpokenBlocks,
    input_of,
)
from hypocenter.server.forms import AnswerForm
from hypocenter.server.inquiry import Choice, Inquiry
from hypocenter.wire.messages import Piece

#: By status; others of 4xx are invalid requests, others of 5xx errors of the server.
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
#: Of the routes whose errors have this form.
PATH = "/v1/messages"
#: What clients look for in an error's text before they shorten a conversation.
_TOO_LONG = "prompt is too long"


def error_of(error: ApiError) -> said.MessageError:
    """The error as Anthropic's clients read it."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"{_TOO_LONG}: {message}"
    return said.MessageError(said.MessageErrorFields(_ERRORS.get(error.status, kind), message))


class MessageForm(AnswerForm):
    """The arguments of a call are held back until they are whole, or the answer is cut off.

    Of a call that is cut off a stream has what was written, but for a number that may go on, and a
    whole answer those of its members that are whole, as Anthropic's client makes them of a stream.
    Arguments that are no JSON object though the model ended them are a text: no client is to run a
    tool with these.
    """

    def __init__(self, inquiry: Inquiry, model: str, *, shows_thoughts: bool = True) -> None:
        self._inquiry, self._model, self._shows_thoughts = inquiry, model, shows_thoughts
        self._blocks = SpokenBlocks()
        self._content: list[said.AnswerBlock] = []

    def note(self, choice: Choice, piece: Piece) -> None:
        for change, block, _ in self._blocks.take(choice, piece):
            if change is BlockChange.ENDS:
                self._content.append(self._finish_block(block))

    def encode_whole(self, timings: AnswerTimings) -> bytes:
        return msgspec.json.encode(self._message(self._content, *self._stop()))

    def begin(self) -> list[bytes]:
        started = said.MessageStart(self._message([], None, None))
        return [_line("message_start", started), self.ping()]

    def piece(self, choice: Choice, piece: Piece, *, is_first: bool) -> list[bytes]:
        lines = []
        for change, block, text in self._blocks.take(choice, piece):
            for event in self._events(change, block, text):
                lines.append(_line(event.__struct_config__.tag, event))
        return lines

    def end(self, timings: AnswerTimings, *, wants_usage: bool) -> list[bytes]:
        reason, string = self._stop()
        stopped = said.MessageDelta(said.StopDelta(reason, string), self._usage())
        return [_line("message_delta", stopped), _line("message_stop", said.MessageStop())]

    def failure(self, error: ApiError) -> bytes:
        return _line("error", error_of(error))

    def ping(self) -> bytes:
        return _line("ping", said.Ping())

    def _events(self, change: BlockChange, block: SpokenBlock, text: str) -> Iterator[Any]:
        if block.kind is BlockKind.CALL:
            if change is BlockChange.ENDS:
                whole = self._finish_block(block)
                self._content.append(whole)
                yield from _at_once(block, whole, is_cut=self._is_cut())
            return
        is_thought = block.kind is BlockKind.THOUGHT
        if change is BlockChange.BEGINS:
            begun = said.ThinkingBlock("") if is_thought else said.TextBlock("")
            yield said.BlockStart(block.index, begun)
        elif change is BlockChange.ENDS:
            self._content.append(self._finish_block(block))
            yield said.BlockStop(block.index)
        elif not is_thought:
            yield said.BlockDelta(block.index, said.TextDelta(text))
        elif self._shows_thoughts:
            yield said.BlockDelta(block.index, said.ThinkingDelta(text))

    def _finish_block(self, block: SpokenBlock) -> said.AnswerBlock:
        if block.kind is BlockKind.THOUGHT:
            return said.ThinkingBlock(block.text if self._shows_thoughts else "")
        if block.kind is BlockKind.TEXT:
            return said.TextBlock(block.text)
        given = input_of(block.text, is_cut=self._is_cut())
        if given is None:
            return said.TextBlock(f"{block.name} {block.text}")
        return said.ToolUseBlock(block.call_id, block.name, given)

    def _is_cut(self) -> bool:
        """Whether the answer was cut off, as far as is known by now."""
        [choice] = self._inquiry.choices
        return choice.is_cut

    def _stop(self) -> tuple[str, str | None]:
        """Why the answer ended, and at which stop string."""
        [choice] = self._inquiry.choices
        ending = choice.ending
        assert ending is not None, "it has ended"
        if ending.reason == "length":
            return "max_tokens", None
        if any(isinstance(block, said.ToolUseBlock) for block in self._content):
            return "tool_use", None
        if ending.stop_string:
            return "stop_sequence", ending.stop_string
        return "end_turn", None

    def _message(
        self, content: list[said.AnswerBlock], reason: str | None, string: str | None
    ) -> said.AnthropicMessage:
        return said.AnthropicMessage(
            id=self._inquiry.name,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=string,
            usage=self._usage(),
        )

    def _usage(self) -> said.MessageUsage:
        usage = self._inquiry.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return said.MessageUsage(
            usage.prompt_tokens - num_cached, usage.completion_tokens, num_cached
        )


def _at_once(block: SpokenBlock, whole: said.AnswerBlock, *, is_cut: bool) -> Iterator[Any]:
    """The events of a block that is sent when it is whole, or as far as it goes."""
    if isinstance(whole, said.ToolUseBlock):
        yield said.BlockStart(block.index, said.ToolUseBlock(whole.id, whole.name, {}))
        written = without_cut_number(block.text) if is_cut else block.text or "{}"
        yield said.BlockDelta(block.index, said.InputDelta(written))
    else:
        assert isinstance(whole, said.TextBlock), "a call is a tool_use or a text"
        yield said.BlockStart(block.index, said.TextBlock(""))
        yield said.BlockDelta(block.index, said.TextDelta(whole.text))
    yield said.BlockStop(block.index)


def _line(name: str, event: msgspec.Struct) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
