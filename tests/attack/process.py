"""What a server's process takes, read from /proc: memory, files, threads and its children."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_LOOK_SECONDS = 0.2


def status(pid: int, name: str) -> int:
    """A number of /proc/PID/status; bytes where it is written in kB. 0 when the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                words = line.split()
                return int(words[1]) << (10 if words[2:] == ["kB"] else 0)
    return 0


def num_files(pid: int) -> int:
    """How many files the process has open; 0 when it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def forget_peak(pid: int) -> None:
    """Let VmHWM begin anew at what is resident now (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def tree(pid: int) -> Iterator[int]:
    """The process and all below it."""
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    yield from tree(int(child))


class TreeMemory:
    """Looks at the memory of a process and of all below it until it is left.

    `peak` is of their resident bytes together; shared pages count in each.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.peak = pid, 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> TreeMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            now = sum(status(pid, "VmRSS") for pid in set(tree(self.pid)))
            self.peak = max(self.peak, now)
