"""The one door for kernel launches: prepare a launch once, run it many times.

A prepared launch holds its arguments for good; nothing is looked up or checked when it runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypocenter.device.lang import CpuKernel
from hypocenter.errors import LaunchRejected
from hypocenter.tensor import Tensor

log = logging.getLogger("hypocenter.launch")

# numba has one thread pool per process, and its workqueue layer aborts the process when two
# threads enter it at once; so this lock is the process's too and not an engine's.
_POOL = threading.Lock()

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel with its arguments: `tensors` as the plan knows them, `args` as the kernel does."""

    kernel: str
    function: Any
    tensors: tuple[Tensor, ...]
    args: tuple[Any, ...]


def prepare(kernel: CpuKernel, args: Sequence[Any], *, parallel: bool) -> Launch:
    """Bind a kernel to its arguments: Tensors, numpy arrays of a packed weight, and scalars.

    Raises LaunchRejected when a tensor is not on this device.
    """
    tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
    for tensor in tensors:
        if tensor.device != "cpu":
            raise LaunchRejected(kernel.name, f"{tensor.name} is on {tensor.device}, not on cpu")
    bound = tuple(part for arg in args for part in _parts(arg))
    function = kernel.parallel if parallel else kernel.serial
    return Launch(kernel.name, function, tensors, bound)


def _parts(arg: Any) -> tuple[Any, ...]:
    """What the kernel sees of an argument: a packed weight stands for several arrays."""
    if not isinstance(arg, Tensor):
        return (arg,)
    parts: tuple[Any, ...] = getattr(arg.data, "parts", (arg.data,))
    return parts


def compile_all(launches: Sequence[Launch], progress: Progress | None = None) -> None:
    """Compile, or load from the cache, every kernel of `launches` before the first one runs."""
    missing = {}
    for launch in launches:
        signature = tuple(map(launch.function.typeof_pyval, launch.args))
        if signature not in launch.function.overloads:
            missing[id(launch.function), signature] = launch
    for done, ((_, signature), launch) in enumerate(missing.items()):
        if progress:
            progress(f"compiling kernel {launch.kernel}", done / len(missing))
        started = time.perf_counter()
        launch.function.compile(signature)
        log.info("%s compiled in %.2f s", launch.kernel, time.perf_counter() - started)
    if progress and missing:
        progress("compiling kernels", 1.0)


def run(launches: Sequence[Launch]) -> None:
    """Run prepared launches in order. Safe from several threads: they take turns."""
    with _POOL:
        for launch in launches:
            launch.function(*launch.args)
