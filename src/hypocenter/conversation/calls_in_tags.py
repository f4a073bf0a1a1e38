"""Takes calls of tools out of an answer, in any format of `call_formats.py`.

What stands behind a mark and is no call stays a part of the answer. A call is told when it is
whole, or as far as it goes where the answer was cut off.
"""

from __future__ import annotations

from hypocenter.base.results import CallPiece
from hypocenter.conversation.call_formats import HERMES, NO_TYPES, CallFormat, TextParameters
from hypocenter.conversation.cut_calls import CUT_READERS
from hypocenter.conversation.harmony import NOTHING, AnswerDelta
from hypocenter.conversation.marks import num_begun
from hypocenter.conversation.tools import MAX_CALLS

#: Blanks that may belong to a call are held back, but no more of them.
_MAX_BLANKS = 256
#: An argument may have the text of an end in it, so what is no call there may go on so often.
_MAX_ENDS = 8
#: Stands before Llama's calls where a tool of its own is called; it is no part of them.
_PYTHON_TAG = "<|python_tag|>"


class CallsInTags:
    """Takes calls out of the text of one answer, wherever its pieces break.

    Blanks before a call belong to no text. `types` are those of the tools that are offered. An
    answer that `must_call` has no text beside its calls.
    """

    def __init__(
        self,
        form: CallFormat = HERMES,
        types: TextParameters = NO_TYPES,
        *,
        must_call: bool = False,
    ) -> None:
        self._form, self._types, self.must_call = form, types, must_call
        self._held = ""
        #: The blanks before the mark of a call that has begun, and that mark.
        self._blanks = ""
        #: The text behind that mark, in pieces; None: there is no such mark.
        self._call: list[str] | None = None
        self._looks_like_one = False
        self._num_ends = self._num_calls = 0
        #: A call without a mark is the whole answer, or there is none.
        self._may_be_whole = not form.begin
        if self._may_be_whole:
            self._call = []

    def push(self, text: str) -> AnswerDelta:
        """What `text` adds to answer and calls; what may be a part of a mark is held back."""
        self._held += text
        spoken = NOTHING
        while (more := self._step()) is not None:
            spoken += more
        if self._call is not None:
            return spoken
        begun = num_begun(self._held, self._form.begin) if self._form.begin else 0
        end = len(self._held) - begun
        if self._form.begin:
            end = max(len(self._held[:end].rstrip()), end - _MAX_BLANKS)
        taken, self._held = self._held[:end], self._held[end:]
        return spoken + AnswerDelta(taken, "")

    def flush(self, *, is_cut: bool = False) -> AnswerDelta:
        """What is held back; no more text will follow.

        Where the answer `is_cut`, a call that has begun is told as far as it goes; else it is text.
        """
        spoken = NOTHING
        if self._call is not None and (is_cut or not self._form.end or self._form.may_lack_end):
            self._call.append(self._held)
            self._held = ""
            spoken = self._take("".join(self._call), is_cut=is_cut) or NOTHING
        left = self._as_text().content if self._call is not None else ""
        left, self._held = left + self._held, ""
        if is_cut and self.must_call:
            return spoken  # what is left are marks
        return spoken if self._num_calls and not left.strip() else spoken + AnswerDelta(left, "")

    def _step(self) -> AnswerDelta | None:
        """Take a mark, a call or what is none off what is held; None: that is not known yet."""
        if self._call is None:
            if not self._form.begin:
                return None
            before, mark, rest = self._held.partition(self._form.begin)
            if not mark:
                return None
            text = before.rstrip()
            self._blanks, self._held = before[len(text) :] + mark, rest
            self._call, self._num_ends, self._looks_like_one = [], 0, False
            return AnswerDelta(text, "")
        if not self._looks_like_one:
            begun = self._held.lstrip()
            if not begun:
                return None if len(self._held) <= _MAX_BLANKS else self._as_text()
            if self._may_be_whole and _PYTHON_TAG.startswith(begun):
                return None
            if self._may_be_whole and begun.startswith(_PYTHON_TAG):
                at = self._held.index(_PYTHON_TAG) + len(_PYTHON_TAG)
                self._blanks, self._held = self._blanks + self._held[:at], self._held[at:]
                return NOTHING
            if not self._form.may_begin(begun):
                return self._as_text()
            self._looks_like_one = len(begun) > _MAX_BLANKS
        if self._form.end:
            return self._take_call(self._call)
        if self._looks_like_one:  # the rest of the answer is read at its end
            self._call.append(self._held)
            self._held = ""
        return None

    def _take_call(self, pieces: list[str]) -> AnswerDelta | None:
        """What the next end makes of a call; text without one is put aside, and not read anew."""
        mark = self._form.end
        at = self._held.find(mark)
        if at < 0:
            end = len(self._held) - num_begun(self._held, mark)
            if end and self._looks_like_one:
                pieces.append(self._held[:end])
                self._held = self._held[end:]
            return None
        pieces.append(self._held[:at])
        self._held = self._held[at + len(mark) :]
        self._num_ends, self._looks_like_one = self._num_ends + 1, True
        if (called := self._take("".join(pieces))) is not None:
            return called
        pieces.append(mark)
        return self._as_text() if self._num_ends >= _MAX_ENDS else NOTHING

    def _take(self, text: str, *, is_cut: bool = False) -> AnswerDelta | None:
        """The calls of a text; None where it is none, or there were enough."""
        if is_cut:
            found = CUT_READERS[self._form.name](text.lstrip(), self._types)
        else:
            found = self._form.read(text.strip(), self._types)
        if not found or self._num_calls + len(found) > MAX_CALLS:
            return None
        self._call = None
        first, self._num_calls = self._num_calls, self._num_calls + len(found)
        calls = (CallPiece(first + number, *call) for number, call in enumerate(found))
        return AnswerDelta("", "", tuple(calls))

    def _as_text(self) -> AnswerDelta:
        """What stands behind the mark is no call."""
        text = self._blanks + "".join(self._call or ())
        self._call, self._blanks = None, ""
        return AnswerDelta(text, "")
