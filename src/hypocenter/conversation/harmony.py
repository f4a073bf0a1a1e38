"""The harmony format of gpt-oss: an answer in several messages, each in a channel, told apart.

A message is `<|channel|>NAME ...<|message|>TEXT<|end|>`, and the next one begins with
`<|start|>assistant`. The channel "final" holds what is for the reader, "analysis" what the model
thinks, "commentary" what it says beside calls of tools. A call is a message whose head names a
recipient, `to=functions.NAME`, and whose text are the arguments. Format: OpenAI's harmony response
format, https://github.com/openai/harmony.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hypocenter.base.results import CallPiece
from hypocenter.conversation.tools import CALLED_NAME, MAX_CALLS

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
#: Ends a call, and with it the answer, unless that was asked to go on.
_CALL = "<|call|>"
#: Before the kind of text that a message has, where that is none for readers.
CONSTRAIN = "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, _CALL)
#: Of the head of a message.
_BEGINNINGS = (START, CHANNEL)
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
#: Of tools of the conversation; those that a model brings along have no prefix.
PREFIX = "functions."
#: Recipients that are no tools.
_SPEAKERS = frozenset({"user", "assistant", "system", "developer", "all"})
#: A head that is longer is none, or it would be read anew with each piece.
_MAX_HEAD_CHARS = 1024
#: What the first message may begin with, if not with its text: the prompt has begun it.
_OPENINGS = (CHANNEL, START, " to=")
_FINAL, _ANALYSIS = "final", "analysis"


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """Text for the reader, what the model thought or said beside it, and its calls of tools."""

    content: str
    reasoning: str
    calls: tuple[CallPiece, ...] = ()

    def __add__(self, more: AnswerDelta) -> AnswerDelta:
        return AnswerDelta(
            self.content + more.content, self.reasoning + more.reasoning, self.calls + more.calls
        )


NOTHING = AnswerDelta("", "")


def answers_in_channels(chat_template: str) -> bool:
    """Whether a model with this chat template answers in channels."""
    return CHANNEL in chat_template and MESSAGE in chat_template


class Channels:
    """Tells the channels of one answer apart, wherever its pieces break.

    An answer that names no channel, as one that is held to a form, is all for the reader. Where
    no tools were offered, `reads_calls` is False, and what a call says is a thought.
    """

    def __init__(self, *, reads_calls: bool = True) -> None:
        self._held = ""
        self._reads_calls = reads_calls
        #: That of the text that comes; None: the head of a message comes, or nothing yet.
        self._channel: str | None = None
        #: Whether that text are the arguments of a call, and how many calls have begun.
        self._is_call, self._num_calls = False, 0
        self._has_begun = self._has_message = False
        #: It names no channel, so what looks like a mark is text.
        self._is_plain = False

    def push(self, text: str) -> AnswerDelta:
        """What `text` adds to each; what may be a part of a mark is held back."""
        self._held += text
        parts: list[AnswerDelta] = []
        while self._step(parts):
            pass
        return sum(parts, NOTHING)

    def flush(self, *, is_cut: bool = False) -> AnswerDelta:
        """What is held back; no more text will follow. The head of a message is no text.

        Of an answer that `is_cut` what may be a mark is left out, in a call and where it begins.
        """
        held, self._held = self._held, ""
        if self._is_call and (is_cut or held.startswith((END, _CALL))):
            held = ""
        if is_cut and not self._has_begun and any(mark.startswith(held) for mark in _BEGINNINGS):
            held = ""
        is_text = self._channel is not None or not self._has_begun
        if not self._has_message and held.startswith(" to="):
            is_text = True  # words that looked like the head of a call
        return self._delta_of(held) if is_text else NOTHING

    def _step(self, parts: list[AnswerDelta]) -> bool:
        """Take one head, or some text, off what is held; whether more may be taken."""
        if not self._has_begun:
            if any(opening.startswith(self._held) for opening in _OPENINGS):
                return False  # it may become one
            self._has_begun = True
            self._is_plain = not self._held.startswith(_OPENINGS)
            self._channel = _FINAL if self._is_plain else None
        if self._is_plain:
            parts.append(self._delta_of(self._held))
            self._held = ""
            return False
        if self._channel is None:
            head, mark, self._held = self._held.partition(MESSAGE)
            if not mark and len(head) <= _MAX_HEAD_CHARS:
                self._held = head
                return False
            if not mark:
                self._channel, self._is_call, self._has_message = _ANALYSIS, False, True
                parts.append(self._delta_of(head))
                return False
            parts.append(self._begin(head))
            return True
        places = [(at, mark) for mark in MARKS if (at := self._held.find(mark)) >= 0]
        if not places:
            end = len(self._held) - _num_undecided(self._held)
            parts.append(self._delta_of(self._held[:end]))
            self._held = self._held[end:]
            return False
        at, mark = min(places)
        is_end = self._ends_message(mark, self._held[at + len(mark) :])
        if is_end is False:
            at += len(mark)
        parts.append(self._delta_of(self._held[:at]))
        if is_end is not True:
            self._held = self._held[at:]
            return is_end is False
        # The mark that names a channel belongs to the head that it begins.
        self._held = self._held[at if mark == CHANNEL else at + len(mark) :]
        self._channel = self._channel if mark == MESSAGE else None
        return True

    def _ends_message(self, mark: str, behind: str) -> bool | None:
        """Whether a mark is one; None: what comes behind it will tell.

        Arguments may have the text of one in them: a call ends where the next message begins.
        """
        if not self._is_call or mark in _BEGINNINGS:
            return True
        if behind.startswith(_BEGINNINGS):
            return True
        return None if any(begun.startswith(behind) for begun in _BEGINNINGS) else False

    def _begin(self, head: str) -> AnswerDelta:
        """Note what a message is by its head; the name of a tool that it calls is told at once."""
        named, called = _NAME.findall(head), _RECIPIENT.findall(head)
        author = head.rpartition(START)[2].partition(CHANNEL)[0].split()[:1]
        is_ours = author in ([], ["assistant"]) or author[0].startswith("to=")
        name = called[-1].removeprefix(PREFIX) if called and is_ours else ""
        self._has_message = True
        is_tool = bool(CALLED_NAME.fullmatch(name)) and name not in _SPEAKERS
        self._channel = named[-1] if named else (_ANALYSIS if is_tool else _FINAL)
        self._is_call = (
            is_tool
            and self._reads_calls
            and self._channel != _FINAL
            and self._num_calls < MAX_CALLS
        )
        if not self._is_call:
            return NOTHING
        self._num_calls += 1
        return AnswerDelta("", "", (CallPiece(self._num_calls - 1, name=name),))

    def _delta_of(self, text: str) -> AnswerDelta:
        """Text of the message that comes."""
        if not text:
            return NOTHING
        if self._is_call:
            return AnswerDelta("", "", (CallPiece(self._num_calls - 1, arguments=text),))
        is_final = self._channel in (_FINAL, None)
        return AnswerDelta(text, "") if is_final else AnswerDelta("", text)


def _num_undecided(text: str) -> int:
    """Length of the end of the text with which a mark may begin; each has one `<`, its first."""
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(m.startswith(text[at:]) for m in MARKS) else 0
