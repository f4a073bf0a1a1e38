"""Where this package's own Python raised what it never raises on purpose: a defect of its own."""

from __future__ import annotations

import ast
import linecache
import traceback
from types import FrameType

from hypocenter.base import package
from hypocenter.base.errors import HypoError
from hypocenter.record.events import CodePlace

#: Of a traceback so many statements are kept, and so many characters of each.
_MAX_PLACES, _MAX_CHARS = 8, 300
#: What the machine may have caused, or a library that was called, and not the line that called it.
_OF_OTHERS = (HypoError, OSError, MemoryError, RuntimeError)


def raised_in(error: BaseException) -> tuple[CodePlace, ...]:
    """The package's statements in the traceback of a failed check or a wrong operation.

    The innermost first. Empty for errors that say what a caller, a file or a device did wrong.
    """
    if isinstance(error, _OF_OTHERS) or not isinstance(error, Exception):
        return ()
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _module(frame) and not _module(frame).startswith("lab.")
    ]
    places = [_place(*frame) for frame in reversed(frames[-_MAX_PLACES:])]
    return tuple(place for place in places if place.text != "yield")  # of a context manager


def _module(frame: FrameType) -> str:
    """The module's name below the package; empty for one of others."""
    top, _, below = str(frame.f_globals.get("__name__", "")).partition(".")
    return below if top == package.NAME else ""


def _place(frame: FrameType, line: int) -> CodePlace:
    code = frame.f_code
    return CodePlace(
        module=_module(frame),
        function=code.co_qualname,
        file=code.co_filename,
        line=line,
        text=statement_at(code.co_filename, line)[:_MAX_CHARS],
    )


def statement_at(file: str, line: int) -> str:
    """The statement on one line: of a compound one its head; empty without a source."""
    lines = linecache.getlines(file)
    if not 0 < line <= len(lines):
        return ""
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return lines[line - 1].strip()
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or hasattr(node, "body"):
            continue
        if node.lineno <= line <= (node.end_lineno or 0):
            held = lines[node.lineno - 1 : node.end_lineno]
            return " ".join(text.strip() for text in held)
    return lines[line - 1].strip()
