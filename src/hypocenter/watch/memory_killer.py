"""Whether the kernel killed a process because memory ran out: its counter and its log.

File names and meanings are those of the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hypocenter.record.fault_record import FaultRecord, MemoryKill

_LOGGED = re.compile(
    r"Killed process (\d+)|oom-kill:.*\bpid=(\d+)|oom_reaper: reaped process (\d+)"
)


def num_memory_kills(root: Path = Path("/")) -> int | None:
    """How many processes of our control group the kernel has killed for lack of memory so far.

    None where it does not say. `root` is where /proc and /sys are looked for.
    """
    for file in _counters(root):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdecimal():
                return int(number)
    return None


def with_memory_kill(
    fault: FaultRecord, lines: Sequence[str], pid: int | None, num_kills: int | None
) -> FaultRecord:
    """The record with what is known of the kernel's killer.

    `lines` are of the kernel's log, `num_kills` how many processes of the control group it ended
    while the run lasted.
    """
    if fault.kind != "crash":
        return fault
    named = {
        number for line in lines for match in _LOGGED.finditer(line) for number in match.groups()
    }
    if str(pid) in named:
        found = MemoryKill.LOGGED
    elif num_kills is None:
        found = MemoryKill.UNKNOWN
    else:
        found = MemoryKill.COUNTED if num_kills > 0 else MemoryKill.NOT_COUNTED
    return msgspec.structs.replace(fault, memory_kill=found)


def _counters(root: Path) -> Iterator[Path]:
    """Files that may hold the counter, of our own control group first."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield mount / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield mount / "memory" / path.lstrip("/") / "memory.oom_control"
    # Where a container has a view of its own, its group is the topmost one that it sees.
    yield mount / "memory.events"
    yield mount / "memory/memory.oom_control"
