"""Runs the real command as a person would: as a process with pipes, or on a terminal of its own.

Or in this process, for the many tests of what a command answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from hypocenter.cli import app

TIMEOUT_SECONDS = 250
HYPO = [sys.executable, "-m", "hypocenter"]

#: A command started in the background of a script inherits that Ctrl-C is ignored; a person's does
#: not. Where stdin is a terminal it becomes the controlling one, so that Ctrl-C can be typed.
_AS_A_PERSON = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""

AS_A_PERSON = [sys.executable, "-c", _AS_A_PERSON, *HYPO]
#: A shell with job control, in which commands can be typed.
SHELL = [sys.executable, "-c", _AS_A_PERSON, "bash", "--norc", "--noprofile", "-i"]


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


def hypo_in_process(
    *args: str, stdin: str = "", environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `hypo` gives, in this process, which has loaded and compiled what it needs once.

    For what a command answers. Not for signals, pipes and terminals, the end of a process, its
    log (pytest takes that) and what only a fresh interpreter shows.
    """
    numbers = (0, 1, 2)
    level = logging.getLogger("hypocenter").level
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in numbers]
        files[0].write(stdin.encode())
        files[0].seek(0)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, file in zip(numbers, files, strict=True):
            before = os.dup(number)
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, number)
            os.dup2(file.fileno(), number)
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
            opened = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            patched.setattr(sys, name, opened)
            stack.callback(opened.close)
        for name, value in (environ or {}).items():
            patched.setenv(name, value)
        try:
            app.main(list(args))
        except SystemExit as left:
            code = left.code
        finally:
            logging.getLogger("hypocenter").setLevel(level)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        texts = []
        for file in files[1:]:
            file.seek(0)
            texts.append(file.read().decode())
    assert isinstance(code, int)
    return subprocess.CompletedProcess([*HYPO, *args], code, *texts)


def lines_without_progress(stderr: str) -> list[str]:
    """Lines that tell of progress do not count: a slow machine shows more of them."""
    return [line for line in stderr.splitlines() if not line.endswith(" ...")]


class Terminal:
    """A command that runs on a terminal; `seen` is all that it has shown."""

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
def on_terminal(
    args: Sequence[str], command: Sequence[str] = AS_A_PERSON, *, term: str = "dumb"
) -> Iterator[Terminal]:
    """Start `hypo`, or another command, on a terminal; it is killed at the end if it still runs."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*command, *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": term},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)


def assert_one_line(stderr: str, *parts: str) -> None:
    """One line that begins with the program's name, holds `parts`, and is no traceback."""
    lines = lines_without_progress(stderr)
    assert len(lines) == 1, stderr
    assert lines[0].startswith("hypo: "), stderr
    for part in parts:
        assert part in lines[0], stderr
