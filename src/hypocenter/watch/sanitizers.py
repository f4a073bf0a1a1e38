"""Tools of others that check a program's accesses: how they are started, and where they write.

compute-sanitizer is NVIDIA's; `fault_text.py` reads what it says.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hypocenter.record.gpu_stop import MAX_REPORTS, SanitizerReport
from hypocenter.watch.child import Enough
from hypocenter.watch.fault_text import MEMCHECK_NAME, num_heads_in, reports_in

#: With it each tensor of torch's is an allocation of its own, whose ends the tool knows.
VARIABLES = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
_MAX_LOG_BYTES, _MAX_LOGS = 8 << 20, 64
_LOG = "memcheck-"
#: How long a command may take to end by itself, once the tool has told all that it tells: how it
#: ends is known from the run before. Where a launch has a million threads that stray, the tool goes
#: on for a minute and more.
LAST_SECONDS = 0.5


def memcheck() -> str | None:
    """Where compute-sanitizer is; None where it is not on PATH."""
    return shutil.which(MEMCHECK_NAME)


def memcheck_command(program: str, command: Sequence[str], logs: Path) -> list[str]:
    """The command below the tool, whose text goes to files in `logs` and not between its own.

    Without stacks: they are not read, and a launch may have a million threads that stray.
    """
    options = ["--tool", "memcheck", "--target-processes", "all"]
    options += [
        "--show-backtrace",
        "no",
        "--print-limit",
        str(MAX_REPORTS),
        "--log-file",
        str(logs / f"{_LOG}%p"),
    ]
    return [program, *options, *command]


def enough_reports(logs: Path) -> Enough:
    """Of one process the tool told of as many accesses as it ever does, and that a while ago."""
    since = 0.0

    def is_there() -> bool:
        nonlocal since
        if not since and any(num_heads_in(text) >= MAX_REPORTS for text in _texts(logs)):
            since = time.monotonic()
        return bool(since) and time.monotonic() - since >= LAST_SECONDS

    return Enough(is_there, f"{MEMCHECK_NAME} had told of {MAX_REPORTS} accesses")


def reports_below(logs: Path) -> tuple[SanitizerReport, ...]:
    """What the tool wrote of all processes."""
    found: dict[SanitizerReport, None] = {}
    for text in _texts(logs):
        found |= dict.fromkeys(reports_in(text))
    return tuple(found)[:MAX_REPORTS]


def _texts(logs: Path) -> Iterator[str]:
    for path in sorted(logs.glob(f"{_LOG}*"))[:_MAX_LOGS]:
        with contextlib.suppress(OSError), path.open(errors="replace") as file:
            yield file.read(_MAX_LOG_BYTES)
