"""What the C library keeps of memory that was freed.

glibc takes blocks above a threshold from the system and gives them back when they are freed. But
each such block that is freed raises the threshold to its own size, up to 32 MiB, and the heap is
trimmed only beyond twice as much (mallopt(3), M_MMAP_THRESHOLD). After one long body the next ones
would so lie in a heap with holes, and the server would hold far more than its bodies. Small blocks
lie in a heap in any case: what is free amid them goes back by malloc_trim(3) alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from pathlib import Path

#: Names of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: What glibc begins with.
_THRESHOLD_BYTES = 128 << 10
#: Beyond what the server had when it began to answer. Less is not worth a look.
_MANY_BYTES = 32 << 20
_CHANGE_BYTES = 1 << 20
_EVERY_SECONDS = 0.5


def return_freed_blocks() -> None:
    """Keep the thresholds where they are; nothing where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)


class Heap:
    """The process's memory, and what it had when it began to answer."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._few = self._last = _resident_bytes()
        self._looked = time.monotonic()

    async def look(self) -> None:
        """Give back what is free; nothing while little has come, or nothing has changed."""
        if self._trim is None or time.monotonic() < self._looked + _EVERY_SECONDS:
            return
        self._looked, resident = time.monotonic(), _resident_bytes()
        has_changed = abs(resident - self._last) > _CHANGE_BYTES
        if has_changed and max(resident, self._last) > self._few + _MANY_BYTES:
            await asyncio.to_thread(self._trim, 0)
            resident = _resident_bytes()
        self._last = resident


def _resident_bytes() -> int:
    """0 where the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0
