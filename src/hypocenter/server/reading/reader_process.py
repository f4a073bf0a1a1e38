"""The server's end of one reader: start it, ask it one question at a time, and say how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any

import msgspec

from hypocenter.base import package
from hypocenter.base.errors import TokenizerError
from hypocenter.base.wording import FROM_OUTSIDE, signal_name
from hypocenter.wire.frames import LENGTH_BYTES, as_frame, body_bytes
from hypocenter.wire.messages import (
    MAX_FRAME_BYTES,
    Ask,
    Failed,
    FormRead,
    FromReader,
    ReaderReady,
    ReadForm,
    StartReader,
    Told,
)

READER = "hypocenter.worker.reader"
_START_SECONDS = 600.0
#: All that a reader has of the server's environment. What it reads is a stranger's.
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "SYSTEMROOT", "TZ", "VIRTUAL_ENV")
#: One thread, and one heap: each further one would count against the limit on memory.
_ONE_THREAD = {
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

ReaderAnswer = Told | FormRead | Failed


class ReaderEnded(Exception):
    """A reader is gone. `is_innocent`: nothing says that what it read was why."""

    def __init__(self, how: str, *, is_innocent: bool = False) -> None:
        self.is_innocent = is_innocent
        super().__init__(how)


class CannotRead(Exception):
    """A reader cannot read the model's file, and says why."""


class ReaderProcess:
    """One reader. What goes wrong ends it, and raises ReaderEnded; then another one is needed."""

    def __init__(self, start: StartReader) -> None:
        self._start = start
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Wait until it has the model's tokenizer. Raises CannotRead, ReaderEnded."""
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *package.module_command(READER),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=sys.stderr.fileno(),
                env={**kept, **_ONE_THREAD},
                start_new_session=True,
            )
        except OSError as error:
            raise CannotRead(f"{sys.executable}: {error.strerror}") from error
        told = await self._exchange(self._start, as_frame(self._start), _START_SECONDS)
        if isinstance(told, Failed):
            await self.close()
            raise CannotRead(told.message)
        assert isinstance(told, ReaderReady), "a reader says that it is ready, or why not"

    async def answer(self, question: Ask | ReadForm) -> ReaderAnswer:
        """What it says. Raises ReaderEnded, also where it takes longer than it may."""
        if self._process is None or self._process.returncode is not None:
            raise ReaderEnded("it was gone", is_innocent=True)
        try:
            frame = as_frame(question)
        except UnicodeEncodeError as error:
            reason = f"a text has U+{ord(error.object[error.start]):04X}, which is no character"
            return Failed(question.id, TokenizerError.__name__, f"{reason}; decode it anew")
        told = await self._exchange(question, frame, self._start.limits.wall_seconds)
        assert not isinstance(told, ReaderReady), "a reader is ready once"
        return told

    async def close(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _exchange(self, message: Any, frame: bytes, seconds: float) -> FromReader:
        """Send a message and wait for its answer; only one of them is under way at a time."""
        process = self._process
        assert process is not None, "it was started"
        assert process.stdin is not None, "it has a pipe"
        assert process.stdout is not None, "it has another pipe"
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(frame)
                await process.stdin.drain()
                header = await process.stdout.readexactly(LENGTH_BYTES)
                body = await process.stdout.readexactly(body_bytes(header, MAX_FRAME_BYTES))
                told: FromReader = msgspec.msgpack.decode(body, type=FromReader)
                return told
        except TimeoutError:
            await self.close()
            raise ReaderEnded(f"it takes more than {seconds:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._code()
        except (ValueError, msgspec.MsgspecError) as error:
            await self.close()
            raise ReaderEnded(f"its answer is none: {error}") from error
        except BaseException:
            await self.close()  # an answer still to come would be taken for the next one
            raise
        raise ReaderEnded(self._how(code, message), is_innocent=-code in FROM_OUTSIDE)

    async def _code(self) -> int:
        """How it ended, once its pipe did."""
        process = self._process
        assert process is not None, "it was started"
        try:
            async with asyncio.timeout(1.0):
                return await process.wait()
        except TimeoutError:
            await self.close()
            return await process.wait()

    def _how(self, code: int, message: Any) -> str:
        limits = self._start.limits
        if code == -signal.SIGPROF:
            is_form = isinstance(message, ReadForm)
            seconds = limits.form_cpu_seconds if is_form else limits.text_cpu_seconds
            return f"it takes more than {seconds:g} s of processor time"
        if -code in FROM_OUTSIDE:
            return f"it was ended by {signal_name(-code)}, and not by a limit of ours"
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        return f"it takes more than {limits.memory_bytes >> 20} MiB of memory ({how})"
