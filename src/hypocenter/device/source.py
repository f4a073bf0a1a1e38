"""The source text of kernels and of the functions that they call, each with its hash."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator
from typing import Any

from hypocenter.recording import SourceRecord

_MAX_DEPTH = 8


@functools.lru_cache(maxsize=1024)
def sources_of(kernel: Any) -> tuple[SourceRecord, ...]:
    """The text of a Triton function or a compiled CPU kernel, and then of Triton's callees.

    Empty when its text is not to be had. The `id` of a record is sha256 of its text.
    """
    found = _records(kernel, 0)
    return tuple({record.id: record for record in found}.values())


def _records(kernel: Any, depth: int) -> list[SourceRecord]:
    function = _python_function(kernel)
    if function is None:
        return []
    try:
        lines, first_line = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return []
    inner: list[SourceRecord] = []
    ids = []
    if depth < _MAX_DEPTH:
        for callee in _callees(function):
            records = _records(callee, depth + 1)
            ids += [record.id for record in records[:1]]
            inner += records
    text = "".join(lines)
    own = SourceRecord(
        id=hashlib.sha256(text.encode()).hexdigest(),
        function=function.__name__,
        file=function.__code__.co_filename,
        first_line=max(first_line, 1),
        text=text,
        callees=tuple(dict.fromkeys(ids)),
        constants=dict(_constants(function)),
    )
    return [own, *inner]


def _python_function(kernel: Any) -> Any:
    """What was compiled: `fn` of a Triton function, `py_func` of numba's."""
    for name in ("fn", "py_func"):
        if inspect.isfunction(function := getattr(kernel, name, None)):
            return function
    return None


def _constants(function: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and texts of the module that the function names; Triton's constexpr by its value."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
        if isinstance(value, bool | int | float | str) and name != "__name__":
            yield name, value


def _callees(function: Any) -> Iterator[Any]:
    """The other Triton functions that a Triton function names."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if hasattr(value, "arg_names") and inspect.isfunction(getattr(value, "fn", None)):
            yield value
