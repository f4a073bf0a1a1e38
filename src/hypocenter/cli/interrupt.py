"""Ctrl-C: an exception at once, but never inside the kernel compiler, where it would be lost.

LLVM calls back into Python through ctypes. An exception there is printed and dropped, or leaves a
kernel half compiled; so inside the compiler Ctrl-C is only noted, and raised once it is done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_COMPILER = ("numba", "llvmlite")
_held = False


@contextlib.contextmanager
def handle_interrupts() -> Iterator[None]:
    """Within, Ctrl-C is as this file says. A process that ignores Ctrl-C goes on ignoring it."""
    global _held
    _held = False
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
        raise_held()
    finally:
        signal.signal(signal.SIGINT, previous)


def note(number: int, frame: FrameType | None) -> None:
    """The signal handler. While one Ctrl-C waits for the compiler, the next ends the process."""
    global _held
    if not _in_compiler(frame):
        raise KeyboardInterrupt
    _held = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.write(2, b"hypo: stopping after this kernel; Ctrl-C again stops at once\n")


def raise_held() -> None:
    """Raise KeyboardInterrupt if one was held back; called wherever work comes up for air."""
    global _held
    if _held and threading.current_thread() is threading.main_thread():
        _held = False
        signal.signal(signal.SIGINT, note)
        raise KeyboardInterrupt


def _in_compiler(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _COMPILER:
            return True
        frame = frame.f_back
    return False
