"""The kernels of this installation as text, and the lines in which a bundle's differ from them.

Reads files; imports no kernel, so it needs no Triton.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from hypocenter.base.package import gpu_kernel_files
from hypocenter.record.events import LaunchRecord, SourceRecord

#: Texts of functions by module and name; by "" and the name those of all modules. Of one module
#: several may have a name, as functions within others do.
Texts = Mapping[tuple[str, str], Collection[str]]

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Change:
    """A line of a kernel that is not as it was: its number in `file`, both texts, and whose."""

    file: str
    line: int
    function: str
    text: str
    was: str


def changes(
    launch: LaunchRecord, sources: Mapping[str, SourceRecord], others: Texts
) -> list[Change]:
    """Places where a launch's kernel, or what it calls, is not the text in `others`."""
    found: list[Change] = []
    waiting, seen = [launch.source], set[str]()
    while waiting:
        number = waiting.pop(0)
        source = sources.get(number)
        if source is None or number in seen:
            continue
        seen.add(number)
        waiting += source.callees
        found += _changes(source, _other_text(source, others))
    return found


def texts_of(sources: Iterable[SourceRecord]) -> Texts:
    """Those of recorded functions."""
    found = defaultdict[tuple[str, str], set[str]](set)
    for source in sources:
        for module in (module_of(source.file), ""):
            found[module, source.function].add(source.text.rstrip())
    return found


def module_of(file: str) -> str:
    """The name that tells a function's module from others, wherever it lies."""
    return PurePath(file).name.partition(".")[0].partition("-")[0]


def _other_text(source: SourceRecord, others: Texts) -> str:
    """What stands in place of a function; its own text where nothing does, or nothing else."""
    own = source.text.rstrip()
    texts = others.get((module_of(source.file), source.function))
    if texts is None:  # it may have moved to another file
        texts = others.get(("", source.function), ())
        texts = texts if len(texts) == 1 else ()
    if own in texts or not texts:
        return own
    return max(
        sorted(texts),
        key=lambda text: difflib.SequenceMatcher(None, text, own, autojunk=False).quick_ratio(),
    )


@functools.cache
def installed_texts() -> Texts:
    """Text of every function in the files of GPU kernels; decorators included."""
    found = defaultdict[tuple[str, str], set[str]](set)
    for path in gpu_kernel_files():
        text = path.read_text("utf-8")
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                first = min(decorator.lineno for decorator in node.decorator_list)
                held = "".join(lines[first - 1 : node.end_lineno]).rstrip()
                for module in (module_of(path.name), ""):
                    found[module, node.name].add(held)
    return found


def _changes(source: SourceRecord, other: str) -> list[Change]:
    """Without what changes nothing that is computed: comments, docstrings, how lines are broken."""
    texts = [textwrap.dedent(text).rstrip() for text in (other, source.text)]
    docstrings: list[Collection[int]] = [(), ()]
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        trees = [ast.parse(text) for text in texts]
        docstrings = [take_docstrings(tree) for tree in trees]
        if ast.dump(trees[0]) == ast.dump(trees[1]):
            return []
    right, bad = (text.splitlines() for text in texts)
    found = []
    matcher = difflib.SequenceMatcher(None, right, bad, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            continue
        was = [at for at in range(a, b) if is_code(right[at], at, docstrings[0])]
        now = [at for at in range(c, d) if is_code(bad[at], at, docstrings[1])]
        if was or now:
            at = now[0] if now else min(c, len(bad) - 1)
            found.append(
                Change(
                    source.file,
                    source.first_line + at,
                    source.function,
                    bad[at].strip() if now else "(a line is missing before this one)",
                    " / ".join(right[number].strip() for number in was),
                )
            )
    return found


def is_code(line: str, at: int, docstrings: Collection[int]) -> bool:
    """Whether a line, `at` lines behind the first, is more than a comment, a docstring or nothing.

    `docstrings` are the lines of all of them, counted from 1.
    """
    return bool(line.strip()) and not line.strip().startswith("#") and at + 1 not in docstrings


def take_docstrings(tree: ast.Module) -> set[int]:
    """Takes them out of the tree; returns their lines, counted from 1."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *_DEFINITIONS)) or not node.body:
            continue
        first = node.body[0]
        value = first.value if isinstance(first, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
            value.value = ""
    return lines
