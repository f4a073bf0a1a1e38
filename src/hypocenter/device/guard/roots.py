"""Which kernel parameters a value inside a kernel may point into: names, calls, and a fixed point.

Works on syntax alone, before types and constants are known, and never guesses: what it cannot
follow has no root, and `guard.py` refuses an access without one.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hypocenter.device.guard.source import KernelSource, is_jit, scope_of
from hypocenter.device.triton_lang import tl

#: What a value may point into: names of kernel parameters and the two marks below; of a tuple, one
#: such value per element.
RootsOf = frozenset[str] | tuple["RootsOf", ...]

NOTHING: frozenset[str] = frozenset()
#: A pointer that came from elsewhere: out of memory, out of an integer.
UNKNOWN = "a pointer of unknown origin"
#: A descriptor whose making was guarded.
DESCRIPTOR = "a guarded descriptor"

#: Answer of `Names.find` for what is only known when the kernel is compiled.
LOCAL = object()

#: Functions of triton.language and methods of tensors whose result points where an argument does.
PASSES = frozenset(
    {"add", "broadcast", "broadcast_to", "cast", "cat", "expand_dims", "flip", "interleave"}
    | {"item", "join", "max_constancy", "max_contiguous", "multiple_of", "permute", "ravel"}
    | {"reshape", "split", "squeeze", "sub", "to", "trans", "unsqueeze", "view", "where"}
)
#: Attributes of a pointer that are facts about it and no pointers.
FACTS = frozenset(
    {"dtype", "element_ty", "name", "ndim", "numel", "primitive_bitwidth", "shape", "type", "value"}
)


def flat(value: RootsOf) -> frozenset[str]:
    """All roots of a value, those of a tuple's elements together."""
    if isinstance(value, frozenset):
        return value
    return NOTHING.union(*map(flat, value))


def join(first: RootsOf, second: RootsOf) -> RootsOf:
    """What a name may hold that gets either value; tuples of one length join by element."""
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return tuple(join(a, b) for a, b in zip(first, second, strict=True))
    return flat(first) | flat(second)


class Names:
    """What the names of a kernel's source denote when it is compiled."""

    def __init__(self, source: KernelSource) -> None:
        self.scope = scope_of(source.function)
        arguments = source.tree.args
        self.parameters = [
            a.arg
            for a in (
                *arguments.posonlyargs,
                *arguments.args,
                *filter(None, [arguments.vararg]),
                *arguments.kwonlyargs,
            )
        ]
        stored = {
            node.id
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        self.local = {*self.parameters, *stored}
        #: Every name in the source: a name that is made up must not be one of them.
        self.all = self.local | {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name)}

    def visible_scope(self) -> dict[str, Any]:
        """What the source can see of what its module holds: no tensor of a script's stays alive."""
        return {
            name: value
            for name, value in self.scope.items()
            if name in self.all or name.startswith("__") or inspect.ismodule(value)
        }

    def find(self, node: ast.expr) -> object:
        """The object that an expression of names and dots denotes, or LOCAL."""
        if isinstance(node, ast.Name) and node.id not in self.local:
            return self.scope.get(node.id, getattr(builtins, node.id, LOCAL))
        if isinstance(node, ast.Attribute):
            owner = self.find(node.value)
            return LOCAL if owner is LOCAL else getattr(owner, node.attr, LOCAL)
        return LOCAL


def language_name(value: object) -> str | None:
    """Name of a function of triton.language (library functions written in Triton too), or None."""
    function = getattr(value, "fn", value)
    module = getattr(function, "__module__", None) or ""
    if not module.startswith("triton.language") or isinstance(value, type):
        return None
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and callable(value) else None


class Roots:
    """The roots of every name of one function, by a flow-insensitive fixed point.

    `given`: parameter to its roots. `returned_by(jit, bound)`: roots of what a call of another
    @triton.jit function returns, with its parameters bound to values.
    """

    def __init__(
        self,
        source: KernelSource,
        names: Names,
        given: Mapping[str, RootsOf],
        returned_by: Callable[[Any, Mapping[str, RootsOf]], RootsOf],
    ) -> None:
        self.names = names
        self.of_name: dict[str, RootsOf] = dict(given)
        self.reassigned: set[str] = set()
        self.returned: RootsOf | None = None
        self._returned_by = returned_by
        body = [node for statement in source.tree.body for node in ast.walk(statement)]
        while True:
            before = dict(self.of_name), self.returned
            for node in body:
                self._follow(node)
            if before == (self.of_name, self.returned):
                break
        self.reassigned &= set(names.parameters)

    def _follow(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, self.of(node.value))
        elif isinstance(node, ast.AugAssign):
            keeps = isinstance(node.op, ast.Add)
            self._bind(node.target, self.of(node.value) if keeps else NOTHING)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._bind(node.target, self.of(node.value))
        elif isinstance(node, ast.For | ast.comprehension):
            self._bind(node.target, self._element(self.of(node.iter)))
        elif isinstance(node, ast.Return) and node.value is not None:
            value = self.of(node.value)
            self.returned = value if self.returned is None else join(self.returned, value)

    def _bind(self, target: ast.expr, value: RootsOf) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            values: tuple[RootsOf, ...] = (flat(value),) * len(target.elts)
            if isinstance(value, tuple) and len(value) == len(target.elts):
                values = value
            for element, part in zip(target.elts, values, strict=True):
                self._bind(element, part)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, flat(value))
        elif isinstance(target, ast.Name):
            self.reassigned.add(target.id)
            known = self.of_name.get(target.id)
            self.of_name[target.id] = value if known is None else join(known, value)

    @staticmethod
    def _element(value: RootsOf) -> RootsOf:
        if isinstance(value, frozenset):
            return value
        joined: RootsOf | None = None
        for element in value:
            joined = element if joined is None else join(joined, element)
        return NOTHING if joined is None else joined

    def of(self, node: ast.expr) -> RootsOf:
        """The roots of an expression."""
        if isinstance(node, ast.Name):
            return self.of_name.get(node.id, NOTHING)
        if isinstance(node, ast.BinOp):
            return self._of_operation(node)
        if isinstance(node, ast.IfExp):
            return join(self.of(node.body), self.of(node.orelse))
        if isinstance(node, ast.BoolOp):
            return NOTHING.union(*(flat(self.of(value)) for value in node.values))
        if isinstance(node, ast.Tuple | ast.List):
            if any(isinstance(element, ast.Starred) for element in node.elts):
                return NOTHING.union(*(flat(self.of(element)) for element in node.elts))
            return tuple(self.of(element) for element in node.elts)
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return flat(self.of(node.elt))
        if isinstance(node, ast.NamedExpr | ast.Starred):
            return self.of(node.value)
        if isinstance(node, ast.Subscript):
            return self._of_subscript(node)
        if isinstance(node, ast.Attribute):
            return NOTHING if node.attr in FACTS else flat(self.of(node.value))
        return self._of_call(node) if isinstance(node, ast.Call) else NOTHING

    def _of_operation(self, node: ast.BinOp) -> RootsOf:
        left, right = self.of(node.left), self.of(node.right)
        if isinstance(node.op, ast.Add):
            if isinstance(left, tuple) and isinstance(right, tuple):
                return left + right
            return flat(left) | flat(right)
        # A pointer less an integer; the difference of two pointers is an integer.
        return left if isinstance(node.op, ast.Sub) and not flat(right) else NOTHING

    def _of_subscript(self, node: ast.Subscript) -> RootsOf:
        value = self.of(node.value)
        index = node.slice
        if isinstance(value, frozenset):
            return value
        if isinstance(index, ast.Constant) and isinstance(index.value, int):
            return value[index.value] if index.value < len(value) else NOTHING
        return flat(value)

    def _of_call(self, node: ast.Call) -> RootsOf:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        target = self.names.find(node.func)
        if is_jit(target) and language_name(target) is None:
            return self._returned_by(target, self.bound(target, node))
        name = language_name(target)
        if name == "make_tensor_descriptor":
            return frozenset({DESCRIPTOR})
        if name is None and target is LOCAL and isinstance(node.func, ast.Attribute):
            name, given = node.func.attr, [node.func.value, *given]  # a method: x.to(…)
        elif isinstance(target, type) and issubclass(target, tuple):
            return NOTHING.union(*(flat(self.of(argument)) for argument in given))
        if name not in PASSES:
            return NOTHING
        roots = NOTHING.union(*(flat(self.of(argument)) for argument in given))
        return frozenset({UNKNOWN}) if not roots and self._names_pointer(given) else roots

    def _names_pointer(self, given: list[ast.expr]) -> bool:
        """Whether an argument of a cast is a pointer type: then its result is a pointer."""
        for node in given:
            called = node.func if isinstance(node, ast.Call) else None
            if called is not None and self.names.find(called) is tl.pointer_type:
                return True
            if isinstance(self.names.find(node), tl.pointer_type):
                return True
            if isinstance(node, ast.Attribute) and node.attr in ("dtype", "type"):
                return bool(flat(self.of(node.value)))
        return False

    def bound(self, jit: Any, call: ast.Call) -> dict[str, RootsOf]:
        """Parameter of `jit` to the roots of its argument in `call`; no starred arguments."""
        given: dict[str, RootsOf] = {}
        kinds = {p.name: p.kind for p in inspect.signature(jit.fn).parameters.values()}
        rest = next((n for n, k in kinds.items() if k is inspect.Parameter.VAR_POSITIONAL), None)
        named = [n for n, k in kinds.items() if k < inspect.Parameter.VAR_POSITIONAL]
        for i, argument in enumerate(call.args):
            if i < len(named):
                given[named[i]] = self.of(argument)
            elif rest is not None:
                given[rest] = flat(given.get(rest, NOTHING)) | flat(self.of(argument))
        given.update({k.arg: self.of(k.value) for k in call.keywords if k.arg is not None})
        return given


def references(source: KernelSource) -> Iterator[tuple[ast.expr, ast.Call | None, bool]]:
    """(expression, the call whose function it is or None, inside an f-string) of the whole body.

    Yields every call's function, and every other longest chain of names and dots that is read; an
    outer call comes before the calls in its arguments.
    """
    waiting: list[tuple[ast.AST, bool]] = [(node, False) for node in reversed(source.tree.body)]
    while waiting:
        node, in_string = waiting.pop()
        in_string = in_string or isinstance(node, ast.JoinedStr)
        if isinstance(node, ast.Call):
            yield node.func, node, in_string
            inner = [*node.args, *node.keywords]
            chain = isinstance(node.func, ast.Name) or _is_chain(node.func)
            if not chain:
                # `f(x).to(…)`: the receiver holds calls of its own.
                owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
                inner = [owner, *inner]
        elif isinstance(node, ast.Name | ast.Attribute) and _is_chain(node):
            if isinstance(node.ctx, ast.Load):
                yield node, None, in_string
            inner = []
        else:
            inner = list(ast.iter_child_nodes(node))
        waiting.extend((child, in_string) for child in reversed(inner))


def _is_chain(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
