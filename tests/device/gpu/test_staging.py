"""Large copies through pinned buffers: whole, in order, none filled before the GPU has read it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hypocenter.device.gpu import staging
from hypocenter.device.gpu.staging import NUM_BUFFERS, Staging

torch = pytest.importorskip("torch")
SIZE = 64


class LateCopies:
    """A GPU whose copies run when somebody waits for an event behind them, and no sooner."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.lock = threading.Lock()
        self.num_pinned = 0

    def pinned(self, num_bytes: int) -> Any:
        self.num_pinned += 1
        gpu = self

        class Pinned:
            def __init__(self, data: Any) -> None:
                self.data = data

            def numpy(self) -> Any:
                return self.data

            def __getitem__(self, at: slice) -> Any:
                return Pinned(self.data[at])

        _ = gpu
        return Pinned(np.zeros(num_bytes, np.uint8))

    def record(self) -> Any:
        end, gpu = len(self.queued), self

        class Event:
            def synchronize(self) -> None:
                gpu.run(end)

        return Event()

    def run(self, end: int) -> None:
        with self.lock:
            for number in range(end):
                if (copy := self.queued[number]) is not None:
                    copy()
                    self.queued[number] = None

    def target(self, data: Any) -> Any:
        gpu = self

        class Target:
            def __getitem__(self, at: slice) -> Any:
                class Part:
                    def copy_(self, source: Any, non_blocking: bool) -> None:
                        def run() -> None:
                            data[at] = source.data

                        gpu.queued.append(run)

                return Part()

        return Target()


def test_bytes_arrive_whole_and_a_buffer_is_filled_once_it_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "BUFFER_BYTES", SIZE)
    gpu = LateCopies()
    copies = Staging(gpu.pinned, gpu.record)
    made = np.random.default_rng(0)
    for num_bytes in (SIZE - 1, SIZE * NUM_BUFFERS * 3 + 5, SIZE, 7 * SIZE + 1):
        source, there = made.integers(0, 256, num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        expected = source.copy()
        copies.copy(source, gpu.target(there))
        source[:] = 0  # it may change now
        gpu.run(len(gpu.queued))
        np.testing.assert_array_equal(there, expected)
    assert gpu.num_pinned == NUM_BUFFERS


def test_what_cannot_be_read_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateCopies()
    copies = Staging(gpu.pinned, gpu.record)

    def fail(self: Any, part: Any) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr(staging._Buffer, "fill", fail)
    with pytest.raises(OSError, match="Input/output"):
        copies.copy(np.zeros(5, np.uint8), gpu.target(np.zeros(5, np.uint8)))
