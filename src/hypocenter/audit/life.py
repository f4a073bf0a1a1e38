"""The program of a process that answers requests until it is killed, or once after another was.

`deaths.py` starts it with a LifeOrder on its stdin. It writes what it answered to a new file, and
says so by a line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.equivalence import AuditSizes, OwnGates
from hypocenter.audit.executed import Executed, OwnRecord
from hypocenter.audit.gates import NOT_TO_BE_HAD
from hypocenter.audit.ways import Ways
from hypocenter.engine.llm import LLM
from hypocenter.settings.config import EngineConfig

#: The most that a process lives: longer than whoever started it waits.
_MAX_SECONDS = 600.0
_LOOK_SECONDS = 1.0


class LifeWord(msgspec.Struct, frozen=True):
    """What it says, by one line: that the answer lies in its file, or why there can be none."""

    cannot: str = ""


class LifeOrder(msgspec.Struct, frozen=True):
    """Answer the fixed prompt of `sizes` and write it to `out`. With `goes_on` answer more until
    killed. Blocks of the cache outlive the process in `block_memory` (CPU). It ends with its
    `parent`, a process."""

    path: str
    config: EngineConfig
    sizes: AuditSizes
    block_memory: str
    out: str
    name: str
    goes_on: bool
    parent: int


class _Answer(msgspec.Struct, frozen=True):
    """A AuditedRun in a file, without what was asked; `rows` are f32 [len(positions), width]."""

    name: str
    executed: Executed
    positions: tuple[int, ...]
    rows: bytes
    token_ids: tuple[int, ...]


def main() -> None:
    """Live as stdin says."""
    life = msgspec.json.decode(sys.stdin.readline(), type=LifeOrder)
    threading.Thread(target=end_with, args=(life.parent,), name="parent watch", daemon=True).start()
    try:
        _live(life)
    except NOT_TO_BE_HAD as error:
        _say(LifeWord(str(error)))


def _live(life: LifeOrder) -> None:
    end = time.monotonic() + _MAX_SECONDS
    with LLM(life.path, life.config, block_memory=life.block_memory) as llm:
        own = OwnGates(Ways(llm, OwnRecord(), llm.route().device), life.sizes, 0.0)
        write_answer(Path(life.out), own.answer(life.name) if own.ways.writes else own.together(1))
        _say(LifeWord())
        while life.goes_on and time.monotonic() < end:
            own.together(2)


def _say(word: LifeWord) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(word) + b"\n")
    sys.stdout.flush()


def end_with(parent: int) -> None:
    """End this process once `parent` has ended, or at the latest of its life."""
    end = time.monotonic() + _MAX_SECONDS
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


def write_answer(path: Path, ran: AuditedRun) -> None:
    """Write it for `read_answer`."""
    rows = np.ascontiguousarray(ran.rows).tobytes()
    answer = _Answer(ran.name, ran.executed, ran.positions, rows, ran.token_ids)
    path.write_bytes(msgspec.msgpack.encode(answer))


def read_answer(path: Path, asked: Mapping[str, Any]) -> AuditedRun:
    """What a process has written that was to run as `asked`. Raises OSError, MsgspecError."""
    answer = msgspec.msgpack.decode(path.read_bytes(), type=_Answer)
    rows = np.frombuffer(answer.rows, np.float32).reshape(len(answer.positions), -1)
    return AuditedRun(answer.name, asked, answer.executed, answer.positions, rows, answer.token_ids)


if __name__ == "__main__":
    main()
