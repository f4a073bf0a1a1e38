"""A worker that is told to wait has its model, says so, and takes requests when it takes over."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import Mock

import msgspec
import pytest

from hypocenter.base.package import bundled_model
from hypocenter.device import devices
from hypocenter.settings.config import EngineConfig, SamplingParams
from hypocenter.wire.frames import as_frame, read_frame
from hypocenter.wire.messages import (
    MAX_FRAME_BYTES,
    Accepted,
    KeptWeights,
    Loading,
    News,
    Prepare,
    Ready,
    SharedPiece,
    StandingBy,
    Start,
    Submit,
    TakeOver,
    ToServer,
)
from hypocenter.worker import worker


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
        process = subprocess.Popen(
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
        assert process.wait(60) == 0


def test_a_step_that_goes_on_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a simulated GPU, which takes many seconds: the server has gone."""
    left = threading.Event()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    monkeypatch.setattr(worker, "_LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(os, "_exit", leave)
    stuck: Any = worker.ModelWorker.__new__(worker.ModelWorker)
    stuck._arrivals = stuck._driver = stuck._outbox = Mock()
    stuck._llm = SimpleNamespace(close=lambda: left.wait(20))
    stuck.close()
    assert codes == [0]


def test_memory_is_mapped_while_kernels_and_prompts_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache of a large GPU takes the driver a second, and so do these."""
    begun = threading.Event()
    calls: list[str] = []

    def load_forms(device: str, forms: str) -> None:
        assert begun.wait(20), "it waits for what the server says only later"
        calls.append("kernels")

    def call_device(device: str, call: str, handle: bytes) -> None:
        calls.append(f"{call} {device} {handle!r}")
        begun.set()

    monkeypatch.setattr(worker, "load_forms", load_forms)
    monkeypatch.setattr(worker, "open_recorder", lambda: None)
    monkeypatch.setattr(worker, "read_prompts", lambda path, config: f"prompts of {path}")
    monkeypatch.setattr(devices, "open_device", lambda name: name)
    monkeypatch.setattr(devices, "call_device", call_device)
    monkeypatch.setattr(worker, "ModelWorker", lambda *given: given[1:])
    config = EngineConfig(device="cuda")
    kept = KeptWeights("stamps", (), {}, SharedPiece(b"handle", 7))
    start = Start("m.gguf", config, kept)
    frames = as_frame(Prepare("cuda", "forms", "m.gguf", config)) + as_frame(start)
    found: Any = worker._start(Mock(), io.BytesIO(frames))
    assert found == (start, "prompts of m.gguf")
    assert calls == ["begin_map cuda b'handle'", "kernels"]
