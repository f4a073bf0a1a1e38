"""Turns the source of a kernel into that of its guarded variant, and refuses what it cannot follow.

Each access becomes a call of its form in `ops_gpu.py`, and each inner @triton.jit function that
accesses memory a clone per call: so a site knows its parameter and its whole call chain beforehand.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Mapping
from typing import Any

from hypocenter.base.errors import Unguardable
from hypocenter.device.guard.ops_gpu import GUARDED
from hypocenter.device.guard.roots import (
    DESCRIPTOR,
    LOCAL,
    NOTHING,
    PASSES,
    UNKNOWN,
    Names,
    Roots,
    RootsOf,
    flat,
    language_name,
    references,
)
from hypocenter.device.guard.source import KernelSource, is_jit
from hypocenter.device.triton_lang import tl, triton
from hypocenter.record.guard_faults import GuardSite, SourceLine

MAX_SITES = 4096
MAX_CALL_DEPTH = 32

#: Name of the kernel argument that takes the slots, and beginning of every name that is made up.
SLOTS = "guard__slots"
OURS = "guard__"

#: Methods of a descriptor; it keeps them inside the shape that was checked when it was made.
_DESCRIPTOR_METHODS = re.compile(r"load|store|gather|scatter|atomic_\w+")
_MEMORY_WORDS = re.compile(
    r"load|store|atomic|descriptor|tma|prefetch|copy|scatter|block_ptr|advance"
)
_MEMORY_ASM = re.compile(
    r"\b(ld|st|atom|red|cp|prefetch|tex|suld|sust|mbarrier|discard|applypriority|multimem|"
    r"global_\w+|buffer_\w+|flat_\w+|ds_\w+|scratch_\w+|s_load\w*|s_buffer\w*|s_store\w*)\b"
)
#: Functions that may see a pointer and neither use nor return it.
_HARMLESS = frozenset(
    {"assume", "device_assert", "device_print", "static_assert", "static_print", "static_range"}
    | {"isinstance", "len", "print", "range", "zeros_like"}
)
_KNOWN_METHODS = frozenset(
    name for kind in (tl.tensor, tl.dtype, tl.constexpr, tuple, str) for name in dir(kind)
)
_REASONS = {
    "atomic_poll": "waiting for a value has no guarded form: it might wait for ever",
    "make_block_ptr": "block pointers have no guarded form; use a tensor descriptor",
    "advance": "block pointers have no guarded form; use a tensor descriptor",
}


#: A @triton.jit function (by its id) and what its parameters are bound to.
_Call = tuple[int, frozenset[tuple[str, RootsOf]]]


class _Body:
    """One function on its way to be guarded, with what is known about its names."""

    def __init__(
        self,
        derivation: Derivation,
        jit: Any,
        given: Mapping[str, RootsOf],
        calls: tuple[SourceLine, ...],
    ) -> None:
        self.derivation = derivation
        self.calls = calls
        self.source = KernelSource(jit)
        self.names = Names(self.source)
        if getattr(jit, "is_gluon", lambda: False)():
            raise self.refusal(
                self.source.tree, "Gluon kernels have no guarded form", self.source.name
            )
        if taken := sorted(name for name in self.names.all if name.startswith(OURS)):
            raise self.refusal(self.source.tree, f"names with {OURS} are the guard's", taken[0])
        self.roots = Roots(self.source, self.names, given, derivation.returned_by)
        self.scope: dict[str, Any] = self.names.visible_scope()
        self.changed = False

    def refusal(self, node: ast.AST, reason: str, expression: str = "") -> Unguardable:
        return Unguardable(
            self.source.file, self.source.line(node), expression or ast.unparse(node), reason
        )

    def where(self, node: ast.AST) -> tuple[SourceLine, ...]:
        here = SourceLine(self.source.file, self.source.line(node), self.source.name)
        return (here, *self.calls)

    def root(self, parameter: str) -> str:
        """Expression in this function for where a kernel parameter begins."""
        plain = not self.calls and parameter not in self.roots.reassigned
        return parameter if plain else f"{OURS}{parameter}_base"

    def guard_accesses(self) -> None:
        """Collect the edits of every access and inner call; refuse what cannot be followed."""
        # Decorators are not the kernel's own text: heuristics are full of lambdas.
        for node in itertools.chain.from_iterable(map(ast.walk, self.source.tree.body)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
                raise self.refusal(node, "a definition inside a kernel cannot be followed")
        for function, call, in_string in references(self.source):
            target = self.names.find(function)
            changed = self.changed
            self.changed = False
            if call is None:
                self._mention(function, target)
            elif target is LOCAL:
                self._local_call(function, call)
            elif is_jit(target) and language_name(target) is None:
                self._inner_call(call, target)
            else:
                self._static_call(call, target)
            if self.changed and in_string:
                raise self.refusal(function, "an access inside an f-string cannot be edited")
            self.changed |= changed

    def _mention(self, node: ast.expr, target: object) -> None:
        """A function that is not called here but handed on: to tl.reduce, say."""
        if is_jit(target) and language_name(target) is None:
            if self.derivation.inner(target, {}, self.where(node)) is not None:
                raise self.refusal(node, "a function that accesses memory can only be called")
            return
        name = language_name(target)
        if name is not None and _MEMORY_WORDS.search(name):
            raise self.refusal(node, f"tl.{name} can only be called, not handed on or renamed")

    def _roots_of_call(self, call: ast.Call) -> frozenset[str]:
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        return NOTHING.union(*(flat(self.roots.of(argument)) for argument in given))

    def _static_call(self, call: ast.Call, target: object) -> None:
        name = language_name(target)
        if name in GUARDED and target is getattr(tl, name):
            self._access(call, name, None)
            return
        rooted = self._roots_of_call(call)
        if name is not None and _MEMORY_WORDS.search(name):
            descriptor = name in ("load_tensor_descriptor", "store_tensor_descriptor")
            if not descriptor or rooted != {DESCRIPTOR}:
                reason = _REASONS.get(name, f"tl.{name} has no guarded form")
                raise self.refusal(call, reason)
            return
        if name == "inline_asm_elementwise":
            self._assembly(call)
        if name is None and not self._is_harmless(target):
            raise self.refusal(call, "cannot look into this function")
        plain = getattr(target, "__name__", "")
        passes = name in PASSES or (isinstance(target, type) and issubclass(target, tuple))
        if rooted and not passes and plain not in _HARMLESS:
            raise self.refusal(call, f"cannot tell what {plain or 'this'} does with a pointer")

    @staticmethod
    def _is_harmless(target: object) -> bool:
        """A class of Triton or Python, or a function that Triton runs while it compiles."""
        if isinstance(target, type):
            module = target.__module__
            return issubclass(target, tuple) or module.startswith(("builtins", "triton.language"))
        if is_jit(getattr(target, "__func__", None)) or tl.core.is_builtin(target):
            return False  # somebody's own builtin gets the compiler's hand and may emit anything
        return inspect.isroutine(target) or type(target).__name__ == "ConstexprFunction"

    def _assembly(self, call: ast.Call) -> None:
        text = call.args[0] if call.args else None
        text = text or next((k.value for k in call.keywords if k.arg == "asm"), None)
        if not isinstance(text, ast.Constant) or _MEMORY_ASM.search(str(text.value)):
            raise self.refusal(call, "assembly that may touch memory has no guarded form")

    def _local_call(self, function: ast.expr, call: ast.Call) -> None:
        """A call of something that is known only when the kernel is compiled: a method, mostly."""
        if not isinstance(function, ast.Attribute):
            raise self.refusal(call, "cannot tell which function this calls")
        name = function.attr
        receiver = flat(self.roots.of(function.value))
        if receiver == {DESCRIPTOR} and _DESCRIPTOR_METHODS.fullmatch(name):
            return
        if name in GUARDED and receiver:
            self._access(call, name, function)
        elif _MEMORY_WORDS.search(name) or name == "gather":
            way_out = "write tl.gather(…)" if name == "gather" else "a descriptor from the host?"
            raise self.refusal(call, f"cannot tell which parameter this accesses ({way_out})")
        elif name not in _KNOWN_METHODS:
            raise self.refusal(call, "cannot tell which function this calls")
        elif self._roots_of_call(call) and name not in PASSES:
            raise self.refusal(call, f"cannot tell what {name} does with a pointer")

    def _access(self, call: ast.Call, name: str, method: ast.Attribute | None) -> None:
        form = GUARDED[name]
        pointer = self._checked_pointer(call, name, method)
        rooted = flat(self.roots.of(pointer))
        if not rooted or rooted & {UNKNOWN, DESCRIPTOR}:
            shown = ast.unparse(pointer)
            raise self.refusal(call, f"cannot tell which parameter `{shown}` points into")
        if len(rooted) > 2:
            raise self.refusal(call, f"may go through {', '.join(sorted(rooted))}: more than two")
        parameters = tuple(p for p in self.derivation.pointers if p in rooted)
        slot = self.derivation.add_site(self, call, name, parameters)
        given = [part for p in parameters for part in self.derivation.extent_of(p, self.root(p))]
        given += ["None"] * (6 - len(given))
        group = self.derivation.group_bytes
        text = ", ".join([str(slot), str(group), SLOTS, *given, ""])
        self.scope[f"{OURS}{name}"] = form
        source = self.source
        if method is None:
            source.replace(source.start(call.func), source.end(call.func), f"{OURS}{name}")
            source.insert(source.after_parenthesis(call), text)
        else:
            dot, opened = self._dot(method), source.after_parenthesis(call)
            lines = "\n" * source.text[dot:opened].count(b"\n")
            comma = ", " if call.args or call.keywords else ""
            source.insert(source.start(method), f"{OURS}{name}({text}")
            source.replace(dot, opened, comma + lines)
        self.changed = True

    def _dot(self, method: ast.Attribute) -> int:
        """Byte offset of the dot of `receiver.method`."""
        place = self.source.end(method) - len(method.attr.encode()) - 1
        while (byte := self.source.text[place : place + 1]) in (b" ", b"\t", b"\n", b"\\"):
            place -= 1
        if byte != b".":
            raise self.refusal(method, "cannot be edited; write it on one line")
        return place

    def _checked_pointer(self, call: ast.Call, name: str, method: ast.Attribute | None) -> ast.expr:
        """The pointer of an access; refuses arguments that its guarded form does not take."""
        given = [*([method.value] if method else []), *call.args]
        wanted = list(inspect.signature(GUARDED[name].fn).parameters)[9:]
        theirs = inspect.signature(getattr(tl, name)).parameters.values()
        by_position = [p.name for p in theirs if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        if any(isinstance(argument, ast.Starred) for argument in given):
            raise self.refusal(call, "starred arguments have no guarded form")
        if by_position[: len(given)] != wanted[: len(given)]:
            raise self.refusal(call, f"write the options of tl.{name} as keywords")
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if strange := [str(k) for k in keywords if k not in wanted]:
            raise self.refusal(call, f"{strange[0]} has no guarded form")
        pointer = given[0] if given else keywords.get(wanted[0])
        if pointer is None:
            raise self.refusal(call, f"has no argument {wanted[0]}")
        return pointer

    def _inner_call(self, call: ast.Call, target: Any) -> None:
        """Replace the function of a call by a clone that knows where it is called from."""
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        if starred:
            raise self.refusal(call, "starred arguments cannot be followed")
        given = self.roots.bound(target, call)
        clone = self.derivation.inner(target, given, self.where(call))
        if clone is None:
            return
        rooted = NOTHING.union(*map(flat, given.values())) - {UNKNOWN, DESCRIPTOR}
        name = f"{OURS}call_{len(self.scope)}"
        self.scope[name] = clone
        text = f"{SLOTS}, "
        for p in self.derivation.pointers:
            if p in rooted:
                names = self.derivation.names_of(p)
                text += ", ".join([self.root(p), *names, ""])
        source = self.source
        source.replace(source.start(call.func), source.end(call.func), name)
        source.insert(source.after_parenthesis(call), text)
        self.changed = True


class Derivation:
    """All sites of one kernel, and the clones of the functions that it calls."""

    def __init__(
        self, pointers: tuple[str, ...], group_bytes: int, with_rows: frozenset[str] = frozenset()
    ) -> None:
        self.pointers = pointers
        self.with_rows = with_rows
        self.group_bytes = group_bytes
        self.sites: list[GuardSite] = []
        self.num_slots = 1  # word 0 is where a compare-and-swap out of bounds goes
        self._num_clones = 0
        self._returned: dict[_Call, RootsOf] = {}
        self._untouched: set[_Call] = set()

    def add_site(self, body: _Body, call: ast.Call, name: str, parameters: tuple[str, ...]) -> int:
        if len(self.sites) == MAX_SITES:
            raise body.refusal(call, f"more than {MAX_SITES} accesses in one kernel")
        slot = self.num_slots
        self.sites.append(GuardSite(slot, name, parameters, ast.unparse(call), body.where(call)))
        self.num_slots += len(parameters)
        return slot

    def names_of(self, pointer: str) -> list[str]:
        """The parameters that say how far a pointer reaches."""
        rows = [f"{OURS}{pointer}_rows"] if pointer in self.with_rows else []
        return [f"{OURS}{pointer}_bytes", *rows]

    def extent_of(self, pointer: str, root: str) -> tuple[str, str, str]:
        """What a form takes of a pointer: its root, its bytes, and its rows or None."""
        num_bytes, *rows = self.names_of(pointer)
        return root, num_bytes, rows[0] if rows else "None"

    def returned_by(self, jit: Any, given: Mapping[str, RootsOf]) -> RootsOf:
        """Roots of what a call returns; a recursive one returns what its other branches do."""
        key = id(jit), frozenset(given.items())
        if key not in self._returned:
            self._returned[key] = NOTHING
            source = KernelSource(jit)
            roots = Roots(source, Names(source), given, self.returned_by)
            self._returned[key] = NOTHING if roots.returned is None else roots.returned
        return self._returned[key]

    def kernel(self, jit: Any) -> Any:
        """The guarded kernel: the extents and the slots become its last parameters."""
        body = _Body(self, jit, {p: frozenset({p}) for p in self.pointers}, ())
        if body.source.tree.args.kwarg is not None:
            raise body.refusal(body.source.tree, "** parameters", body.source.name)
        body.guard_accesses()
        source = body.source
        ours = [name for p in self.pointers for name in self.names_of(p)]
        extra = [*(f"{name}=0" for name in ours), f"{SLOTS}=None"]
        _, closing, comma = source.parameter_ends()
        source.insert(closing, ", " * comma + ", ".join(extra))
        if saved := [p for p in self.pointers if p in body.roots.reassigned]:
            source.begin_with([f"{OURS}{p}_base = {p}" for p in saved])
        # The width of an extent and the alignment of a window must not compile the kernel again.
        free = [*ours, SLOTS]
        return self._make_variant(body, jit, "__guarded", free)

    def inner(self, jit: Any, given: Mapping[str, RootsOf], calls: tuple[SourceLine, ...]) -> Any:
        """A guarded clone for one call, or None when the function accesses nothing."""
        key = id(jit), frozenset(given.items())
        if key in self._untouched:
            return None
        body = _Body(self, jit, given, calls)
        if len(calls) > MAX_CALL_DEPTH:
            raise body.refusal(
                body.source.tree, f"calls deeper than {MAX_CALL_DEPTH}: recursion?", jit.fn.__name__
            )
        body.guard_accesses()
        if not body.changed:
            self._untouched.add(key)
            return None
        rooted = NOTHING.union(*map(flat, given.values()))
        extra = [SLOTS]
        for p in self.pointers:
            if p in rooted:
                extra += [f"{OURS}{p}_base", *self.names_of(p)]
        opened, _, _ = body.source.parameter_ends()
        body.source.insert(opened, ", ".join([*extra, ""]))
        self._num_clones += 1
        return self._make_variant(body, jit, f"__guarded_{self._num_clones}", [])

    @staticmethod
    def _make_variant(body: _Body, jit: Any, label: str, free: list[str]) -> Any:
        body.scope.update(body.source.freeze_defaults())
        function = body.source.compile(body.scope, label)
        # Here and not in the text, where it would have to be a name that the kernel can see.
        function.__annotations__.update({name: "i64" for name in free if name != SLOTS})
        kept = getattr(jit, "kwargs", None)  # of an interpreted function
        if kept is None:
            names = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug")
            kept = {name: getattr(jit, name, None) for name in (*names, "noinline")}
            kept["launch_metadata"] = getattr(jit, "launch_metadata", None)
            kept["repr"] = getattr(jit, "_repr", None)
        options = {name: value for name, value in kept.items() if value}
        if free:
            options["do_not_specialize"] = [*options.get("do_not_specialize", ()), *free]
        else:
            # Only a kernel's own parameters are specialised, and a clone's have moved.
            options.pop("do_not_specialize", None)
            options.pop("do_not_specialize_on_alignment", None)
        return triton.jit(function, **options)
