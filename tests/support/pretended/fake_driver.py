"""A driver and a CUPTI that are made of C and have no GPU: calls of them run the callbacks.

`Fake` compiles `fake_driver.c`, once for all tests of a process.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("fake_driver.c")
#: Kernels that it has: a pointer, a pointer and a number; a pointer and a number.
SCATTER, SCALE = 0, 1


def has_compiler() -> bool:
    return shutil.which("cc") is not None


@functools.cache
def library() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fake-driver-"))
    made = folder / "libfake.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", str(made), str(SOURCE)]
    subprocess.run(command, check=True)
    return made


class Fake:
    """Calls of the driver, as a program makes them."""

    def __init__(self) -> None:
        self.path = library()
        self._lib: Any = ctypes.CDLL(str(self.path))
        self._lib.fake_function.restype = ctypes.c_void_p

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        assert self._lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)) == 0
        return address.value

    def free(self, address: int) -> None:
        assert self._lib.cuMemFree_v2(ctypes.c_uint64(address)) == 0

    def launch(
        self,
        kernel: int,
        *given: int,
        threads: int = 128,
        blocks: int = 4,
        is_extended: bool = False,
        is_packed: bool = False,
    ) -> int:
        """Launch a kernel of it; pointers are those above 32 bits or null, numbers the others.

        With `is_packed` the parameters come in one buffer, as `extra`.
        """
        function = ctypes.c_void_p(self._lib.fake_function(kernel))
        values: list[Any] = [ctypes.c_uint64(value) for value in given[:-1]]
        values.append(ctypes.c_int(given[-1]))
        addresses = [ctypes.addressof(value) for value in values]
        pointers: Any = (ctypes.c_void_p * len(values))(*addresses)
        extra: Any = None
        if is_packed:
            text = b"".join(bytes(value) for value in values)
            buffer, size = ctypes.create_string_buffer(text), ctypes.c_size_t(len(text))
            where = ctypes.addressof(buffer), ctypes.addressof(size)
            extra = (ctypes.c_void_p * 5)(1, where[0], 2, where[1], 0)
            pointers = None
        sizes = blocks, 1, 1, threads, 1, 1, 64
        if is_extended:
            config = (ctypes.c_uint32 * 16)(*sizes)
            return int(self._lib.cuLaunchKernelEx(config, function, pointers, extra))
        return int(self._lib.cuLaunchKernel(function, *sizes, None, pointers, extra))

    def launch_graph(self) -> None:
        assert self._lib.cuGraphLaunch(None, None) == 0

    def launch_in_thread(self, kernel: int, times: int) -> None:
        """A thread that Python knows nothing of launches, and ends."""
        function = ctypes.c_void_p(self._lib.fake_function(kernel))
        assert self._lib.fake_thread(function, times) == 0

    def fail_launches(self, code: int, *, is_end: bool = False) -> None:
        """From now on a launch runs into a fault, and the GPU answers nothing any more; 0: it is
        healthy again. With `is_end` the process ends in it: its answer is never seen."""
        self._lib.fake_fail(code, is_end)

    def load_late(self) -> None:
        """What a kernel takes is not known before its first launch has loaded it."""
        self._lib.fake_load_late()

    def refuse_subscribers(self, code: int) -> None:
        """From now on CUPTI answers so to whoever subscribes; 0: it is free again."""
        self._lib.fake_refuse(code)

    def unload(self) -> None:
        assert self._lib.cuModuleUnload(None) == 0
