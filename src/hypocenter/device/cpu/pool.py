"""How threads share the launches of a step: they enter once, and take items as they come.

The first thread to enter walks the launches; each other helps with those that have many items. It
does not wait for helpers that have not come, or not come back from the system: what they do not
take, it does itself. So a busy core costs its share and no more, and between two launches of a step
no thread goes to sleep.

The walker opens a ticket, (launch + 1) << 32, and closes it when no items are left; then it waits
for those who are inside. A helper says that it is inside and then looks whether the ticket is still
open: one that the walker did not wait for finds it closed. The items of a launch lie in as many
regions as there are threads; each takes those of its own one by one, and then helps with the others
(`lang.items`). So it is known beforehand what a thread will read, and one that waits, for the end
of a launch or of one that the walker does alone, brings the first weights of its next region into
its cache meanwhile. Order of memory: every access that threads agree by is sequentially
consistent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.kernel_forms import named_kernel
from hypocenter.device.cpu.shared_state import (
    CLOSED,
    NUM_DONE,
    NUM_FIELDS,
    NUM_REGIONS_OFFSET,
    STATE,
    TICKET,
)
from hypocenter.device.cpu.slots import slots_of
from hypocenter.device.cpu.threads import call_together, num_threads

_ENTER = "device.cpu.pool_steps.enter"
#: Where what varies lies in the slots of `enter`, behind those of the table: the place and the word
#: of the recorder; and, at the end, the number of threads.
_PLACE, _WORD, _NUM_THREADS = 9, 10, -1


class StepTable:
    """The launches of a table i64 [num_launches, NUM_FIELDS], ready to be run by all threads."""

    def __init__(self, table: np.ndarray[Any, Any]) -> None:
        self._table = table  # its memory must outlive the slots
        args = table, 0, 0, STATE, 1
        entry = named_kernel(_ENTER).form(is_shared=False).entry(args)
        self._slots = slots_of(args)
        self._data = np.array([entry.spread, entry.kernel, self._slots.ctypes.data], np.int64)
        self._counts = np.zeros(2, np.int64)
        counts = self._counts.ctypes.data
        self._given = entry.enter, None, counts, counts, self._data.ctypes.data

    def run(self, place: int, first_word: int) -> int:
        """Run the launches, writing `first_word` + the number of each at the address `place` before
        it. Returns how many ended well.

        One at a time in a process: the launch door sees to that.
        """
        most, slots = num_threads(), self._slots
        STATE[:] = 0
        STATE[TICKET] = CLOSED
        STATE[NUM_REGIONS_OFFSET] = most
        slots[_PLACE], slots[_WORD], slots[_NUM_THREADS] = place, first_word, most
        self._counts[0] = most
        call_together()(*self._given, 0, 0, most)
        return int(STATE[NUM_DONE])


def start() -> None:
    """Load, or compile, how threads get into a step, so that the first step need not."""
    StepTable(np.zeros((0, NUM_FIELDS), np.int64)).run(0, 0)
