"""What CPU kernels are written and compiled with; `code_cache.py` keeps their machine code.

Knows nothing of what a kernel computes; the vector words that kernels are written in are in
`vector.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from importlib import metadata
from types import FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import prange, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, register_model

from hypocenter.device.cpu import code_cache, instructions
from hypocenter.device.cpu.items import items
from hypocenter.device.cpu.numba_target import ASKED_FOR
from hypocenter.device.cpu.whole_kernels import compile_part, compile_whole

# By default libgomp's idle threads spin for milliseconds, and on cores that others use too they
# keep the very thread they wait for from running: measured 3.6 tokens/s against 20.6 with this.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


_asked_for = ASKED_FOR


def _load_tbb() -> bool:
    """Let numba find the TBB of this environment, which the system's loader does not know of.

    Its threads take work as they come, where OpenMP waits for each of them to do its share: on
    two cores of which another process wants one, long prompts are 13 % faster.
    """
    try:
        files = metadata.files("tbb") or []
        found = next(file for file in files if file.name in ("libtbb.so.12", "libtbb.12.dylib"))
        ctypes.CDLL(str(found.locate()), ctypes.RTLD_GLOBAL)
    except (metadata.PackageNotFoundError, StopIteration, OSError):
        return False
    return True


_has_tbb = _load_tbb()


def thread_pool() -> str:
    """The library whose threads run kernels: tbb where it is installed, or what was asked for."""
    asked: str = numba.config.THREADING_LAYER
    if asked != "default":
        return asked
    return "tbb" if _has_tbb else "omp or workqueue"


#: What others have of numba from here.
__all__ = ["binding", "cgutils", "ir", "models", "prange", "register_model", "types"]


_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": False}


class CpuKernel:
    """One kernel source compiled twice: `serial` takes all items of its `prange`, `shared`, which
    several threads run at once, those that no other has taken (`pool.py`).

    Both do an item by the same body, so their results are bitwise equal.
    """

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        self.name = function.__name__.strip("_").removesuffix("_cpu")
        self.serial = _compile_on_demand(function, "serial", **options)
        self._function, self._options = function, options

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of what it takes, in order."""
        code = self._function.__code__
        return code.co_varnames[: code.co_argcount]

    @cached_property
    def floats(self) -> frozenset[str]:
        """Names of the parameters that are annotated `float`: numbers of 32 bits."""
        kinds = self._function.__annotations__
        return frozenset(name for name in self.parameters if kinds.get(name) in ("float", float))

    @cached_property
    def shared(self) -> Any:
        """The same code, in which the name `prange` means something else."""
        function = self._function
        sharing = {**function.__globals__, "prange": items}
        twin = FunctionType(function.__code__, sharing, function.__name__)
        # numba names machine code by this and a number that begins anew in each process: of two
        # functions of one name that come out of the cache, one would be called for both.
        twin.__qualname__, twin.__module__ = f"{function.__qualname__}_shared", function.__module__
        return _compile_on_demand(twin, "shared", **self._options)


def cpu_kernel(function: Callable[..., None]) -> CpuKernel:
    """Make a kernel of a function whose outer loop is a `prange` over independent items.

    It allocates nothing, so numba counts no references: that would be an atomic step per array and
    call, which are many in a kernel.
    """
    return CpuKernel(function, _nrt=False)


def allocating_kernel(function: Callable[..., None]) -> CpuKernel:
    """As `cpu_kernel`, for one that makes arrays of its own."""
    return CpuKernel(function)


def host_function(function: Callable[..., None]) -> Any:
    """Compile a function that is no kernel: it takes arrays of the host, and no plan has it."""
    return _compile_on_demand(function, "serial", _nrt=False)


def _record_name(record: Any) -> tuple[str, tuple[str, ...]]:
    """What stands for a record type in the names of machine code: a hash of its fields.

    By itself numba takes a number that begins anew in each process, so code for two layouts that
    two processes have compiled could come out of the cache under one name.
    """
    return "Record", (hashlib.sha256(record.name.encode()).hexdigest()[:16],)


types.Record.mangling_args = property(_record_name)


def threads_entry(function: Callable[..., None]) -> Any:
    """Make a function whose `prange` numba's own threads share: how threads get into a step."""
    compiled = numba.njit(parallel=True, _nrt=False, **_OPTIONS)(function)
    return _look_on_disk(compiled, function, "threads")


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that kernels call; LLVM inlines it where that pays. It allocates nothing."""
    return compile_part(function, _nrt=False, **_OPTIONS)  # type: ignore[no-any-return]


def always_inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `inline`, for a function whose vectors must stay in registers between its calls."""
    part = compile_part(function, _nrt=False, forceinline=True, **_OPTIONS)
    return part  # type: ignore[no-any-return]


def inline_allocating(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `inline`, for a function that makes arrays or is given some by one that does."""
    return compile_part(function, **_OPTIONS)  # type: ignore[no-any-return]


def intrinsic(build: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that kernels call out of one that types it and emits its LLVM code."""
    return numba_intrinsic(build)  # type: ignore[no-any-return]


def literal_intrinsic(build: Callable[..., Any]) -> Callable[..., Any]:
    """As `intrinsic`, for one that wants arguments which are written out as constants."""
    return numba_intrinsic(prefer_literal=True)(build)  # type: ignore[no-any-return]


def literal(count: Any) -> int:
    """A count that the kernel's source states; 0 sends numba to ask again with its value."""
    return getattr(count, "literal_value", 0)


#: Types of arguments, by what they hang on. numba asks anew for each; a plan has thousands.
_kinds: dict[Any, Any] = {}


def kinds_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """The types that numba compiles a kernel for when it is launched with `args`."""
    kinds = []
    for value in args:
        key: Any = type(value)
        if key is np.ndarray:
            key = value.dtype, value.ndim, value.flags.num
        elif key is int and not -(1 << 63) <= value < 1 << 63:
            key = value  # the few that are unsigned
        if (kind := _kinds.get(key)) is None:
            kind = _kinds[key] = numba.typeof(value)
        kinds.append(kind)
    return tuple(kinds)


def kernel_entry(function: Any, args: Sequence[Any]) -> tuple[int, tuple[Any, ...]]:
    """Address of the machine code of a compiled kernel for these arguments, and their types.

    It takes two addresses, for a result and an exception, then each argument flattened, and
    returns 0 when all is well.
    """
    kinds = kinds_of(args)
    compiled = function.overloads[kinds]
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return int(address), kinds


_of_thread = threading.local()


def set_num_threads(num_threads: int) -> None:
    """Bound the threads of the parallel kernels that the calling thread launches."""
    if num_threads == getattr(_of_thread, "num_threads", None):
        return  # numba takes its time, before each step
    num_threads = min(num_threads, max_num_threads())
    numba.set_num_threads(num_threads)
    # Each item is some microseconds of work: a thread that comes late leaves more to the others.
    numba.set_parallel_chunksize(1)
    _of_thread.num_threads = num_threads


def num_threads() -> int:
    """Threads that kernels which the calling thread launches may use."""
    known: int | None = getattr(_of_thread, "num_threads", None)
    return int(numba.get_num_threads()) if known is None else known


def max_num_threads() -> int:
    """Threads in numba's pool: the cores of this process, or NUMBA_NUM_THREADS."""
    return int(numba.config.NUMBA_NUM_THREADS)


@cache
def cpu_features() -> frozenset[str]:
    """Names of the instruction-set features that kernels are compiled for, as LLVM spells them.

    Read from numba's code generator, so NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are honoured.
    """
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(word[1:] for word in features.split(",") if word.startswith("+"))


def cpu_name() -> str:
    """The processor that kernels are compiled for, as LLVM spells it: znver4."""
    _, name, _ = cpu_target.target_context.codegen().magic_tuple()
    return str(name)


def instruction_set() -> str:
    """By which instructions kernels multiply and add: the fastest of those they may use.

    avx512-bf16, avx512-vnni, avx512, avx-vnni, avx2, neon or plain. Sums of codes, and those of
    products of two bf16, are the same on all of them (`vdpbf16ps` was held against that on Intel's
    alone); other floats are where there is a fused step.
    """
    with_bf16 = _asked_for == "avx512-bf16" or instructions.is_fast_in_bf16(cpu_name())
    return instructions.fastest(cpu_features(), with_bf16=with_bf16)


def _compile_on_demand(function: Callable[..., Any], form: str, **options: Any) -> Any:
    return _look_on_disk(compile_whole(function, **_OPTIONS, **options), function, form)


def _look_on_disk(dispatcher: Any, function: Callable[..., Any], form: str) -> Any:
    # What words emit depends on the path, which the features of a processor do not tell alone.
    code_cache.keep(dispatcher, function, f"{form}-{instruction_set()}")
    return dispatcher
