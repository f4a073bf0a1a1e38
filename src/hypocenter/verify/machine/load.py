"""Other work on a machine's cores while something is looked at."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import numpy as np

#: Numbers of a matrix that stays in a core's second cache.
_SIZE = 256


@contextlib.contextmanager
def busy_cores() -> Iterator[int]:
    """Keep each core that this process may use multiplying for the time of the block; how many."""
    ended = threading.Event()
    cores = sorted(os.sched_getaffinity(0))
    threads = [threading.Thread(target=_work, args=(ended,), daemon=True) for _ in cores]
    for thread in threads:
        thread.start()
    try:
        yield len(cores)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _work(ended: threading.Event) -> None:
    numbers = np.random.default_rng(0).standard_normal((_SIZE, _SIZE)).astype(np.float32)
    while not ended.is_set():
        np.dot(numbers, numbers)


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Keep the calling thread on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
