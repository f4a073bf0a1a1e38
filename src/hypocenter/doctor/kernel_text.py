"""Which lines of a kernel's text read or write through which pointer parameter; runs nothing.

A walk over the syntax tree that follows assignments: `start = x_ptr + ...` makes `start` a pointer
of x_ptr, and what a load returns is none.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hypocenter.record.events import SourceRecord

_LOADS = frozenset({"load"})
_STORES = frozenset({"store"})
_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Access:
    """A load, store or atomic: its line in `file`, its text, and how it is masked, if it is."""

    file: str
    line: int
    function: str
    expression: str
    operation: str
    has_mask: bool


def accesses(
    source: SourceRecord, parameter: str, callees: Mapping[str, SourceRecord], depth: int = 0
) -> tuple[Access, ...]:
    """Accesses through `parameter`, in the order of the text, those of callees included."""
    function = function_of(source.text)
    if function is None or depth > _MAX_DEPTH:
        return ()
    found: list[Access] = []
    for call, operation, bases in calls_in(function):
        if parameter not in bases.all:
            continue
        if operation:
            if parameter in bases.address:
                found.append(_access(source, function, call, operation))
        elif (callee := callees.get(ast.unparse(call.func).split(".")[-1])) is not None:
            inner = function_of(callee.text)
            for name in _names_passed(inner, call, parameter, bases.by_argument) if inner else ():
                found += accesses(callee, name, callees, depth + 1)
    return tuple(found)


def parameters_stored(source: SourceRecord) -> frozenset[str]:
    """Parameters that the kernel itself writes through (not its callees)."""
    function = function_of(source.text)
    if function is None:
        return frozenset()
    stores = (
        bases.address for _, operation, bases in calls_in(function) if operation not in ("", "load")
    )
    return frozenset().union(*stores)


def has_loop(source: SourceRecord) -> int | None:
    """The line of the first `while` of a kernel, which may never end; None without one."""
    function = function_of(source.text)
    for node in ast.walk(function) if function else ():
        if isinstance(node, ast.While):
            return source.first_line + node.lineno - 1
    return None


def line_text(source: SourceRecord, line: int) -> str:
    """Line `line` of the file, without its indentation; empty when it is not in this text."""
    lines = source.text.splitlines()
    number = line - source.first_line
    return lines[number].strip() if 0 <= number < len(lines) else ""


@dataclass(frozen=True, slots=True)
class _Bases:
    """Pointer parameters behind a call's arguments; `address` those behind its first."""

    by_argument: tuple[tuple[int | str, frozenset[str]], ...]

    @property
    def all(self) -> frozenset[str]:
        return frozenset().union(*(names for _, names in self.by_argument))

    @property
    def address(self) -> frozenset[str]:
        return next((names for at, names in self.by_argument if at in (0, "pointer")), frozenset())


@functools.lru_cache(maxsize=512)
def function_of(text: str) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)


def calls_in(function: ast.FunctionDef) -> list[tuple[ast.Call, str, _Bases]]:
    """Each call with its operation (load, store, atomic; empty for others) and its bases."""
    arguments = function.args
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    behind: dict[str, frozenset[str]] = {name: frozenset({name}) for name in names}
    found = []
    for node in statements_in(function.body):
        for call in (inner for part in _own_expressions(node) for inner in ast.walk(part)):
            if isinstance(call, ast.Call):
                bases: tuple[tuple[int | str, frozenset[str]], ...] = (
                    *((at, _behind(value, behind)) for at, value in enumerate(call.args)),
                    *((k.arg or "", _behind(k.value, behind)) for k in call.keywords),
                )
                found.append((call, _operation(call), _Bases(bases)))
        _assign(node, behind)
    return sorted(found, key=lambda item: (item[0].lineno, item[0].col_offset))


def statements_in(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from statements_in(getattr(node, name, []))


def _own_expressions(node: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            yield child


def _assign(node: ast.stmt, behind: dict[str, frozenset[str]]) -> None:
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    else:
        return
    for target, value in pairs:
        same = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        parts = (
            zip(target.elts, value.elts, strict=False) if same else [(target, value)]  # type: ignore[attr-defined]
        )
        for into, part in parts:
            for name in ast.walk(into):
                if isinstance(name, ast.Name):
                    old = behind.get(name.id, frozenset())
                    keep = old if isinstance(node, ast.AugAssign) else frozenset()
                    behind[name.id] = keep | _behind(part, behind)


def _behind(node: ast.AST, behind: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Parameters that an expression is computed from, loaded values apart."""
    if isinstance(node, ast.Call) and _operation(node):
        return frozenset()
    if isinstance(node, ast.Name):
        return behind.get(node.id, frozenset())
    return frozenset().union(*(_behind(child, behind) for child in ast.iter_child_nodes(node)))


def _operation(call: ast.Call) -> str:
    name = ast.unparse(call.func).split(".")[-1]
    if name in _LOADS or name in _STORES:
        return name
    return "atomic" if name.startswith("atomic_") else ""


def _names_passed(
    callee: ast.FunctionDef,
    call: ast.Call,
    parameter: str,
    bases: tuple[tuple[int | str, frozenset[str]], ...],
) -> Iterator[str]:
    names = [arg.arg for arg in callee.args.args]
    for at, behind in bases:
        if parameter in behind:
            if isinstance(at, str):
                yield at
            elif at < len(names):
                yield names[at]


def _access(
    source: SourceRecord, function: ast.FunctionDef, call: ast.Call, operation: str
) -> Access:
    text = ast.get_source_segment(textwrap.dedent(source.text), call) or ast.unparse(call)
    has_mask = _has_mask(call, operation)
    line = source.first_line + call.lineno - 1
    return Access(source.file, line, function.name, " ".join(text.split()), operation, has_mask)


def is_masked(access: str) -> bool:
    """Whether an access, given as its text alone, leaves lanes out."""
    try:
        parsed = ast.parse(access.strip(), mode="eval").body
    except SyntaxError:  # shortened
        return "mask" in access
    calls = [n for n in ast.walk(parsed) if isinstance(n, ast.Call) and _operation(n)]
    return any(_has_mask(call, _operation(call)) for call in calls[:1])


def _has_mask(call: ast.Call, operation: str) -> bool:
    named = {keyword.arg for keyword in call.keywords}
    return bool(named & {"mask", "boundary_check"}) or (
        len(call.args) > (1 if operation == "load" else 2)
    )


def mask_of(call: ast.Call, operation: str) -> ast.expr | None:
    """The mask that a load, store or atomic was given."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "mask"]
    return next(iter((*named, *call.args[1 if operation == "load" else 2 :])), None)


def guard_line(source: SourceRecord, line: int) -> tuple[int, str] | None:
    """Line and text of what compares in the mask of the access at `line`: it, or an assignment.

    Of a mask with several names, the one whose assignment holds a comparison; None without a mask.
    """
    function = function_of(source.text)
    if function is None:
        return None
    at = line - source.first_line + 1
    names: list[str] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _operation(node) and node.lineno <= at <= _end(node):
            mask = mask_of(node, _operation(node))
            if mask is None:
                continue
            if any(isinstance(part, ast.Compare) for part in ast.walk(mask)):
                return source.first_line + mask.lineno - 1, ast.unparse(mask)
            names += [part.id for part in ast.walk(mask) if isinstance(part, ast.Name)]
    found = _line_that_makes(function, names, at)
    if found is None:
        return None
    number = source.first_line + found - 1
    return number, line_text(source, number)


def _line_that_makes(function: ast.FunctionDef, names: list[str], before: int) -> int | None:
    """The last line before `before` that assigns a comparison to one of the names, or to a name
    that one of them was made of."""
    assigned = [
        node
        for node in statements_in(function.body)
        if isinstance(node, ast.Assign) and node.lineno <= before
    ]
    for _ in range(_MAX_DEPTH):
        behind: list[str] = []
        for node in reversed(assigned):
            targets = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            if targets & set(names):
                if any(isinstance(part, ast.Compare) for part in ast.walk(node.value)):
                    return node.lineno
                behind += [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
        names = behind
    return None


def program_line(source: SourceRecord) -> tuple[int, str] | None:
    """The line that divides a program's number, so that several programs get one index."""
    function = function_of(source.text)
    for node in ast.walk(function) if function else ():
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.FloorDiv | ast.Mod)
            and "program_id" in ast.unparse(node.left)
        ):
            number = source.first_line + node.lineno - 1
            return number, line_text(source, number)
    return None


def _end(node: ast.expr) -> int:
    return node.end_lineno or node.lineno


def is_index_in(source: SourceRecord, access: str, parameter: str) -> bool:
    """Whether the address of an access of the kernel is worked out from what `parameter` holds.

    `access` is its text. Masks do not count: what only decides which lanes run is no index.
    """
    expression = _parse(access)
    return expression is not None and bool(_names(expression) & _names_after(source, parameter))


def is_divided_in(source: SourceRecord, parameter: str) -> bool:
    """Whether the kernel divides, cuts or takes the rest of what it works out from `parameter`."""
    tree = _parse(source.text)
    followed = _names_after(source, parameter) | {parameter}
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.FloorDiv | ast.Mod | ast.RShift | ast.BitAnd)
        and bool(_names(node.left) & followed)
        for node in (ast.walk(tree) if tree is not None else ())
    )


def is_mask_in(source: SourceRecord, access: str, parameter: str) -> bool:
    """Whether the mask of an access of the kernel is worked out from what `parameter` holds."""
    expression = _parse(access)
    if expression is None:
        return False
    masks = [keyword.value for keyword in _keywords(expression) if keyword.arg == "mask"]
    followed = _names_after(source, parameter)
    return any(_names(mask) & followed for mask in masks)


def _parse(text: str) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None


def _keywords(expression: ast.AST) -> Iterator[ast.keyword]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Call):
            yield from node.keywords


def _names_after(source: SourceRecord, parameter: str) -> set[str]:
    """Names of the kernel that are worked out from `parameter`, without itself."""
    tree = _parse(source.text)
    if tree is None:
        return set()
    found = {parameter}
    for _ in range(8):  # an assignment may use a name that a later line of a loop makes
        before = len(found)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AugAssign) and _names(node.value) & found:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        if len(found) == before:
            break
    return found - {parameter}


def _names(node: ast.AST) -> set[str]:
    """Names in an expression, without those of masks and of the values that are stored."""
    skipped: set[int] = set()
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            parts: list[ast.AST] = [k.value for k in call.keywords if k.arg in ("mask", "other")]
            if ast.unparse(call.func).split(".")[-1] == "store":
                parts += call.args[1:]
            skipped |= {id(inner) for part in parts for inner in ast.walk(part)}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and id(n) not in skipped}


def follows_what_it_loads(source: SourceRecord, parameter: str) -> bool:
    """Whether a value loaded through `parameter` decides which addresses the kernel touches.

    By an address, a mask, a branch, the end of a loop, or by a function that it is given to.
    """
    function = function_of(source.text)
    if function is None:
        return True
    loaded = {
        id(call)
        for call, operation, bases in calls_in(function)
        if operation in ("load", "atomic") and parameter in bases.address
    }
    given = (
        call
        for call, operation, bases in calls_in(function)
        if not operation and parameter in bases.all
    )
    if any(not _is_language(call) or "descriptor" in ast.unparse(call.func) for call in given):
        return True
    held: set[str] = set()

    def is_held(node: ast.AST) -> bool:
        return any(
            id(n) in loaded or (isinstance(n, ast.Name) and n.id in held) for n in ast.walk(node)
        )

    for _ in range(8):  # as in _names_after
        before = len(held)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if is_held(node.value):
                    held |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        if len(held) == before:
            break
    return any(is_held(part) for part in _deciding(function))


def _is_language(call: ast.Call) -> bool:
    """Whether a call is of Triton's own functions and not of one with a text of its own."""
    return ast.unparse(call.func).split(".")[0] in ("tl", "language", "libdevice")


def _deciding(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What decides where a kernel reads and writes."""
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.For):
            yield node.iter
        elif isinstance(node, ast.Call) and (operation := _operation(node)):
            yield from node.args[:1]
            yield from node.args[1 if operation == "load" else 2 :]
            yield from (k.value for k in node.keywords if k.arg not in ("other", "value"))
        elif isinstance(node, ast.Call) and not _is_language(node):
            yield from node.args
            yield from (keyword.value for keyword in node.keywords)
