"""What the C library keeps of memory that was freed.

glibc takes blocks above a threshold from the system and gives them back when they are freed. But
each such block that is freed raises the threshold to its own size, up to 32 MiB, and the heap is
trimmed only beyond twice as much (mallopt(3), M_MMAP_THRESHOLD). After one long body the next ones
would so lie in a heap with holes, and the server would hold far more than its bodies.
"""

from __future__ import annotations

import ctypes

#: Names of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: What glibc begins with.
_THRESHOLD_BYTES = 128 << 10


def return_freed_blocks() -> None:
    """Keep the thresholds where they are; nothing where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)
