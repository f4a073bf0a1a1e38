"""Source text of a kernel and the edits that turn it into another one; knows nothing of guarding.

Edits are made by byte offsets of the syntax tree, so that every statement keeps its line.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import io
import itertools
import linecache
import tokenize
import types
from collections.abc import Mapping
from typing import Any

from hypocenter.base.errors import Unguardable

#: Two derived functions never share a file name: linecache would show the wrong text.
_serial = itertools.count()


def is_jit(value: object) -> bool:
    """Whether `value` is a @triton.jit function, compiled or interpreted, and not its autotuner."""
    return inspect.isfunction(getattr(value, "fn", None)) and hasattr(value, "run")


class KernelSource:
    """The text of a @triton.jit function, its tree, and the edits collected for it."""

    def __init__(self, jit: Any) -> None:
        function = jit.fn
        self.function: types.FunctionType = function
        self.name: str = function.__name__
        self.file: str = function.__code__.co_filename
        # Triton keeps the lines that it read when the function was made; the file may change later.
        lines = getattr(jit, "raw_src", None)
        first = getattr(jit, "starting_line_number", None)
        if lines is None or first is None:
            lines, first = inspect.getsourcelines(function)
        # A function that is indented becomes the body of `if 1:`: dedenting would change strings.
        self._wrapped = lines[0][:1] in (" ", "\t")
        text = "".join(lines)
        self.text = (f"if 1:\n{text}" if self._wrapped else text).encode()
        #: Number in the file of the text's line 1.
        self.first_line: int = max(first, 1) - self._wrapped
        self.tree = self._parse()
        self._starts = list(itertools.accumulate(map(len, self.text.splitlines(True)), initial=0))
        self._edits: list[tuple[int, int, str]] = []
        #: Whether a line of its own was put before the first statement.
        self._line_added = False

    def _parse(self) -> ast.FunctionDef:
        try:
            tree: ast.AST = ast.parse(self.text)
        except SyntaxError as error:
            raise Unguardable(self.file, self.first_line, self.name, f"{error}") from error
        while not isinstance(tree, ast.FunctionDef):
            tree = tree.body[0]  # type: ignore[attr-defined]
        return tree

    def line(self, node: ast.AST) -> int:
        """Line of `node` in the file."""
        return self.first_line + node.lineno - 1  # type: ignore[attr-defined,no-any-return]

    def start(self, node: ast.AST) -> int:
        """Byte offset where `node` begins."""
        return self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined,no-any-return]

    def end(self, node: ast.AST) -> int:
        """Byte offset just behind `node`."""
        return self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined,no-any-return]

    def insert(self, offset: int, text: str) -> None:
        """Of two insertions at one place the first made comes first."""
        self._edits.append((offset, offset, text))

    def replace(self, start: int, end: int, text: str) -> None:
        self._edits.append((start, end, text))

    def after_parenthesis(self, call: ast.Call) -> int:
        """Byte offset just behind the parenthesis that opens the arguments of `call`."""
        place = self.end(call.func)
        while (byte := self.text[place : place + 1]) != b"(":
            # Between a function and its arguments: blanks, line ends, comments, closing brackets.
            assert byte in (b" ", b"\t", b"\n", b"\r", b"\\", b")", b"#"), byte
            place = self.text.index(b"\n", place) if byte == b"#" else place + 1
        return place + 1

    def parameter_ends(self) -> tuple[int, int, bool]:
        """(behind the opening, at the closing parenthesis, whether an addition needs a comma)."""
        header = self.text[self.start(self.tree) :]
        lines = header.decode().splitlines(True)
        bytes_before = list(itertools.accumulate((len(x.encode()) for x in lines), initial=0))
        depth, opened, last = 0, 0, ""
        for token in tokenize.generate_tokens(io.StringIO(header.decode()).readline):
            row, column = token.start
            place = bytes_before[row - 1] + len(lines[row - 1][:column].encode())
            if token.string in ("(", "[", "{") and token.type == tokenize.OP:
                depth += 1
                opened = opened or place + 1
            elif token.string in (")", "]", "}") and token.type == tokenize.OP:
                depth -= 1
                if depth == 0:
                    base = self.start(self.tree)
                    return base + opened, base + place, last not in (",", "(")
            if token.type not in (tokenize.NL, tokenize.COMMENT):
                last = token.string
        raise AssertionError(f"{self.name}: no parameter list")

    def begin_with(self, statements: list[str]) -> None:
        """Put simple statements before the body; on a line of their own only where they must."""
        first = self.tree.body[0]
        text = "; ".join(statements)
        if not isinstance(first, ast.For | ast.While | ast.If | ast.With):
            self.insert(self.start(first), f"{text}; ")
            return
        indent = self.text[self._starts[first.lineno - 1] : self.start(first)].decode()
        self.insert(self.start(first), f"{text}\n{indent}")
        self._line_added = True

    def _render(self) -> str:
        """The edited text without decorators; the statements of the body keep their lines."""
        # Insertions before a replacement that begins at the same byte, else in order of making.
        edits = sorted(self._edits, key=lambda edit: (edit[0], edit[1] > edit[0]))
        place = self._starts[self.tree.lineno - 1]
        parts = []
        for start, end, text in edits:
            assert start >= place, (self.name, text)
            parts += [self.text[place:start].decode(), text]
            place = end
        body = "".join(parts) + self.text[place:].decode()
        lines_before = self.line(self.tree) - 1 - self._line_added
        if not self._wrapped:
            return "\n" * lines_before + body
        return "\n" * (lines_before - 1) + "if 1:\n" + body

    def compile(self, scope: dict[str, Any], label: str) -> types.FunctionType:
        """Run the edited definition in `scope`; the new function is called `name<label>` to Triton.

        Raises Unguardable where the definition needs a name that only existed when the original was
        defined (in an annotation, say).
        """
        text = self._render()
        virtual = f"{self.file}:guarded:{self.name}:{next(_serial)}"
        linecache.cache[virtual] = (len(text), None, text.splitlines(True), virtual)
        flag = __future__.annotations.compiler_flag
        flags = self.function.__code__.co_flags & flag
        try:
            exec(compile(text, virtual, "exec", flags=flags, dont_inherit=True), scope)
        except Exception as error:
            reason = f"its definition cannot be run again: {error}; define it at module level"
            raise Unguardable(
                self.file, self.line(self.tree), f"def {self.name}", reason
            ) from error
        made: types.FunctionType = scope[self.name]
        # Triton tells functions apart by module and qualified name: clones must differ in it, or
        # the second call of an inner function would run the clone of the first.
        made.__qualname__ = f"{self.function.__qualname__}{label}"
        return made

    def freeze_defaults(self) -> Mapping[str, Any]:
        """Replace each default by a name that holds its value: its own names may be gone."""
        arguments = self.tree.args
        nodes = [
            *arguments.defaults,
            *(node for node in arguments.kw_defaults if node is not None),
        ]
        values = [
            *(self.function.__defaults__ or ()),
            *(self.function.__kwdefaults__ or {}).values(),
        ]
        assert len(nodes) == len(values), self.name
        frozen = {}
        for i, (node, value) in enumerate(zip(nodes, values, strict=True)):
            if not isinstance(node, ast.Constant):
                frozen[f"guard__default_{i}"] = value
                self.replace(self.start(node), self.end(node), f"guard__default_{i}")
        return frozen


def scope_of(function: types.FunctionType) -> dict[str, Any]:
    """Every name that `function` sees outside itself, builtins excepted: globals and closure."""
    scope = dict(function.__globals__)
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not yet assigned: the kernel cannot use it either
            scope.pop(name, None)
    return scope
