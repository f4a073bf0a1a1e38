"""A prompt that ends within the last message, so that the answer goes on with it.

Templates put marks behind a message and trim it. So a mark of our own is added to its text before
the template sees it, and the prompt is cut there.
"""

from __future__ import annotations

from hypocenter.base.errors import TemplateError, UsageError
from hypocenter.conversation.message_fields import THOUGHT
from hypocenter.model.text.chat_messages import CheckedMessage

#: A character of Unicode's private use plane 16, which no text has any business with.
END_MARK = "\U0010f5a7"


def with_end_mark(messages: list[CheckedMessage]) -> CheckedMessage:
    """The last message, with the mark behind what it says; behind its thought if it says nothing.

    Raises UsageError for a conversation that has this very character.
    """
    if any(END_MARK in _texts_of(message) for message in messages):
        raise UsageError(
            "messages has the character U+10F5A7, which marks where an answer goes on; leave it out"
        )
    last = messages[-1]
    name = "content" if last["content"] or not last.get(THOUGHT) else THOUGHT
    return {**last, name: last[name] + END_MARK}


def _texts_of(message: CheckedMessage) -> str:
    """All texts of a message that a template may write."""
    return "".join((message["content"], message.get(THOUGHT, ""), message.get("name", "")))


def up_to_end_mark(parts: list[tuple[str, bool]], name: str) -> list[tuple[str, bool]]:
    """The parts up to the mark. Raises TemplateError for a template that did not write it once."""
    num = sum(text.count(END_MARK) for text, _ in parts)
    if num != 1:
        raise TemplateError(
            f"chat template {name!r} shows the last message {num} times, so no answer can go on "
            "with it; leave continue_final_message out"
        )
    kept: list[tuple[str, bool]] = []
    for text, is_template in parts:
        before, mark, _ = text.partition(END_MARK)
        kept += [(before, is_template)] if before else []
        if mark:
            break
    return kept
