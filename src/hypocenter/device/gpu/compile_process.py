"""The program of a process that compiles Triton's kernels for a GPU that it does not open.

It is told the GPU's target, reads a line of JSON for each form of a kernel, compiles it into
Triton's cache on disk, and answers with a line: done, or failed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

import msgspec


class CompileOrder(msgspec.Struct):
    """A kernel by its module and name, and what Triton writes down of a form of it."""

    module: str
    name: str
    data: str


def hash_in_order(kernels: Iterable[Any]) -> list[tuple[str, str]]:
    """Have Triton hash the source of kernels, by their names; returns modules and names.

    Some versions of Triton hash a kernel otherwise when a function that it calls was hashed before,
    so each process must do that in one order, or it would not find what another has compiled.
    """
    by_name = {(jit.fn.__module__, jit.fn.__qualname__): jit for jit in kernels}
    for name in sorted(by_name):
        _ = by_name[name].cache_key
    return sorted(by_name)


class AbsentDriver:
    """Stands for Triton's driver: it says for which target is compiled, and launches nothing."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0


def main(words: list[str]) -> None:
    """Compile what stdin asks for, until it ends; `words` are backend, architecture, warp size,
    and in JSON the modules and names of all kernels."""
    from hypocenter.device.triton_lang import triton

    backend, arch, warp_size, order = words
    target = triton.backends.compiler.GPUTarget(
        backend, int(arch) if arch.isdigit() else arch, int(warp_size)
    )
    triton.runtime.driver.set_active(AbsentDriver(target))
    kernels = msgspec.json.decode(order, type=list[tuple[str, str]])
    found = (getattr(importlib.import_module(module), name, None) for module, name in kernels)
    hash_in_order(jit for jit in found if hasattr(jit, "cache_key"))
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=CompileOrder)
        try:
            getattr(importlib.import_module(job.module), job.name).preload(job.data)
            answer = b"done\n"
        except Exception:  # who asked compiles it too, and tells what is wrong
            answer = b"failed\n"
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
