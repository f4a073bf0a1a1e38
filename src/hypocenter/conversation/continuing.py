"""A last message of the assistant that its answer goes on with: which part of it goes on.

Clients ask for it by `continue_final_message`, and call the message a prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hypocenter.base.errors import UsageError
from hypocenter.conversation.message_fields import CALLS, OTHER_THOUGHT, THOUGHT
from hypocenter.conversation.thoughts import marks_of

#: The part of a message that an answer goes on with; empty: it is a message of its own.
MessagePart = Literal["", "answer", "thought"]


def continued_part(chat_template: str, messages: object) -> MessagePart:
    """Which part of the last message is not finished.

    That is its thought where it says nothing yet, or where its text has begun one. Raises
    UsageError for a last message that is not the assistant's, and for one that calls tools.
    """
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise UsageError(
            "continue_final_message is True, but the last message is not the assistant's; add one "
            "with the beginning of the answer"
        )
    if last.get(CALLS):
        raise UsageError(
            "continue_final_message is True, but the last message calls tools and is finished; "
            "leave its tool_calls out"
        )
    text = text_of(last.get("content"))
    if not text:
        return "thought" if thought_of(last) else "answer"
    marks = marks_of(chat_template)
    if not marks:
        return "answer"
    begun = text.rfind(marks[0])
    return "thought" if begun >= 0 and marks[1] not in text[begun:] else "answer"


def text_of(content: object) -> str:
    """What a content says, be it a text or parts; what is none of these says nothing."""
    if isinstance(content, str):
        return content
    parts: list[Any] = list(content) if isinstance(content, list | tuple) else []
    return "\n".join(
        str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part
    )


def thought_of(message: Mapping[str, Any]) -> str:
    """What the assistant thought before this message."""
    return text_of(message.get(THOUGHT)) or text_of(message.get(OTHER_THOUGHT))
