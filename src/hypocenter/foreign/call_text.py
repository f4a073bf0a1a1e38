"""How a call's arguments are spelled where it is made, read from the source; touches no variable.

A frame's `f_locals` would do as well, but up to Python 3.12 it keeps what it shows alive.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from dataclasses import dataclass, field
from types import CodeType, FrameType

_MAX_CHARS = 60
_MAX_LINES = 200


@dataclass(frozen=True, slots=True)
class Spelled:
    """The text of a call's arguments; `positional` ends before the first `*`."""

    positional: tuple[str, ...] = ()
    keywords: dict[str, str] = field(default_factory=dict)

    def of(self, parameter: str, names: tuple[str, ...]) -> str | None:
        """What was written for a parameter of a function with parameters `names`."""
        at = names.index(parameter)
        text = self.positional[at] if at < len(self.positional) else self.keywords.get(parameter)
        return text if text and len(text) <= _MAX_CHARS and "\n" not in text else None


def launch_in(frame: FrameType) -> Spelled:
    """The arguments of the `kernel[grid](...)` that `frame` is in; none where it is in no such."""
    return _spell(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _spell(code: CodeType, instruction: int) -> Spelled:
    place = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    if place is None or None in place:
        return Spelled()
    first, last, start, stop = (number or 0 for number in place)
    lines = [
        linecache.getline(code.co_filename, line).encode()
        for line in range(first, min(last, first + _MAX_LINES) + 1)
    ]
    lines[-1] = lines[-1][:stop]
    lines[0] = lines[0][start:]
    try:
        call = ast.parse(b"".join(lines).decode(), mode="eval").body
    except (SyntaxError, ValueError):
        return Spelled()
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Subscript):
        return Spelled()
    plain = itertools.takewhile(lambda arg: not isinstance(arg, ast.Starred), call.args)
    return Spelled(
        tuple(map(ast.unparse, plain)),
        {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg},
    )
