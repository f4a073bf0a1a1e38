"""A GPU's context, made by its driver in a thread of its own while Python imports torch.

Torch's runtime takes the driver's primary context, and makes it at its first call where there is
none: some 0.4 s on an H200. Nothing is told of what goes wrong here, since torch meets it as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

_DRIVER = "libcuda.so.1"


def begin_context(vendor: str, index: int, load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """Have the context of a GPU of NVIDIA made meanwhile; returns at once. It stays."""
    if vendor == "cuda":
        threading.Thread(target=_make, args=[index, load], name="context", daemon=True).start()


def _make(index: int, load: Callable[[str], Any]) -> None:
    """CUDA driver API, "Primary Context Management"."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with contextlib.suppress(OSError, AttributeError):  # there is no driver, or an old one
        driver = load(_DRIVER)
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), index):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
