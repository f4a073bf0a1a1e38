"""Host memory for what each step reads a lot of, packed weights and KV caches, in large pages.

Arrays lie side by side in stretches that begin at a large page. Where the system has no such pages
these are ordinary ones. On a small page a core stops to look ahead at every 4096 bytes.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np

PAGE_BYTES = 2 << 20
#: A cache line.
LINE_BYTES = 64
_STRETCH_BYTES = 64 << 20
_HAS_FLAGS = hasattr(mmap, "MAP_ANONYMOUS")

_lock = threading.Lock()
_stretch = np.zeros(0, np.uint8)
_used = 0


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """A zeroed array that begins at a cache line; its memory goes when its stretch is unused."""
    global _stretch, _used
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    with _lock:
        if _used + num_bytes > len(_stretch):
            _stretch, _used = _new_stretch(max(num_bytes, _STRETCH_BYTES)), 0
        start = _used
        _used += -(-num_bytes // LINE_BYTES) * LINE_BYTES
        raw = _stretch[start : start + num_bytes]
    array: np.ndarray[Any, Any] = raw.view(dtype).reshape(shape)
    return array


def _new_stretch(num_bytes: int) -> np.ndarray[Any, Any]:
    num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    # Shared memory, which is what mmap makes by itself, has no large pages.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if _HAS_FLAGS else {}
    mapped = mmap.mmap(-1, num_bytes + PAGE_BYTES, **private)
    raw = np.frombuffer(mapped, np.uint8)  # keeps the mapping
    start = -raw.ctypes.data % PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE, start // mmap.PAGESIZE * mmap.PAGESIZE, num_bytes)
    return raw[start : start + num_bytes]
