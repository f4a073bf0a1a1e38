"""What `/v1/messages` answers, field by field: whole messages and the events of a stream.

https://docs.anthropic.com/en/api/messages and .../messages-streaming name the fields. The thoughts
of models that run here are signed by nobody, so a `signature` is empty.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class MessageUsage(msgspec.Struct):
    """`input_tokens` are those that were computed; those from the cache are counted beside them."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = ThinkingBlock | TextBlock | ToolUseBlock


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """`stop_reason` is null as long as the answer goes on."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: ThinkingDelta | TextDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class MessageErrorFields(msgspec.Struct):
    type: str
    message: str


class MessageError(msgspec.Struct, tag_field="type", tag="error"):
    error: MessageErrorFields


MessageEvent = (
    MessageStart
    | Ping
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | MessageError
)
