"""Tells a program that goes round in circles from one that gets on: by what it reads and writes.

Looks at accesses alone; how long a program may take, `replay.py` decides.
"""

from __future__ import annotations

from hypocenter.dtypes import Array

#: Different accesses that are kept; a circle has few.
_MAX_KNOWN = 1 << 16


class Repetition:
    """The accesses of one program from some moment on."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int, int]] = set()
        self._num_seen = self._num_since_new = 0

    def note(self, operation: str, pointers: Array, values: Array) -> None:
        """An access of these addresses, and what was read or written there."""
        self._num_seen += 1
        access = (operation, hash(pointers.tobytes()), hash(values.tobytes()))
        if access in self._known or len(self._known) >= _MAX_KNOWN:
            self._num_since_new += access in self._known
            return
        self._known.add(access)
        self._num_since_new = 0

    @property
    def is_circle(self) -> bool:
        """Whether the same accesses come again and again, with the same values, and no new one.

        Nothing changes then unless another program changes it.
        """
        return self._num_since_new > max(self._num_seen // 2, len(self._known))
