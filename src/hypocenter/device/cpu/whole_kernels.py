"""How numba compiles kernels: as a whole, and not each function that they call by itself as well.

By default numba optimises and assembles every function on its own, wraps it for calls from Python,
and then does the same with all who call it. Of functions that only kernels call nothing is wanted
but their code, which the kernel's compilation takes in; that is a third of a first start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _LateLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Is optimised and assembled when its machine code is asked for, not when it is linked."""

    _is_assembled = False

    def finalize(self) -> None:
        """What numba's does before it optimises."""
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._assemble()
        return int(super().get_pointer_to_function(name))

    def _get_compiled_object(self) -> bytes:
        self._assemble()
        return bytes(super()._get_compiled_object())

    def _assemble(self) -> None:
        self._ensure_finalized()
        if not self._is_assembled:
            self._is_assembled = True
            self._optimize_final_module()
            self._final_module.verify()
            self._finalize_final_module()


class _WholeCompiler(Compiler):  # type: ignore[misc]
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        library = _LateLibrary(self.state.targetctx.codegen(), func.__qualname__)
        library.enable_object_caching()
        self.state.library = library
        return super().compile_extra(func)


def compile_whole(function: Callable[..., Any], **options: Any) -> Any:
    """numba's dispatcher of a kernel, which compiles it when it is first launched."""
    return numba.njit(pipeline_class=_WholeCompiler, no_cfunc_wrapper=True, **options)(function)


def compile_part(function: Callable[..., Any], **options: Any) -> Any:
    """numba's dispatcher of a function that kernels call. Python cannot call it."""
    dispatcher = numba.njit(
        pipeline_class=_WholeCompiler, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options
    )(function)

    def without_machine_code(flags: Any) -> Any:
        flags.no_compile = True
        return flags

    def add_overload(result: Any) -> None:
        # Callers look for it by its entry point, of which there is none.
        result = result._replace(entry_point=object())
        context = dispatcher.targetctx
        context.insert_user_function(result.entry_point, result.fndesc, [result.library])
        dispatcher.overloads[tuple(result.signature.args)] = result

    dispatcher._compiler._customize_flags = without_machine_code
    dispatcher.add_overload = add_overload
    return dispatcher
