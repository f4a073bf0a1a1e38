"""Messages of a conversation, for a chat and for a single question."""

from __future__ import annotations


def system_message(text: str | None) -> list[dict[str, str]]:
    """The message that a conversation begins with, if there is one."""
    return [] if text is None else [{"role": "system", "content": text}]


def as_user(text: str) -> dict[str, str]:
    """A message of the person who asks."""
    return {"role": "user", "content": text}
