"""The other processes that hold parts of a model, as the one sees them that has the engine.

Each step is told to all of them before it begins here. They run the same launches, so their
collectives meet. A process that ends takes the step down: what waits for it is ended, and
`RankLost` says which one it was.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from hypocenter.base.errors import DeviceFault, HypoError, RankLost, UsageError
from hypocenter.base.own_folder import own_folder
from hypocenter.base.package import RANK_MODULE, module_command
from hypocenter.base.wording import ending_of
from hypocenter.device.group import Group
from hypocenter.engine.batch import Batch
from hypocenter.engine.ranks.messages import MAX_FRAME_BYTES, Capture, Join, Step, Word
from hypocenter.settings.config import EngineConfig, is_simulated
from hypocenter.wire.frames import as_frame, read_frame
from hypocenter.wire.messages import KeptWeights

#: After what a collective reports, for the end of another process to be known.
_NOTICE_SECONDS = 2.0
_END_SECONDS = 5.0


class Ranks:
    """All ranks but the first of `config.tensor_parallel`, from `start` to `close`."""

    def __init__(self, path: Path, config: EngineConfig, kept: Sequence[KeptWeights] = ()) -> None:
        """Start the processes; they load their parts from now on, or map what a keeper has of each
        part but the first. Raises UsageError."""
        self.num_ranks = config.tensor_parallel
        self._devices = [device_of(config.device, rank) for rank in range(self.num_ranks)]
        self._folder = contextlib.ExitStack()
        folder = self._folder.enter_context(own_folder("hypo-ranks-"))
        self._meeting_place = str(folder / "ranks")
        self._lost: RankLost | None = None
        self._is_loaded = self._is_closing = False
        self._ended = threading.Event()
        #: What each has said since it was loaded, and whether it has said all.
        self._problems: dict[int, str] = {}
        self._num_compiled: dict[int, int] = {}
        self._heard = {rank: threading.Event() for rank in range(1, self.num_ranks)}
        self._group: Group | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._readers: list[BinaryIO] = []
        for rank in range(1, self.num_ranks):
            own = replace(config, device=self._devices[rank])
            part = kept[rank - 1] if kept else None
            join = Join(str(path), own, rank, self.num_ranks, self._meeting_place, part)
            self._start(join)

    @property
    def processes(self) -> tuple[int, ...]:
        """Their numbers, by rank."""
        return tuple(process.pid for process in self._processes)

    def join(self, device: str) -> Group:
        """The group of all ranks, once every process is there. Raises as `wait` does."""
        self._hear()
        self._group = Group(0, self.num_ranks, self._meeting_place, device, self._explain)
        return self._group

    def wait(self) -> None:
        """Wait until all parts are loaded. Raises UsageError with what a rank says, RankLost."""
        self._hear()
        self._is_loaded = True
        for rank, reader in enumerate(self._readers, start=1):
            name = f"words of rank {rank}"
            threading.Thread(
                target=self._listen, args=[rank, reader], name=name, daemon=True
            ).start()

    def _hear(self) -> None:
        """Wait for a word of each rank: the first says that it is there, the second loaded."""
        for rank, reader in enumerate(self._readers, start=1):
            try:
                problem = _word_of(reader)
            except (EOFError, OSError) as error:
                raise self._explain("loading", error) from error
            if problem:
                raise UsageError(f"rank {rank} ({self._devices[rank]}): {problem}")

    @property
    def num_compiled_since(self) -> int:
        """How many forms of kernels they had to compile since their parts were loaded."""
        return sum(self._num_compiled.values())

    def run(self, batch: Batch) -> None:
        """Tell all ranks of a step; raises RankLost where one has ended."""
        self._tell("step", Step.of(batch))

    def capture(self) -> None:
        """Have all ranks capture steps, as the first one then does; raises RankLost."""
        self._tell("capture", Capture())

    def _tell(self, what: str, message: Step | Capture) -> None:
        self.require_alive()
        frame = as_frame(message)
        for connection in self._sockets:
            try:
                connection.sendall(frame)
            except OSError as error:
                raise self._explain(what, error) from error

    def require_alive(self) -> None:
        """Raises RankLost when a process has ended; what came of a step is nothing then."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """End the processes."""
        self._is_closing = True
        for connection in self._sockets:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)  # which ends what is read there, too
        for rank, reader in enumerate(self._readers, start=1):
            if self._is_loaded:
                self._heard[rank].wait(_END_SECONDS)
            reader.close()
        for connection in self._sockets:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
            process.wait()
        if self._group is not None:
            self._group.close()
        self._folder.close()

    def _start(self, join: Join) -> None:
        ours, theirs = socket.socketpair()
        command = module_command(RANK_MODULE)
        with theirs:
            try:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl-C is for this process
                )
            except OSError as error:
                ours.close()
                raise UsageError(f"rank {join.rank} cannot be started: {error.strerror}") from error
        self._processes.append(process)
        self._sockets.append(ours)
        self._readers.append(ours.makefile("rb"))
        ours.sendall(as_frame(join))
        watch = threading.Thread(
            target=self._watch, args=(join.rank, process), name=f"rank {join.rank}", daemon=True
        )
        watch.start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if self._is_closing:
            return
        how = ending_of(process.returncode)
        if self._is_loaded:
            self._heard[rank].wait(_END_SECONDS)
            if rank in self._problems:  # most often it had no time
                how = f"ended: {self._problems[rank]}"
        device = self._devices[rank]
        self._lost = self._lost or RankLost(device, rank, self.num_ranks, process.pid, how)
        self._ended.set()
        if self._group is not None:
            self._group.abort()

    def _listen(self, rank: int, reader: BinaryIO) -> None:
        """What a rank says from now on, up to its end."""
        try:
            while True:
                word = _read_word(reader)
                if word.problem:
                    self._problems[rank] = word.problem
                self._num_compiled[rank] = max(self._num_compiled.get(rank, 0), word.num_compiled)
        except (EOFError, OSError, ValueError):  # it has ended, or we close
            pass
        finally:
            self._heard[rank].set()

    def _explain(self, call: str, error: Exception) -> HypoError:
        """What became of a call that failed: most often another process has ended."""
        self._ended.wait(_NOTICE_SECONDS)
        if self._lost is not None:
            self._lost = self._lost.during(call)
            return self._lost
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return DeviceFault(self._devices[0], call, reason, is_asynchronous=False)


def _word_of(reader: BinaryIO) -> str:
    return _read_word(reader).problem


def _read_word(reader: BinaryIO) -> Word:
    return msgspec.msgpack.decode(read_frame(reader, MAX_FRAME_BYTES), type=Word)


def device_of(device: str, rank: int) -> str:
    """The device of a rank: GPUs in a row from the one that is named, or one more simulated."""
    if is_simulated(device):
        return device
    vendor, _, index = device.partition(":")
    return f"{vendor}:{int(index or 0) + rank}"
