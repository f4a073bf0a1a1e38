"""A server that may open few files: it refuses to start in a line, or goes on whoever connects."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from outside.served import serving

from attack.arena import Row

_NUM_CLIENTS = 200
_MAX_LINES = 20


@pytest.mark.parametrize("num_files", [64, 100])
def test_clients_that_take_all_files(
    tmp_path: Path, note: Callable[[Row], None], num_files: int
) -> None:
    row = Row(f"ulimit -n {num_files}, {_NUM_CLIENTS} clients")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n {num_files}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    lines: list[str] = []
    try:
        with serving(tmp_path, python=str(python)) as served, contextlib.ExitStack() as held:
            lines = served.stderr
            num_lines = len(lines)
            for _ in range(_NUM_CLIENTS):
                with contextlib.suppress(OSError):
                    address = ("127.0.0.1", served.port)
                    held.enter_context(socket.create_connection(address, timeout=2))
            time.sleep(2.0)
            served.kill_worker()  # the next one needs files too
            time.sleep(2.0)
            row.seen = {"lines": len(lines) - num_lines}
            held.close()
            served.wait_ready(30)
            reply = served.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
            if reply.status != 200:
                row.problems.append(f"afterwards: {reply.status} {reply.body[:200]!r}")
            if len(lines) - num_lines > _MAX_LINES:
                row.problems.append(f"{len(lines) - num_lines} lines are in the log")
    except (AssertionError, OSError) as error:
        is_refused = len(lines) == 1 and ("files" in lines[0] or "ulimit" in lines[0])
        if not is_refused:
            row.problems.append(f"{type(error).__name__}: {lines[-3:]}")
    if any("Traceback" in line for line in lines):
        row.problems.append("a traceback is in the log")
    note(row)
