"""What an exception says that ended a program: what Triton refused of which kernel, and where.

Knows Triton's exceptions by their fields, and imports no Triton.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from hypocenter.base.refusals import AnyRefusal, CompileError, ResourceExceeded
from hypocenter.foreign.caller import is_library
from hypocenter.foreign.inductor import is_written_by_inductor
from hypocenter.record.catalogue import sources_of

MAX_CHARS = 2000
#: The frame of Dynamo's that calls what it compiled.
_DYNAMO = "torch/_dynamo/eval_frame.py"
#: Functions in a chain of calls, of which the compiler tells each.
_MAX_CALLS = 100
#: Where Triton says what may be done with which values, for compilers and its interpreter.
_FRONT_END = ("triton/language/semantic.py",)


def refusal_of(
    error: BaseException,
    jit: Any,
    options: Mapping[str, Any],
    limits_of_gpu: Callable[[], Mapping[str, Any] | None],
) -> tuple[AnyRefusal, str] | None:
    """What Triton refused of the kernel `jit`, and its name; None for another exception."""
    name = jit.fn.__name__ if jit is not None else ""
    if all(hasattr(error, field) for field in ("required", "limit", "name")):  # OutOfResources
        known: Any = error
        limits = limits_of_gpu()
        exceeded = ResourceExceeded(
            resource=str(known.name),
            needed=int(known.required),
            limit=int(known.limit),
            gpu=limits["product"] if limits else "the GPU",
            shape=", ".join(f"{n}={v}" for n, v in options.items() if isinstance(v, int)),
        )
        return exceeded, name
    if _is_of_compiler(error):
        return _compile_error(jit, error), name
    found = _interpreter_error(jit, error)
    return (found, name) if found is not None else None


def _compile_error(jit: Any, error: BaseException) -> CompileError:
    """What Triton's compiler says, and the innermost line of the program's own that led to it."""
    chain: list[Any] = []
    below: Any = error
    while _is_of_compiler(below) and len(chain) < _MAX_CALLS:
        chain.append(below)  # of the kernel, then of the functions that it calls
        below = below.__cause__
    said = str(chain[-1].error_message or below or "").strip().split("\n")
    placed = [(told, *_place_of(jit, told.src)) for told in chain]
    own = [place for place in placed if place[1] and not is_library(place[1])]
    inner, file, first = (own or placed[:1])[-1]
    line = int(getattr(inner.node, "lineno", 0))
    source = str(inner.src or "").split("\n")
    return CompileError(
        sentence=said[-1][:MAX_CHARS] or type(chain[-1]).__name__,
        file=file,
        line=first + line - 1 if file else 0,
        text=source[line - 1].strip()[:200] if 0 < line <= len(source) else "",
    )


def _interpreter_error(jit: Any, error: BaseException) -> CompileError | None:
    """What Triton's front end refused in the interpreter, at the innermost line of the kernel.

    A compiler asks the same front end. What Python or NumPy could not do there is none of that.
    """
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ == "InterpreterError":
        cause = cause.__cause__
    if jit is None or cause is None or cause is error:
        return None
    files = {source.file for source in sources_of.__wrapped__(jit)}
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(cause.__traceback__)]
    lines = [(file, line) for file, line in frames if file in files]
    if not lines or not frames[-1][0].endswith(_FRONT_END):
        return None
    file, line = lines[-1]
    said = f"{type(cause).__name__}: {cause}"[:MAX_CHARS]
    text = linecache.getline(file, line).strip()[:200]
    return CompileError(sentence=said, file=file, line=line, text=text)


def _is_of_compiler(error: Any) -> bool:
    return all(hasattr(error, field) for field in ("src", "node", "error_message"))


def _place_of(jit: Any, text: str | None) -> tuple[str, int]:
    """File and line where the source of a kernel, or of a function that it calls, begins."""
    if jit is None or not text:
        return "", 0
    for source in sources_of.__wrapped__(jit):
        before, found, _ = source.text.partition(text.rstrip())
        if found:
            return source.file, source.first_line + before.count("\n")
    return "", 0


def _is_of_others(file: str) -> bool:
    """Whether a line is of torch, Triton or this package, or torch.compile wrote it."""
    return is_library(file) or is_written_by_inductor(file)


def call_of(trace: TracebackType | None) -> tuple[str, str, bool]:
    """What the program was doing, where, and whether that is the text of its line."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)]
    inner = [code.co_filename for code, _ in frames[1:]] + [""]
    own = [
        (code, line)
        for (code, line), below in zip(frames, inner, strict=True)
        if not _is_of_others(code.co_filename)
        # Dynamo runs what it compiled of a function in a frame of that name, at its first line.
        and not (below.endswith(_DYNAMO) and line == code.co_firstlineno)
    ] or frames
    if not own:
        return "the program", "", False
    code, line = own[-1]
    text = linecache.getline(code.co_filename, line).strip()[:200]
    return f"`{text}`" if text else code.co_name, f"{code.co_filename}:{line}", bool(text)
