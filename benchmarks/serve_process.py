"""A server as a process of its own, for the scripts that measure what its clients see."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

START_SECONDS = 300.0


def own_command(model: str | None, port: int, *more: str) -> list[str]:
    """The words of `hypo serve` for a model, or for the bundled one."""
    words = [sys.executable, "-P", "-m", "hypocenter", "serve", *filter(None, [model])]
    return [*words, "-q", "--bundles", "", "--port", str(port), *more]


@contextlib.contextmanager
def running(command: Sequence[str], port: int) -> Iterator[int]:
    """Its pid, once it answers at `port`; ended behind. Raises SystemExit when it never does."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        stop = time.monotonic() + START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > stop:
                raise SystemExit(f"{command[0]} did not begin to serve")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def child_pids(pid: int) -> list[int]:
    """Processes that it started and that are there still."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # of each thread its own
    return [int(word) for one in lists for word in one.read_text().split()]


def cpu_seconds(pid: int) -> float:
    """Of all its threads so far, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
