"""Checks the messages of a conversation, and the calls of tools in them, before a template is told.

What comes out are plain copies that go through a pipe. Never looks for control tokens: which texts
are any is known to `chat.py`.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hypocenter.base.errors import UsageError
from hypocenter.conversation.message_fields import (
    CALLS,
    OTHER_THOUGHT,
    THOUGHT,
    is_nothing,
    unread_text,
)
from hypocenter.conversation.tools import CALLED_NAME, MAX_CALLS

MAX_MESSAGES = 4096
MAX_TEXT_BYTES = 16 << 20
#: Of the arguments of all calls together: a short text may hold millions of empty lists.
MAX_ARGUMENT_VALUES = 1 << 18
MAX_DEPTH = 128
#: A "role" and a "content"; what may stand in them is checked, and not left to type checkers.
Message = Mapping[str, object]
#: Texts under "role" and "content", and perhaps calls under "tool_calls".
CheckedMessage = dict[str, Any]
#: Roles may end up inside a control token (`<|user|>`), so they cannot be any text.
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}", re.ASCII)
#: Printable ASCII but `<`, `>`, `|`, `[` and `]`, which control tokens begin and end with.
CALL_ID = re.compile(r"[ -;=?-Z\\^-{}~]{1,128}", re.ASCII)

#: Of any speaker: no mark begins or ends with what is left out, and OpenAI leaves out these too.
SPEAKER = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff<>|｜\\/\[\]]{1,64}")
_SPEAKER_SAYS = "up to 64 characters without blanks and '<', '>', '|', '[', ']', '/' and '\\'"
_NAME_SAYS = "up to 128 letters, digits, '_', '-' and '.'"
_ID_SAYS = "up to 128 printable ASCII characters without '<', '>', '|', '[' and ']'"
#: Roles that templates know; what is nearly one of them is a slip, others are a template's own.
_ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython")


class _Taken:
    """What the messages so far have of the limits that hold for all of them together."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._num_values = 0

    def add_text(self, text: str, where: str) -> None:
        self._num_bytes += _num_bytes(text, where)
        if self._num_bytes > MAX_TEXT_BYTES:
            raise UsageError(f"messages have more than {MAX_TEXT_BYTES} bytes of text, the limit")

    def add_arguments(self, text: str, where: str) -> None:
        """Call it before the text is decoded."""
        self.add_text(text, where)
        # Each value but the outermost comes after one of these.
        self._num_values += 1 + sum(map(text.count, ",[{"))
        if self._num_values > MAX_ARGUMENT_VALUES:
            raise UsageError(
                f"messages have tool calls with more than {MAX_ARGUMENT_VALUES} values in their "
                "arguments, the limit; leave out the first of them"
            )


def check_messages(messages: Sequence[Message]) -> list[CheckedMessage]:
    """Plain copies of the messages, each with a text for its content.

    A content is a text, or parts {"type": "text", "text": ...} as in OpenAI's API, which are joined
    by line breaks. A message may have a `name`. An assistant's may have `tool_calls` or
    `reasoning_content`, and then no content; a tool's may have `tool_call_id`. What else it has is
    passed over (`conversation/message_fields.py`). Arguments that are the text of a JSON object
    come out as this object. Raises UsageError that names the first wrong field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UsageError(
            f"messages is {reprlib.repr(messages)}, but must be a list of messages, each with "
            '"role" and "content"'
        )
    if not messages:
        raise UsageError("messages is empty, but at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise UsageError(f"{len(messages)} messages, but at most {MAX_MESSAGES} are allowed")
    taken = _Taken()
    return [
        _check_message(message, f"messages[{index}]", taken)
        for index, message in enumerate(messages)
    ]


def require_depth(value: object, where: str) -> None:
    """Raises UsageError for JSON that nests too deeply to be walked by functions."""
    containers = [value]
    depth = 0
    while containers := [item for item in containers if isinstance(item, Mapping | list | tuple)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep(where)
        containers = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, Mapping) else container)
        ]


def texts_of(value: object) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a key) for each text in a value of JSON."""
    if isinstance(value, str):
        yield value, False
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield name, True
            yield from texts_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)


def _check_message(message: object, where: str, taken: _Taken) -> CheckedMessage:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} is {type(message).__name__}, but must be a mapping")
    role = message.get("role")
    # Clients send back what they were given, with fields that hold nothing.
    fields = {name for name in message if not is_nothing(message[name])}
    has_calls = CALLS in fields and role == "assistant"
    # An assistant may have thought or called, and said nothing.
    may_be_silent = role == "assistant" and fields & {CALLS, THOUGHT, OTHER_THOUGHT}
    if not {"role", *(() if may_be_silent else ("content",))} <= set(message):
        found = ", ".join(sorted(map(str, message)))[:80]
        raise UsageError(f"{where} has fields {found!r}, but must have role and content")
    content = message.get("content")
    text = "" if content is None and may_be_silent else _content_text(content, where)
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise UsageError(
            f"{where}.role is {str(role)[:40]!r}, but must be up to 32 letters, digits, "
            "'-' and '_', a letter first"
        )
    near = difflib.get_close_matches(role, _ROLES, n=1, cutoff=0.75)
    if near and role not in _ROLES:
        raise UsageError(f"{where}.role is {role!r}; did you mean {near[0]!r}?")
    checked: CheckedMessage = {"role": role, "content": text}
    for name in (OTHER_THOUGHT, THOUGHT):
        if message.get(name) is not None:
            checked[THOUGHT] = _content_text(message[name], where, name)
    for name in checked.keys() - {"role"}:
        taken.add_text(checked[name], f"{where}.{name}")
    if has_calls:
        checked[CALLS] = _check_calls(message[CALLS], f"{where}.{CALLS}", taken)
    if role == "tool" and "tool_call_id" in fields:
        given = message["tool_call_id"]
        checked["tool_call_id"] = _matching(given, f"{where}.tool_call_id", CALL_ID, _ID_SAYS)
    if "name" in fields:
        pattern, says = (CALLED_NAME, _NAME_SAYS) if role == "tool" else (SPEAKER, _SPEAKER_SAYS)
        checked["name"] = _matching(message["name"], f"{where}.name", pattern, says)
    return checked


def _check_calls(calls: object, where: str, taken: _Taken) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes | bytearray):
        raise UsageError(
            f"{where} is {reprlib.repr(calls)}, but must be a list of calls, each with id, type "
            "and function"
        )
    if len(calls) > MAX_CALLS:
        raise UsageError(f"{where} has {len(calls)} calls, but may have {MAX_CALLS}")
    return [_check_call(call, f"{where}[{index}]", taken) for index, call in enumerate(calls)]


def _check_call(call: object, where: str, taken: _Taken) -> dict[str, Any]:
    known = _mapping(call, where, ("id", "type", "function"))
    checked: dict[str, Any] = {}
    if not is_nothing(known.get("id")):
        checked["id"] = _matching(known["id"], f"{where}.id", CALL_ID, _ID_SAYS)
    if known.get("type") not in (None, "function"):
        raise UsageError(
            f'{where}.type is {reprlib.repr(known["type"])}, but must be "function" or left out'
        )
    where = f"{where}.function"
    function = _mapping(known.get("function"), where, ("name", "arguments"))
    name = _matching(function.get("name"), f"{where}.name", CALLED_NAME, _NAME_SAYS)
    arguments = _check_arguments(function.get("arguments"), f"{where}.arguments", taken)
    return {**checked, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_arguments(given: object, where: str, taken: _Taken) -> str | dict[str, Any]:
    """The object that a text of JSON holds; a text that holds none stays what it is."""
    if isinstance(given, str):
        taken.add_arguments(given, where)
        if not given.strip():
            return {}  # so clients write that there are none
        try:
            return _decode_object(given, where)
        except (ValueError, OverflowError):
            return given
    if not isinstance(given, Mapping):
        raise UsageError(
            f"{where} is {reprlib.repr(given)}, but must be a text of JSON or a mapping"
        )
    require_depth(given, where)
    try:
        text = json.dumps(dict(given), ensure_ascii=False, allow_nan=False)
        taken.add_arguments(text, where)
        return _decode_object(text, where)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{where} cannot be given to a template: {error}") from None


def _decode_object(text: str, where: str) -> dict[str, Any]:
    """Raises ValueError or OverflowError for what is no JSON object or cannot go through a pipe."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    require_depth(value, where)
    json.dumps(value, allow_nan=False)  # NaN and infinity are no JSON, though Python reads them
    msgspec.msgpack.encode(value)
    return value


def _mapping(given: object, where: str, known: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(given, Mapping):
        raise UsageError(
            f"{where} is {reprlib.repr(given)}, but must be a mapping with {', '.join(known)}"
        )
    return given


def _matching(given: object, where: str, pattern: re.Pattern[str], says: str) -> str:
    if not isinstance(given, str) or not pattern.fullmatch(given):
        raise UsageError(f"{where} is {reprlib.repr(given)}, but must be {says}")
    return given


def _too_deep(where: str) -> UsageError:
    return UsageError(f"{where} nests deeper than {MAX_DEPTH} levels, the limit")


def _num_bytes(text: str, where: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where} has a lone surrogate at character {error.start}, but must be valid Unicode"
        ) from error


def _content_text(content: object, where: str, name: str = "content") -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        found = type(content).__name__
        raise UsageError(f"{where}.{name} is {found}, but must be a text or parts of text")
    texts = []
    for index, part in enumerate(content):
        text = None
        if isinstance(part, Mapping):
            kind = part.get("type")
            if why := unread_text(kind):
                shown = f"{where}.{name}[{index}].type is {reprlib.repr(kind)}"
                raise UsageError(f"{shown}, which is not read: {why}")
            text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise UsageError(
                f"{where}.{name}[{index}] is {reprlib.repr(part)}, but must be "
                '{"type": "text", "text": ...}, for models read text only'
            )
        texts.append(text)
    return "\n".join(texts)
