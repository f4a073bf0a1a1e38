"""Which place each run of a plan with marks has: a mark can only say the number of its run."""

from __future__ import annotations

import threading

from hypocenter import ring


class MarkRuns:
    """The slots of the devices whose marks write to a recorder's `cells`, and the runs of each.

    Safe from several threads.
    """

    def __init__(self, cells: memoryview) -> None:
        self._cells, self._lock = cells, threading.Lock()
        self._slots: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    def claim(self, device: str) -> int | None:
        """The number under which a device's marks write; None when there is none left."""
        with self._lock:
            if device not in self._slots and len(self._slots) < ring.NUM_SLOTS:
                self._slots[device] = len(self._slots)
            return self._slots.get(device)

    def count(self, device: str) -> int:
        """How many runs of plans with marks have begun on `device`."""
        return self._counts.get(device, 0)

    def note(self, device: str, tag: int, word: int) -> None:
        """Another run begins, of the plan with this tag and at this place."""
        if device not in self._slots:
            return
        with self._lock:
            number = self._counts[device] = self._counts.get(device, 0) + 1
            slot = self._slots[device]
            at = ring.CELL_RUNS + 2 * (slot * ring.NUM_RUNS + number % ring.NUM_RUNS)
            self._cells[at] = 0  # not this one while it is written
            self._cells[at + 1] = word
            self._cells[at] = number << 16 | tag
