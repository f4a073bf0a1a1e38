"""A worker without a model that answers at a fixed speed: `... STEP TOKEN SOCKET MODEL`.

A step takes STEP seconds, and TOKEN more for each token of a prompt that it reads; with 0 it knows
all prompts, as those that its cache has. Each request whose prompt is read gets one token a step,
until it has as many as it asks for. What a server adds to that is then known without a card
(`front_capacity.py`).
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hypocenter.settings.config import EngineConfig
from hypocenter.wire.frames import LENGTH_BYTES, as_frame, body_bytes
from hypocenter.wire.messages import (
    MAX_FRAME_BYTES,
    Accepted,
    Cancel,
    Ending,
    EngineState,
    News,
    Piece,
    Ready,
    ServedModel,
    Start,
    Submit,
    ToWorker,
)

#: A token that the bundled model has, and a text of usual length.
_TOKEN, _TEXT = 40, " words"
#: Tokens of a step.
_STEP_TOKENS = 2048
#: Tokens of its KV cache for each request.
_CONTEXT = 8192


@dataclass
class _Open:
    """A request, and the tokens that are still to be read and to be given."""

    number: int
    num_unread: int
    num_left: int


def main(words: Sequence[str]) -> int:
    """Serve until the server leaves; returns the exit code."""
    step_seconds, token_seconds = float(words[0]), float(words[1])
    path, model = words[2:]
    decode = msgspec.msgpack.Decoder(ToWorker).decode
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        is_open: dict[int, _Open] = {}
        due, num_steps, is_within = 0.0, 0, False
        while True:
            if is_open and not is_within:
                seconds = step_seconds + token_seconds * _read(is_open)
                due = max(due, time.monotonic() - step_seconds) + seconds
                is_within = True
            wait = max(due - time.monotonic(), 0.0) if is_within else None
            if select.select([connection], [], [], wait)[0]:
                try:
                    message = decode(_next_frame(connection))
                except (EOFError, ConnectionError):
                    return 0
                _handle(connection, message, model, is_open)
                if not token_seconds:
                    for one in is_open.values():
                        one.num_unread = 0
                continue
            is_within = False
            num_steps += 1
            connection.sendall(as_frame(_step(is_open, num_steps)))


def _next_frame(connection: socket.socket) -> bytes:
    """The next frame's body. A buffered reader would hide from `select` what it has read ahead."""
    header = connection.recv(LENGTH_BYTES, socket.MSG_WAITALL)
    return connection.recv(body_bytes(header, MAX_FRAME_BYTES), socket.MSG_WAITALL)


def _handle(
    connection: socket.socket, message: ToWorker, model: str, is_open: dict[int, _Open]
) -> None:
    match message:
        case Start(_, config):
            connection.sendall(as_frame(Ready(_facts(model, config), 0.0)))
        case Submit(number, params, prompt_ids, output_ids):
            is_open[number] = _Open(
                number, len(prompt_ids), (params.max_tokens or 16) - len(output_ids)
            )
            connection.sendall(as_frame(Accepted(number)))
        case Cancel(number) if number in is_open:
            is_open[number].num_unread = is_open[number].num_left = 0
        case _:
            pass


def _read(is_open: dict[int, _Open]) -> int:
    """How many tokens of prompts the next step reads, the oldest first."""
    left = _STEP_TOKENS
    for one in is_open.values():
        num = min(one.num_unread, left)
        one.num_unread -= num
        left -= num
    return _STEP_TOKENS - left


def _step(is_open: dict[int, _Open], num_steps: int) -> News:
    """A token for each, and the end of those that have theirs."""
    pieces = []
    for one in [one for one in is_open.values() if not one.num_unread]:
        one.num_left -= 1
        if one.num_left > 0:
            pieces.append(Piece(one.number, _TEXT, (_TOKEN,)))
        else:
            del is_open[one.number]
            pieces.append(Piece(one.number, _TEXT, (_TOKEN,), ending=Ending("length")))
    return News(tuple(pieces), EngineState(len(is_open), 0, 0, 0, num_steps, 0))


def _facts(model: str, config: EngineConfig) -> ServedModel:
    num_requests = config.max_batch_requests
    return ServedModel(
        name="steady",
        architecture="llama",
        quantisation="none",
        num_parameters=0,
        file_bytes=Path(model).stat().st_size,
        context_length=_CONTEXT,
        trained_length=_CONTEXT,
        vocab_size=256,
        bos_id=-1,
        eos_id=-1,
        bos_text="",
        eos_text="",
        chat_template="",
        device="none",
        instruction_set="",
        max_requests=num_requests,
        block_size=16,
        num_blocks=num_requests * _CONTEXT // 16,
        step_tokens=_STEP_TOKENS,
        longest_token_bytes=16,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
