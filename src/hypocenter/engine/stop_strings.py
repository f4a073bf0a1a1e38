"""Texts at which an answer ends, found across the borders of its pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text before the first stop string, wherever the pieces break.

    The string that is complete first wins; of several complete at once, the longest.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
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
            sent, self._held = self._held[: min(found)[1]], ""
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
