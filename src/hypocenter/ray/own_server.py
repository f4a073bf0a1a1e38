"""A `hypo serve` of one replica: a process on its machine, asked through a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence

import aiohttp

from hypocenter.base.errors import HypoError
from hypocenter.base.own_folder import own_folder
from hypocenter.base.package import module_command

_LOOK_SECONDS = 0.2
_START_SECONDS = 900.0
_PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)


class ServerEnded(HypoError):
    """The server's process is no more, or does not answer."""


class OwnServer:
    """The process, from `start` to `stop`; it ends with the process that started it."""

    def __init__(self, model: str, options: Sequence[str]) -> None:
        self._folder = contextlib.ExitStack()
        self._socket = str(self._folder.enter_context(own_folder("hypo-ray-")) / "http.sock")
        command = [*module_command("hypocenter"), "serve", model, "--uds", self._socket, *options]
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._process = subprocess.Popen(command, env=environ, preexec_fn=_end_with_parent)
        self._session: aiohttp.ClientSession | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self) -> None:
        """Wait until it takes requests. Raises ServerEnded."""
        async with asyncio.timeout(_START_SECONDS):
            while True:
                if self._process.poll() is not None:
                    code = self._process.returncode
                    raise ServerEnded(f"hypo serve ended with exit code {code}; see its log")
                with contextlib.suppress(OSError, aiohttp.ClientError, StopAsyncIteration):
                    if await self.status_of("/ready") == 200:
                        return
                await asyncio.sleep(_LOOK_SECONDS)

    async def status_of(self, path: str) -> int:
        """The status of a GET. Raises OSError or aiohttp's errors."""
        async with self._client().get(f"http://localhost{path}") as answer:
            await answer.read()
            return int(answer.status)

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
        """First the status and headers of the answer, then what it says, whole events at a time.

        Raises ServerEnded when it breaks off.
        """
        try:
            async with self._client().request(
                method, f"http://localhost{path}", headers=dict(headers), data=body
            ) as answer:
                yield answer.status, {name.lower(): text for name, text in answer.headers.items()}
                held = b""
                async for data, is_whole in answer.content.iter_chunks():
                    held += data
                    if is_whole and held:
                        yield held
                        held = b""
                if held:
                    yield held
        except (OSError, aiohttp.ClientError) as error:
            raise ServerEnded(f"{type(error).__name__}: {error}") from error

    async def stop(self, seconds: float) -> None:
        """Let open answers end, for so many seconds."""
        if self._session is not None:
            await self._session.close()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._folder.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._socket, limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._session


def _end_with_parent() -> None:
    """A replica that is killed leaves no server behind; called in the new process."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
