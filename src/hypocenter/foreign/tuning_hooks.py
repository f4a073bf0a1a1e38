"""Sees Triton's autotuner take the times of a kernel: trials run on the tensors of the launch."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from hypocenter.foreign.recorder import ForeignRecorder
from hypocenter.settings.environment import Environment

#: Characters of a decorator that are kept, and trials of one process that are told of.
_MAX_CHARS, MAX_TRIALS = 4096, 512


class Decorator(NamedTuple):
    """The lines of a decorator: its file, the first of them, and their text."""

    file: str
    line: int
    text: str


def watch_tuning(
    kind: Any,
    recorder: Callable[[], ForeignRecorder | None],
    attempt: Callable[..., None],
) -> None:
    """With --suspect tell of each configuration that an autotuner runs to take its time.

    `recorder` opens what records, and `attempt` calls what may fail.
    """
    if not Environment.read().trace:
        return
    original = kind._bench
    num_told = 0

    @functools.wraps(original)
    def bench(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal num_told
        if num_told >= MAX_TRIALS or (opened := recorder()) is None:
            return original(self, *args, **options)
        num_told += 1
        began: list[int] = []
        attempt(lambda: began.append(opened.begin_trial()))
        try:
            return original(self, *args, **options)
        finally:
            if began:
                attempt(_tell, opened, began[0], self)

    kind._bench = bench


def _tell(opened: ForeignRecorder, began: int, tuner: Any) -> None:
    function = tuner.base_fn
    decorator = decorator_of(function)
    place = decorator._asdict() if decorator is not None else {}
    opened.end_trial(
        began,
        kernel=str(function.__name__),
        restored=tuple(map(str, tuner.restore_value)),
        cleared=tuple(map(str, tuner.reset_to_zero)),
        **place,
    )


@functools.cache
def decorator_of(function: Any) -> Decorator | None:
    """The decorator that tunes `function`; its `def` where it is tuned elsewhere."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    tuners = [node for node in tree.decorator_list if "autotune" in ast.unparse(node)]
    start = tuners[0].lineno if tuners else tree.lineno
    end = (tuners[0].end_lineno or start) if tuners else start
    text = textwrap.dedent("".join(lines[start - 1 : end]))[:_MAX_CHARS]
    return Decorator(function.__code__.co_filename, first + start - 1, text.rstrip("\n"))
