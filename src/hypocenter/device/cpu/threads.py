"""The threads that run kernels: how many, and how they are called together.

They are numba's, which are TBB's where that is installed. numba's part that calls them is a library
of its own, which is loaded without the rest of numba where nothing else needs that.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

from hypocenter.device.cpu import target

# By default libgomp's idle threads spin for milliseconds, and on cores that others use too they
# keep the very thread they wait for from running: measured 3.6 tokens/s against 20.6 with this.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

#: The oldest TBB that numba takes.
_TBB_INTERFACE = 12060
_of_thread = threading.local()


@cache
def load_tbb() -> bool:
    """Let numba find the TBB of this environment, which the system's loader does not know of.

    Its threads take work as they come, where OpenMP waits for each of them to do its share: on
    two cores of which another process wants one, long prompts are 13 % faster.
    """
    try:
        files = metadata.files("tbb") or []
        found = next(file for file in files if file.name in ("libtbb.so.12", "libtbb.12.dylib"))
        loaded = ctypes.CDLL(str(found.locate()), ctypes.RTLD_GLOBAL)
    except (metadata.PackageNotFoundError, StopIteration, OSError):
        return False
    return int(loaded.TBB_runtime_interface_version()) >= _TBB_INTERFACE


def thread_pool() -> str:
    """The library whose threads run kernels: tbb where it is installed, or what was asked for."""
    asked = os.environ.get("NUMBA_THREADING_LAYER", "default")
    if asked != "default":
        return asked
    return "tbb" if load_tbb() else "omp or workqueue"


def set_num_threads(num_threads: int) -> None:
    """Bound the threads of the parallel kernels that the calling thread launches."""
    _of_thread.num_threads = min(num_threads, max_num_threads())


def num_threads() -> int:
    """Threads that kernels which the calling thread launches may use."""
    return getattr(_of_thread, "num_threads", None) or max_num_threads()


@cache
def max_num_threads() -> int:
    """Threads in numba's pool: the cores of this process, or NUMBA_NUM_THREADS."""
    if numba := sys.modules.get("numba"):
        return int(numba.config.NUMBA_NUM_THREADS)
    asked = os.environ.get("NUMBA_NUM_THREADS", "")
    return int(asked) if asked.isdigit() else len(os.sched_getaffinity(0))


@cache
def call_together() -> Callable[..., None]:
    """`f(function, arguments, counts, steps, data, num_axes, num_arguments, num_threads)`: has that
    many threads call `void function(arguments, counts, steps, data)` for counts[0] items."""
    kind = ctypes.CFUNCTYPE(
        None, *[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int
    )
    return kind(_address())


def _address() -> int:
    load_tbb()
    if "numba" not in sys.modules and target.digest() and load_tbb():
        pool = numba_library("np/ufunc/tbbpool")
        if pool is not None:
            ctypes.CFUNCTYPE(None, ctypes.c_int)(pool.launch_threads)(max_num_threads())
            return int(pool.parallel_for)
    from llvmlite import binding
    from numba.np.ufunc import parallel

    parallel._launch_threads()
    return int(binding.address_of_symbol("numba_parallel_for"))


@cache
def numba_library(place: str) -> Any:
    """A compiled part of numba, by its path without an ending, alone; None where it is not so."""
    folder, name = target.numba_folder(), place.rpartition("/")[2]
    if folder is None:
        return None
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"{place}{suffix}"
        if path.is_file():
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None, path
            assert spec.loader is not None, path
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None
