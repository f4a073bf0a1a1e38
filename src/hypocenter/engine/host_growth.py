"""How far a KV cache in host memory may still grow, looked at while it does.

Zeroed memory takes room when it is first written, so a cache that was given its addresses takes its
memory block by block, beside whatever else runs on the machine. Where the kernel finds none left,
it ends a process. So what is available is read now and then, and some of it is left to others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hypocenter.base.errors import NoHostMemory
from hypocenter.base.wording import bytes_text
from hypocenter.device.backend import Room
from hypocenter.model.tensors.footprint import host_room

_log = logging.getLogger("hypocenter.engine")
#: Between two looks at the memory that is available.
_LOOK_SECONDS = 0.25
#: Left to others: a part of the memory, within bounds.
_LEFT_PART, _LEAST_LEFT, _MOST_LEFT = 32, 64 << 20, 1 << 30


def left_bytes(room: Room) -> int:
    """What a cache leaves of the memory that is available."""
    return min(max(room.limit_bytes // _LEFT_PART, _LEAST_LEFT), _MOST_LEFT)


class HostGrowth:
    """Tells how many blocks may be written that never were, which take `block_bytes` each then.

    Where the system tells nothing of its memory, all may be.
    """

    def __init__(
        self,
        block_bytes: int,
        look: Callable[[], Room | None] = host_room,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_bytes, self._look_at, self._now = max(block_bytes, 1), look, now
        self._looked: float | None = None
        self._room: Room | None = None
        self._num_blocks: int | None = None
        self._is_short = False

    def look(self) -> None:
        """See what is available, if the last look was long ago; a step asks for that."""
        now = self._now()
        if self._looked is not None and now - self._looked < _LOOK_SECONDS:
            return
        self._looked, self._room = now, self._look_at()
        if self._room is None:
            self._num_blocks = None
            return
        free = self._room.available_bytes - left_bytes(self._room)
        self._num_blocks = max(free // self._block_bytes, 0)
        if self._num_blocks and self._is_short:
            self._is_short = False
            _log.info("KV cache: there is memory again")

    def num_withheld(self, num_fresh: int) -> int:
        """How many of so many blocks that were never written must not be."""
        if self._num_blocks is None:
            return 0
        return max(num_fresh - self._num_blocks, 0)

    def note_taken(self) -> None:
        """One of them will be written now."""
        if self._num_blocks is not None:
            self._num_blocks -= 1
            if not self._num_blocks and not self._is_short:
                self._is_short = True
                _log.warning("%s", self._message())

    def error(self, num_needed: int, num_free: int, num_blocks: int) -> NoHostMemory:
        """Why a request gets no more blocks."""
        why = f"{self._message()}; end other programs, or lower kv_tokens and ask for less"
        return NoHostMemory(num_needed, num_free, num_blocks, why)

    def _message(self) -> str:
        assert self._room is not None, "something was withheld"
        available, left = self._room.available_bytes, left_bytes(self._room)
        return (
            f"the KV cache grows no further: {bytes_text(available)} of memory are available, of "
            f"which {bytes_text(left)} are left to other programs"
        )
