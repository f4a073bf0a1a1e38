"""The only import of numba and llvmlite: compiles CPU kernels and keeps their machine code on disk.

Knows nothing of what a kernel computes; the vector words that kernels are written in are in
`vector.py`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import prange, types
from numba.core import caching, cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from hypocenter.config import Environment

# By default libgomp's idle threads spin for milliseconds, and on cores that others use too they
# keep the very thread they wait for from running: measured 3.6 tokens/s against 20.6 with this.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__all__ = [
    "CpuKernel",
    "cache_problem",
    "cgutils",
    "cpu_features",
    "cpu_kernel",
    "inline",
    "instruction_set",
    "ir",
    "models",
    "prange",
    "register_model",
    "set_num_threads",
    "types",
    "word",
]

_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": False}


@dataclass(frozen=True, slots=True, eq=False)
class CpuKernel:
    """One kernel source compiled twice: for one thread and for numba's thread pool.

    Both walk the same items by the same body, so their results are bitwise equal.
    """

    name: str
    serial: Any
    parallel: Any


def cpu_kernel(function: Callable[..., None]) -> CpuKernel:
    """Make a kernel of a function whose outer loop is a `prange` over independent items."""
    name = function.__name__.strip("_").removesuffix("_cpu")
    serial = _compile_on_demand(function, "serial", parallel=False)
    parallel = _compile_on_demand(function, "parallel", parallel=True)
    return CpuKernel(name, serial, parallel)


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that kernels call; LLVM inlines it where that pays."""
    return numba.njit(**_OPTIONS)(function)  # type: ignore[no-any-return]


def word(build: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that kernels call out of one that types it and emits its LLVM code."""
    return intrinsic(build)  # type: ignore[no-any-return]


def set_num_threads(num_threads: int) -> None:
    """Bound the threads of the parallel kernels that the calling thread launches."""
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))


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


def instruction_set() -> str:
    """The widest vector extension that the kernels use: avx512, avx2, neon or plain."""
    features = cpu_features()
    if "avx512f" in features:
        return "avx512"
    if {"avx2", "fma"} <= features:
        return "avx2"
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    return "plain"


@cache
def source_hash() -> str:
    """Hash of every file that may end up inside a kernel.

    numba's own key sees only the file of the outer function and misses an edited callee.
    """
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted([*package.glob("device/*.py"), *package.glob("kernels/*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def _cache_folder() -> tuple[Path | None, str]:
    """The private folder for machine code, or None and the reason why there is none.

    numba's cache files are pickles: they are only trusted in a folder that no one else can write,
    nor put another in its place.
    """
    chosen = Environment.read().cache_dir
    folder = chosen / "kernels" / source_hash()
    try:
        _make_private(chosen)
        found = chosen.stat()
        if found.st_uid not in (0, os.getuid()):
            return None, f"{chosen} belongs to another user"
        # With the sticky bit, as in /tmp, others may add to a folder but not replace what is ours.
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return None, f"others may write to {chosen}; chmod go-w it"
        _make_private(folder)
        for private in (folder.parent, folder):
            private.chmod(0o700)
            found = private.stat()
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                return None, f"{private} is not private to this user"
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return None, f"{folder}: {error.strerror or error}"
    return folder, ""


def _make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing; `parents=True` would leave them open."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(exist_ok=True, mode=0o700)


def cache_problem() -> str:
    """Why compiled kernels are not kept on disk; empty when they are."""
    return _cache_folder()[1]


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """Tells numba where one kernel's machine code lives and what makes it stale."""

    def __init__(self, py_func: Callable[..., None], py_file: str) -> None:
        self._py_file = py_file  # numba names it in its warnings
        self._variant = py_func.__hypo_variant__  # type: ignore[attr-defined]

    def get_cache_path(self) -> str:
        return str(_cache_folder()[0])

    def get_source_stamp(self) -> tuple[str, str]:
        return source_hash(), sys.version

    def get_disambiguator(self) -> str:
        return str(self._variant)

    @classmethod
    def from_function(cls, py_func: Callable[..., None], py_file: str) -> _Locator | None:
        return cls(py_func, py_file) if _cache_folder()[0] else None


class _CacheImpl(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _KernelCache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _CacheImpl


def _compile_on_demand(function: Callable[..., None], variant: str, *, parallel: bool) -> Any:
    function.__hypo_variant__ = variant  # type: ignore[attr-defined]
    dispatcher = numba.njit(parallel=parallel, **_OPTIONS)(function)
    if _cache_folder()[0]:
        dispatcher._cache = _KernelCache(function)
    return dispatcher
