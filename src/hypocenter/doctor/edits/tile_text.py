"""Comparisons of a lane's number within its tile where the address goes on from the tile's start.

`h < n` beside an address with `h * stride` and `tile * WIDTH * stride`: the index is
`tile * WIDTH + h`. Runs nothing: a replay decides.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from hypocenter.doctor.mask_text import (
    MaskedAccess,
    MaskEdit,
    comparisons,
    made_of,
    roots_in,
    with_left_side,
)
from hypocenter.record.events import SourceRecord

#: Names that are looked behind, one after another, and summands of one address.
_MAX_DEPTH, _MAX_PRODUCTS = 8, 32


def whole_index_edits(
    source: SourceRecord, access: MaskedAccess
) -> Iterator[tuple[MaskEdit, ast.Compare]]:
    """The text with the start of the tile added to what the mask compares; and the comparison."""
    address = access.call.args[0] if access.call.args else None
    products = _products(access, address, 0) if address is not None else []
    for compare in comparisons(access):
        lane = _bare(compare.left)
        width = _width_of(access, lane) if isinstance(lane, ast.Name) else None
        is_below = len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Lt)
        if width is None or not is_below or roots_in(compare.comparators[0], access.roots):
            continue
        own = ast.unparse(lane)
        for step in (Counter(product) - Counter([own]) for product in products if own in product):
            of_tile = step + Counter([width])
            for start in (product for product in products if of_tile < Counter(product)):
                tile = (Counter(start) - of_tile).elements()
                text = f"{' * '.join((*tile, width))} + {ast.unparse(compare.left)}"
                node = ast.parse(text, mode="eval").body
                whole = ast.Compare(node, compare.ops, compare.comparators)
                yield with_left_side(source, compare, text), whole


def _products(access: MaskedAccess, node: ast.expr, depth: int) -> list[list[str]]:
    """The summands of an address, each as the factors of its product; names stand for what they
    were made of."""
    node = _bare(node)
    if isinstance(node, ast.Name):
        made = made_of(access, node.id)
        made = _bare(made) if made is not None else None
        is_made = isinstance(made, ast.BinOp) and depth < _MAX_DEPTH
        return _products(access, made, depth + 1) if is_made and made else [[node.id]]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = (_products(access, side, depth + 1) for side in (node.left, node.right))
        if isinstance(node.op, ast.Add):
            return [*left, *right][:_MAX_PRODUCTS]
        return [[*factor, *other] for factor in left for other in right][:_MAX_PRODUCTS]
    return [[ast.unparse(node)]]


def _bare(node: ast.expr) -> ast.expr:
    """`h` of `h[:, None]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _width_of(access: MaskedAccess, lane: ast.Name) -> str | None:
    """How many lanes a name counts from 0 on, as text; None where it counts none."""
    named = made_of(access, lane.id)
    made = _bare(named) if named is not None else None
    if not isinstance(made, ast.Call) or len(made.args) != 2:
        return None
    is_arange = ast.unparse(made.func).split(".")[-1] == "arange"
    return ast.unparse(made.args[1]) if is_arange and ast.unparse(made.args[0]) == "0" else None
