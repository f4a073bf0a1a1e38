"""Lines of the kernel's log that tell of GPUs and of lack of memory, where they are readable."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator

MAX_LINES = 200
MAX_LINE_CHARS = 1000
MAX_LOG_BYTES = 8 << 20
#: Kernel and monotonic clock drift apart by no more than this.
SLACK_SECONDS = 5.0

#: NVIDIA's module, AMD's, the killer of processes, and the processor's own faults.
_TELLING = re.compile(
    r"NVRM|nvidia|amdgpu|gfxhub|mmhub|drm|Out of memory|oom-kill|oom_reaper|segfault|general prot"
    r"|UTCL2|PERMISSION_FAULTS|MAPPING_ERROR|WALKER_ERROR|MORE_FAULTS|\bRW: 0x"
)
_CUT = "\n"


def kernel_log(since_monotonic: float) -> tuple[tuple[str, ...], str]:
    """The telling lines since then, oldest first, and why the log is not readable."""
    try:
        records = list(_from_device())
    except OSError as error:
        records = list(_from_program())
        if not records:
            return (), f"it is not readable ({error.strerror}); try as root"
    earliest = since_monotonic - SLACK_SECONDS
    lines = [line for seconds, line in records if seconds >= earliest and _TELLING.search(line)]
    return tuple(line[:MAX_LINE_CHARS] for line in lines[-MAX_LINES:]), ""


def _from_device() -> Iterator[tuple[float, str]]:
    """Records of /dev/kmsg: `priority,number,microseconds,flags;text`, one for each read."""
    file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    num_bytes = 0
    try:
        while num_bytes < MAX_LOG_BYTES:
            try:
                record = os.read(file, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:  # what was to be read has been overwritten; the next is there
                continue
            if not record:
                return
            num_bytes += len(record)
            head, _, text = record.decode(errors="replace").partition(";")
            with contextlib.suppress(ValueError, IndexError):
                yield int(head.split(",")[2]) / 1e6, text.split(_CUT)[0]
    finally:
        os.close(file)


def _from_program() -> Iterator[tuple[float, str]]:
    """What `dmesg` shows: `[seconds] text`."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["dmesg"], capture_output=True, timeout=3, env={**os.environ, "LC_ALL": "C"}
        )
        for line in done.stdout[-MAX_LOG_BYTES:].decode(errors="replace").splitlines():
            if match := re.match(r"\[ *(\d+\.\d+)\] (.*)", line):
                yield float(match[1]), match[2]


def now() -> float:
    """The time to give to `kernel_log` later."""
    return time.monotonic()
