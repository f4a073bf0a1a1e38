"""Compiles kernels in several processes at once: numba itself compiles one after the other.

A helper is a process of this module. It reads a line of JSON for each kernel, compiles it, which
leaves the machine code on disk, and answers with a line; who asked loads it from there.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from hypocenter.device.cpu import code_cache
from hypocenter.device.cpu.kept_files import cache_problem
from hypocenter.device.cpu.lang import CpuKernel, kinds_of
from hypocenter.device.cpu.threads import max_num_threads
from hypocenter.device.helper_processes import helper, never, taken_from

#: Fewer kernels are compiled sooner than a helper has started.
_MIN_KERNELS = 4
_MAX_HELPERS = 3
#: What takes longest comes first, so that nobody is left alone with it at the end.
_LONGEST = ("attention", "linear_gate_codes", "_sample_cpu", "linear_codes")
#: Between two looks at whether the helpers are done: a Ctrl-C is heard then.
_LOOK_SECONDS = 0.1


class _Array(msgspec.Struct, tag="array"):
    """`dtype`: numpy's code, or names, codes and shapes of a record's fields."""

    dtype: str | list[tuple[str, str, tuple[int, ...]]]
    num_axes: int
    is_contiguous: bool


class _Scalar(msgspec.Struct, tag="scalar"):
    """`kind`: bool, int or float, or the name of one of numpy's types."""

    kind: str


class _Task(msgspec.Struct):
    """A kernel by module, name and form, and arguments to compile it for."""

    module: str
    name: str
    is_shared: bool
    args: list[_Array | _Scalar]


def compile_together(
    wanted: Sequence[tuple[Any, Sequence[Any]]],
    tell: Callable[[int], None],
    is_over: Callable[[], bool] = never,
) -> bool:
    """Compile dispatchers of numba, each for the arguments beside it, by several processes, until
    the time `is_over`; whether all are.

    `tell` is called with a number among `wanted` before that one is compiled here, and now and then
    while helpers are at work; what it raises ends the compiling.
    """
    tasks = {number: _task_of(*one) for number, one in enumerate(wanted)}
    known = {number: task for number, task in tasks.items() if task is not None}
    lines = {number: msgspec.json.encode(task) for number, task in known.items()}
    waiting = deque(sorted(known, key=lambda number: _rank(known[number].name)))
    number = 0
    with contextlib.ExitStack() as stack:
        helpers = [
            stack.enter_context(helper(__name__, waiting, lines))
            for _ in range(_num_helpers(len(waiting)))
        ]
        for number in itertools.chain(taken_from(waiting), tasks.keys() - known.keys()):
            if is_over():
                break
            tell(number)
            _compile(*wanted[number])
        for thread in helpers:
            while thread.is_alive() and not is_over():
                thread.join(_LOOK_SECONDS)
                tell(number)
    for dispatcher, args in wanted:  # from disk, or here where a helper has failed
        if not is_over():
            _compile(dispatcher, args)
        elif kinds_of(args) not in dispatcher.overloads:
            code_cache.load(dispatcher, kinds_of(args))
    return all(kinds_of(args) in dispatcher.overloads for dispatcher, args in wanted)


def main() -> None:
    """Compile what stdin asks for, until it ends."""
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=_Task)
        kernel = getattr(importlib.import_module(task.module), task.name)
        _compile(kernel.shared if task.is_shared else kernel.serial, _args_of(task))
        sys.stdout.buffer.write(b"done\n")
        sys.stdout.buffer.flush()


def _compile(dispatcher: Any, args: Sequence[Any]) -> None:
    kinds = kinds_of(args)
    if kinds not in dispatcher.overloads:
        dispatcher.compile(kinds)


def _num_helpers(num_kernels: int) -> int:
    if num_kernels < _MIN_KERNELS or cache_problem() or not sys.executable:
        return 0
    return min(max_num_threads() - 1, _MAX_HELPERS, num_kernels // 2)


def _task_of(dispatcher: Any, args: Sequence[Any]) -> _Task | None:
    """How a helper is told of it; None for what it could not be told of."""
    function = dispatcher.py_func
    kernel = getattr(sys.modules[function.__module__], function.__name__, None)
    if not isinstance(kernel, CpuKernel):
        return None
    is_shared = dispatcher is not kernel.serial
    told = [_describe(value) for value in args]
    task = _Task(function.__module__, function.__name__, is_shared, told)
    try:
        is_same = kinds_of(_args_of(task)) == kinds_of(args)
    except (TypeError, AttributeError, ValueError):
        return None
    return task if is_same else None


def _rank(name: str) -> int:
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)


def _describe(value: Any) -> _Array | _Scalar:
    if not isinstance(value, np.ndarray):
        return _Scalar(type(value).__name__)
    fields = value.dtype.fields and [
        (name, kind.base.str, kind.shape) for name, (kind, *_) in value.dtype.fields.items()
    ]
    return _Array(fields or value.dtype.str, value.ndim, value.flags.c_contiguous)


def _args_of(task: _Task) -> list[Any]:
    """Arguments of the types that a task tells of."""
    values: list[Any] = []
    for told in task.args:
        if isinstance(told, _Array):
            array = np.zeros((2,) * told.num_axes, np.dtype(told.dtype))
            values.append(array if told.is_contiguous else array[..., ::2])
        else:
            kinds = {"bool": bool, "int": int, "float": float}
            values.append((kinds.get(told.kind) or getattr(np, told.kind))(0))
    return values


if __name__ == "__main__":
    main()
