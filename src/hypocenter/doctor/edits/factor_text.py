"""Names that multiply an index in an address or are a descriptor's strides, by a kernel's text.

And that text with another name or number in one such place. Runs nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from hypocenter.doctor.kernel_text import calls_in, function_of, line_text
from hypocenter.doctor.mask_text import MaskedAccess, accesses_at, made_of, splice_text
from hypocenter.record.events import SourceRecord

_MAX_DEPTH = 8
_DESCRIPTORS = ("make_tensor_descriptor", "make_block_ptr")


@dataclass(frozen=True, slots=True)
class Factor:
    """A name in a product of an address; `line` counts from that of the function."""

    name: str
    node: ast.Name
    line: int
    statement: str


def factors_at(source: SourceRecord, line: int, parameter: str) -> Iterator[Factor]:
    """Of the address of the accesses in that line, or of the descriptors of the parameter."""
    function = function_of(source.text)
    if function is None:
        return
    found: dict[int, ast.Name] = {}
    for access in accesses_at(source, line, parameter):
        if access.call.args:
            found |= {id(node): node for node in _factors(access.call.args[0], access, 0)}
    for call, _, bases in calls_in(function):
        if ast.unparse(call.func).split(".")[-1] in _DESCRIPTORS and parameter in bases.address:
            strides = [k.value for k in call.keywords if k.arg == "strides"] or call.args[2:3]
            names = (node for part in strides for node in ast.walk(part))
            found |= {id(node): node for node in names if isinstance(node, ast.Name)}
    for node in found.values():
        text = line_text(source, source.first_line + node.lineno - 1)
        yield Factor(node.id, node, node.lineno, text)


def _factors(node: ast.expr, access: MaskedAccess, depth: int) -> Iterator[ast.Name]:
    """Factors of the summands of an address; what is inside an index is none."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield from _factors(node.left, access, depth + 1)
        yield from _factors(node.right, access, depth + 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from (part for part in (node.left, node.right) if isinstance(part, ast.Name))
    elif isinstance(node, ast.Subscript):
        yield from _factors(node.value, access, depth + 1)
    elif isinstance(node, ast.Name) and (made := made_of(access, node.id)) is not None:
        yield from _factors(made, access, depth + 1)


def with_factor(source: SourceRecord, factor: Factor, text: str) -> str:
    """The function's text with `text` in place of the factor."""
    node = factor.node
    stop = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return splice_text(source, (node.lineno, node.col_offset), stop, text)


def is_used_elsewhere(source: SourceRecord, name: str) -> bool:
    """Whether the function reads that name anywhere."""
    function = function_of(source.text)
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in (ast.walk(function) if function else ())
    )
