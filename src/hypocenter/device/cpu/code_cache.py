"""Machine code of CPU kernels on disk: in a private folder, never stale, done without when need be.

What makes it stale is in `sources.py`. `kernel_forms.py` keeps it once more, so that a process
needs no numba to load it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import caching
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys

from hypocenter.device.cpu.sources import source_hash
from hypocenter.settings.cache_folder import make_private, private_folder

_log = logging.getLogger("hypocenter.cpu")
_FOLDER = "kernels"


def keep(dispatcher: Any, function: Callable[..., Any], variant: str) -> None:
    """Have numba look for a function's machine code on disk, and leave it there.

    `variant` tells apart what is made of one function: its form, and the path of instructions.
    """
    function.__hypo_variant__ = variant  # type: ignore[attr-defined]
    if private_folder(_FOLDER)[0]:
        dispatcher._cache = _KernelCache(function)


def object_file(library: Any) -> bytes:
    """The machine code of what numba has compiled, or has loaded from disk."""
    return bytes(getattr(library, "hypo_object", None) or library._get_compiled_object())


def load(dispatcher: Any, signature: tuple[Any, ...]) -> bool:
    """Take a kernel's machine code from disk; False when it is not there."""
    with global_compiler_lock:
        found = dispatcher._cache.load_overload(signature, dispatcher.targetctx)
        if found is None:
            return False
        dispatcher._cache_hits[signature] += 1
        context = dispatcher.targetctx
        context.insert_user_function(found.entry_point, found.fndesc, [found.library])
        dispatcher.add_overload(found)
    return True


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """Tells numba where one kernel's machine code lives and what makes it stale."""

    def __init__(self, py_func: Callable[..., None], py_file: str) -> None:
        self._py_file = py_file  # numba names it in its warnings
        self._variant = py_func.__hypo_variant__  # type: ignore[attr-defined]
        self._hash = source_hash(Path(py_file))

    def get_cache_path(self) -> str:
        return f"{private_folder(_FOLDER)[0]}{os.sep}{self._hash}"

    def ensure_cache_path(self) -> None:
        make_private(Path(self.get_cache_path()))

    def get_source_stamp(self) -> tuple[str, str]:
        return self._hash, sys.version

    def get_disambiguator(self) -> str:
        return str(self._variant)

    @classmethod
    def from_function(cls, py_func: Callable[..., None], py_file: str) -> _Locator | None:
        return cls(py_func, py_file) if private_folder(_FOLDER)[0] else None


class _CacheImpl(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """As numba's, which hands the object file to LLVM and keeps none of it."""
        result = super().rebuild(target_context, payload)
        (_, _, (code, _)), *_ = payload
        result.library.hypo_object = code
        return result


class _KernelCache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _CacheImpl

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """As numba's, which first loads all that a compiler needs: code that is there needs none
        of it, and that would be a third of a start."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, target_context)

    def _save_overload(self, signature: Any, compiled: Any) -> None:
        """One process at a time, for numba's own way may give two the same file.

        The code of one would then be found as that of the other, for arguments of another type.
        """
        try:
            self._impl.locator.ensure_cache_path()
            with open(Path(self._cache_path) / "lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                super()._save_overload(signature, compiled)
        except OSError as error:
            _tell_of_unsaved(error.strerror or str(error))


@cache
def _tell_of_unsaved(reason: str) -> None:
    """Once, for a disk that is full: what was compiled runs, and the next process compiles anew."""
    _log.warning(
        "compiled kernels cannot be kept in %s: %s; make room there or set HYPO_CACHE_DIR",
        private_folder(_FOLDER)[0],
        reason,
    )
