"""Where the engine's own Python is not that of the good run, and what follows from that.

Compares recorded texts; imports and runs nothing of them. Texts of kernels are `installed_text.py`.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hypocenter.base.package import NAME
from hypocenter.doctor.fact_text import around
from hypocenter.doctor.installed_text import Change, is_code, module_of, take_docstrings
from hypocenter.record.bundle import Bundle
from hypocenter.record.module_texts import ModuleText

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class HostChange:
    """The lines of one function, or of one statement outside of functions, that are not as before.

    `lines` are at least one, in their order; their `file` is the path below the package.
    """

    lines: tuple[Change, ...]

    @property
    def place(self) -> str:
        return f"{NAME}/{self.lines[0].file}:{self.lines[0].line}"

    @property
    def text(self) -> str:
        """What stands there, and what stood there in the good run."""
        first = self.lines[0]
        more = f" (and {len(self.lines) - 1} more changed)" if len(self.lines) > 1 else ""
        return f"`{first.text}`, in the good run `{first.was or 'nothing'}`{more}"


@dataclass(frozen=True, slots=True)
class HostTexts:
    """The changes between two runs.

    `is_whole`: all texts of both were there to be compared. `others` is what else differs between
    the runs beside these: texts of kernels, versions, variables, the device, the command.
    """

    changes: tuple[HostChange, ...] = ()
    is_whole: bool = False
    others: tuple[str, ...] = ()

    @property
    def only(self) -> HostChange | None:
        """The change, where it is all that differs between the two runs as far as is recorded."""
        is_alone = len(self.changes) == 1 and self.is_whole and not self.others
        return self.changes[0] if is_alone else None


def host_texts(good: Bundle, bad: Bundle) -> HostTexts:
    """What differs in the modules of two runs, without what changes nothing that they do."""
    sides = [{module.file: module for module in bundle.modules} for bundle in (good, bad)]
    if not sides[0] or not sides[1]:
        return HostTexts()
    # Their functions that were launched are compared as kernels are.
    kernels = {
        (module_of(source.file), source.function)
        for bundle in (good, bad)
        for source in bundle.sources
    }
    found: list[HostChange] = []
    is_whole = True
    for file in sorted(sides[0].keys() | sides[1].keys()):
        one, other = sides[0].get(file), sides[1].get(file)
        if one is None or other is None:
            there = one or other
            assert there is not None
            told = ("(no such file)", "a file") if other is None else ("a file", "(no such file)")
            found.append(HostChange((Change(there.file, 1, "", *told),)))
        elif one.digest != other.digest:
            if one.text and other.text:
                found += _of_file(one, other, kernels)
            else:
                is_whole = False
    if not all(map(_is_import, found)):
        found = [change for change in found if not _is_import(change)]
    model = [] if good.model == bad.model else ["the model is another one"]
    command = [] if good.command == bad.command else ["the command is another one"]
    return HostTexts(tuple(found), is_whole, (*around(good, bad), *model, *command))


def _is_import(change: HostChange) -> bool:
    """A name that is imported does nothing without a line that has it."""
    first = change.lines[0]
    return not first.function and (first.text or first.was).startswith(("import ", "from "))


def _of_file(
    good: ModuleText, bad: ModuleText, kernels: Collection[object]
) -> Iterator[HostChange]:
    try:
        trees = [ast.parse(module.text) for module in (good, bad)]
    except (SyntaxError, ValueError, RecursionError):
        unread = Change(bad.file, 1, "", "(no Python that can be read)", "another text")
        yield HostChange((unread,))
        return
    docstrings = [take_docstrings(tree) for tree in trees]
    if ast.dump(trees[0]) == ast.dump(trees[1]):
        return
    lines = [module.text.splitlines() for module in (good, bad)]
    scopes = [_scopes(tree) for tree in trees]
    found: dict[object, list[Change]] = {}
    matcher = difflib.SequenceMatcher(None, lines[0], lines[1], autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            continue
        # A hunk may span functions: each line belongs to the one that it stands in.
        was = [at for at in range(a, b) if is_code(lines[0][at], at, docstrings[0])]
        now = [at for at in range(c, d) if is_code(lines[1][at], at, docstrings[1])]
        if not was and not now:
            continue
        at = now[0] if now else min(c, len(lines[1]) - 1)
        scope = _scope(scopes[1], at + 1) if now else _scope(scopes[0], was[0] + 1)
        if (module_of(bad.file), scope.rpartition(".")[2]) in kernels:
            continue
        text = lines[1][at].strip() if now else "(a line is missing before this one)"
        before = " / ".join(lines[0][number].strip() for number in was)
        change = Change(bad.file, at + 1, scope, text, before)
        found.setdefault(scope or at, []).append(change)
    yield from (HostChange(tuple(same)) for same in found.values())


def _scopes(tree: ast.Module) -> list[tuple[int, int, str]]:
    """First and last line and name of each function, what it stands in before it."""
    found: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            own = name
            if isinstance(child, (*_DEFINITIONS, ast.ClassDef)):
                own = f"{name}.{child.name}" if name else child.name
                if isinstance(child, _DEFINITIONS):
                    first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                    found.append((first, child.end_lineno or child.lineno, own))
            visit(child, own)

    visit(tree, "")
    return found


def _scope(scopes: list[tuple[int, int, str]], line: int) -> str:
    """The innermost function around a line; empty for none."""
    around_it = [scope for scope in scopes if scope[0] <= line <= scope[1]]
    return max(around_it, key=lambda scope: scope[0])[2] if around_it else ""
