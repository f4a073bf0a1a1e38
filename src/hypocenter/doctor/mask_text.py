"""What the mask of an access leaves in, by a kernel's text, and that text with the mask put right.

Runs nothing. Whether a corrected text is right is for a replay to say.
"""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from hypocenter.doctor.kernel_text import calls_in, function_of, mask_of, statements_in
from hypocenter.record.events import SourceRecord

_MAX_DEPTH = 8
_STRICT: dict[type[ast.cmpop], tuple[str, str]] = {ast.LtE: ("<=", "<"), ast.GtE: (">=", ">")}


@dataclass(frozen=True, slots=True)
class MaskEdit:
    """A kernel's whole `text` with one mask changed at `line` of its file: what stood there, and
    what stands there now. `was` is empty where a condition is added. `compare` is the comparison
    that was changed, where one was."""

    line: int
    was: str
    now: str
    text: str
    compare: ast.Compare | None = None


@dataclass(frozen=True, slots=True)
class MaskedAccess:
    """A load, store or atomic with its function; `roots` are index names by what they come from."""

    parameter: str
    function: ast.FunctionDef
    call: ast.Call
    operation: str
    roots: dict[str, frozenset[str]]

    @property
    def mask(self) -> ast.expr | None:
        return mask_of(self.call, self.operation)


def accesses_at(source: SourceRecord, line: int, parameter: str) -> list[MaskedAccess]:
    """Accesses through `parameter` whose text covers that line of the file."""
    function = function_of(source.text)
    if function is None:
        return []
    at = line - source.first_line + 1
    roots = _lane_roots(function)
    return [
        MaskedAccess(parameter, function, call, operation, roots)
        for call, operation, bases in calls_in(function)
        if operation and parameter in bases.address and call.lineno <= at <= _end(call)
    ]


# -- comparisons that let one too many in ---------------------------------------------------------


def strict_edits(source: SourceRecord, access: MaskedAccess) -> Iterator[MaskEdit]:
    """The text with `<` where the mask has an index `<=` a bound; one such change at a time."""
    for compare in comparisons(access):
        left, right = compare.left, compare.comparators[0]
        index = left if isinstance(compare.ops[0], ast.LtE) else right
        signs = _STRICT.get(type(compare.ops[0]))
        if signs is None or len(compare.ops) > 1 or not roots_in(index, access.roots):
            continue
        was = _segment(source, compare)
        start, stop = (_end(left), left.end_col_offset or 0), (right.lineno, right.col_offset)
        between = _between(source, start, stop)
        text = splice_text(source, start, stop, between.replace(*signs))
        now = was.replace(*signs, 1)
        yield MaskEdit(source.first_line + compare.lineno - 1, was, now, text, compare)


def exchanged_edits(
    source: SourceRecord, access: MaskedAccess
) -> Iterator[tuple[MaskEdit, ast.expr]]:
    """The text with the bounds of two comparisons of the mask exchanged, and what they are then."""
    found = [
        compare
        for compare in comparisons(access)
        if len(compare.ops) == 1
        and isinstance(compare.ops[0], ast.Lt)
        and roots_in(compare.left, access.roots)
        and not roots_in(compare.comparators[0], access.roots)
    ]
    for one, two in itertools.combinations(found, 2):
        texts = ast.unparse(one.comparators[0]), ast.unparse(two.comparators[0])
        if texts[0] == texts[1] or ast.unparse(one.left) == ast.unparse(two.left):
            continue
        first, last = sorted((one, two), key=lambda compare: _start(compare.comparators[0]))
        edit = with_comparator(source, last, ast.unparse(first.comparators[0]))
        edited = msgspec.structs.replace(source, text=edit.text)
        both = with_comparator(edited, first, ast.unparse(last.comparators[0]))
        was = " & ".join(f"({ast.unparse(compare)})" for compare in (one, two))
        crossed = [
            ast.Compare(compare.left, compare.ops, other.comparators)
            for compare, other in ((one, two), (two, one))
        ]
        now = " & ".join(f"({ast.unparse(compare)})" for compare in crossed)
        line = source.first_line + one.lineno - 1
        yield MaskEdit(line, was, now, both.text), ast.BinOp(crossed[0], ast.BitAnd(), crossed[1])


def _start(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


# -- indices without a bound ----------------------------------------------------------------------


def bound_edits(
    source: SourceRecord, access: MaskedAccess, scalars: Sequence[str]
) -> Iterator[MaskEdit]:
    """The text with one more condition in the mask, for an index that it does not compare.

    Bounds of the loop around the access come first, then `scalars`, in the order given.
    """
    found = (
        condition
        for term in _free_terms(access)
        for condition in _upper_bounds(access, term, scalars)
    )
    for condition in dict.fromkeys(found):
        yield with_condition(source, access, condition)


def uncast_edits(source: SourceRecord, line: int) -> Iterator[MaskEdit]:
    """The text without a cast of a pointer in that line, or in one before that makes a name."""
    function = function_of(source.text)
    for node in ast.walk(function) if function else ():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        at = source.first_line + node.lineno - 1
        if node.func.attr != "to" or at > line or "pointer_type" not in ast.unparse(node):
            continue
        start, stop = (node.lineno, node.col_offset), (_end(node), node.end_col_offset or 0)
        now = ast.unparse(node.func.value)
        yield MaskEdit(at, _segment(source, node), now, splice_text(source, start, stop, now))


def _upper_bounds(access: MaskedAccess, term: ast.expr, scalars: Sequence[str]) -> Iterator[str]:
    index = ast.unparse(term)
    for counter, last, step in loops_around(access):
        if counter in names_in(term):
            yield f"{index} < {last}"
        elif step is not None:
            yield f"{index} < {last} - {counter if step == '1' else f'{counter} * {step}'}"
    for name in scalars:
        yield f"{index} < {name}"


def loops_around(access: MaskedAccess) -> Iterator[tuple[str, str, str | None]]:
    """Counter, end and step of each loop around the access; the step is in units of the counter.

    `range(0, K, BK)` counts elements: its step is 1. `range(cdiv(K, BK))` counts tiles of BK.
    """
    for node in ast.walk(access.function):
        if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name):
            continue
        is_around = node.lineno <= access.call.lineno <= max(map(_end, node.body))
        if not is_around or not isinstance(node.iter, ast.Call) or not node.iter.args:
            continue
        args = node.iter.args
        last = args[1] if len(args) > 1 else args[0]
        if isinstance(last, ast.Call) and ast.unparse(last.func).endswith("cdiv"):
            yield node.target.id, ast.unparse(last.args[0]), ast.unparse(last.args[1])
        else:
            yield node.target.id, ast.unparse(last), "1" if len(args) > 2 else None


def _free_terms(access: MaskedAccess) -> Iterator[ast.expr]:
    """Terms of the address that vary within a program, of which the mask compares no part."""
    compared: set[str] = set()
    for compare in comparisons(access):
        compared |= roots_in(compare, access.roots)
    for term in _terms(access.call.args[0], access) if access.call.args else ():
        if not roots_in(term, access.roots) & compared:
            yield term


def _terms(node: ast.expr, access: MaskedAccess, depth: int = 0) -> Iterator[ast.expr]:
    """The summands of an address that hold an index of lanes, without what multiplies them."""
    if depth > _MAX_DEPTH or not roots_in(node, access.roots):
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        yield from _terms(node.left, access, depth + 1)
        yield from _terms(node.right, access, depth + 1)
    elif isinstance(node, ast.Name) and _is_pointer(access, node.id):
        made = made_of(access, node.id)
        yield from _terms(made, access, depth + 1) if made is not None else ()
    elif isinstance(node, ast.Name | ast.Subscript | ast.BinOp):  # i - 1 is one term
        yield node


def _is_pointer(access: MaskedAccess, name: str) -> bool:
    """Whether a name is the parameter, or was made by adding to it."""
    for _ in range(_MAX_DEPTH):
        if name == access.parameter:
            return True
        made = made_of(access, name)
        while isinstance(made, ast.BinOp) and isinstance(made.op, ast.Add):
            made = made.left
        if not isinstance(made, ast.Name):
            return False
        name = made.id
    return False


def with_condition(source: SourceRecord, access: MaskedAccess, condition: str) -> MaskEdit:
    """The text with one more condition in the mask, or with that as the mask."""
    mask = access.mask
    whole = f"({_segment(source, mask)}) & ({condition})" if mask is not None else condition
    return _masked_by(source, access, whole, "", condition)


def with_mask(source: SourceRecord, access: MaskedAccess, mask: str) -> MaskEdit:
    """The text with another mask, or with that as the mask."""
    was = _segment(source, access.mask) if access.mask is not None else ""
    return _masked_by(source, access, mask, was, mask)


def with_comparator(source: SourceRecord, compare: ast.Compare, text: str) -> MaskEdit:
    """The text with `text` at the right side of a comparison."""
    right = compare.comparators[-1]
    start, stop = (right.lineno, right.col_offset), (_end(right), right.end_col_offset or 0)
    was = _segment(source, compare)
    now = f"{was[: len(was) - len(_segment(source, right))]}{text}"
    line = source.first_line + compare.lineno - 1
    return MaskEdit(line, was, now, splice_text(source, start, stop, text))


def with_left_side(source: SourceRecord, compare: ast.Compare, text: str) -> MaskEdit:
    """The text with `text` at the left side of a comparison."""
    left = compare.left
    start, stop = (left.lineno, left.col_offset), (_end(left), left.end_col_offset or 0)
    was = _segment(source, compare)
    now = f"{text}{was[len(_segment(source, left)) :]}"
    line = source.first_line + compare.lineno - 1
    return MaskEdit(line, was, now, splice_text(source, start, stop, text), compare)


def without_layout(text: str) -> str:
    """A text without what its layout alone makes: white space and brackets."""
    return "".join(text.split()).replace("(", "").replace(")", "")


def _masked_by(
    source: SourceRecord, access: MaskedAccess, whole: str, was: str, now: str
) -> MaskEdit:
    mask, call = access.mask, access.call
    if mask is not None:
        start, stop = (mask.lineno, mask.col_offset), (_end(mask), mask.end_col_offset or 0)
        new = whole
    else:
        start = stop = (_end(call), (call.end_col_offset or 1) - 1)
        before = _between(source, (call.lineno, call.col_offset), stop).rstrip()
        comma = "" if before.endswith((",", "(")) else ", "
        new = f"{comma}mask={whole}{', other=0' if access.operation == 'load' else ''}"
    line = source.first_line + call.lineno - 1
    return MaskEdit(line, was, now, splice_text(source, start, stop, new))


# -- the tree -------------------------------------------------------------------------------------


def comparisons(access: MaskedAccess, mask: ast.expr | None = None) -> Iterator[ast.Compare]:
    """Those that a mask is made of, its own and those of the lines that made its names.

    Without a `mask` that of the access.
    """
    mask = access.mask if mask is None else mask
    waiting: list[ast.expr] = [mask] if mask is not None else []
    seen: set[str] = set()
    while waiting:
        part = waiting.pop(0)
        for node in ast.walk(part):
            if isinstance(node, ast.Compare):
                yield node
            elif isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                made = made_of(access, node.id)
                if made is not None:
                    waiting.append(made)


def made_of(access: MaskedAccess, name: str) -> ast.expr | None:
    """What the last assignment before the access gives a name."""
    found = None
    for node in statements_in(access.function.body):
        is_before = node.lineno < access.call.lineno
        if is_before and isinstance(node, ast.Assign):
            found = dict(assigned_in(node)).get(name, found)
    return found


def assigned_in(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """Each name with what it is given; of a call that gives several, all have the call."""
    for target in node.targets:
        if isinstance(target, ast.Tuple):
            values = (
                node.value.elts
                if isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(target.elts)
                else [node.value] * len(target.elts)
            )
            yield from (
                (_name(into), value) for into, value in zip(target.elts, values, strict=True)
            )
        else:
            yield _name(target), node.value


def _lane_roots(function: ast.FunctionDef) -> dict[str, frozenset[str]]:
    """Names that vary within a program, each with the names that were first made by an arange."""
    roots: dict[str, frozenset[str]] = {}
    for _ in range(_MAX_DEPTH):  # a loop may use what a later line of it makes
        before = dict(roots)
        for node in statements_in(function.body):
            for name, value in assigned_in(node) if isinstance(node, ast.Assign) else ():
                found = set(filter(str.isidentifier, roots_in(value, roots))) - {name}
                if _has_arange(value):
                    found |= {name}
                if name and found:
                    roots[name] = frozenset(found)
        if roots == before:
            break
    return roots


def roots_in(node: ast.AST, roots: dict[str, frozenset[str]]) -> set[str]:
    """What the indices in an expression come from: names, or an arange that has none.

    Values that are loaded are no indices.
    """
    called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
    if called in ("load", "arange"):
        return {ast.unparse(node)} if called == "arange" else set()
    if isinstance(node, ast.Name):
        return set(roots.get(node.id, ()))
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        found |= roots_in(child, roots)
    return found


def _has_arange(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Call) and ast.unparse(part.func).split(".")[-1] == "arange"
        for part in ast.walk(node)
    )


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _end(node: ast.expr | ast.stmt) -> int:
    return node.end_lineno or node.lineno


# -- the text -------------------------------------------------------------------------------------


def _segment(source: SourceRecord, node: ast.expr) -> str:
    start, stop = (node.lineno, node.col_offset), (_end(node), node.end_col_offset or 0)
    return " ".join(_between(source, start, stop).split())


def _between(source: SourceRecord, start: tuple[int, int], stop: tuple[int, int]) -> str:
    data = textwrap.dedent(source.text).encode()
    return data[_at(data, start) : _at(data, stop)].decode()


def splice_text(
    source: SourceRecord, start: tuple[int, int], stop: tuple[int, int], new: str
) -> str:
    data = textwrap.dedent(source.text).encode()
    return (data[: _at(data, start)] + new.encode() + data[_at(data, stop) :]).decode()


def _at(data: bytes, place: tuple[int, int]) -> int:
    """The offset of a line (from 1) and a column in bytes, as the syntax tree counts them."""
    line, column = place
    return sum(map(len, data.splitlines(keepends=True)[: line - 1])) + column
