"""Machine code that was linked (`object_code.py`), put into memory and ready to be called."""

from __future__ import annotations

import ctypes
import mmap
import platform
from functools import cache
from typing import Any

import numpy as np

from hypocenter.device.cpu.object_code import FROM_LIBC, FROM_NUMBA, Linked
from hypocenter.device.cpu.shared_state import STATE, TICKET_SYMBOL
from hypocenter.device.cpu.threads import numba_library

_READ_AND_RUN = mmap.PROT_READ | mmap.PROT_EXEC
#: What code may ask for beside functions of libc and of numba: the state of shared launches.
OUTER = frozenset({TICKET_SYMBOL})
#: Memory that holds code, for as long as the process lives.
_kept: list[Any] = []


def can_load() -> bool:
    """Whether code that was linked runs on this kind of machine."""
    return platform.machine() in ("x86_64", "AMD64")


def load(linked: Linked) -> dict[str, int] | None:
    """Addresses of the entries; None where the system gives no memory that code may lie in, or
    something that the code asks for is not there."""
    num_bytes = len(linked.code)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        outer = {name: _address(name) for name in {name for _, name, _ in linked.outer}}
    except (OSError, ValueError, KeyError):
        return None
    memory[:] = linked.code
    held = np.frombuffer(memory, np.uint8)
    base = int(held.ctypes.data)
    words = np.frombuffer(linked.code, np.uint8)
    if linked.inner:
        # A word need not lie at a multiple of 8.
        places = np.array(linked.inner)[:, None] + np.arange(8)
        values = words[places].copy().view(np.int64) + base
        held[places] = values.view(np.uint8)
    for place, name, addend in linked.outer:
        held[place : place + 8] = np.array([outer[name] + addend], np.int64).view(np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if protect(base, num_bytes, _READ_AND_RUN):
        return None
    _kept.append(memory)
    return {name: base + at for name, at in linked.entries.items()}


def _address(name: str) -> int:
    """Raises KeyError for what nobody has."""
    if name == TICKET_SYMBOL:
        return int(STATE.ctypes.data)
    if name in FROM_LIBC:
        function = getattr(ctypes.CDLL(None), name)
        return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
    return int(_helpers()[name.removeprefix(FROM_NUMBA)])


@cache
def _helpers() -> dict[str, int]:
    """Addresses of what numba's arrays are allocated and freed by."""
    library = numba_library("core/runtime/_nrt_python")
    found: dict[str, int] = {} if library is None else library.c_helpers
    return found
