"""What an address is made of, by a kernel's text: each index with what multiplies it.

Numbers come from what the launch was given; runs nothing.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hypocenter.doctor.mask_text import MaskedAccess, made_of, names_in, roots_in
from hypocenter.record.events import TensorRecord

_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class AddressIndex:
    """A summand of an address: an index, and the expressions that it is multiplied by."""

    node: ast.expr
    multipliers: tuple[ast.expr, ...]

    @property
    def text(self) -> str:
        return ast.unparse(self.node)


def indices_of(
    access: MaskedAccess, is_step: Callable[[ast.expr], bool] = lambda factor: False
) -> list[AddressIndex]:
    """Those of the address that vary between lanes; of a single lane all that it is made of.

    What is multiplied by what `is_step` says is the step of an axis is an index by itself, and no
    part of the one that it is added to.
    """
    if not access.call.args:
        return []
    address = access.call.args[0]
    found = list(_indices(address, _Walk(access, is_step, of_lanes=True), (), 0))
    return found or list(_indices(address, _Walk(access, is_step, of_lanes=False), (), 0))


def scalars_of(access: MaskedAccess) -> list[AddressIndex]:
    """Those of the address that all lanes of a program share, such as its row."""
    if not access.call.args:
        return []
    walk = _Walk(access, lambda factor: False, of_lanes=False)
    found = _indices(access.call.args[0], walk, (), 0)
    return [index for index in found if not roots_in(index.node, access.roots)]


@dataclass(frozen=True, slots=True)
class _Walk:
    """An address that is taken apart; `of_lanes`: only what varies between lanes is an index."""

    access: MaskedAccess
    is_step: Callable[[ast.expr], bool]
    of_lanes: bool


def _indices(
    node: ast.expr, walk: _Walk, by: tuple[ast.expr, ...], depth: int
) -> Iterator[AddressIndex]:
    access = walk.access
    if depth > _MAX_DEPTH or _is_pointer(node, access) or isinstance(node, ast.Constant):
        return
    if walk.of_lanes and not roots_in(node, access.roots):
        return
    parts: list[tuple[ast.expr, tuple[ast.expr, ...]]] = []
    if isinstance(node, ast.Name):
        made = made_of(access, node.id)
        is_more = made is not None and (
            _holds_pointer(made, access) or (walk.of_lanes and _is_offset(made, walk))
        )
        parts = [(made, by)] if made is not None and is_more else []
    elif isinstance(node, ast.BinOp) and _holds_pointer(node, access):
        whole = _without_pointer(node, access)
        parts = [(node.left, by), (node.right, by)] if whole is None else [(whole, by)]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        index, factor = _split(node, walk)
        parts = [(index, (*by, factor))]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [(part, by) for part in _apart(node, walk)] if _is_offset(node, walk) else []
    elif isinstance(node, ast.Subscript) and _is_offset(node.value, walk):
        for inner in _indices(node.value, walk, by, depth + 1):
            placed = ast.Subscript(inner.node, node.slice, ast.Load())
            yield AddressIndex(placed, inner.multipliers)
        return
    if not parts:
        yield AddressIndex(node, by)
    for part, multipliers in parts:
        yield from _indices(part, walk, multipliers, depth + 1)


def _apart(node: ast.expr, walk: _Walk) -> list[ast.expr]:
    """The summands that are an index times something, and the sum of what is left, one index."""
    summands = _summands(node)
    rest = [part for part in summands if not _is_offset(part, walk)]
    apart = [part for part in summands if _is_offset(part, walk)]
    return [*apart, functools.reduce(_sum, rest)] if rest else apart


def _summands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_summands(node.left), *_summands(node.right)]
    return [node]


def _sum(one: ast.expr, other: ast.expr) -> ast.expr:
    return ast.BinOp(one, ast.Add(), other)


def _split(node: ast.BinOp, walk: _Walk) -> tuple[ast.expr, ast.expr]:
    """An index and the factor of its product."""
    if walk.of_lanes:
        is_left = bool(roots_in(node.left, walk.access.roots))
    else:
        parameters = {argument.arg for argument in walk.access.function.args.args}
        is_left = not names_in(node.left) <= parameters
    return (node.left, node.right) if is_left else (node.right, node.left)


def _is_offset(node: ast.expr, walk: _Walk) -> bool:
    """Whether an expression holds an index times something: it is an offset then, and no index."""
    if isinstance(node, ast.Subscript):
        return _is_offset(node.value, walk)
    if not isinstance(node, ast.BinOp):
        return False
    if isinstance(node.op, ast.Mult):
        is_step = walk.is_step(node.left) or walk.is_step(node.right)
        return is_step or not walk.of_lanes or bool(roots_in(node, walk.access.roots))
    if not isinstance(node.op, ast.Add | ast.Sub):
        return False
    return any(_is_offset(part, walk) for part in (node.left, node.right))


def _is_pointer(node: ast.expr, access: MaskedAccess) -> bool:
    return isinstance(node, ast.Name) and node.id == access.parameter


def _holds_pointer(node: ast.AST, access: MaskedAccess, depth: int = 0) -> bool:
    """Whether an expression is worked out from the parameter, through the names in it."""
    if isinstance(node, ast.Call) or depth > _MAX_DEPTH:
        return False
    if isinstance(node, ast.Name):
        if node.id == access.parameter:
            return True
        made = made_of(access, node.id)
        return made is not None and made is not node and _holds_pointer(made, access, depth + 1)
    return any(_holds_pointer(child, access, depth + 1) for child in ast.iter_child_nodes(node))


def _without_pointer(node: ast.expr, access: MaskedAccess) -> ast.expr | None:
    """`pid - 1` of `x_ptr + pid - 1`; None where the pointer is no plain summand."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
        return None
    if _is_pointer(node.left, access) and isinstance(node.op, ast.Add):
        return node.right
    if _is_pointer(node.right, access) and isinstance(node.op, ast.Add):
        return node.left
    rest = _without_pointer(node.left, access)
    return None if rest is None else ast.BinOp(rest, node.op, node.right)


# -- numbers --------------------------------------------------------------------------------------


def number_of(node: ast.expr, access: MaskedAccess, given: Mapping[str, object]) -> int | None:
    """What an expression of numbers that the launch was given comes to; None for any other."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Name):
        value = given.get(node.id)
        if type(value) is int:
            return value
        made = made_of(access, node.id)
        return number_of(made, access, given) if made is not None else None
    if isinstance(node, ast.BinOp):
        left, right = number_of(node.left, access, given), number_of(node.right, access, given)
        return _result(node.op, left, right)
    return None


def _result(operator: ast.operator, left: int | None, right: int | None) -> int | None:
    if left is None or right is None:
        return None
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    return left // right if isinstance(operator, ast.FloorDiv) and right else None


def sizes_of(
    index: AddressIndex, access: MaskedAccess, given: Mapping[str, object], tensor: TensorRecord
) -> list[int]:
    """How many entries the index may have, by the strides of the tensor; empty if they don't say.

    An axis whose rows lie one behind the other with those of the axes before it counts with them.
    """
    by = 1
    for factor in index.multipliers:
        number = number_of(factor, access, given)
        if number is None:
            return []
        by *= number
    return sizes_along(tensor.shape, tensor.strides, by)


def sizes_along(shape: tuple[int, ...], strides: tuple[int, ...], by: int) -> list[int]:
    """The size of the axis with that stride, then with the axes before it that continue it."""
    found: list[int] = []
    for axis in reversed(range(len(shape))):
        if strides[axis] != by or shape[axis] < 2:
            continue
        size = shape[axis]
        found.append(size)
        for before in reversed(range(axis)):
            if shape[before] > 1 and strides[before] != by * size:
                break
            size *= shape[before]
            found.append(size)
        break
    return list(dict.fromkeys(found))
