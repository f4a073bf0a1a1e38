"""What AMD's kernel driver leaves when it resets a GPU: its devcoredump, as lines of its log.

Source: `amdgpu_dev_coredump.c` of Linux. The file lies in sysfs for five minutes, and mostly only
root may read it. Registers and rings are left out.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

MAX_DUMPS, MAX_BYTES, MAX_LINES, MAX_LINE_CHARS = 8, 1 << 20, 64, 200
PREFIX = "amdgpu devcoredump: "
_FIRST = "**** AMDGPU Device Coredump ****"
_TELLING = re.compile(
    r"process_name: |Ring timed out|IP Type: |Page fault observed|Faulty page starting"
    r"|Protection fault status|VRAM is lost"
)
_CLOCK_SECONDS = 1.0


def device_dump(since_monotonic: float, root: Path = Path("/")) -> tuple[str, ...]:
    """The telling lines of dumps that are newer than that; empty where none can be read."""
    earliest = time.time() - (time.monotonic() - since_monotonic) - _CLOCK_SECONDS
    lines: list[str] = []
    with contextlib.suppress(OSError):
        for path in sorted(root.glob("sys/class/devcoredump/devcd*/data"))[:MAX_DUMPS]:
            if path.stat().st_mtime < earliest:
                continue
            with path.open("rb") as file:
                text = file.read(MAX_BYTES).decode(errors="replace")
            if text.lstrip().startswith(_FIRST):
                telling = filter(_TELLING.search, text.splitlines())
                lines += [f"{PREFIX}{line.strip()[:MAX_LINE_CHARS]}" for line in telling]
    return tuple(lines[:MAX_LINES])
