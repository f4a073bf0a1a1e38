"""Calls of tools in an answer as Hermes, Qwen 2.5 and Qwen 3 write them: JSON between two tags.

`<tool_call>{"name": "NAME", "arguments": {...}}</tool_call>`, one behind the other, as
https://github.com/NousResearch/Hermes-Function-Calling has it. What stands between the tags and is
no such JSON stays a part of the answer.
"""

from __future__ import annotations

import msgspec

from hypocenter.base.results import CallPiece
from hypocenter.conversation.harmony import NOTHING, AnswerDelta
from hypocenter.conversation.tools import CALLED_NAME, MAX_CALLS

BEGIN, END = "<tool_call>", "</tool_call>"
#: Blanks that may belong to a call are held back, but no more of them.
_MAX_BLANKS = 256
#: An argument may have the text of END in it, so JSON that is not whole there may go on so often.
_MAX_ENDS = 8


class CallsInTags:
    """Takes calls out of the text of one answer, wherever its pieces break.

    Blanks before a call belong to no text.
    """

    def __init__(self) -> None:
        self._held = ""
        #: The blanks before the tag of a call that has begun.
        self._blanks = ""
        #: The text behind that tag, in pieces; None: there is no such tag.
        self._call: list[str] | None = None
        self._num_ends = self._num_calls = 0

    def push(self, text: str) -> AnswerDelta:
        """What `text` adds to the answer and to calls; what may be a part of a tag is held back."""
        self._held += text
        spoken = NOTHING
        while (more := self._step()) is not None:
            spoken += more
        if self._call is not None:
            return spoken
        end = len(self._held) - num_begun(self._held, BEGIN)
        end = max(len(self._held[:end].rstrip()), end - _MAX_BLANKS)
        taken, self._held = self._held[:end], self._held[end:]
        return spoken + AnswerDelta(taken, "")

    def flush(self) -> AnswerDelta:
        """What is held back; no more text will follow. A call that is cut off is text."""
        is_cut = self._call is not None
        left = self._as_text().content if is_cut else ""
        left, self._held = left + self._held, ""
        return NOTHING if self._num_calls and not left.strip() else AnswerDelta(left, "")

    def _step(self) -> AnswerDelta | None:
        """Take a tag, a call or what is none off what is held; None: that is not known yet."""
        if self._call is None:
            before, tag, rest = self._held.partition(BEGIN)
            if not tag:
                return None
            text = before.rstrip()
            self._blanks, self._held = before[len(text) :], rest
            self._call, self._num_ends = [], 0
            return AnswerDelta(text, "")
        if not self._call:
            begun = self._held.lstrip()
            if not begun:
                return None
            if not begun.startswith("{"):
                return self._as_text()
        return self._take_call(self._call)

    def _take_call(self, pieces: list[str]) -> AnswerDelta | None:
        """What the next END makes of a call; text without one is put aside, and not read anew."""
        at = self._held.find(END)
        if at < 0:
            end = len(self._held) - num_begun(self._held, END)
            if end:
                pieces.append(self._held[:end])
                self._held = self._held[end:]
            return None
        pieces.append(self._held[:at])
        self._held = self._held[at + len(END) :]
        self._num_ends += 1
        if (called := _read("".join(pieces))) and self._num_calls < MAX_CALLS:
            self._call = None
            self._num_calls += 1
            return AnswerDelta("", "", (CallPiece(self._num_calls - 1, *called),))
        pieces.append(END)
        return self._as_text() if self._num_ends >= _MAX_ENDS else NOTHING

    def _as_text(self) -> AnswerDelta:
        """What stands behind the tag is no call."""
        text = self._blanks + BEGIN + "".join(self._call or ())
        self._call, self._blanks = None, ""
        return AnswerDelta(text, "")


def _read(text: str) -> tuple[str, str] | None:
    """The name and the arguments of a call; None for a text that is none."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(fields.pop("name", msgspec.Raw(b"0")), type=str)
        # Llama's word for them is "parameters".
        given = fields.pop("arguments", None) or fields.pop("parameters", None)
        if fields or not CALLED_NAME.fullmatch(name):
            return None
        arguments = "{}" if given is None else bytes(given).decode().strip()
        if arguments.startswith('"'):  # JSON that is written as a text
            inner = msgspec.json.decode(arguments, type=str)
            if inner.lstrip().startswith("{"):
                msgspec.json.decode(inner, type=dict[str, msgspec.Raw])
                arguments = inner
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return name, "{}" if arguments == "null" else arguments


def num_begun(text: str, mark: str) -> int:
    """Length of the end of the text with which the mark may begin."""
    for num in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:num]):
            return num
    return 0
