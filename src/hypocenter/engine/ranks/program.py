"""The program of a process that holds one part of a model: it runs the steps that it is told of.

`ranks.py` starts it. It says that it is there, that its part is loaded, and what it ended by. It
ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, NoReturn

import msgspec

from hypocenter.base.errors import HypoError
from hypocenter.device import devices
from hypocenter.device.group import Group
from hypocenter.engine.ranks.messages import MAX_FRAME_BYTES, Capture, Join, Step, Word
from hypocenter.engine.runner import Runner, Seat, load_runner
from hypocenter.model.facts.part import Part
from hypocenter.model.gguf.file import open_gguf
from hypocenter.record.recorder import close_recorder, current
from hypocenter.settings.config import is_simulated
from hypocenter.wire.frames import as_frame, read_frame

#: How often it looks whether its parent still lives; a GPU that waits for others hears of nothing.
_LOOK_SECONDS = 1.0


def main(descriptor: int) -> None:
    """Run until the socket `descriptor` ends."""
    _end_with_parent()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as reader:
        join = msgspec.msgpack.decode(read_frame(reader, MAX_FRAME_BYTES), type=Join)
        try:
            runner = _load(join, connection)
            _say(connection)
            _follow(runner, reader, connection)
        except Exception as error:
            _end(connection, error)
    _leave()


def _load(join: Join, connection: socket.socket) -> Runner:
    device = devices.open_device(join.config.device)
    _say(connection)
    group = Group(join.rank, join.num_ranks, join.meeting_place, device)
    with open_gguf(Path(join.path), join.config.override_kv) as file:
        part = Part(join.rank, join.num_ranks)
        return load_runner(file, join.config, seat=Seat(part, group, kept=join.kept))


def _follow(runner: Runner, reader: BinaryIO, connection: socket.socket) -> None:
    decoder: msgspec.msgpack.Decoder[Step | Capture] = msgspec.msgpack.Decoder(Step | Capture)
    is_sim = is_simulated(runner.config.device)
    waits: SimpleQueue[Callable[[], object]] = SimpleQueue()
    # This thread launches ahead of the GPU, so another one hears of what went wrong there.
    watch = threading.Thread(target=_wait_for, args=(waits, connection), daemon=True)
    watch.start()
    num_compiled = 0
    while True:
        try:
            frame = read_frame(reader, MAX_FRAME_BYTES)
        except EOFError:
            return
        message = decoder.decode(frame)
        if isinstance(message, Capture):
            runner.capture()
            continue
        runner.run(message.batch())
        if (num_now := runner.num_compiled_since) > num_compiled:
            num_compiled = num_now
            _say(connection, num_compiled=num_now)
        if is_sim:  # it runs when somebody waits, and a GPU by itself
            runner.wait()
        else:
            waits.put(runner.end_of_step())


def _wait_for(waits: SimpleQueue[Callable[[], object]], connection: socket.socket) -> None:
    while True:
        wait = waits.get()
        try:
            wait()
        except Exception as error:
            _end(connection, error)


def _say(connection: socket.socket, problem: str = "", num_compiled: int = 0) -> None:
    with contextlib.suppress(OSError):  # of a first rank that has ended, with which this one ends
        connection.sendall(as_frame(Word(problem, num_compiled)))


def _leave() -> NoReturn:
    """End well, and not by the usual way: what runs on the GPU may wait for ranks that are gone."""
    close_recorder()
    os._exit(0)


def _end(connection: socket.socket, error: Exception) -> NoReturn:
    """Say what this rank ended by; its record, which is left as it is, tells the doctor more."""
    current().record_failure(error)
    if not isinstance(error, HypoError):  # a defect of ours, whose statement matters
        traceback.print_exception(error, file=sys.stderr)
    _say(connection, str(error) or type(error).__name__)
    os._exit(1)


def _end_with_parent() -> None:
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        _leave()

    threading.Thread(target=look, name="parent watch", daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
