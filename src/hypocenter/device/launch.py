"""The one door for kernel launches: prepare a launch once, run it many times.

A prepared launch holds its arguments for good. Its `run` is rebound by its mode, so that a launch
without checks is the compiled kernel itself, with nothing looked up before it.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hypocenter.device import memory
from hypocenter.device.lang import CpuKernel
from hypocenter.errors import UsageError
from hypocenter.tensor import Tensor

log = logging.getLogger("hypocenter.launch")

# numba has one thread pool per process, and its workqueue layer aborts the process when two
# threads enter it at once; so this lock is the process's too and not an engine's.
_POOL = threading.Lock()

MODES = ("off", "checked")

Progress = Callable[[str, float], None]


class Demands(Protocol):
    """What a launch needs of a contract (`kernels/contract.py`)."""

    def check(self, **arguments: Any) -> dict[str, Any]: ...

    def check_values(self, read: Callable[[Tensor], Any], **arguments: Any) -> None: ...


class Launch:
    """A kernel with its arguments: `facts` as its contract names them, `args` as it takes them."""

    __slots__ = ("args", "contract", "facts", "function", "kernel", "options", "run")

    def __init__(
        self, kernel: str, function: Any, args: tuple[Any, ...], contract: Demands,
        facts: Mapping[str, Any], options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.kernel, self.function, self.args = kernel, function, args
        self.contract, self.facts, self.options = contract, facts, options or {}
        self.run: Callable[[], None] = functools.partial(function, *args, **self.options)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments by their names in the contract."""
        return {name: fact for name, fact in self.facts.items() if isinstance(fact, Tensor)}

    def set_mode(self, mode: str) -> None:
        """`off` runs the kernel alone; `checked` first rechecks arguments and index values."""
        if mode not in MODES:
            raise UsageError(f"launch mode is {mode!r}, but must be one of {', '.join(MODES)}")
        plain = functools.partial(self.function, *self.args, **self.options)
        self.run = plain if mode == "off" else functools.partial(self._checked, plain)

    def _checked(self, plain: Callable[[], None]) -> None:
        self.contract.check_values(memory.to_host, **self.facts)
        plain()


def prepare(
    kernel: CpuKernel, args: Sequence[Any], contract: Demands, facts: Mapping[str, Any], *,
    parallel: bool,
) -> Launch:  # fmt: skip
    """Bind a CPU kernel to its arguments: Tensors, numpy arrays and scalars.

    Raises LaunchRejected when `facts` break the contract.
    """
    contract.check(**facts)
    bound = tuple(part for arg in args for part in _parts(arg))
    function = kernel.parallel if parallel else kernel.serial
    return Launch(kernel.name, function, bound, contract, facts)


def prepare_gpu(
    jit: Any, args: Sequence[Any], options: Mapping[str, Any], contract: Demands,
    facts: Mapping[str, Any], device: str,
) -> Launch:  # fmt: skip
    """Bind a Triton kernel to its arguments and `options` (grid, num_warps, constants).

    Raises LaunchRejected when `facts` break the contract.
    """
    contract.check(**facts)
    bound = tuple(part for arg in args for part in _parts(arg))
    name = jit.__name__.removesuffix("_kernel")
    launcher = memory.backend_of(device).launcher(jit)
    return Launch(name, launcher, bound, contract, facts, options)


def compile_all(launches: Sequence[Launch], progress: Progress | None = None) -> None:
    """Compile, or load from the cache, every kernel of `launches` before the first one runs."""
    missing = {}
    for launch in launches:
        if not hasattr(launch.function, "typeof_pyval"):
            continue  # Triton compiles a kernel when it is first launched
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
            launch.run()


def _parts(arg: Any) -> tuple[Any, ...]:
    """What the kernel sees of an argument: a packed weight stands for several arrays."""
    if not isinstance(arg, Tensor):
        return (arg,)
    parts: tuple[Any, ...] = getattr(arg.data, "parts", (arg.data,))
    return parts
