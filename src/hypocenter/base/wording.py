"""How counts, sizes and foreign text are spelled in messages."""

from __future__ import annotations

import re
import signal


def count_text(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def bytes_text(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves a figure above 1."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def ending_of(returncode: int) -> str:
    """How a process ended, by what Python says of it: `ended by SIGKILL`."""
    if returncode < 0:
        return f"ended by {signal_name(-returncode)}"
    return f"ended with exit code {returncode}"


#: What somebody, or the kernel for lack of memory, ends a process with that did nothing wrong.
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def signal_name(number: int) -> str:
    """SIGABRT and the like; `signal 99` for one that has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def bare_name(kernel: str) -> str:
    """The name of a kernel without what a compiler adds: result, namespace, types, arguments."""
    return re.split(r"[(\[<]", kernel)[0].split("::")[-1].split(" ")[-1]
