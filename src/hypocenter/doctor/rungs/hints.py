"""Rung: what a kernel promises the compiler about its addresses, held against recorded numbers.

`tl.multiple_of(x, n)` is believed: on a GPU a false one loads and stores in steps that the address
does not have. An expression of loaded values cannot be worked out here.
"""

from __future__ import annotations

import ast
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.kernel_text import line_text
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord
from hypocenter.record.gap import Gap

NAME = "hints"
_MAX_VALUES = 4


@dataclass(frozen=True, slots=True)
class _Hint:
    """`tl.multiple_of(expression, factor)` in line `line`; `pointers` stand beside it."""

    expression: ast.expr
    factor: ast.expr
    line: int
    pointers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Broken:
    """A promised multiple of `factor` that is `value` in `program`; all are multiples of `common`.

    `program` has the number of the program along each axis.
    """

    value: int
    program: Mapping[int, int]
    factor: int
    common: int


#: What each name was assigned, with the lines.
_Names = Mapping[str, list[tuple[int, ast.expr]]]


class _Unknown(Exception):
    """An expression that holds what only the device knows."""


def hints(case: Case) -> list[Claim]:
    """Promises of a multiple that the recorded strides and sizes do not keep."""
    claims: list[Claim] = []
    seen: set[int] = set()
    num_kept = 0
    for use in case.launches:
        source = case.sources.get(use.launch.source)
        if source is None or id(use.launch) in seen or "multiple_of" not in source.text:
            continue
        seen.add(id(use.launch))
        known = _known_numbers(use)
        for hint, names in _hints(source):
            try:
                wrong = _broken_hint(use, hint, names, known)
            except _Unknown as error:
                what = f"the promise in line {hint.line} of {use.launch.kernel}"
                case.leave_unseen(Gap.not_recorded(what, str(error)))
                continue
            if wrong is None:
                num_kept += 1
            elif not claims:
                claims.append(_claim(case, use, source, hint, wrong))
    if num_kept and not claims:
        claims.append(
            row(
                Cause.MISALIGNMENT,
                Verdict.REFUTED,
                NAME,
                f"{num_kept} promises of a multiple hold for the recorded strides",
                would_refute="a value that is no multiple",
            )
        )
    return claims


def _known_numbers(use: LaunchMade) -> dict[str, int]:
    """Numbers among the kernel's parameters and constants."""
    given = {arg.name: arg.value for arg in use.launch.arguments} | dict(use.launch.constants)
    return {name: int(value) for name, value in given.items() if isinstance(value, int)}


def _hints(source: SourceRecord) -> Iterator[tuple[_Hint, _Names]]:
    try:
        tree = ast.parse(textwrap.dedent(source.text))
    except SyntaxError:
        return
    names: dict[str, list[tuple[int, ast.expr]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _assign(target, node.value, names)
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Assign | ast.Expr):
            continue
        for call in ast.walk(statement):
            if (
                isinstance(call, ast.Call)
                and ast.unparse(call.func).endswith("multiple_of")
                and len(call.args) == 2
            ):
                inside = {id(node) for node in ast.walk(call)}
                pointers = tuple(
                    node.id
                    for node in ast.walk(statement)
                    if isinstance(node, ast.Name)
                    and node.id.endswith("_ptr")
                    and id(node) not in inside
                )
                line = source.first_line + call.lineno - 1
                yield _Hint(call.args[0], call.args[1], line, pointers), names


def _assign(
    target: ast.expr, value: ast.expr, names: dict[str, list[tuple[int, ast.expr]]]
) -> None:
    if isinstance(target, ast.Name):
        names.setdefault(target.id, []).append((target.lineno, value))
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, part in zip(target.elts, value.elts, strict=False):
            _assign(name, part, names)


def _broken_hint(
    use: LaunchMade, hint: _Hint, names: _Names, known: Mapping[str, int]
) -> _Broken | None:
    """The first program in which a promise does not hold, or None."""
    grid = (*use.launch.grid, 1, 1)[:3]
    axes = [sorted({0, 1, 2, size - 1} & set(range(size)))[:_MAX_VALUES] for size in grid]
    factor = _value(hint.factor, names, known, {})
    found: tuple[int, dict[int, int]] | None = None
    common = 0
    for numbers in itertools.product(*axes):
        program = dict(enumerate(numbers))
        value = _value(hint.expression, names, known, program)
        common = math.gcd(common, value)
        if value % factor and found is None:
            found = value, program
    return None if found is None else _Broken(*found, factor, common)


def _value(
    node: ast.expr,
    names: _Names,
    known: Mapping[str, int],
    program: Mapping[int, int],
    depth: int = 0,
    before: int = 1 << 30,
) -> int:
    """An integer expression over parameters and program numbers; raises _Unknown."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name) and depth < 16:
        if node.id in known:
            return known[node.id]
        earlier = [pair for pair in names.get(node.id, ()) if pair[0] < before]
        if earlier:
            line, value = max(earlier, key=lambda pair: pair[0])
            return _value(value, names, known, program, depth + 1, line)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).split(".")[-1]
        if name == "program_id" and isinstance(node.args[0], ast.Constant):
            return program.get(int(str(node.args[0].value)), 0)
        if name in ("as_offset", "to", "multiple_of") and node.args:
            inner = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]
            inner = node.args[0] if name != "to" else inner
            return _value(inner, names, known, program, depth + 1, before)
    if isinstance(node, ast.BinOp):
        left = _value(node.left, names, known, program, depth + 1, before)
        right = _value(node.right, names, known, program, depth + 1, before)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv) and right:
            return left // right
        if isinstance(node.op, ast.Mod) and right:
            return left % right
    raise _Unknown(f"{ast.unparse(node)} is known to the device alone")


def _claim(
    case: Case, use: LaunchMade, source: SourceRecord, hint: _Hint, broken: _Broken
) -> Claim:
    launch, common = use.launch, broken.common
    pointer = hint.pointers[0] if hint.pointers else None
    argument = case.fact_of(launch, pointer) if pointer else None
    tensor = case.tensor_of(launch, pointer) if pointer else None
    expression = ast.unparse(hint.expression)
    text = f"{expression} is promised to be a multiple of {broken.factor}"
    where = tuple(broken.program.values())
    red = f"{text}, but in program {where} it is {broken.value}"
    root = RootCause(
        cause=Cause.MISALIGNMENT,
        blames=Blame.KERNEL,
        sentence=f"{launch.kernel}: {red}: a vector access there does not begin where it seems",
        fix=f"Promise tl.multiple_of({expression}, {common}) at most, or space the rows "
        f"{broken.factor} elements apart",
        proof=Proof(
            red,
            f"a promise of {common}",
            f"a multiple of {common} is what it is in every program that was tried",
        ),
        kernel=launch.kernel,
        argument=argument,
        tensor=tensor.name if tensor else None,
        file=source.file,
        line=hint.line,
        expression=line_text(source, hint.line),
        place=use.place,
    )
    return proven(
        root,
        NAME,
        (),
        "strides with which the promise holds",
        use.seq,
        (tensor.id,) if tensor else (),
    )
