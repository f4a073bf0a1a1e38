"""Syntax trees of sources, which several rules look through: each is parsed and walked once."""

from __future__ import annotations

import ast
import heapq
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from operator import itemgetter
from typing import Any


@cache
def tree_of(text: str) -> ast.Module:
    """The tree of a source; whoever gets it changes nothing in it."""
    return ast.parse(text)


@cache
def _by_kind(tree: ast.Module) -> dict[type[ast.AST], list[tuple[int, ast.AST]]]:
    """Nodes with their places in a walk."""
    found: dict[type[ast.AST], list[tuple[int, ast.AST]]] = defaultdict(list)
    for place, node in enumerate(ast.walk(tree)):
        found[type(node)].append((place, node))
    return found


def nodes_of(tree: ast.Module, *kinds: type[ast.AST]) -> Iterator[Any]:
    """Nodes of a whole source that are exactly of these kinds, in the order of `ast.walk`."""
    lists = [_by_kind(tree).get(kind, []) for kind in kinds]
    yield from (node for _, node in heapq.merge(*lists, key=itemgetter(0)))
