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

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be sent now, and whether a stop string was found.

        What could be the beginning of a stop string is held back until more text decides it.
        """
        self._held += text
        found = [
            (start + len(string), start)
            for string in self._strings
            if (start := self._held.find(string)) >= 0
        ]
        if found:
            sent, self._held = self._held[: min(found)[1]], ""
            return sent, True
        keep = self._num_undecided()
        sent, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
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
