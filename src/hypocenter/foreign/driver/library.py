"""CUPTI's and the driver's own functions, as far as they are called: found, loaded, asked.

CUPTI's interface of callbacks is that of `cupti_callbacks.h`, the driver's that of `cuda.h`.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypocenter.record.driver_table import CALLS

_DRIVER_API, _SUCCESS = 1, 0
_TAKEN = "another tool has subscribed to CUPTI before: a profiler or a sanitizer"
_WHY = {
    12: _TAKEN,
    39: _TAKEN,
    15: "CUPTI was not initialised: there is no driver, or another tool has it",
    35: "this user may not use CUPTI's counters (ERR_NVGPUCTRPERM)",
}

#: What a launch may exceed: `CUdevice_attribute`, and `CUfunction_attribute` of `OF_KERNEL`.
LIMITS = {
    "threads of a block": 1,
    "threads of a block along x": 2,
    "threads of a block along y": 3,
    "threads of a block along z": 4,
    "blocks along x": 5,
    "blocks along y": 6,
    "blocks along z": 7,
    "shared bytes of a block": 97,
}
OF_KERNEL = {
    "threads of a block of the kernel": 0,
    "static shared bytes of the kernel": 1,
    "dynamic shared bytes of the kernel": 8,
}


class NotHere(Exception):
    """CUPTI or the driver cannot be had; says why in one sentence."""


class DriverLibrary:
    """The driver's functions that tell of kernels and limits; raises NotHere without a driver."""

    def __init__(self, name: str = "libcuda.so.1") -> None:
        try:
            self._lib: Any = ctypes.CDLL(name)
        except OSError as error:
            raise NotHere(f"the driver ({name}) cannot be loaded") from error

    def address(self, name: str) -> ctypes.c_void_p:
        """Where a function lies; null where this driver has none of that name."""
        function = getattr(self._lib, name, None)
        return ctypes.cast(function, ctypes.c_void_p) if function else ctypes.c_void_p()

    def error(self, code: int) -> tuple[str, str]:
        """The driver's name of an error, and what it says of it."""
        told = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            code_of = getattr(self._lib, name)(ctypes.c_int(code), ctypes.byref(text))
            told.append((text.value or b"").decode(errors="replace") if not code_of else "")
        return told[0] or f"error {code}", told[1]

    def limits(self, function: int) -> dict[str, int]:
        """Those of the current GPU and of a kernel, as far as they can be asked for."""
        device, value, found = ctypes.c_int(), ctypes.c_int(), {}
        if self._lib.cuCtxGetDevice(ctypes.byref(device)) != _SUCCESS:
            return {}
        for name, number in LIMITS.items():
            if not self._lib.cuDeviceGetAttribute(ctypes.byref(value), number, device):
                found[name] = value.value
        for name, number in OF_KERNEL.items():
            kernel, where = ctypes.c_void_p(function), ctypes.byref(value)
            code = self._lib.cuFuncGetAttribute(where, number, kernel)
            if code and hasattr(self._lib, "cuKernelGetAttribute"):  # the runtime's handles
                code = self._lib.cuKernelGetAttribute(where, number, kernel, device)
            if not code:
                found[name] = value.value
        return found


class Cupti:
    """The one subscription to callbacks that a process may have.

    Raises NotHere where CUPTI is not there, and where another tool has subscribed.
    """

    def __init__(self, callback: Any, path: Path | None = None) -> None:
        found = path or next(cupti_files(), None)
        if found is None:
            raise NotHere("libcupti is not here: torch brings it, and CUDA's toolkit does")
        try:
            self._lib: Any = ctypes.CDLL(str(found))
        except OSError as error:
            raise NotHere(f"{found.name} cannot be loaded: {error}") from error
        self._handle = ctypes.c_void_p()
        code = self._lib.cuptiSubscribe(ctypes.byref(self._handle), callback, None)
        if code:
            raise NotHere(_WHY.get(code, f"cuptiSubscribe answered {code}"))
        for number in CALLS.values():
            self._lib.cuptiEnableCallback(ctypes.c_uint32(1), self._handle, _DRIVER_API, number)

    def close(self) -> None:
        """End the subscription, so that another tool may have it; callbacks still run out."""
        self._lib.cuptiUnsubscribe(self._handle)


def cupti_files() -> Iterator[Path]:
    """Libraries that may be CUPTI: what the process has mapped, torch's, the toolkit's."""
    yield from _mapped_files()
    roots = dict.fromkeys([sysconfig.get_path("purelib"), *sys.path])
    for root in filter(None, roots):
        for pattern in ("nvidia/*/lib/libcupti.so.*", "nvidia/*/*/lib/libcupti.so.*"):
            yield from sorted(Path(root).glob(pattern), reverse=True)
    for pattern in ("extras/CUPTI/lib64/libcupti.so.*", "lib64/libcupti.so.*"):
        yield from sorted(Path("/usr/local/cuda").glob(pattern), reverse=True)


def _mapped_files() -> Iterator[Path]:
    """Those of CUPTI's libraries that this process has loaded already."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        name = line.rpartition(" ")[2]
        if name.startswith("/") and Path(name).name.startswith("libcupti.so"):
            yield Path(name)
