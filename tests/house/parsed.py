"""Syntax trees of sources, which several rules look through: each source is parsed once."""

from __future__ import annotations

import ast
from functools import cache


@cache
def tree_of(text: str) -> ast.Module:
    """The tree of a source; whoever gets it changes nothing in it."""
    return ast.parse(text)
