"""Notes in a run's folder that somebody ended the process on purpose, so that it is no crash.

The note is written by faulthandler, in C and at once, so a process that is stuck ends as ever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from pathlib import Path
from typing import IO

from hypocenter import ring

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_note: IO[bytes] | None = None
_watched: list[signal.Signals] = []


def watch(folder: Path) -> None:
    """From now on SIGTERM and SIGHUP leave a note, unless the program handles them itself.

    Raises OSError when there can be no file for it.
    """
    global _note
    forget()
    _note = open(folder / ring.BY_HAND, "wb", buffering=0)  # noqa: SIM115 - until `forget`
    for number in _SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            faulthandler.register(number, file=_note, all_threads=False, chain=True)
            _watched.append(number)


def forget() -> None:
    """The run is over, or this is the child of a fork."""
    global _note
    while _watched:
        with contextlib.suppress(OSError, ValueError):
            faulthandler.unregister(_watched.pop())
    if _note is not None:
        _note.close()
    _note = None
