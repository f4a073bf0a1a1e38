"""How the benchmark talks to its workers: a line of JSON there, a line back; measures nothing.

Standard library only, because the peer's Python imports it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

REPLY_SECONDS = 1800
#: Idle threads of OpenMP and TBB spin for milliseconds before they sleep.
ASLEEP_SECONDS = 10
#: A compiler's complaint fills pages.
MAX_ERROR_CHARS = 600

Facts = dict[str, Any]


class WorkerError(Exception):
    """A worker could not do what it was told, or died; one line."""


class Worker:
    """A child process that obeys one command at a time and sleeps in between."""

    def __init__(self, name: str, python: Path, script: Path) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        try:
            self._process = subprocess.Popen(
                [python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
            )
        except OSError as error:
            self._said.close()
            raise WorkerError(f"{name}: {python} does not start: {error.strerror}") from error

    def ask(self, command: str, **arguments: Any) -> Facts:
        """What the worker reports after `command`. Raises WorkerError."""
        stdin, stdout = self._pipes()
        line = json.dumps({"command": command, **arguments}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            stdin.write(line.encode())
            stdin.flush()
        if not select.select([stdout], [], [], REPLY_SECONDS)[0]:
            raise WorkerError(f"{self.name}: no answer to {command!r} within {REPLY_SECONDS} s")
        answer = stdout.readline()
        if not answer:
            raise WorkerError(f"{self.name} died at {command!r}: {self._last_words()}")
        facts: Facts = json.loads(answer)
        if "error" in facts:
            raise WorkerError(f"{self.name}: {command}: {facts['error']}")
        return facts

    def cpu_seconds(self) -> float:
        """Processor time of the worker's threads so far (proc_pid_stat(5), fields 14 and 15)."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_until_asleep(self) -> None:
        """Return once no thread of the worker spins or works. Raises WorkerError."""
        deadline = time.monotonic() + ASLEEP_SECONDS
        while self._is_awake():
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{self.name}: its threads still run {ASLEEP_SECONDS} s after its last answer; "
                    "nothing can be measured beside them (is OMP_WAIT_POLICY active?)"
                )
            time.sleep(0.001)

    def _is_awake(self) -> bool:
        """Whether a thread runs or waits for a core (proc_pid_stat(5), field 3)."""
        for path in Path(f"/proc/{self._process.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                if path.read_text().rpartition(")")[2].split()[0] == "R":
                    return True
        return False

    def close(self) -> None:
        """End it; a worker that does not go by itself is killed. May be called twice."""
        if self._said.closed:
            return
        stdin, stdout = self._pipes()
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stdout.close()
        self._said.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _last_words(self) -> str:
        self._process.wait(20)
        self._said.seek(0)
        lines = [line for line in self._said.read().decode(errors="replace").splitlines() if line]
        return lines[-1] if lines else f"exit code {self._process.returncode}, no message"


def serve(handlers: Mapping[str, Callable[..., Facts]]) -> None:
    """The worker's side: obey commands from stdin until it ends."""
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            facts = handlers[arguments.pop("command")](**arguments)
        except Exception as error:  # the other side decides what a failed command means
            reason = " ".join(str(error).split())
            facts = {"error": f"{type(error).__name__}: {reason[:MAX_ERROR_CHARS]}"}
        answers.write(json.dumps(facts) + "\n")
        answers.flush()


def memory_facts() -> Facts:
    """Peak and present memory of this process in bytes (proc_pid_status(5))."""
    return {f"{name}_bytes": num_bytes for name, num_bytes in _status_bytes()}


def _status_bytes() -> Iterator[tuple[str, int]]:
    names = {"VmHWM": "peak", "RssAnon": "anonymous", "RssFile": "mapped_file"}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in names:
            yield names[key], int(value.split()[0]) << 10
