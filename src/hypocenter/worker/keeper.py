"""The program of the process that has a GPU's weights and KV cache, for workers to map.

It runs no kernel of ours, so it outlives what workers die of.

It says what it is doing, `KeptWeights` once their memory is taken and `WeightsWhole` once they are
read, and stays until its server goes. Where a start before has left how they lie, workers make
ready over that memory while it is filled.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO

import msgspec

from hypocenter.base.errors import EXIT_OK, HypoError
from hypocenter.device import devices
from hypocenter.engine.ranks.ranks import device_of
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.facts.part import Part
from hypocenter.model.facts.split import part_of
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.layers.step_buffers import lend_pages
from hypocenter.model.placement import (
    context_length_of,
    kv_room,
    kv_tokens_in,
    require_gpu_room,
    reserved_bytes,
    with_whole_texts,
)
from hypocenter.model.tensors.footprint import num_kv_blocks, require_kv_dtype
from hypocenter.model.tensors.part_of_file import PartOfFile
from hypocenter.model.tensors.shared_weights import WeightLender
from hypocenter.settings.config import KV_DTYPES, EngineConfig, OnProgress
from hypocenter.wire.frames import as_frame, read_frame
from hypocenter.wire.messages import (
    MAX_FRAME_BYTES,
    NO_REQUEST,
    KeptWeights,
    Loading,
    Start,
    ToWorker,
    WeightsWhole,
)
from hypocenter.worker.outbox import failure_of
from hypocenter.worker.prepared import words_of

#: What the GPU takes besides while it packs, with what its allocator keeps of that.
_PACKING_BYTES = 2 << 30


def main(words: Sequence[str]) -> int:
    """Serve the server whose socket is named; returns the exit code."""
    words = words_of(words)
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
                for said in load(message, report):
                    connection.sendall(as_frame(said))
    except (EOFError, ConnectionError):
        return


def load(start: Start, report: OnProgress) -> Iterator[KeptWeights | WeightsWhole]:
    """The weights of each part of the model on the GPU of its rank, and memory for its KV cache.

    Raises ModelTooLarge before anything is read, where there is no room for it.
    """
    began, config = time.monotonic(), start.config
    parts = []
    with open_gguf(start.model, config.override_kv) as file:
        for rank in range(config.tensor_parallel):
            own = replace(config, device=devices.open_device(device_of(config.device, rank)))
            parts.append(_Part(file, own, rank))
        is_planned = all(part.plan() for part in parts)
        if not is_planned:
            for part in parts:
                part.fill(report)
        if (num_tokens := config.kv_tokens) is None:
            num_tokens = min(part.kv_tokens(has_spare=start.has_spare) for part in parts)
        first, *others = [part.with_cache(num_tokens) for part in parts]
        yield msgspec.structs.replace(first, of_ranks=tuple(others))
        if is_planned:
            for part in parts:
                part.fill(report)
        yield WeightsWhole(time.monotonic() - began)


class _Part:
    """What one GPU has of the model."""

    def __init__(self, file: GGUFFile, config: EngineConfig, rank: int) -> None:
        self._facts, self._file = read_architecture(file, config.pooling), file
        # Raises before anything is read.
        self._config = config = with_whole_texts(self._facts, config)
        if config.tensor_parallel > 1:
            part = Part(rank, config.tensor_parallel)
            self._file = PartOfFile(file, self._facts, part)
            self._facts = part_of(self._facts, part)
        elif (room := devices.room_of(config.device)) is not None:
            require_gpu_room(config.device, file, self._facts, config, room)
        part_name = f"{rank} of {config.tensor_parallel}"
        self._lender = WeightLender(self._file, self._facts, config.device, part_name)
        self._lent: KeptWeights | None = None

    def plan(self) -> bool:
        """Whether it is known how the weights will lie; their memory is then taken.

        Packing needs memory beside them, which a KV cache must leave.
        """
        room = devices.room_of(self._config.device)
        if room is None or reserved_bytes(self._config, room) >= _PACKING_BYTES:
            self._lent = self._lender.plan()
        return self._lent is not None

    def fill(self, report: OnProgress) -> None:
        self._lent = self._lender.fill(report)

    def kv_tokens(self, *, has_spare: bool) -> int:
        """Tokens of KV cache for which this GPU has room, beside what steps of each worker take."""
        config = self._config
        if (room := devices.room_of(config.device)) is None:
            return context_length_of(self._facts, config)
        num_workers = 2 if has_spare else 1
        num_bytes = kv_room(self._file, self._facts, config, room, num_workers)
        return kv_tokens_in(num_bytes, self._facts, config)

    def with_cache(self, num_tokens: int) -> KeptWeights:
        """What was lent, and memory for a KV cache of so many tokens."""
        config = replace(self._config, kv_tokens=num_tokens)
        num_blocks = num_kv_blocks(config, context_length_of(self._facts, config))
        dtype, size = KV_DTYPES[config.kv_dtype], config.block_size
        require_kv_dtype(self._facts, config.kv_dtype)
        pages = lend_pages(self._facts, num_blocks, size, dtype, device=config.device)
        assert self._lent is not None, "planned or filled"
        return msgspec.structs.replace(self._lent, pages=pages, kv_tokens=num_tokens)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
