"""The harmony format of gpt-oss: an answer in several messages, each in a channel, told apart.

A message is `<|channel|>NAME ...<|message|>TEXT<|end|>`, and the next one begins with
`<|start|>assistant`. The channel "final" holds what is for the reader, "analysis" what the model
thinks, "commentary" what it says beside calls of tools. Format: OpenAI's harmony response format,
https://github.com/openai/harmony. Calls of tools are not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_MARKS = (_START, _CHANNEL, _MESSAGE, _END)
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
#: What the first message may begin with, if not with its text: the prompt has begun it.
_OPENINGS = (_CHANNEL, _START, " to=")
_FINAL = "final"


@dataclass(frozen=True, slots=True)
class Spoken:
    """Text for the reader, and what the model thought or said beside it."""

    content: str
    reasoning: str

    def __add__(self, more: Spoken) -> Spoken:
        return Spoken(self.content + more.content, self.reasoning + more.reasoning)


NOTHING = Spoken("", "")


def is_spoken_by(chat_template: str) -> bool:
    """Whether a model with this chat template answers in channels."""
    return _CHANNEL in chat_template and _MESSAGE in chat_template


class Channels:
    """Tells the channels of one answer apart, wherever its pieces break.

    An answer that names no channel, as one that is held to a form, is all for the reader.
    """

    def __init__(self) -> None:
        self._held = ""
        #: That of the text that comes; None: the head of a message comes, or nothing yet.
        self._channel: str | None = None
        self._has_begun = False
        #: It names no channel, so what looks like a mark is text.
        self._is_plain = False

    def push(self, text: str) -> Spoken:
        """What `text` adds to each; what may be a part of a mark is held back."""
        self._held += text
        parts: list[tuple[str, str]] = []
        while self._step(parts):
            pass
        return self._spoken(parts)

    def flush(self) -> Spoken:
        """What is held back; no more text will follow. The head of a message is no text."""
        held, self._held = self._held, ""
        is_text = self._channel is not None or not self._has_begun
        return self._spoken([(self._channel or _FINAL, held)] if is_text and held else [])

    def _step(self, parts: list[tuple[str, str]]) -> bool:
        """Take one head, or some text, off what is held; whether more may be taken."""
        if not self._has_begun:
            if any(opening.startswith(self._held) for opening in _OPENINGS):
                return False  # it may become one
            self._has_begun = True
            self._is_plain = not self._held.startswith(_OPENINGS)
            self._channel = _FINAL if self._is_plain else None
        if self._is_plain:
            parts.append((_FINAL, self._held))
            self._held = ""
            return False
        if self._channel is None:
            head, mark, rest = self._held.partition(_MESSAGE)
            if not mark:
                return False
            named = _NAME.findall(head)
            self._channel, self._held = (named[-1] if named else _FINAL), rest
            return True
        places = [(at, mark) for mark in _MARKS if (at := self._held.find(mark)) >= 0]
        if not places:
            end = len(self._held) - _num_undecided(self._held)
            parts.append((self._channel, self._held[:end]))
            self._held = self._held[end:]
            return False
        at, mark = min(places)
        parts.append((self._channel, self._held[:at]))
        # The mark that names a channel belongs to the head that it begins.
        self._held = self._held[at if mark == _CHANNEL else at + len(mark) :]
        self._channel = self._channel if mark == _MESSAGE else None
        return True

    def _spoken(self, parts: list[tuple[str, str]]) -> Spoken:
        content = "".join(text for channel, text in parts if channel == _FINAL)
        return Spoken(content, "".join(text for channel, text in parts if channel != _FINAL))


def _num_undecided(text: str) -> int:
    """Length of the end of the text with which a mark may begin; each has one `<`, its first."""
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(m.startswith(text[at:]) for m in _MARKS) else 0
