"""Which line of a program is at work, and which one makes the tensor that a name stands for.

Looks behind all that torch, Triton and this package run. Reads sources and touches no variable.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import linecache
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType

from hypocenter.base.package import is_own_file
from hypocenter.foreign.inductor import is_written_by_inductor

#: Parts of file names in which no program of anybody's own lies.
_FOLDERS = ("site-packages", "dist-packages")
#: Where Python's own library lies.
_STANDARD = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("triton", "torch", "hypocenter"))
#: Functions and methods of torch that always take memory; others may return a view of older memory.
_MAKERS = frozenset(
    {"arange", "clone", "empty", "empty_like", "empty_strided", "eye", "full", "full_like"}
    | {"linspace", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "normal"}
    | {"ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn"}
    | {"randn_like", "randperm", "tensor", "zeros", "zeros_like"}
)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class _Whose(enum.Enum):
    NOBODYS = 0
    INSTALLED = 1
    OWN = 2


_INSTALLED, _OWN = _Whose.INSTALLED, _Whose.OWN
#: By code and instruction whose it is, the line, and the code, so that no other one gets its id.
_known: dict[tuple[int, int], tuple[_Whose, str, CodeType]] = {}
_MAX_KNOWN = 4096


def caller_of_now(frame: FrameType | None = None) -> tuple[FrameType | None, str]:
    """The nearest frame of the program's own, and its line; else that outside torch and Triton.

    Looks from `frame` on, if that is given: what lies in between costs time.
    """
    frame = frame or sys._getframe(1)
    nearest, line_of_nearest = None, ""
    while frame is not None:
        whose, line, _ = _known.get((id(frame.f_code), frame.f_lasti)) or _look_at(frame)
        if whose is _OWN:
            return frame, line
        if whose is _INSTALLED and nearest is None:
            nearest, line_of_nearest = frame, line
        frame = frame.f_back
    return nearest, line_of_nearest


def whose(file: str) -> _Whose:
    """Whose a file is; the value is 0 for nobody's, 1 for an installed one, 2 for the program's."""
    return _whose(file)


def is_own(file: str) -> bool:
    """Whether a file is the program's own."""
    return _whose(file) is _OWN


def _look_at(frame: FrameType) -> tuple[_Whose, str, CodeType]:
    code = frame.f_code
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    found = _whose(code.co_filename), f"{code.co_filename}:{frame.f_lineno}", code
    _known[id(code), frame.f_lasti] = found
    return found


@functools.lru_cache(maxsize=4096)
def _whose(file: str) -> _Whose:
    if file.startswith("<") or is_library(file) or is_written_by_inductor(file):
        return _Whose.NOBODYS
    is_installed = any(part in file for part in _FOLDERS) or file.startswith(_STANDARD)
    return _Whose.INSTALLED if is_installed else _Whose.OWN


def innermost_line(places: Sequence[tuple[str, int]]) -> str:
    """The innermost of some lines (file, line) that is the program's own, else of what it installed
    beside torch and Triton; "" without either. The innermost stands last."""
    for wanted in (_OWN, _INSTALLED):
        for file, line in reversed(places):
            if _whose(file) is wanted:
                return f"{file}:{line}"
    return ""


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a file is of torch, of Triton or of this package."""
    is_installed = any(part in file for part in _FOLDERS)
    return is_own_file(file) or (is_installed and any(part in file for part in _LIBRARIES))


def made_at(frame: FrameType | None, name: str) -> str:
    """file:line of the one statement of `frame`'s function that makes `name`; "" if none is sure.

    That is `name = torch.empty(...)` and its like, of a name that is bound nowhere else there.
    """
    if frame is None:
        return ""
    line = _maker_lines(frame.f_code).get(name)
    return f"{frame.f_code.co_filename}:{line}" if line else ""


@functools.lru_cache(maxsize=1024)
def _maker_lines(code: CodeType) -> Mapping[str, int]:
    """By name the line that makes it."""
    is_module = code.co_name == "<module>"
    try:
        whole = "".join(linecache.getlines(code.co_filename)) if is_module else None
        text = whole if whole is not None else textwrap.dedent(inspect.getsource(code))
        body = ast.parse(text).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    offset = 0
    if not is_module:
        offset = code.co_firstlineno - 1
        body = [*body[0].body] if body and isinstance(body[0], _SCOPES[:2]) else []
    bound = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    made: dict[str, int] = {}
    for node in _nodes(body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if len(node.targets) == 1 and _makes(node.value):
                made[node.targets[0].id] = node.lineno + offset
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in bound:
                made.pop(node.id, None)
            bound.add(node.id)
    return made


def _nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Those of one scope, each before what is in it."""
    for node in body:
        yield from _nodes_of(node)


def _nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, _SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from _nodes_of(child)


def _makes(value: ast.expr) -> bool:
    """Whether memory is made on that line, whatever is done with it there."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    return value.func.attr in _MAKERS or _makes(value.func.value)
