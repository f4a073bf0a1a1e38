"""Copies large host bytes to a GPU through pinned buffers, which several threads fill.

A driver copies pageable memory, such as a mapped file, by one thread of its own and waits. Here
threads bring a part into a pinned buffer each, while the GPU takes those before it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.device.backend import Bytes

#: Of a buffer, and how many there are: some threads fill, and the GPU reads from the others.
BUFFER_BYTES, NUM_BUFFERS = 8 << 20, 16
_MAX_THREADS = 8


@dataclass(slots=True)
class _Buffer:
    """Pinned bytes as torch and as NumPy have them; `taken`: the GPU has read them by then."""

    pinned: Any
    host: Bytes
    taken: Any = None

    def fill(self, part: Bytes) -> None:
        if self.taken is not None:
            self.taken.synchronize()
        np.copyto(self.host[: len(part)], part)


class Staging:
    """`allocate_pinned(num_bytes)` gives a pinned tensor of torch; `record()` an event at the end
    of the current stream. Not safe from two threads."""

    def __init__(self, allocate_pinned: Callable[[int], Any], record: Callable[[], Any]) -> None:
        self._allocate, self._record = allocate_pinned, record
        self._buffers: list[_Buffer] = []
        num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="staging")
        self._next = -1

    def copy(self, source: Bytes, target: Any) -> None:
        """Copy to a tensor of as many bytes; returns once `source` may change."""
        waiting: deque[tuple[Future[None], _Buffer, int, int]] = deque()
        for start in range(0, len(source), BUFFER_BYTES):
            if len(waiting) == NUM_BUFFERS:
                self._send(target, *waiting.popleft())
            stop, buffer = min(start + BUFFER_BYTES, len(source)), self._take()
            filling = self._pool.submit(buffer.fill, source[start:stop])
            waiting.append((filling, buffer, start, stop))
        while waiting:
            self._send(target, *waiting.popleft())

    def _take(self) -> _Buffer:
        """The buffers go round; whoever fills one waits for the GPU."""
        self._next = (self._next + 1) % NUM_BUFFERS
        if self._next >= len(self._buffers):
            pinned = self._allocate(BUFFER_BYTES)
            self._buffers.append(_Buffer(pinned, pinned.numpy()))
            return self._buffers[-1]
        return self._buffers[self._next]

    def _send(
        self, target: Any, filling: Future[None], buffer: _Buffer, start: int, stop: int
    ) -> None:
        filling.result()
        target[start:stop].copy_(buffer.pinned[: stop - start], non_blocking=True)
        buffer.taken = self._record()
