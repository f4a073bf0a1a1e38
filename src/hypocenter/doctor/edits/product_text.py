"""A kernel's text with a product of 64 bits, or with an atomic for a load, a sum and a store.

Runs nothing: whether such a text is right is for a replay to say.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hypocenter.doctor.kernel_text import function_of, statements_in
from hypocenter.doctor.mask_text import (
    MaskedAccess,
    MaskEdit,
    accesses_at,
    made_of,
    splice_text,
    without_layout,
)
from hypocenter.record.events import SourceRecord

_Span = tuple[tuple[int, int], tuple[int, int]]


def wide_edits(source: SourceRecord, line: int, expression: str) -> Iterator[MaskEdit]:
    """The text with one factor of a product cast to 64 bits, first the left one, then the right."""
    same = [
        node
        for at, node in products_in(source)
        if at == line and without_layout(ast.unparse(node)) in without_layout(expression)
    ]
    for node in same[:1]:
        was = ast.unparse(node)
        for side in (node.left, node.right):
            if isinstance(side, ast.Constant):
                continue
            start, stop = _span(side)
            text = ast.unparse(side)
            cast = f"{text if isinstance(side, ast.Name | ast.Call) else f'({text})'}.to(tl.int64)"
            parts = [
                cast if part is side else ast.unparse(part) for part in (node.left, node.right)
            ]
            yield MaskEdit(line, was, " * ".join(parts), splice_text(source, start, stop, cast))


def text_without(source: SourceRecord, edit: MaskEdit) -> str | None:
    """The text with 0 times the product that `edit` widens; None where it has no such product."""
    for line, node in products_in(source):
        if line == edit.line and ast.unparse(node) == edit.was:
            return splice_text(source, *_span(node), f"({edit.was} * 0)")
    return None


#: Calls that give the number of a place, and those that leave a number what it is.
_PLACES = ("program_id", "arange")
_KEEPERS = ("num_programs", "cdiv", ".to", "multiple_of", "max_contiguous")


def counts_places(source: SourceRecord, node: ast.expr) -> bool:
    """Whether an expression of a kernel is the number of a place: made of program ids or lanes, and
    of numbers that were passed, and of nothing that was loaded or that a loop carries on."""
    function = function_of(source.text)
    if function is None:
        return False
    made: dict[str, list[ast.expr | None]] = {}
    in_loops: set[str] = set()
    for statement in statements_in(function.body):
        for name, value in _assignments(statement):
            made.setdefault(name, []).append(value)
        if isinstance(statement, ast.For | ast.While):
            inside = statements_in(statement.body)
            in_loops |= {name for each in inside for name, _ in _assignments(each)}
    behind, left = [node], {*made} - in_loops
    for part in behind:
        for inner in ast.walk(part):
            if isinstance(inner, ast.Call) and not _is_named(inner, (*_PLACES, *_KEEPERS)):
                return False
            if not isinstance(inner, ast.Name) or inner.id not in made:
                continue
            if inner.id in in_loops or None in made[inner.id]:
                return False
            if inner.id in left:
                left.remove(inner.id)
                behind += [value for value in made[inner.id] if value is not None]
    parts = (inner for part in behind for inner in ast.walk(part))
    return any(isinstance(inner, ast.Call) and _is_named(inner, _PLACES) for inner in parts)


def _is_named(call: ast.Call, names: tuple[str, ...]) -> bool:
    return ast.unparse(call.func).endswith(names)


def _assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """Each name that a statement gives a value, and the value; None where that hangs on more."""
    value: ast.expr | None = None
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign):
        targets, value = [statement.target], statement.value
    elif isinstance(statement, ast.AugAssign | ast.For):
        targets = [statement.target]
    else:
        return
    for node in (node for target in targets for node in ast.walk(target)):
        if isinstance(node, ast.Name):
            yield node.id, value


def products_in(source: SourceRecord) -> Iterator[tuple[int, ast.BinOp]]:
    """The line of each product of a kernel, and the product."""
    function = function_of(source.text)
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            yield source.first_line + node.lineno - 1, node


def atomic_edits(source: SourceRecord, line: int, parameter: str) -> Iterator[MaskEdit]:
    """The text with `tl.atomic_add` where a store adds to what was loaded from the same place.

    The load may stand in a line before; nothing else may use it.
    """
    function = function_of(source.text)
    if function is None:
        return
    for access in _stores(source, function, parameter):
        if len(access.call.args) < 2:
            continue
        found = _added_to(access)
        if found is None:
            continue
        load_line, added = found
        call = access.call
        address = ast.unparse(call.args[0])
        mask = f", mask={ast.unparse(access.mask)}" if access.mask is not None else ""
        now = f"tl.atomic_add({address}, {ast.unparse(added)}{mask})"
        start, stop = _span(call)
        text = splice_text(source, start, stop, now)
        if load_line is not None:
            if load_line.lineno >= call.lineno:
                continue
            edited = _without(source, text, load_line)
            if edited is None:
                continue
            text = edited
        at = source.first_line + call.lineno - 1
        lines = {at} if load_line is None else {at, source.first_line + load_line.lineno - 1}
        if line in lines:
            yield MaskEdit(at, ast.unparse(call), now, text)


def _stores(
    source: SourceRecord, function: ast.FunctionDef, parameter: str
) -> Iterator[MaskedAccess]:
    for number in range(function.lineno, (function.end_lineno or function.lineno) + 1):
        for access in accesses_at(source, source.first_line + number - 1, parameter):
            if access.operation == "store" and access.call.lineno == number:
                yield access


def _added_to(access: MaskedAccess) -> tuple[ast.Assign | None, ast.expr] | None:
    """The assignment of the load, if it is one of its own, and what is added to its value."""
    value = access.call.args[1]
    line: ast.Assign | None = None
    if isinstance(value, ast.Name):
        made = made_of(access, value.id)
        value = made if made is not None else value
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return None
    for loaded, added in ((value.left, value.right), (value.right, value.left)):
        if isinstance(loaded, ast.Name):
            line = _only_use(access, loaded.id)
            load = line.value if line is not None else None
        else:
            line, load = None, loaded
        if not isinstance(load, ast.Call) or not ast.unparse(load.func).endswith("load"):
            continue
        if load.args and ast.unparse(load.args[0]) == ast.unparse(access.call.args[0]):
            return line, added
    return None


def _only_use(access: MaskedAccess, name: str) -> ast.Assign | None:
    """The one assignment of a name that is read once."""
    made = [
        node
        for node in statements_in(access.function.body)
        if isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == name
    ]
    reads = [
        node
        for node in ast.walk(access.function)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    ]
    return made[0] if len(made) == 1 and len(reads) == 1 else None


def _without(source: SourceRecord, text: str, statement: ast.Assign) -> str | None:
    """A text without a statement of one line that stands before all that was changed in it."""
    if statement.lineno != statement.end_lineno:
        return None
    lines = text.splitlines(keepends=True)
    old = lines[statement.lineno - 1]
    lines[statement.lineno - 1] = old[: len(old) - len(old.lstrip())] + "pass\n"
    return "".join(lines)


def _span(node: ast.expr) -> _Span:
    start = (node.lineno, node.col_offset)
    return start, (node.end_lineno or node.lineno, node.end_col_offset or 0)
