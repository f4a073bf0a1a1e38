"""Kernels that touch nothing but what they are given: such a launch can be made again on copies.

Told by the kernel's text and that of all it calls. What is not known to be harmless is not.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Sequence

from hypocenter.record.events import SourceRecord

#: Names that stand for Triton's language and for what it brings along.
_LANGUAGE = frozenset({"tl", "triton", "language", "libdevice", "math"})
#: Parts of it that reach beyond arguments, talk to people, or wait for others.
_REACHING = frozenset(
    {"pointer_type", "inline_asm_elementwise", "device_print", "static_print", "device_assert"}
    | {"atomic_cas", "atomic_xchg", "debug_barrier", "cast", "make_block_ptr"}
    | {"extern_elementwise", "globaltimer", "clock", "smid", "bitcast"}
)
#: Python's own that a kernel may call.
_PLAIN = frozenset({"range", "min", "max", "len", "int", "float", "bool", "abs", "tuple"})


def is_closed(sources: Sequence[SourceRecord]) -> bool:
    """Whether no launch of a kernel can touch or tell anything but its arguments, or wait for it.

    `sources` are its text and those of the functions that it calls.
    """
    names = {source.function for source in sources} | _PLAIN
    for source in sources:
        try:
            tree = ast.parse(textwrap.dedent(source.text))
        except (SyntaxError, ValueError):
            return False
        if not all(_is_harmless(node, names) for node in ast.walk(tree)):
            return False
    return bool(sources)


def _is_harmless(node: ast.AST, names: Iterable[str]) -> bool:
    if isinstance(node, ast.While | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
        return False
    if not isinstance(node, ast.Call):
        return True
    if any(keyword.arg == "volatile" for keyword in node.keywords):
        return False
    func = node.func
    if isinstance(func, ast.Name):
        return func.id in names
    if not isinstance(func, ast.Attribute) or func.attr in _REACHING:
        return False
    if func.attr == "to":  # to a type of Triton's, or to that of elements; never to a pointer's
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return all(_is_type(value) or isinstance(value, ast.Constant) for value in given)
    return _root_of(func) in _LANGUAGE or func.attr in _METHODS


#: Methods of values that work on them alone.
_METHODS = frozenset({"sum", "max", "min", "reshape", "trans", "permute", "broadcast_to", "view"})


def _is_type(node: ast.expr) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr in _REACHING:
        return False
    return node.attr == "element_ty" or _root_of(node) in _LANGUAGE


def _root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
