"""JSON that is cut off: how far a value goes, and what of it is whole. Reads no other errors.

Grammar: RFC 8259.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import msgspec

_BLANK_CHARS = " \t\n\r"
_BLANKS = re.compile(r"[ \t\n\r]*")
_STRING = r'"(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|[^"\\\x00-\x1f])*'
_NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?"
#: A text, a number behind which something stands, a word, a mark.
_TOKEN = re.compile(
    rf'({_STRING}")|({_NUMBER})(?=[ \t\n\r,\]}}])|(true|false|null)|([][{{}},:])', re.ASCII
)
#: The beginning of a token that the end of the text may have cut.
_CUT_STRING = re.compile(rf"({_STRING})(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?\Z")
_CUT_NUMBER = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.|(?:\.\d+)?(?:[eE][-+]?\d*)?)?)?\Z", re.ASCII)
_WORDS = "true", "false", "null"
_CLOSERS = {"{": "}", "[": "]"}
#: More levels than that are no arguments.
_MAX_LEVELS = 256


class JsonValue(NamedTuple):
    """A value in a text: where it ends (None: it is cut off), JSON of what of it is whole, and
    where what was cut begins, a text or a number, say."""

    end: int | None
    whole: str
    cut_at: int


def read_value(text: str, at: int = 0) -> JsonValue | None:
    """The value of JSON that begins at `at`, to its end or to that of the text.

    None for what no text behind it would make a value. Of a number at the text's end it is not
    known whether more digits follow, so it is not whole.
    """
    start = at
    levels: list[str] = []
    #: What may come: a value, a value or the end, a key, a key or the end, ":", "," or the end.
    state, sound = "value", start
    while True:
        if text[at : at + 1] in _BLANK_CHARS:
            found = _BLANKS.match(text, at)
            at = found.end() if found is not None else at
        token = _TOKEN.match(text, at)
        if token is None:
            if not _may_go_on(text, at, state):
                return None
            # What stands behind `sound` opens nothing and closes nothing.
            closers = "".join(_CLOSERS[level] for level in reversed(levels))
            return JsonValue(None, text[start:sound] + closers if sound > start else "", at)
        following = _next_state(state, token[4] or "", token[1] is not None, levels)
        if following is None or len(levels) > _MAX_LEVELS:
            return None
        state, at = following, token.end()
        if not levels and state == "comma":
            return JsonValue(at, text[start:at], at)
        if state in ("comma", "first key", "first value"):
            sound = at


def _next_state(state: str, mark: str, is_string: bool, levels: list[str]) -> str | None:
    """What may come behind a token; None where this token may not. Keeps `levels`."""
    if not mark:
        if state in ("value", "first value"):
            return "comma"
        return "colon" if is_string and state in ("key", "first key") else None
    if mark == ",":
        if state != "comma" or not levels:
            return None
        return "key" if levels[-1] == "{" else "value"
    if mark == ":":
        return "value" if state == "colon" else None
    if mark in _CLOSERS:
        if state not in ("value", "first value"):
            return None
        levels.append(mark)
        return "first key" if mark == "{" else "first value"
    if state not in ("comma", "first key", "first value") or mark != _CLOSERS[levels[-1]]:
        return None
    levels.pop()
    return "comma"


def _may_go_on(text: str, at: int, state: str) -> bool:
    """Whether what stands at `at` is cut off by the end of the text, and may come there."""
    if at == len(text):
        return True
    if text[at] == '"':
        may_come = state in ("key", "first key", "value", "first value")
        return may_come and _CUT_STRING.match(text, at) is not None
    if state not in ("value", "first value"):
        return False
    rest = text[at : at + 5]
    is_word = any(word.startswith(rest) for word in _WORDS)
    return is_word or _CUT_NUMBER.match(text, at) is not None


def read_cut_string(text: str) -> str:
    """What a string of JSON says that begins with its quote and may be cut off."""
    found = _CUT_STRING.match(text.removesuffix('"') if _ends(text) else text)
    if found is None:
        return ""
    said = str(json.loads(found[1] + '"'))
    # The first half of a character that JSON writes as two.
    return said[:-1] if said and "\ud800" <= said[-1] < "\udc00" else said


def _ends(text: str) -> bool:
    value = read_value(text)
    return value is not None and value.end == len(text)


def without_cut_number(text: str) -> str:
    """The same without a number at its end that may go on, which readers would take for whole."""
    value = read_value(text)
    if value is None or value.end is not None:
        return text
    return text[: value.cut_at] if text[value.cut_at :][:1] in tuple("-0123456789") else text


def whole_members(text: str) -> dict[str, Any]:
    """What is whole of an object of JSON that may be cut off; empty for another text."""
    value = read_value(text)
    try:
        return {} if value is None else msgspec.json.decode(value.whole, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
