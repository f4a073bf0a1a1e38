"""The text of one answer as its tokens come: whole characters, thoughts apart, up to a stop string.

Stop strings are looked for in the answer, and not in thoughts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hypocenter.conversation.harmony import AnswerDelta

if TYPE_CHECKING:
    from hypocenter.conversation.thoughts import AnswerReader
    from hypocenter.model.text.tokenizer import Detokenizer
    from hypocenter.settings.config import SamplingParams


class AnswerText:
    """`reader` separates thoughts from the answer; None: all is answer."""

    def __init__(
        self, detokenizer: Detokenizer, params: SamplingParams, reader: AnswerReader | None
    ) -> None:
        self._detokenizer, self._reader = detokenizer, reader
        shows = params.include_stop_str_in_output
        self._stop_strings = StopStrings(params.stop, shows_them=shows)

    def push(self, token_id: int, *, may_end: bool) -> tuple[AnswerDelta, bool]:
        """What may be sent with a token, and whether a stop string ended the answer.

        `may_end`: its text may complete one. Raises what the detokenizer raises.
        """
        text = self._detokenizer.push(token_id)
        return self._up_to_stop(
            AnswerDelta(text, "") if self._reader is None else self._reader.push(text), may_end
        )

    def flush(self, *, may_end: bool, is_cut: bool) -> tuple[AnswerDelta, bool]:
        """What was held back, as `push` gives it; no more tokens will follow. `is_cut`: there would
        have been more."""
        text = self._detokenizer.flush()
        delta = AnswerDelta(text, "")
        if self._reader is not None:
            delta = self._reader.push(text) + self._reader.flush(is_cut=is_cut)
        left, stopped = self._up_to_stop(delta, may_end)
        return left if stopped else left + AnswerDelta(self._stop_strings.flush(), ""), stopped

    @property
    def stop_string(self) -> str:
        """The one that ended the answer; empty where none did."""
        return self._stop_strings.found

    def _up_to_stop(self, delta: AnswerDelta, may_end: bool) -> tuple[AnswerDelta, bool]:
        content, stopped = self._stop_strings.push(delta.content, may_end=may_end)
        return AnswerDelta(content, delta.reasoning, delta.calls), stopped


class StopStrings:
    """Cuts a stream of text before the first stop string, wherever the pieces break.

    The string that is complete first wins; of several complete at once, the longest. With
    `shows_them` the cut is behind it.
    """

    def __init__(self, strings: Sequence[str], *, shows_them: bool = False) -> None:
        self._strings, self._shows_them = tuple(strings), shows_them
        #: The one that was found.
        self.found = ""
        self._held = ""
        self._num_exempt = 0  # of what is held: a stop string must reach beyond it

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """The text that may be sent now, and whether a stop string was found.

        What could be the beginning of a stop string is held back until more text decides it. One
        that is complete with a text that may not end the answer does not count.
        """
        self._held += text
        if not may_end:
            self._num_exempt = len(self._held)
        found = [
            (start + len(string), start)
            for string in self._strings
            if (start := self._held.find(string, max(0, self._num_exempt + 1 - len(string)))) >= 0
        ]
        if found:
            end, start = min(found)
            self.found = self._held[start:end]
            sent, self._held = self._held[: end if self._shows_them else start], ""
            return sent, True
        keep = self._num_undecided()
        sent, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        self._num_exempt = max(0, self._num_exempt - len(sent))
        return sent, False

    def flush(self) -> str:
        """What is held back; no more text will follow."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = max(map(len, self._strings), default=0)
        for length in range(min(len(self._held), longest - 1), 0, -1):
            if any(string.startswith(self._held[-length:]) for string in self._strings):
                return length
        return 0
