"""Processes that help to compile: each reads a line for a kernel, and answers it with a line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence


def never() -> bool:
    """The time of what has no end."""
    return False


def always() -> bool:
    """The time of what is not to begin."""
    return True


@contextlib.contextmanager
def helper(
    module: str,
    waiting: deque[int],
    lines: Mapping[int, bytes],
    words: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Iterator[threading.Thread]:
    """A process of `module`, told the lines of the numbers it takes from `waiting`, one by one.

    The thread that feeds it ends when nothing waits, or with the process: then what it was to do is
    not done. It is ended when the context is left, whatever it is at.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environ, "HYPO_RECORD": "0"},
        start_new_session=True,  # a Ctrl-C is for who asked
    )
    thread = threading.Thread(target=_feed, args=(process, waiting, lines), daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        process.kill()
        thread.join()
        process.communicate()


def taken_from(waiting: deque[int]) -> Iterator[int]:
    """One after the other, each for nobody else."""
    while True:
        try:
            yield waiting.popleft()
        except IndexError:
            return


def _feed(
    process: subprocess.Popen[bytes], waiting: deque[int], lines: Mapping[int, bytes]
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    for number in taken_from(waiting):
        try:
            process.stdin.write(lines[number] + b"\n")
            process.stdin.flush()
        except OSError:
            return  # it has ended; what it was to compile is compiled by who asked
        if not process.stdout.readline():
            return
