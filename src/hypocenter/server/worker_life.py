"""One life of a worker process: start it, talk to it, and say how it ended.

The process stands under the same watch as the command of a `hypo doctor -- COMMAND`: its steps have
a deadline, its stderr is kept, and when it dies of a fault what it left becomes a bundle.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from hypocenter.base import package
from hypocenter.base.wording import FROM_OUTSIDE
from hypocenter.record import ring
from hypocenter.server.operating.log import WorkerWords, tell
from hypocenter.server.operating.signals import FOR_THE_SERVER
from hypocenter.server.patience import Patience
from hypocenter.settings.config import EngineConfig
from hypocenter.settings.environment import SECRETS, Environment
from hypocenter.watch.child import Deadlines, Ended, Follower, environment_for, watch
from hypocenter.watch.dead_runs import watched_runs
from hypocenter.wire.frames import LENGTH_BYTES, as_frame, body_bytes
from hypocenter.wire.messages import (
    MAX_FRAME_BYTES,
    NO_REQUEST,
    Failed,
    KeptWeights,
    Prepare,
    Start,
    TakeOver,
    ToServer,
)

#: The program of a worker: a module, and words for it.
WORKER: tuple[str, ...] = ("hypocenter.worker.worker",)
#: The program of what has a GPU's weights.
KEEPER: tuple[str, ...] = ("hypocenter.worker.keeper",)
#: How long a process may take to write its stacks and end.
_ABORT_SECONDS = 10.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Orders:
    """What every worker is started with. `folder` is private, for the socket."""

    model: str
    config: EngineConfig
    deadlines: Deadlines
    folder: Path
    #: Seconds without a word from a worker that is to load its model.
    load_seconds: float = 600.0
    #: Whether another worker waits, its packages imported and its device open.
    has_spare: bool = True
    worker: tuple[str, ...] = WORKER
    #: What the log calls the model, where there are several.
    label: str = ""


def forms_name(orders: Orders) -> str:
    """What stands for the kernels that a worker needs: the files and the settings."""
    draft = orders.config.draft_model
    files = [_stamp_of(path) for path in (orders.model, draft) if path is not None]
    depends_on = repr((files, replace(orders.config, kv_tokens=None)))
    return hashlib.blake2b(depends_on.encode(), digest_size=16).hexdigest()


def _stamp_of(path: str) -> tuple[str, int, int]:
    try:
        status = Path(path).stat()
    except OSError:  # told of when it is opened
        return path, 0, 0
    return path, status.st_size, status.st_mtime_ns


class WorkerLife:
    """`on_message` is called in the event loop for each message; `on_late` when it is past a
    deadline, from where on nothing that it says is heard; `on_ended` once, when the process is
    gone; `on_left` in a thread of its own, with the folder of what it recorded, before that is
    removed."""

    def __init__(
        self,
        number: int,
        orders: Orders,
        on_message: Callable[[ToServer], None],
        on_late: Callable[[float], None],
        on_ended: Callable[[Ended | Exception], None],
        on_left: Callable[[Path, Ended], None],
        program: tuple[str, ...] = WORKER,
    ) -> None:
        self.number = number
        self._program = program
        self.pid: int | None = None
        self._orders = orders
        self._on_message, self._on_late = on_message, on_late
        self._on_ended, self._on_left = on_ended, on_left
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.StreamWriter | None = None
        self._runs: Path | None = None
        self._path = orders.folder / f"{number}.sock"
        self._is_over = self._is_stopping = self._is_late = False
        self._late_seconds: float | None = None
        self._thread: threading.Thread | None = None
        self._listener: asyncio.Server | None = None
        self._begun: Start | None = None
        self._patience = Patience(orders.deadlines, orders.load_seconds)
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the process; it connects when it can, opens its device and waits."""
        self._listener = await asyncio.start_unix_server(self._connect, self._path)
        name = f"worker {self.number}"
        self._thread = threading.Thread(target=self._watch, args=[str(self._path)], name=name)
        self._thread.start()

    def begin(
        self,
        kept: KeptWeights | None,
        block_memory: str = "",
        config: EngineConfig | None = None,
        *,
        is_first: bool = False,
        waits: bool = False,
    ) -> None:
        """Have it load the model, by the weights that a keeper has, if one does.

        `config`: what has become of the one in its orders. One that `waits` then stands by until
        `take_over`.
        """
        config, has_spare = config or self._orders.config, self._orders.has_spare
        self._begun = Start(
            self._orders.model, config, kept, block_memory, is_first, waits, has_spare
        )
        self.send(self._begun)
        self._patience.begin(self._loop.time())
        self._look()

    @property
    def has_begun(self) -> bool:
        """Whether it was told to load the model."""
        return self._begun is not None

    def take_over(self, block_memory: str) -> None:
        """Have one that stands by, or is about to, take requests."""
        assert self._begun is not None, "it stands by for nothing"
        self._begun = msgspec.structs.replace(
            self._begun, block_memory=block_memory, waits=self._writer is not None
        )
        self.send(TakeOver(block_memory))
        self._patience.begin(self._loop.time())

    def send(self, message: msgspec.Struct) -> None:
        """Say something to the worker, if it listens still."""
        self._patience.say(message, self._loop.time())
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(as_frame(message))

    def abort(self) -> None:
        """End the process; Python writes the stack of every thread, even of one stuck in C.

        One that was stopped goes on for that.
        """
        self._send_signal(signal.SIGABRT)
        self._send_signal(signal.SIGCONT)
        self._timer = self._loop.call_later(_ABORT_SECONDS, self.kill)

    def kill(self) -> None:
        """End the process at once, and all that it started."""
        self._is_over = True
        self._send_signal(signal.SIGKILL)

    async def stop(self, seconds: float) -> None:
        """Let the process end by itself, and end it after so many seconds."""
        self._is_stopping = True
        if self._writer is not None:
            self._writer.close()
        elif self.pid is not None:  # it never came
            self.kill()
        thread = self._thread
        if thread is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while thread.is_alive():
                    await asyncio.sleep(0.02)
        self.kill()
        await asyncio.to_thread(thread.join)

    def seconds_in_step(self, now: float) -> float | None:
        """How long its running step has taken; None where none runs, or that is not recorded."""
        runs = self._runs
        if runs is None:
            return None
        for folder in ring.run_folders(runs):
            beat = ring.read_heartbeat(folder)
            if beat is not None and beat.step_started_ns is not None and not beat.is_clean:
                return now - beat.step_started_ns / 1e9
        return None

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._listener is None or self._writer is not None:
            writer.close()
            return
        self._stop_listening()
        self._writer = writer
        config, model = self._orders.config, self._orders.model
        if config.device.partition(":")[0] in ("cuda", "hip") and self._program != KEEPER:
            self.send(Prepare(config.device, forms_name(self._orders), model, config))
        else:
            self.send(Prepare(config.device))
        if self._begun is not None:
            self.send(self._begun)
        decode = msgspec.msgpack.Decoder(ToServer).decode
        has_told_why = False
        try:
            while not self._is_over:
                header = await reader.readexactly(LENGTH_BYTES)
                body = await reader.readexactly(body_bytes(header, MAX_FRAME_BYTES))
                if not self._is_over and not self._is_late:
                    message = decode(body)
                    has_told_why |= isinstance(message, Failed) and message.id == NO_REQUEST
                    self._patience.hear(message, self._loop.time())
                    self._on_message(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it is about to end
        finally:
            # A worker that cannot be understood is none: the watch then says how it ended.
            writer.close()
            if has_told_why and not self._is_over:
                self._let_end()
            elif not self._is_stopping:
                self.kill()

    def _let_end(self) -> None:
        """It has said why it ends: its exit code is to say so as well."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_ABORT_SECONDS, self.kill)

    def _look(self) -> None:
        """End a process that has owed a word for too long."""
        if self._is_late:
            return
        late = self._patience.seconds_late(self._loop.time())
        if late is None:
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)
            return
        message = f"worker {self.number} (process {self.pid}) has said nothing for {late:.0f} s"
        tell(logging.ERROR, "worker_silent", message, worker=self.number, pid=self.pid)
        self._late_seconds = late
        self._note_late(late)
        self.abort()

    def _note_late(self, seconds: float) -> None:
        """It is past a deadline and is ended: who waits for it need not wait for that."""
        if not self._is_late and not self._is_over:
            self._is_late = True
            self._on_late(seconds)

    def _watch(self, path: str) -> None:
        # What is blocked in this thread is blocked in all that it starts.
        signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_SERVER)
        environment = Environment.read()
        module, *arguments = self._program
        orders = self._orders
        command = [*package.module_command(module), *arguments]
        command += [path, orders.model, orders.config.device]
        words = WorkerWords(self.number)
        try:
            with watched_runs(environment.run_dir) as runs:
                self._runs = runs
                variables = environment_for(runs)
                for secret in SECRETS:
                    variables.pop(secret, None)
                if not environment.record:
                    variables["HYPO_RECORD"] = "0"
                ended = watch(
                    command,
                    variables,
                    runs,
                    words.take,
                    self._orders.deadlines,
                    subprocess.DEVNULL if sys.stderr is None else sys.stderr.fileno(),
                    Follower(self._note_pid, self._tell_late),
                )
                words.end()
                self._runs = None
                if self._late_seconds is not None:
                    ended = replace(ended, hung_seconds=self._late_seconds)
                self._tell(ended)
                if not self._is_stopping:
                    self._on_left(runs, ended)
        except Exception as error:  # the server must hear of it, whatever it is
            self._tell(error)

    def _send_signal(self, number: int) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _note_pid(self, pid: int) -> None:
        self.pid = pid

    def _tell(self, ended: Ended | Exception) -> None:
        self._call(functools.partial(self._end, ended))

    def _tell_late(self, seconds: float) -> None:
        self._call(functools.partial(self._note_late, seconds))

    def _call(self, work: Callable[[], None]) -> None:
        """In the event loop, from the thread that watches."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(work)

    def _end(self, ended: Ended | Exception) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._stop_listening()
        self._on_ended(ended)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                self._path.unlink()


def is_fault(ended: Ended | Exception) -> bool:
    """Whether it died of something that it did, and was not ended from outside."""
    if isinstance(ended, Exception):
        return False
    by_hand = (
        ended.signal in FROM_OUTSIDE and not ended.num_memory_kills and ended.hung_seconds is None
    )
    return not by_hand
