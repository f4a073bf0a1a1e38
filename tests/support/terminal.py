"""Runs the real command as a person would: as a process with pipes, or on a terminal of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

TIMEOUT_SECONDS = 100
HYPO = [sys.executable, "-m", "hypocenter"]

#: A command started in the background of a script inherits that Ctrl-C is ignored; a person's does
#: not. Where stdin is a terminal it becomes the controlling one, so that Ctrl-C can be typed.
_AS_A_PERSON = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "hypocenter", *sys.argv[1:]])
"""

AS_A_PERSON = [sys.executable, "-c", _AS_A_PERSON]


def hypo(
    *args: str, stdin: str = "", environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `hypo` with pipes and wait for it; `environ` is added to the environment."""
    return subprocess.run(
        [*HYPO, *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, **(environ or {})},
    )


class Terminal:
    """A `hypo` that runs on a terminal; `seen` is all that it has shown."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self._process = process
        self._master = master
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Read until `text` has been shown at or behind position `after`; returns where it ends."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (at := self.seen.find(text, after)) < 0:
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"{text!r} was not shown; shown was {self.seen!r}")
        return at + len(text)

    def wait_for_more(self, after: int) -> None:
        """Read until something has been shown behind position `after`."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(self.seen) <= after:
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"no more was shown; shown was {self.seen!r}")

    def wait(self) -> int:
        """Read to the end; returns the exit code."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self._read(deadline - time.monotonic()):
            pass
        return self._process.wait(max(deadline - time.monotonic(), 1))

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(seconds, 0))
        if not ready:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux's word for "the other side has closed the terminal"
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def on_terminal(args: Sequence[str]) -> Iterator[Terminal]:
    """Start `hypo` with these arguments on a terminal; it is killed at the end if it still runs."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*AS_A_PERSON, *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
