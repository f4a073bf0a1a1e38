"""The fields of messages and tools that are read, and what clients send beside them.

Others are passed over, for they come from frameworks and other servers and mean nothing here. The
server names them in its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypocenter.conversation.tools import FIELDS, FUNCTION_FIELDS, STRICT

#: Of an assistant's message: what it thought, as most call it, and as vLLM and OpenRouter do.
THOUGHT, OTHER_THOUGHT = "reasoning_content", "reasoning"
CALLS = "tool_calls"
_FIELDS = frozenset({"role", "content", "name", THOUGHT, OTHER_THOUGHT})
#: What messages of a role may have beside those.
_FIELDS_OF: dict[object, frozenset[str]] = {
    "assistant": frozenset({CALLS}),
    "tool": frozenset({"tool_call_id"}),
}
_NO_FIELDS: frozenset[str] = frozenset()
#: Of a call and of its function; deltas of a stream are numbered, and clients keep that.
_CALL_FIELDS, _CALLED_FIELDS = ("id", "type", "function", "index"), ("name", "arguments")
#: So many messages are looked at, and so many names are told of.
_MAX_MESSAGES, _MAX_NAMES = 4096, 32


def unread_text(kind: object) -> str:
    """Why a part of that type is not read, where it is of another modality than text; or empty."""
    modalities = [
        word for word in ("image", "audio", "video", "file", "document") if word in str(kind)
    ]
    return f"models are served that read and write text, no {modalities[0]}" if modalities else ""


def is_nothing(value: object) -> bool:
    """Whether a field holds nothing, as in what clients send back as they were given it."""
    return value is None or (isinstance(value, str | list | tuple) and not value)


def passed_over(messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[str]:
    """The fields that hold something and are not read, such as `messages[].message_id`."""
    found: set[str] = set()
    for name in _all_passed_over(messages, tools or ()):
        found.add(name)
        if len(found) >= _MAX_NAMES:
            break
    return sorted(found)


def _all_passed_over(messages: Sequence[Any], tools: Sequence[Any]) -> Iterator[str]:
    for message in messages[:_MAX_MESSAGES]:
        if not isinstance(message, Mapping):
            continue
        role = message.get("role")
        own = _FIELDS_OF.get(role, _NO_FIELDS) if isinstance(role, str) else _NO_FIELDS
        yield from _others(message, _FIELDS | own, "messages[]")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            yield from _others(part, ("type", "text"), "messages[].content[]")
        calls = message.get(CALLS)
        for call in calls if isinstance(calls, list) and CALLS in own else ():
            yield from _others(call, _CALL_FIELDS, "messages[].tool_calls[]")
            if isinstance(call, Mapping):
                where = "messages[].tool_calls[].function"
                yield from _others(call.get("function"), _CALLED_FIELDS, where)
    for tool in tools[:_MAX_MESSAGES]:
        yield from _others(tool, FIELDS, "tools[]")
        if isinstance(tool, Mapping):
            yield from _others(tool.get("function"), (*FUNCTION_FIELDS, STRICT), "tools[].function")


def _others(given: object, known: frozenset[str] | tuple[str, ...], where: str) -> Iterator[str]:
    if isinstance(given, Mapping):
        for name, value in given.items():
            if name not in known and not is_nothing(value):
                yield f"{where}.{str(name)[:64]}"
