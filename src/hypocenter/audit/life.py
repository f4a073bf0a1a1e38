"""The program of a process that answers requests until it is killed, or once after another was.

`deaths.py` starts it with a LifeOrder on its stdin. It writes what it answered to a new file, and
says so by a line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.equivalence import AuditSizes, OwnGates
from hypocenter.audit.executed import Executed, OwnRecord
from hypocenter.audit.ways import Ways
from hypocenter.engine.llm import LLM
from hypocenter.settings.config import EngineConfig

#: What it says when the answer lies in its file.
ANSWERED = "answered"


class LifeOrder(msgspec.Struct, frozen=True):
    """Answer the fixed prompt of `sizes` and write it to `out`. With `goes_on` answer more until
    killed. Blocks of the cache outlive the process in `block_memory` (CPU)."""

    path: str
    config: EngineConfig
    sizes: AuditSizes
    block_memory: str
    out: str
    name: str
    goes_on: bool


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
    with LLM(life.path, life.config, block_memory=life.block_memory) as llm:
        own = OwnGates(Ways(llm, OwnRecord(), llm.route().device), life.sizes, 0.0)
        ran = own.answer(life.name) if own.ways.writes else own.together(1)
        answer = _Answer(
            ran.name,
            ran.executed,
            ran.positions,
            np.ascontiguousarray(ran.rows).tobytes(),
            ran.token_ids,
        )
        Path(life.out).write_bytes(msgspec.msgpack.encode(answer))
        print(ANSWERED, flush=True)
        while life.goes_on:
            own.together(2)


def read_answer(path: Path, asked: Mapping[str, Any]) -> AuditedRun:
    """What a process has written that was to run as `asked`. Raises OSError, MsgspecError."""
    answer = msgspec.msgpack.decode(path.read_bytes(), type=_Answer)
    rows = np.frombuffer(answer.rows, np.float32).reshape(len(answer.positions), -1)
    return AuditedRun(answer.name, asked, answer.executed, answer.positions, rows, answer.token_ids)


if __name__ == "__main__":
    main()
