"""A worker that is told to wait has its model, says so, and takes requests when it takes over."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hypocenter.base.package import bundled_model
from hypocenter.settings.config import EngineConfig, SamplingParams
from hypocenter.wire.frames import as_frame, read_frame
from hypocenter.wire.messages import (
    MAX_FRAME_BYTES,
    Accepted,
    Loading,
    News,
    Prepare,
    Ready,
    StandingBy,
    Start,
    Submit,
    TakeOver,
    ToServer,
)


def heard(reader: BinaryIO) -> Any:
    """The next message that tells more than progress and figures."""
    while True:
        message = msgspec.msgpack.decode(read_frame(reader, MAX_FRAME_BYTES), type=ToServer)
        is_empty = isinstance(message, News) and not message.pieces
        if not isinstance(message, Loading) and not is_empty:
            return message


def test_it_waits_with_its_model_and_takes_over(tmp_path: Path) -> None:
    path, model = tmp_path / "worker.sock", str(bundled_model())
    config = EngineConfig(device="cpu", context_length=256)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(60)
        worker = subprocess.Popen(
            [sys.executable, "-m", "hypocenter.worker.worker", str(path), model]
        )
        connection, _ = listening.accept()
        connection.settimeout(60)
        with connection, connection.makefile("rb") as reader:

            def say(message: msgspec.Struct) -> None:
                connection.sendall(as_frame(message))

            say(Prepare("cpu"))
            say(Start(model, config, waits=True))
            assert isinstance(heard(reader), StandingBy)
            # What comes while it waits is no reason to say that it is ready.
            say(TakeOver())
            say(Submit(7, SamplingParams(max_tokens=3, ignore_eos=True), (72, 105)))
            ready = heard(reader)
            assert isinstance(ready, Ready)
            assert ready.seconds < 5, "its model was there"
            assert isinstance(heard(reader), Accepted)
            tokens: list[int] = []
            while len(tokens) < 3:
                news = heard(reader)
                assert isinstance(news, News)
                tokens += [token for piece in news.pieces for token in piece.token_ids]
        assert worker.wait(60) == 0
