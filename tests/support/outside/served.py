"""A server in a process of its own, asked over HTTP by nothing but the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 120.0


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """What a stream held, its end as the text it is."""
        return list(_events(self.body.decode().splitlines()))


@dataclass
class Served:
    """A running `hypo serve`; `stderr` is what it has said so far."""

    process: subprocess.Popen[str]
    port: int
    stderr: list[str] = field(default_factory=list)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float = 120,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, named, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **more: Any) -> Reply:
        return self.ask("GET", path, **more)

    def post(self, path: str, body: Any, **more: Any) -> Reply:
        return self.ask("POST", path, body, **more)

    @contextlib.contextmanager
    def stream(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> Iterator[Iterator[Any]]:
        """The events of a stream as they come; leaving early closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = json.dumps({**body, "stream": True})
            connection.request("POST", path, data, headers or {})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield _events(line.decode().rstrip("\n") for line in answer)
        finally:
            connection.close()

    @property
    def worker_pid(self) -> int:
        """The one that has the model: the spare one came after it, whatever its number."""
        program = f"hypocenter.worker.worker (--prepared|.*{os.sep})"
        found = subprocess.run(
            ["pgrep", "-o", "-P", str(self.process.pid), "-f", program],
            capture_output=True, text=True, check=False,
        ).stdout.split()  # fmt: skip
        assert found, self.stderr
        return int(found[0])

    @property
    def reader_pids(self) -> list[int]:
        """The processes that read what clients send."""
        found = subprocess.run(
            ["pgrep", "-f", "hypocenter.worker.reader", "-P", str(self.process.pid)],
            capture_output=True, text=True, check=False,
        ).stdout.split()  # fmt: skip
        return [int(pid) for pid in found]

    def kill_worker(self, number: int = signal.SIGKILL) -> int:
        pid = self.worker_pid
        os.kill(pid, number)
        return pid

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        stop = time.monotonic() + seconds
        while self.get("/health").status != 200:
            assert time.monotonic() < stop, self.stderr
            time.sleep(0.05)


def _events(lines: Any) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: "):
            text = line.removeprefix("data: ")
            yield text if text == "[DONE]" else json.loads(text)


@contextlib.contextmanager
def serving(
    folder: Path,
    *words: str,
    environ: dict[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[Served]:
    """`hypo serve WORDS`, ready, in `folder`; ended at the end."""
    with started(folder, *words, environ=environ, python=python) as served:
        served.wait_ready()
        yield served


@contextlib.contextmanager
def started(
    folder: Path,
    *words: str,
    environ: dict[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[Served]:
    """`hypo serve WORDS` as soon as it listens at a port."""
    command = [python, "-P", "-m", "hypocenter", "serve", *words]
    if "--port" not in words:
        command += ["--port", str(free_port())]
    port = int(command[command.index("--port") + 1])
    with launched(folder, command, port, environ) as served:
        yield served


@contextlib.contextmanager
def launched(
    folder: Path, command: Sequence[str], port: int, environ: dict[str, str] | None = None
) -> Iterator[Served]:
    """The server that a command starts, as soon as it listens at its port."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
    )
    assert process.stderr is not None
    served = Served(process, port)
    reader = threading.Thread(target=_read_into, args=[process.stderr, served.stderr])
    reader.start()
    try:
        _wait_for_port(served)
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            reader.join()
            process.stderr.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_for_port(served: Served) -> None:
    stop = time.monotonic() + START_SECONDS
    while served.process.poll() is None:
        with contextlib.suppress(OSError):
            served.get("/health")
            return
        assert time.monotonic() < stop, served.stderr
        time.sleep(0.02)


def _read_into(pipe: Any, lines: list[str]) -> None:
    for line in pipe:
        lines.append(line.rstrip("\n"))


def texts(events: Sequence[Any]) -> str:
    """What a stream of one choice says."""
    parts = []
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(parts)
