"""The program of the process that has a GPU's weights, for workers to map; it runs none of ours.

It says what it is doing, then `KeptWeights` once, and stays until its server goes.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from hypocenter.base.errors import EXIT_OK, HypoError
from hypocenter.device import devices
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors.shared_weights import lend_weights
from hypocenter.settings.config import OnProgress
from hypocenter.wire.frames import as_frame, read_frame
from hypocenter.wire.messages import (
    MAX_FRAME_BYTES,
    NO_REQUEST,
    KeptWeights,
    Loading,
    Start,
    ToWorker,
)
from hypocenter.worker.outbox import failure_of


def main(words: Sequence[str]) -> int:
    """Serve the server whose socket is named; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which tells us
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(words[0])
        with connection.makefile("rb") as reader:
            try:
                _keep(connection, reader)
            except HypoError as error:  # the server tells of it
                connection.sendall(as_frame(failure_of(NO_REQUEST, error)))
                return error.exit_code
    return EXIT_OK


def _keep(connection: socket.socket, reader: BinaryIO) -> None:
    """Load what `Start` names, then wait for the end of the server."""

    def report(what: str, share: float) -> None:
        connection.sendall(as_frame(Loading(what, share)))

    try:
        while True:
            message = msgspec.msgpack.decode(read_frame(reader, MAX_FRAME_BYTES), type=ToWorker)
            if isinstance(message, Start):
                connection.sendall(as_frame(_load(message, report)))
    except (EOFError, ConnectionError):
        return


def _load(start: Start, report: OnProgress) -> KeptWeights:
    device = devices.open_device(start.config.device)
    with open_gguf(start.model, start.config.override_kv) as file:
        facts = read_architecture(file)
        return lend_weights(file, facts, report, device=device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
