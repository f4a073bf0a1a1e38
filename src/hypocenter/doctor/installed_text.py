"""The kernels of this installation as text, and the lines in which a bundle's differ from them.

Reads files; imports no kernel, so it needs no Triton.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from hypocenter.package import gpu_kernel_files
from hypocenter.record.events import LaunchRecord, SourceRecord


@dataclass(frozen=True, slots=True)
class Change:
    """A line of a kernel that is not as it was: its number in `file`, both texts, and whose."""

    file: str
    line: int
    function: str
    text: str
    was: str


def changes(
    launch: LaunchRecord, sources: Mapping[str, SourceRecord], others: Mapping[str, str]
) -> list[Change]:
    """Places where a launch's kernel, or what it calls, is not the text in `others` (by name)."""
    found: list[Change] = []
    waiting, seen = [launch.source], set[str]()
    while waiting:
        number = waiting.pop(0)
        source = sources.get(number)
        if source is None or number in seen:
            continue
        seen.add(number)
        waiting += source.callees
        other = others.get(source.function)
        if other is not None:
            found += _changes(source, other)
    return found


@functools.cache
def installed_texts() -> Mapping[str, str]:
    """Text of every function in the files of GPU kernels, by its name; decorators included."""
    found: dict[str, str] = {}
    for path in gpu_kernel_files():
        text = path.read_text("utf-8")
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                first = min(decorator.lineno for decorator in node.decorator_list)
                found[node.name] = "".join(lines[first - 1 : node.end_lineno])
    return found


def _changes(source: SourceRecord, other: str) -> list[Change]:
    bad, right = source.text.rstrip().splitlines(), other.rstrip().splitlines()
    found = []
    matcher = difflib.SequenceMatcher(None, right, bad, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            at = min(c, len(bad) - 1)
            found.append(
                Change(
                    source.file,
                    source.first_line + at,
                    source.function,
                    bad[at].strip() if d > c else "(a line is missing before this one)",
                    " / ".join(text.strip() for text in right[a:b]),
                )
            )
    return found
