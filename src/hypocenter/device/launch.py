"""The one door for kernel launches: prepare a launch once, run it many times.

A prepared launch holds its arguments for good. Its `run` is rebound by its mode, so that a launch
without checks is the compiled kernel itself, with nothing looked up before it.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hypocenter.config import LAUNCH_MODES
from hypocenter.device import memory
from hypocenter.device.lang import CpuKernel
from hypocenter.device.limits import check_launch
from hypocenter.errors import UsageError
from hypocenter.tensor import Tensor

log = logging.getLogger("hypocenter.launch")

# numba has one thread pool per process, and its workqueue layer aborts the process when two
# threads enter it at once; so this lock is the process's too and not an engine's.
_POOL = threading.Lock()

Progress = Callable[[str, float], None]


class Demands(Protocol):
    """What a launch needs of a contract (`kernels/contract.py`)."""

    def check(self, **arguments: Any) -> dict[str, Any]: ...

    def needs_int64(self, **arguments: Any) -> bool: ...

    def check_values(self, read: Callable[[Tensor], Any], **arguments: Any) -> None: ...


class Launch:
    """A kernel with its arguments: `facts` as its contract names them, `args` as it takes them.

    Of a GPU launch `jit` is Triton's function, `options` its grid, warps and constants, `extents`
    the bytes behind each pointer parameter.
    """

    __slots__ = (
        "args", "contract", "device", "extents", "facts", "function", "jit", "kernel", "options",
        "run",
    )  # fmt: skip

    def __init__(
        self, kernel: str, function: Any, args: tuple[Any, ...], contract: Demands,
        facts: Mapping[str, Any], *, device: str = "cpu", jit: Any = None,
        options: Mapping[str, Any] | None = None, extents: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.kernel, self.function, self.args = kernel, function, args
        self.contract, self.facts = contract, facts
        self.device, self.jit = device, jit
        self.options, self.extents = options or {}, extents or {}
        self.run: Callable[[], None] = functools.partial(function, *args, **self.options)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments by their names in the contract."""
        return {name: fact for name, fact in self.facts.items() if isinstance(fact, Tensor)}

    def set_mode(self, mode: str) -> None:
        """Rebind `run`: `off` is the kernel alone; `checked` first rechecks arguments and index
        values; `guarded` (GPU kernels) masks accesses off that leave their tensors.
        """
        plain = functools.partial(self.function, *self.args, **self.options)
        if mode == "off":
            self.run = plain
        elif mode == "checked":
            self.run = functools.partial(self._checked, plain)
        elif mode == "guarded":
            self.run = self._guarded()
        else:
            raise UsageError(
                f"launch mode is {mode!r}, but must be one of {', '.join(LAUNCH_MODES)}"
            )

    def _checked(self, plain: Callable[[], None]) -> None:
        self.contract.check_values(memory.to_host, **self.facts)
        plain()

    def _guarded(self) -> Callable[[], None]:
        if self.jit is None:
            raise UsageError(f"{self.kernel} runs on the CPU; guarded launches are for GPU kernels")
        from hypocenter.device.guarded import guarded_run  # needs Triton

        return guarded_run(self.jit, self.args, self.options, self.extents, self.device)


def prepare(
    kernel: CpuKernel, args: Sequence[Any], contract: Demands, facts: Mapping[str, Any], *,
    parallel: bool,
) -> Launch:  # fmt: skip
    """Bind a CPU kernel to its arguments: Tensors, numpy arrays and scalars.

    Raises LaunchRejected when `facts` break the contract.
    """
    contract.check(**facts)
    bound = tuple(value for arg in args for value, _ in _bound(arg))
    function = kernel.parallel if parallel else kernel.serial
    return Launch(kernel.name, function, bound, contract, facts)


def prepare_gpu(
    jit: Any, args: Sequence[Any], options: Mapping[str, Any], contract: Demands,
    facts: Mapping[str, Any], device: str,
) -> Launch:  # fmt: skip
    """Bind a Triton kernel to its arguments and `options` (grid, num_warps, constants).

    An argument of 2**31 elements or more picks the kernel's 64-bit variant. Raises LaunchRejected
    when `facts` break the contract or the launch exceeds the device's limits.
    """
    contract.check(**facts)
    if "WIDE" in jit.arg_names:
        options = {**options, "WIDE": contract.needs_int64(**facts)}
    pairs = [pair for arg in args for pair in _bound(arg)]
    names = [name for name in jit.arg_names if name not in options]
    extents = {
        name: extent for name, (_, extent) in zip(names, pairs, strict=True) if extent is not None
    }
    name, backend = jit.__name__.removesuffix("_kernel"), memory.backend_of(device)
    if backend.limits is not None:
        # Shared memory is known when the kernel is compiled; the compiler refuses too much of it.
        check_launch(backend.limits, name, options["grid"], options["num_warps"], 0)
    return Launch(
        name,
        backend.launcher(jit),
        tuple(value for value, _ in pairs),
        contract,
        facts,
        device=device,
        jit=jit,
        options=options,
        extents=extents,
    )


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
        started, num_hits = time.perf_counter(), _num_cache_hits(launch.function)
        launch.function.compile(signature)
        how = "loaded" if _num_cache_hits(launch.function) > num_hits else "compiled"
        log.info("%s %s in %.2f s", launch.kernel, how, time.perf_counter() - started)
    if progress and missing:
        progress("compiling kernels", 1.0)


def _num_cache_hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


def run(launches: Sequence[Launch]) -> None:
    """Run prepared launches in order. Safe from several threads: they take turns."""
    with _POOL:
        for launch in launches:
            launch.run()


def _bound(arg: Any) -> Iterator[tuple[Any, int | None]]:
    """What a kernel gets for an argument, and the bytes behind it if it is memory.

    A packed weight stands for several values.
    """
    if isinstance(arg, memory.Part):
        yield arg.argument, arg.num_bytes
    elif not isinstance(arg, Tensor):
        yield arg, None
    elif hasattr(arg.data, "parts"):
        for part in arg.data.parts:
            yield from _bound(part)
    else:
        yield arg.data, arg.extent_bytes
