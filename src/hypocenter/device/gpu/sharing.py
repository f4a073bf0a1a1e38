"""Memory of a GPU that one process has and others map: the driver's calls, which torch lacks.

CUDA driver API, "Unified Addressing" and cuIpcGetMemHandle; HIP has the same by its names. What is
mapped stays with the process that allocated it. It outlives whoever maps it, however that dies.
HIP's calls have not run on hardware.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypocenter.base.errors import NotShareable

_HANDLE_BYTES = 64
#: Peer access may be switched on when the memory lies on another GPU; both vendors' only flag.
_LAZY_PEER_ACCESS = 1
#: CUDA_ERROR_OUT_OF_MEMORY, and hipErrorOutOfMemory.
_OUT_OF_MEMORY = 2
#: CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED.
_HAS_ATOMICS = 3


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * _HANDLE_BYTES)]


@dataclass(frozen=True, slots=True)
class _Names:
    library: str
    allocate: str
    export: str
    open: str
    #: Of two GPUs; empty where nobody asks.
    attribute: str = ""


_CUDA = _Names(
    "libcuda.so.1",
    "cuMemAlloc_v2",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuDeviceGetP2PAttribute",
)
_HIP = _Names("libamdhip64.so", "hipMalloc", "hipIpcGetMemHandle", "hipIpcOpenMemHandle")
_DRIVERS = {"cuda": _CUDA, "hip": _HIP}


class SharingDriver:
    """The calls of one vendor's driver, for the GPU that is current in this thread.

    Raises NotShareable where there is no driver, or it refuses.
    """

    def __init__(self, device: str) -> None:
        self._device, self._names = device, _DRIVERS[device.partition(":")[0]]
        try:
            self._library = ctypes.CDLL(self._names.library)
        except OSError as error:
            raise NotShareable(device, str(error)) from error

    def allocate(self, num_bytes: int) -> int | None:
        """Address of fresh memory, which is no part of a larger piece; None: there is no room."""
        address = ctypes.c_uint64()
        call = self._function(self._names.allocate)
        status = call(ctypes.byref(address), ctypes.c_size_t(num_bytes))
        if status == _OUT_OF_MEMORY:
            return None
        self._require(self._names.allocate, status)
        return int(address.value)

    def export(self, address: int) -> bytes:
        """The handle by which another process opens an allocation."""
        handle = _Handle()
        call = self._function(self._names.export)
        self._require(self._names.export, call(ctypes.byref(handle), ctypes.c_uint64(address)))
        return bytes(memoryview(handle).cast("B"))

    def open(self, handle: bytes) -> int:
        """Where the memory of a handle lies in this process."""
        if len(handle) != _HANDLE_BYTES:
            raise NotShareable(self._device, f"a handle of {len(handle)} bytes")
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        call = self._function(self._names.open)
        status = call(ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._require(self._names.open, status)
        return int(address.value)

    def has_atomics(self, own: int, other: int) -> bool:
        """Whether kernels of GPU `own` take atomic steps in memory of GPU `other`."""
        value = ctypes.c_int()
        call = self._function(self._names.attribute)
        pair = (ctypes.c_int(own), ctypes.c_int(other))  # a CUdevice is the number of the device
        status = call(ctypes.byref(value), ctypes.c_int(_HAS_ATOMICS), *pair)
        self._require(self._names.attribute, status)
        return bool(value.value)

    def _function(self, name: str) -> Callable[..., int]:
        found: Any = getattr(self._library, name, None)
        if found is None:
            raise NotShareable(self._device, f"{self._names.library} has no {name}")
        function: Callable[..., int] = found
        return function

    def _require(self, call: str, status: int) -> None:
        if status:
            raise NotShareable(self._device, f"{call} gave error {status}")


class Foreign:
    """Memory that torch did not allocate, as it takes it: https://numba.readthedocs.io/en/stable/
    cuda/cuda_array_interface.html."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
