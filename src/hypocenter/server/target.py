"""A server under test: asked over HTTP by nothing but the standard library."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from hypocenter.base.errors import HypoError

_START_SECONDS = 300.0
_TIMEOUT = 600.0
_LOOK_SECONDS = 0.01


class Target:
    """The server under test."""

    def __init__(self, port: int, admin_key: str, process: subprocess.Popen[bytes]) -> None:
        self.port, self._process = port, process
        self._headers = {"Authorization": f"Bearer {admin_key}"}

    def get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT)
        try:
            connection.request("GET", path, headers=self._headers)
            answer = connection.getresponse()
            return answer.status, msgspec.json.decode(answer.read())
        finally:
            connection.close()

    def wait_ready(self, other_than: int | None = None) -> int:
        """The worker's process, once one is ready that is not `other_than`."""
        stop = time.monotonic() + _START_SECONDS
        while time.monotonic() < stop:
            if self._process.poll() is not None:
                raise HypoError(f"the server ended with exit code {self._process.returncode}")
            with contextlib.suppress(OSError):
                if self.get("/ready")[0] == 200:
                    pid = self.get("/debug/requests")[1]["worker_pid"]
                    if pid not in (None, other_than):
                        return int(pid)
            time.sleep(_LOOK_SECONDS)
        raise HypoError(f"no worker was ready within {_START_SECONDS:.0f} seconds")

    def wait_spare(self) -> None:
        """Wait until no worker loads a model to stand by with it."""
        stop = time.monotonic() + _START_SECONDS
        while self.get("/debug/requests")[1]["spare_state"] == "loading":
            if time.monotonic() > stop:
                raise HypoError(f"no worker stands by after {_START_SECONDS:.0f} seconds")
            time.sleep(_LOOK_SECONDS)

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer; raises HypoError for one that does not end as it should."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT)
        try:
            data = msgspec.json.encode(body)
            connection.request("POST", "/v1/completions", data, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise HypoError(f"status {answer.status}: {answer.read(300)!r}")
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    event = msgspec.json.decode(line[6:])
                    if "error" in event:
                        raise HypoError(f"an error in the stream: {event['error']}")
                    yield event
            raise HypoError("the stream ended without its end")
        except (OSError, http.client.HTTPException) as error:
            raise HypoError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()


def text_of(event: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


@contextlib.contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A server's process, which is told to end at the end."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
