"""Messages of a conversation as they are put together from blocks or items of another dialect.

What others call a block or an item is a text, a thought, a call or what a tool said. One that is
none of these is refused by its kind, and fields that nobody reads are noted.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hypocenter.conversation.message_fields import CALLS, THOUGHT, is_nothing, unread_text
from hypocenter.server.api_error import ApiError

#: Of one conversation: messages, and what stands in them. Nothing else runs while these are looked
#: at, which takes some ten microseconds for each.
MAX_ITEMS = 4096
#: So many names are told of.
_MAX_NAMES = 32


class Noted:
    """Fields that are passed over, and how many items were looked at."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._num_items = 0

    def count(self, where: str) -> None:
        """Another item. Raises ApiError for too many."""
        self._num_items += 1
        self.require_room(0, where)

    def require_room(self, num_more: int, where: str) -> None:
        """Refuse so many more items before one of them is looked at. Raises ApiError."""
        if self._num_items + num_more > MAX_ITEMS:
            raise ApiError(
                400, f"{where} holds more than {MAX_ITEMS} items; send fewer", param=where
            )

    def pass_over(self, name: str) -> None:
        """Note a field by its place, such as `messages[].id`."""
        if len(self._names) < _MAX_NAMES:
            self._names.add(name[:100])

    def others(self, given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
        """Note the fields of `given` that hold something and are none of `known`."""
        if given.keys() <= known:
            return
        for name, value in given.items():
            if name not in known and not is_nothing(value):
                self.pass_over(f"{where}.{name}")

    @property
    def names(self) -> list[str]:
        """All that was noted, in the order of the alphabet."""
        return sorted(self._names)


class TurnList:
    """Messages in the making: what the assistant said in several items is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, texts: Sequence[str]) -> None:
        """A message of texts, joined to the assistant's last one where that goes on."""
        if role == "assistant":
            self._assistant()["content"] += "".join(texts)
        else:
            content = [{"type": "text", "text": text} for text in texts]
            self.messages.append({"role": role, "content": content})

    def think(self, text: str) -> None:
        """A thought, which begins a message of the assistant where it stands behind words."""
        last = self._assistant()
        if last["content"] or CALLS in last:
            last = self._begin()
        last[THOUGHT] = last.get(THOUGHT, "") + text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A call of a tool by the assistant."""
        called = {"name": name, "arguments": arguments}
        calls = self._assistant().setdefault(CALLS, [])
        calls.append({"id": call_id, "type": "function", "function": called})

    def result(self, call_id: str, text: str) -> None:
        """What a tool said."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    @property
    def last_calls(self) -> bool:
        """Whether the last message calls tools."""
        return bool(self.messages) and CALLS in self.messages[-1]

    def _assistant(self) -> dict[str, Any]:
        last = self.messages[-1] if self.messages else {}
        return last if last.get("role") == "assistant" else self._begin()

    def _begin(self) -> dict[str, Any]:
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def text_of(given: Mapping[str, Any], name: str, where: str) -> str:
    """A text that must be there. Raises ApiError."""
    value = given.get(name)
    if not isinstance(value, str):
        field = where.partition("[")[0]
        raise ApiError(
            400, f"{where}.{name} is {reprlib.repr(value)}, but must be a text", param=field
        )
    return value


def mapping_of(value: object, where: str) -> dict[str, Any]:
    """An object that must be there. Raises ApiError."""
    if not isinstance(value, dict):
        raise ApiError(
            400,
            f"{where} is {reprlib.repr(value)}, but must be an object",
            param=where.partition("[")[0],
        )
    return value


def refuse(kind: object, where: str, known: Sequence[str]) -> ApiError:
    """The error for an item of a kind that is not read, with its modality where it is one."""
    shown = reprlib.repr(kind)
    why = unread_text(kind) or f"it may be {', '.join(known)}"
    return ApiError(
        400, f"{where}.type is {shown}, which is not read: {why}", param=where.partition("[")[0]
    )


def as_json(value: object) -> str:
    """A value as JSON, for what is passed on as a text."""
    return msgspec.json.encode(value).decode()
