"""Which tensors a Triton kernel reads and which it writes, by its text.

A parameter whose pointer goes where this does not follow it is left out: nothing is said of it.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Mapping
from typing import Any

from hypocenter.record.catalogue import sources_of
from hypocenter.record.events import SourceRecord

_LOADS = frozenset({"load"})
_STORES = frozenset({"store"})
#: Functions of Triton that give a pointer or a descriptor which leads where their first one does.
_MAX_DEPTH = 6

Uses = dict[str, tuple[bool, bool]]


@functools.lru_cache(maxsize=1024)
def uses_of(jit: Any) -> Mapping[str, tuple[bool, bool]]:
    """By parameter whether the kernel reads it, and whether it writes it; {} without a text."""
    sources: tuple[SourceRecord, ...] = sources_of.__wrapped__(jit)
    return _uses(sources[0], {source.id: source for source in sources}, 0) if sources else {}


def _uses(source: SourceRecord, known: Mapping[str, SourceRecord], depth: int) -> Uses:
    try:
        tree = ast.parse(textwrap.dedent(source.text))
    except SyntaxError:
        return {}
    function = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    if function is None:
        return {}
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    names += [arg.arg for arg in function.args.kwonlyargs]
    callees = {
        known[number].function: known[number] for number in source.callees if number in known
    }
    return _Walk(names, callees, known, depth).walk(function)


class _Walk:
    """Follows pointers through assignments, in loops as well."""

    def __init__(
        self,
        names: list[str],
        callees: Mapping[str, SourceRecord],
        known: Mapping[str, SourceRecord],
        depth: int,
    ) -> None:
        self._behind = {name: frozenset({name}) for name in names}
        self._callees, self._known, self._depth = callees, known, depth
        self._read: set[str] = set()
        self._written: set[str] = set()

    def walk(self, function: ast.FunctionDef) -> Uses:
        before = -1
        while before != (before := sum(map(len, self._behind.values()))):
            for node in ast.walk(function):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        self._assign(target, node.value)
                elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
                    self._assign(node.target, node.value)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                self._call(node)
        return {
            name: (name in self._read, name in self._written) for name in self._read | self._written
        }

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, of in zip(target.elts, value.elts, strict=False):
                self._assign(part, of)
        elif isinstance(target, ast.Name):
            self._behind[target.id] = self._behind.get(target.id, frozenset()) | self._from(value)

    def _from(self, node: ast.AST) -> frozenset[str]:
        """The parameters that a pointer is made of; what was loaded is none."""
        if isinstance(node, ast.Call) and _operation(node):
            return frozenset()
        if isinstance(node, ast.Name):
            return self._behind.get(node.id, frozenset())
        if isinstance(node, ast.Compare):
            return frozenset()
        return frozenset().union(*map(self._from, ast.iter_child_nodes(node)))

    def _call(self, call: ast.Call) -> None:
        operation = _operation(call)
        if operation:
            is_method = isinstance(call.func, ast.Attribute) and bool(self._from(call.func.value))
            pointer = call.func.value if is_method else _first(call)  # type: ignore[attr-defined]
            named = self._from(pointer) if pointer is not None else frozenset()
            if operation != "store":
                self._read |= named
            if operation != "load":
                self._written |= named
            return
        name = ast.unparse(call.func).split(".")[-1]
        callee = self._callees.get(name)
        if callee is None or self._depth >= _MAX_DEPTH:
            return
        inner = _uses(callee, self._known, self._depth + 1)
        parameters = _parameters(callee)
        given = [*zip(parameters, call.args, strict=False)]
        given += [(keyword.arg or "", keyword.value) for keyword in call.keywords]
        for parameter, value in given:
            reads, writes = inner.get(parameter, (False, False))
            named = self._from(value)
            self._read |= named if reads else frozenset()
            self._written |= named if writes else frozenset()


def _parameters(source: SourceRecord) -> list[str]:
    tree = ast.parse(textwrap.dedent(source.text))
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]


def _first(call: ast.Call) -> ast.expr | None:
    if call.args:
        return call.args[0]
    named = ("pointer", "desc")
    return next((keyword.value for keyword in call.keywords if keyword.arg in named), None)


def _operation(call: ast.Call) -> str:
    name = ast.unparse(call.func).split(".")[-1]
    if name in _LOADS or name in _STORES:
        return name
    return "atomic" if name.startswith("atomic_") else ""
