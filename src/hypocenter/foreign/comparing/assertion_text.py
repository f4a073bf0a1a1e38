"""What a failed assertion compared, read from its text and from the assignments before it.

Reads sources alone; what a name stands for is asked of `watch.py`. What it does not know it leaves.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

#: Comparisons that allow nothing; and those that do, with `rtol` and `atol` where none are given,
#: or None where these hang on the types.
_EXACT = frozenset({"equal", "array_equal", "assert_equal", "assert_array_equal"})
_CLOSE: dict[str, tuple[float, float] | None] = {
    "allclose": (1e-5, 1e-8),
    "isclose": (1e-5, 1e-8),
    "assert_allclose": (1e-7, 0.0),
    "assert_close": None,
}
#: Calls that keep each number in its place, or nearly so, and those that take the largest.
_KEEPING = frozenset(
    {"float", "double", "half", "bfloat16", "int", "long", "to", "type", "cpu", "cuda", "numpy"}
    | {"detach", "clone", "contiguous", "item"}
)
_LARGEST = frozenset({"abs", "max", "amax", "item", "float", "cpu", "detach"})
#: Calls that divide whole numbers, and those that give what is left; `divmod` does both.
_DIVIDING = frozenset({"floor_divide", "div", "divide", "divmod"})
_LEAVING = frozenset({"remainder", "fmod", "mod", "divmod"})
#: Of other sums of the differences it is not known what one element may be.
_SUMMING = frozenset({"mean", "sum", "norm", "square", "pow", "sqrt"})
_MAX_DEPTH, _MAX_LINES = 8, 20_000
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Two expressions that were compared, in a statement at `line`.

    `rtol` and `atol` are what was allowed: numbers, or names of such; None where that is not known.
    """

    one: ast.expr
    other: ast.expr
    line: int
    rtol: float | str = 0.0
    atol: float | str | None = 0.0


@dataclass(frozen=True, slots=True)
class Assertion:
    """A failed assertion: `lines` are its own and those of what it hangs on, `pairs` what was
    compared there as far as the text tells. `origins` has by name what that is a copy of, and
    `divisors` by which numbers the program takes apart what it names, or what it makes of that."""

    lines: frozenset[int]
    pairs: tuple[ComparedPair, ...]
    origins: Mapping[str, ast.expr]
    divisors: Mapping[str, tuple[int | str, ...]]


def assertion_at(file: str, line: int, is_module: Callable[[str], bool]) -> Assertion | None:
    """The assertion in a line of a file; None where there is none, or no source.

    `is_module`: whether a name stands for a module there, so that no tensor is before the dot.
    """
    lines = linecache.getlines(file)
    if not 0 < line <= len(lines) <= _MAX_LINES:
        return None
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return None
    body = _scope_of(tree.body, line)
    for node in _nodes(body):
        if not isinstance(node, ast.Assert | ast.Expr) or not _covers(node, line):
            continue
        reading = _Reading(body, line, is_module)
        test = node.test if isinstance(node, ast.Assert) else node.value
        pairs = tuple(reading.pairs_in(test, node.lineno, 0))
        reading.lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        names = {side.id for pair in pairs for side in _sides(pair) if isinstance(side, ast.Name)}
        return Assertion(
            lines=frozenset(reading.lines),
            pairs=pairs,
            origins=dict(reading.origins_of(pairs)),
            divisors={name: tuple(_divisors_of(body, name)) for name in names},
        )
    return None


def base_of(node: ast.expr) -> ast.expr:
    """The tensor itself behind calls that leave its elements where they are."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr not in _KEEPING:
            break
        node = node.func.value
    return node


class _Reading:
    """Follows an assertion through a scope; `lines` are those that it hangs on."""

    def __init__(self, body: list[ast.stmt], line: int, is_module: Callable[[str], bool]) -> None:
        self._body, self._line, self._is_module = body, line, is_module
        self.lines: set[int] = set()

    def pairs_in(self, node: ast.expr, line: int, depth: int) -> Iterator[ComparedPair]:
        """The comparisons that an expression in that line is true by."""
        if depth > _MAX_DEPTH:
            return
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for value in node.values:
                yield from self.pairs_in(value, line, depth + 1)
        elif isinstance(node, ast.Name):
            if (made := self._assignment_of(node.id, line)) is not None:
                yield from self.pairs_in(made.value, made.lineno, depth + 1)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._of_operator(node, line, depth)
        elif isinstance(node, ast.Call):
            yield from self._of_call(node, line, depth)

    def origins_of(self, pairs: Sequence[ComparedPair]) -> Iterator[tuple[str, ast.expr]]:
        """By name of a side the expression that it was made of by calls which keep elements."""
        for pair in pairs:
            for side in _sides(pair):
                made = (
                    self._assignment_of(side.id, pair.line) if isinstance(side, ast.Name) else None
                )
                if made is None:
                    continue
                origin = ComparedPair(base_of(made.value), base_of(made.value), made.lineno)
                if isinstance(side, ast.Name) and any(self._valid_pairs(origin)):
                    yield side.id, origin.one

    def _of_call(self, call: ast.Call, line: int, depth: int) -> Iterator[ComparedPair]:
        name = _name_of(call)
        owner = self._owner_of(call)
        if name in _EXACT or name in _CLOSE:
            operands = [*call.args[:2]] if len(call.args) > 1 else [*filter(None, (owner,))]
            operands += call.args[:1] if len(call.args) == 1 else []
            if len(operands) == 2:
                pair = ComparedPair(operands[0], operands[1], line, *_tolerances(call, name))
                yield from self._valid_pairs(pair)
        elif name in ("all", "item", "bool"):
            inner = owner or next(iter(call.args), None)
            if inner is not None:
                yield from self.pairs_in(inner, line, depth + 1)

    def _of_operator(self, node: ast.Compare, line: int, depth: int) -> Iterator[ComparedPair]:
        left, right = node.left, node.comparators[0]
        if isinstance(node.ops[0], ast.Eq) and not isinstance(right, ast.Constant):
            yield from self._valid_pairs(ComparedPair(left, right, line))
        elif isinstance(node.ops[0], ast.Lt | ast.LtE):
            limit = _number_in(right)
            for pair in self._differences(left, line, limit, depth):
                yield from self._valid_pairs(pair)

    def _differences(
        self, node: ast.expr, line: int, limit: float | str | None, depth: int
    ) -> Iterator[ComparedPair]:
        """The tensors of whose difference a number was made; `limit` is what it may be."""
        if depth > _MAX_DEPTH:
            return
        if isinstance(node, ast.Name):
            if (made := self._assignment_of(node.id, line)) is not None:
                yield from self._differences(made.value, made.lineno, limit, depth + 1)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            yield ComparedPair(node.left, node.right, line, 0.0, limit)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult | ast.Pow):
            yield from self._differences(node.left, line, None, depth + 1)
        elif isinstance(node, ast.Call):
            name = _name_of(node)
            inner = self._owner_of(node) or next(iter(node.args), None)
            if inner is not None and name in _LARGEST | _SUMMING:
                kept = limit if name in _LARGEST else None
                yield from self._differences(inner, line, kept, depth + 1)

    def _owner_of(self, call: ast.Call) -> ast.expr | None:
        """What a method is called of; None for a function."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        root = owner
        while isinstance(root, ast.Attribute):  # np.testing, torch.testing
            root = root.value
        if isinstance(root, ast.Name) and self._is_module(root.id):
            return None
        return owner

    def _valid_pairs(self, pair: ComparedPair) -> Iterator[ComparedPair]:
        """The pair, unless one of its names was bound again behind the comparison."""
        names = {
            node.id
            for side in (pair.one, pair.other)
            for node in ast.walk(side)
            if isinstance(node, ast.Name)
        }
        again = (
            node.id in names and pair.line < node.lineno <= self._line
            for node in _nodes(self._body)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        if not any(again):
            yield pair

    def _assignment_of(self, name: str, line: int) -> ast.Assign | None:
        """The last statement before a line that binds a name, where it binds that name alone."""
        stores = [
            node.lineno
            for node in _nodes(self._body)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
            if node.lineno < line
        ]
        for node in _nodes(self._body):
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target = node.targets[0]
            is_it = isinstance(target, ast.Name) and target.id == name
            if is_it and stores and target.lineno == max(stores):
                self.lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                return node
        return None


def _sides(pair: ComparedPair) -> tuple[ast.expr, ast.expr]:
    return base_of(pair.one), base_of(pair.other)


def _divisors_of(body: list[ast.stmt], name: str) -> Iterator[int | str]:
    """By what the scope both divides and takes the remainder of one expression that is made of
    `name`, or was made together with it: numbers, or names of such."""
    made = _names_made_of(body, name)
    divided: set[tuple[str, str]] = set()
    left: dict[tuple[str, str], ast.expr] = {}
    for node in _nodes(body):
        operands, divides, leaves = _division_in(node)
        if len(operands) == 2 and _names_in(operands[0]) & made:
            key = (ast.dump(operands[0]), ast.dump(operands[1]))
            divided |= {key} if divides else set()
            left |= {key: operands[1]} if leaves else {}
    for key, divisor in left.items():
        number = _number_in(divisor) if key in divided else None
        if number is not None:
            yield number if isinstance(number, str) else int(number)


def _division_in(node: ast.AST) -> tuple[Sequence[ast.expr], bool, bool]:
    """The operands of a division of whole numbers, and whether it gives quotient and remainder."""
    if isinstance(node, ast.BinOp):
        operands = node.left, node.right
        return operands, isinstance(node.op, ast.FloorDiv), isinstance(node.op, ast.Mod)
    if not isinstance(node, ast.Call):
        return (), False, False
    name = _name_of(node)
    is_rounded = name not in ("div", "divide") or any(
        keyword.arg == "rounding_mode" for keyword in node.keywords
    )
    given: Sequence[ast.expr] = node.args
    if isinstance(node.func, ast.Attribute) and len(node.args) == 1:  # a method
        given = [node.func.value, *node.args]
    return given, name in _DIVIDING and is_rounded, name in _LEAVING


def _names_made_of(body: list[ast.stmt], name: str) -> set[str]:
    """The name itself, those that are bound together with it, and those that are made of them."""
    made, before = {name}, set[str]()
    while made != before:
        before = set(made)
        for node in _nodes(body):
            for target, value in _bindings(node):
                bound = _names_in(target)
                if name in bound or _names_in(value) & made:
                    made |= bound
    return made


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What an assignment binds, and to what; element by element where both are written out."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        value = node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        else:
            yield target, value


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _name_of(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _tolerances(call: ast.Call, name: str) -> tuple[float | str, float | str | None]:
    if name in _EXACT:
        return 0.0, 0.0
    given = {keyword.arg: _number_in(keyword.value) for keyword in call.keywords}
    default = _CLOSE[name]
    if default is None or len(call.args) > 2:  # told by their place
        return 0.0, None
    rtol = given.get("rtol", default[0])
    return (rtol, given.get("atol", default[1])) if rtol is not None else (0.0, None)


def _number_in(node: ast.expr) -> float | str | None:
    """A number, or the name of one."""
    if isinstance(node, ast.Name):
        return node.id
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _scope_of(body: list[ast.stmt], line: int) -> list[ast.stmt]:
    """The body of the innermost function that a line stands in, else of the module."""
    found = body
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _covers(node, line):
            found = node.body
    return found


def _nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Those of one scope, and nothing of the functions in it."""
    left: list[ast.AST] = list(reversed(body))
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, _SCOPES):
            left += reversed(list(ast.iter_child_nodes(node)))
