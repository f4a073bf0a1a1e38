"""What CPU kernels are written and compiled with; `code_cache.py` keeps their machine code.

Knows nothing of what a kernel computes; the vector words that kernels are written in are in
`vector.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from types import FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, register_model

import hypocenter.device.cpu.numba_target  # noqa: F401  # before anything is compiled
from hypocenter.device.cpu import code_cache
from hypocenter.device.cpu.items import items
from hypocenter.device.cpu.shared_state import STATE, TICKET_SYMBOL
from hypocenter.device.cpu.target import instruction_set
from hypocenter.device.cpu.whole_kernels import compile_part, compile_whole

binding.add_symbol(TICKET_SYMBOL, STATE.ctypes.data)

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


def machine_code(function: Any, args: Sequence[Any]) -> tuple[str, bytes]:
    """The name of a kernel in its object file for these arguments, and that file; compiles it if
    need be.

    It takes two addresses, for a result and an exception, then each argument flattened, and
    returns 0 when all is well.
    """
    compiled = _overload_of(function, args)
    return str(compiled.fndesc.llvm_func_name), code_cache.object_file(compiled.library)


def address_of(function: Any, args: Sequence[Any]) -> int:
    """Where numba has the machine code of a kernel for these arguments."""
    compiled = _overload_of(function, args)
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


def _overload_of(function: Any, args: Sequence[Any]) -> Any:
    kinds = kinds_of(args)
    if kinds not in function.overloads:
        function.compile(kinds)
    return function.overloads[kinds]


def _compile_on_demand(function: Callable[..., Any], form: str, **options: Any) -> Any:
    return _look_on_disk(compile_whole(function, **_OPTIONS, **options), function, form)


def _look_on_disk(dispatcher: Any, function: Callable[..., Any], form: str) -> Any:
    # What words emit depends on the path, which the features of a processor do not tell alone.
    code_cache.keep(dispatcher, function, f"{form}-{instruction_set()}")
    return dispatcher
