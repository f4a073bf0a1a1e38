"""What the threads that share launches agree by, and where it lies: `pool.py` says how it is used.

The words are in memory that kernels know by an address; numba is not needed for it.
"""

from __future__ import annotations

import numpy as np

from hypocenter.device.cpu.threads import max_num_threads

#: Where threads that share the items of a kernel find what is open: the first word.
TICKET_SYMBOL = "hypo_ticket"
#: Bit of a ticket that says that there are no more items.
CLOSED = 1 << 63
#: Words from the ticket to the number of regions, and to how far the first of them is; words from
#: one region to the next.
NUM_REGIONS_OFFSET, REGIONS_OFFSET, REGION_WORDS = 48, 56, 8
#: Words of a cache line: what threads change often lies in lines of its own.
_LINE = 8
TICKET, INSIDE, ENTERED, NUM_DONE, HAS_FAILED, IS_OVER = (_LINE * n for n in range(6))
#: Fields of a row of a launch table: what to call, and the word to leave before; whether threads
#: share it; the nearest launch after it that reads weights; the bytes of an item of weights, and
#: where each of up to three stretches of items begins and how many it has.
SPREAD, ENTRY, BLOCK, NUMBER, IS_SHARED, NEXT, ITEM_BYTES, STRETCHES = range(8)
NUM_STRETCHES = 3
NUM_FIELDS = STRETCHES + 2 * NUM_STRETCHES

_num_words = REGIONS_OFFSET + max_num_threads() * REGION_WORDS
_raw = np.zeros(_num_words + _LINE, np.uint64)
STATE = _raw[-_raw.ctypes.data % 64 // 8 :][:_num_words]
