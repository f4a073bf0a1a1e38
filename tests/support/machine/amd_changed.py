"""The machine of `device/amd` as plain Python, and with one small mistake at a time.

Its functions are written for numba. Here their text is run by Python itself, so that a mistake
costs no compilation. Every address of this process is looked at before it is touched, and every
handler before it is called: what would end the process is an exception instead.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import inspect
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import pytest

from hypocenter.device.amd import (
    access,
    lanes,
    lower,
    lower_memory,
    lower_other,
    machine,
    operands,
    routes,
)
from hypocenter.device.amd import instruction_rows as r
from machine import amd_wave

#: In the order in which they use each other.
_COMPILED = (lanes, operands, access, machine)
_OWN = {module.__name__ for module in _COMPILED} | {"hypocenter.device.amd.compiled"}
#: Who has a function of a module that reads instructions.
_USERS: dict[ModuleType, tuple[ModuleType, ...]] = {
    lower_memory: (lower,),
    lower_other: (lower, lower_memory),
    routes: (lower, lower_other),
}
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True, slots=True)
class Noted:
    """A module of which is noted which blocks are run: `reached` are their numbers."""

    module: ModuleType
    reached: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Change:
    """A mistake in a module: the function, what its line is and what becomes of it. `block` is the
    number of the innermost statements that it stands in."""

    module: ModuleType
    number: int
    block: int
    function: str
    line: str
    what: str

    def __str__(self) -> str:
        return f"{self.function}: {self.line}: {self.what}"


def changes_of(module: ModuleType, functions: Sequence[str]) -> list[Change]:
    """Every mistake of some functions."""
    tree, text = _tree(module), inspect.getsource(module).splitlines()
    block_of = {
        id(node): number
        for number, statements in enumerate(_blocks(tree))
        for statement in statements
        for node in ast.walk(statement)
    }
    return [
        Change(module, number, block_of[id(node)], function, text[node.lineno - 1].strip(), what)
        for number, (function, node, what, _) in enumerate(_sites(tree))
        if function in functions
    ]


@cache
def _source(module: ModuleType) -> str:
    return inspect.getsource(module)


def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(_source(module))


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The statements of functions and of their branches and loops, inner ones behind outer ones."""
    for node in ast.iter_child_nodes(tree):
        for name in ("body", "orelse"):
            statements = getattr(node, name, None)
            if isinstance(statements, list) and statements:
                yield statements
        yield from _blocks(node)


def _sites(tree: ast.Module) -> Iterator[tuple[str, Any, str, Callable[[], None]]]:
    """Function, place, what is done, and what does it to the tree itself."""
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        body = function.body[1:] if ast.get_docstring(function) else function.body
        for statement in body:
            for node in ast.walk(statement):
                for what, step in _steps(node):
                    yield function.name, node, what, step


def _steps(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _BINARY:
        other = _BINARY[type(node.op)]
        yield f"{type(node.op).__name__} is {other.__name__}", _setter(node, "op", other())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        compared = _COMPARED[type(node.ops[0])]
        what = f"{type(node.ops[0]).__name__} is {compared.__name__}"
        yield what, _setter(node, "ops", [compared(), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        either = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and for or", _setter(node, "op", either)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield "sign left out", _setter(node, "op", ast.UAdd())
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value} is {node.value + 1}", _setter(node, "value", node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield "the other way", _swapper(node)
    elif isinstance(node, ast.Name) and node.id in ("min", "max"):
        yield "min for max", _setter(node, "id", "max" if node.id == "min" else "min")
    if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare):
        negated = ast.UnaryOp(ast.Not(), node.test)
        yield "if not", _setter(node, "test", negated)
    for name in ("body", "orelse"):
        statements = getattr(node, name, None)
        if isinstance(statements, list):
            for at, each in enumerate(statements):
                if isinstance(each, ast.AugAssign | ast.Expr) or _fills(each):
                    yield f"without {ast.unparse(each)}", _setter_at(statements, at)


def _fills(each: ast.AST) -> bool:
    """An assignment to an element: what is left out of it leaves no name unknown."""
    return isinstance(each, ast.Assign) and not isinstance(each.targets[0], ast.Name)


def _setter(node: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def _setter_at(statements: list[Any], at: int) -> Callable[[], None]:
    return lambda: statements.__setitem__(at, ast.Pass())


def _swapper(node: ast.IfExp) -> Callable[[], None]:
    def swap() -> None:
        node.body, node.orelse = node.orelse, node.body

    return swap


def _code(module: ModuleType, change: Change | None) -> CodeType:
    """The module's functions, with the mistake that is in them."""
    if change is None or change.module is not module:
        return _plain_code(module)
    tree = _tree(module)
    (step,) = [each[3] for i, each in enumerate(_sites(tree)) if i == change.number]
    step()
    return _to_code(module, tree)


@cache
def _plain_code(module: ModuleType) -> CodeType:
    return _to_code(module, _tree(module))


@cache
def _noting_code(module: ModuleType) -> CodeType:
    """The module's functions, which put the number of each block that they run into `reached`."""
    tree = _tree(module)
    for number, statements in enumerate(list(_blocks(tree))):
        statements[:0] = ast.parse(f"reached.add({number})").body
    return _to_code(module, tree)


def _to_code(module: ModuleType, tree: ast.Module) -> CodeType:
    tree.body = [
        each for each in tree.body if not (isinstance(each, ast.ImportFrom) and each.module in _OWN)
    ]
    return compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec")


class _Places:
    """The bytes of this process that a machine may touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._handlers: set[int] = set()

    def allow(self, m: r.Machine) -> None:
        """Those of a machine."""
        self._ranges = []
        for begin, end, host, _, table in m.regions[:, :5].tolist():
            self._ranges.append((host, host + end - begin))
            if table:
                self._ranges.append((table, table + -(-(end - begin) // (1 << access.PAGE_BITS))))
        for array in (m.lds, m.scratch):
            self._ranges.append((array.ctypes.data, array.ctypes.data + array.nbytes))
        self._handlers = {int(address) for address in m.code[:, r.HANDLER]} - {0}

    def check(self, address: int, num_bytes: int) -> int:
        """The address, where it may be touched."""
        for begin, end in self._ranges:
            if begin <= address and address + num_bytes <= end:
                return int(address)
        raise AssertionError(f"{address:#x} is outside of what the machine has")

    def load(self, address: int, num_bytes: int) -> np.int64:
        """The number there; one of 8 bytes has a sign."""
        raw = ctypes.string_at(self.check(address, num_bytes), int(num_bytes))
        return np.int64(int.from_bytes(raw, "little", signed=num_bytes == 8))

    def store(self, address: int, value: int, num_bytes: int) -> None:
        """The low bytes of a number."""
        size = int(num_bytes)
        raw = (int(value) % (1 << 8 * size)).to_bytes(size, "little")
        ctypes.memmove(self.check(address, size), raw, size)

    def call(self, handler: int, rows: int, num_lanes: int) -> int:
        """Call a handler of the machine's code."""
        assert handler in self._handlers
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(int(handler))(rows, num_lanes)
        return 0


def python_machine(
    change: Change | None = None, noted: Noted | None = None
) -> Callable[[r.Machine], int]:
    """`run_workgroup` in Python, with a mistake in it; or with a note of what of it is run."""
    places = _Places()
    space: dict[str, Any] = {
        "reached": noted.reached if noted else None,
        "compile_call": lambda function: function,
        "compile_inline": lambda function: function,
        "int": np.int64,  # as wide as in numba's code
        "range": lambda *ends: map(np.int64, range(*map(int, ends))),
        "call_handler": places.call,
        "load_bytes": places.load,
        "load_word": lambda address: places.load(address, 4),
        "store_bytes": places.store,
        "store_word": lambda address, value: places.store(address, value, 4),
    }
    for module in _COMPILED:
        is_noted = noted is not None and noted.module is module
        exec(_noting_code(module) if is_noted else _code(module, change), space)

    def run(m: r.Machine) -> int:
        places.allow(m)
        with np.errstate(all="ignore"):
            return int(space["run_workgroup"](m))

    return run


@contextlib.contextmanager
def planted(change: Change | None, noted: Noted | None = None) -> Iterator[None]:
    """Waves of tests run by Python, with a mistake in the machine or in what reads instructions; or
    with a note of what is run."""
    given = change or noted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amd_wave, "run_workgroup", python_machine(change, noted))
        if given is not None and given.module in _USERS:
            module = given.module
            space = dict(vars(module))
            if noted is not None:
                space["reached"] = noted.reached
            exec(_code(module, change) if noted is None else _noting_code(module), space)
            for user in (module, *_USERS[module]):
                for name in vars(user):
                    if inspect.getmodule(vars(user)[name]) is module:
                        patch.setattr(user, name, space[name])
        yield


Case = Callable[[], None]


def cases_by_block(module: ModuleType, cases: Sequence[Case]) -> dict[int, set[Case]]:
    """The cases that run each block of a module: no other case can see a mistake there."""
    found: dict[int, set[Case]] = {}
    for case in cases:
        noted = Noted(module)
        with planted(None, noted):
            case()
        for block in noted.reached:
            found.setdefault(block, set()).add(case)
    return found


def is_found(
    change: Change, cases: list[Case], reach: Collection[Case], seconds: float = 60.0
) -> bool:
    """Whether a case of those in `reach` fails with it; that case then stands first. Who never ends
    is found, too."""

    def out_of_time(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, out_of_time)
    try:
        with planted(change):
            for case in filter(reach.__contains__, cases):
                signal.setitimer(signal.ITIMER_REAL, seconds)
                try:
                    case()
                except Exception:
                    cases.remove(case)
                    cases.insert(0, case)
                    return True
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
