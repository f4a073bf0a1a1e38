"""Calls of tools in an answer as Hermes, Qwen 2.5 and Qwen 3 write them: JSON between two tags.

`<tool_call>{"name": "NAME", "arguments": {...}}</tool_call>`, one behind the other, as
https://github.com/NousResearch/Hermes-Function-Calling has it. What stands between the tags and is
no such JSON stays a part of the answer.
"""

from __future__ import annotations

import msgspec

from hypocenter.conversation.harmony import NOTHING, Spoken
from hypocenter.results import CallPiece

BEGIN, END = "<tool_call>", "</tool_call>"


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class CallsInTags:
    """Takes calls out of the text of one answer, wherever its pieces break.

    Blanks before a call and behind the last one belong to no text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_within = False
        self._num_calls = 0

    def push(self, text: str) -> Spoken:
        """What `text` adds to the answer and to calls; what may be a part of a tag is held back."""
        self._held += text
        spoken = NOTHING
        while True:
            before, tag, rest = self._held.partition(END if self._is_within else BEGIN)
            if not tag:
                break
            spoken += self._call(before) if self._is_within else Spoken(before.rstrip(), "")
            self._held, self._is_within = rest, not self._is_within
        if self._is_within:
            return spoken
        end = len(self._held) - num_begun(self._held, BEGIN)
        end = len(self._held[:end].rstrip())
        taken, self._held = self._held[:end], self._held[end:]
        return spoken + Spoken(taken, "")

    def flush(self) -> Spoken:
        """What is held back; no more text will follow. A call that is cut off is text."""
        held, self._held = self._held, ""
        if self._is_within:
            return Spoken(BEGIN + held, "")
        return NOTHING if self._num_calls and not held.strip() else Spoken(held, "")

    def _call(self, text: str) -> Spoken:
        try:
            written = msgspec.json.decode(text, type=_Written)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return Spoken(BEGIN + text + END, "")
        self._num_calls += 1
        arguments = bytes(written.arguments).decode()
        return Spoken("", "", (CallPiece(self._num_calls - 1, written.name, arguments),))


def num_begun(text: str, mark: str) -> int:
    """Length of the end of the text with which the mark may begin."""
    for num in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:num]):
            return num
    return 0
