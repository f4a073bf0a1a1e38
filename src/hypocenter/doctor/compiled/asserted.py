"""Which index an assertion of Inductor's checks: the load behind it, and the range it must be in.

Inductor asserts `0 <= tmp4 < 1000`, where tmp4 is a loaded index, or that plus the size where it is
negative. Anything else that leads from a load to an assertion is not solved.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hypocenter.doctor.kernel_text import function_of
from hypocenter.record.events import SourceRecord

_CHECK = re.compile(r"index out of bounds: 0 <= (\w+) < (\w+)")


@dataclass(frozen=True, slots=True)
class AssertedIndex:
    """An index is loaded through `parameter` at `line` of the file, and is to be below `bound`.

    `bound` is a number, or the parameter that has it. With `wraps` it may be negative: it counts
    from the end then. `line` is 0 where something else is done with what was loaded.
    """

    parameter: str
    line: int
    bound: str
    wraps: bool


def asserted_index(source: SourceRecord, condition: str) -> AssertedIndex | None:
    """What an assertion of a kernel checks; None where that does not follow from its text."""
    function, found = function_of(source.text), _CHECK.search(condition)
    if function is None or found is None:
        return None
    made = {
        node.targets[0].id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    pointers = {argument.arg for argument in function.args.args}
    value, wraps = _index_behind(found[1], made)
    load = made.get(value)
    behind = _pointers_of(load, pointers)
    if load is not None and _name_of_call(load) == "load" and len(behind) == 1:
        line = source.first_line + load.lineno - 1
        return AssertedIndex(behind.pop(), line, found[2], wraps)
    behind = _pointers_behind(found[1], made, pointers)
    return AssertedIndex(behind.pop(), 0, found[2], wraps) if len(behind) == 1 else None


def _name_of_call(value: ast.expr | None) -> str:
    function = value.func if isinstance(value, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else ""


def _index_behind(name: str, made: Mapping[str, ast.expr]) -> tuple[str, bool]:
    """The index that a name stands for: `where(i < 0, i + size, i)` is i, and may be negative."""
    value = made.get(name)
    if not isinstance(value, ast.Call) or _name_of_call(value) != "where" or len(value.args) != 3:
        return name, False
    condition, added, index = (_value_of(argument, made) for argument in value.args)
    original = value.args[2]
    is_test = (
        isinstance(condition, ast.Compare)
        and isinstance(condition.ops[0], ast.Lt)
        and ast.unparse(condition.comparators[0]) == "0"
        and ast.unparse(condition.left) == ast.unparse(original)
    )
    is_sum = (
        isinstance(added, ast.BinOp)
        and isinstance(added.op, ast.Add)
        and ast.unparse(original) in (ast.unparse(added.left), ast.unparse(added.right))
    )
    if is_test and is_sum and isinstance(original, ast.Name) and index is not None:
        return original.id, True
    return name, False


def _value_of(value: ast.expr, made: Mapping[str, ast.expr]) -> ast.expr | None:
    return made.get(value.id) if isinstance(value, ast.Name) else value


def _pointers_of(load: ast.expr | None, pointers: set[str]) -> set[str]:
    """The parameters that the address of a load is made of, itself."""
    if not isinstance(load, ast.Call) or not load.args:
        return set()
    names = {node.id for node in ast.walk(load.args[0]) if isinstance(node, ast.Name)}
    return {name for name in names & pointers if "ptr" in name}


def _pointers_behind(name: str, made: Mapping[str, ast.expr], pointers: set[str]) -> set[str]:
    """The parameters through which everything behind a name was loaded."""
    seen, left, found = set(), [name], set()
    while left:
        one = left.pop()
        value = made.get(one)
        if one in seen or value is None:
            continue
        seen.add(one)
        if _name_of_call(value) == "load":
            found |= _pointers_of(value, pointers)
            continue
        left += [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
    return found
