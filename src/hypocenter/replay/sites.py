"""Where a kernel is just now: its frames as sites, and the values in an expression at one lane.

Reads frames of Triton's interpreter; knows nothing of memory or findings.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Protocol

import numpy as np

from hypocenter.base.package import is_below
from hypocenter.device.interpret.block_pointers import BlockPointer
from hypocenter.device.interpret.builder import Wrap, is_machinery
from hypocenter.device.interpret.interpret import Interpretation, indent_of
from hypocenter.device.triton_lang import tl
from hypocenter.replay.findings import Site

SiteValue = bool | int | float | str

MAX_EXPRESSION_CHARS = 200
_OUTERMOST = Interpretation.run.__code__


class FrameMoment(Protocol):
    """A frame of a kernel, or what one held at an earlier moment."""

    @property
    def f_code(self) -> CodeType: ...
    @property
    def f_lasti(self) -> int: ...
    @property
    def f_lineno(self) -> int: ...
    @property
    def f_locals(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    f_code: CodeType
    f_lasti: int
    f_lineno: int
    f_locals: Mapping[str, Any]


def moment_of(frame: FrameType) -> FrameMoment:
    """What a frame holds now, whatever it does later."""
    return _Kept(frame.f_code, frame.f_lasti, frame.f_lineno, dict(frame.f_locals))


def kernel_frames() -> list[FrameType]:
    """Frames of the kernel that is being run, innermost first; empty outside a run."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _OUTERMOST:
        name = frame.f_code.co_filename
        if not is_machinery(name) and not is_below(name, "replay", "check"):
            frames.append(frame)
        frame = frame.f_back
    return frames if frame is not None else []


def state_of(frames: Sequence[FrameType]) -> object:
    """Equal for moments at which a kernel is at one place and all its names stand for the same."""
    return tuple(
        (frame.f_lasti, *((name, _held_by(value)) for name, value in frame.f_locals.items()))
        for frame in frames
    )


def _held_by(value: Any) -> object:
    if isinstance(value, tuple | list):
        return tuple(map(_held_by, value))
    data = getattr(getattr(value, "handle", None), "data", None)
    return data.tobytes() if data is not None else repr(value)


def site_of(frame: FrameMoment) -> Site:
    return site_at(frame.f_code, frame.f_lasti)


def wrap_site(wrap: Wrap) -> Site:
    return site_at(wrap.code, wrap.instruction)


def site_at(code: CodeType, instruction: int) -> Site:
    """File, line and text of the expression that instruction `instruction` of `code` evaluates."""
    positions = list(code.co_positions())[instruction // 2]
    line = positions[0] or code.co_firstlineno
    text = " ".join(_expression(code, instruction).split())
    if len(text) > MAX_EXPRESSION_CHARS:
        text = f"{text[: MAX_EXPRESSION_CHARS - 3]}..."
    return Site(code.co_filename, line, code.co_name, text)


def _expression(code: CodeType, instruction: int) -> str:
    positions = list(code.co_positions())[instruction // 2]
    line = positions[0] or code.co_firstlineno
    return _text(code, positions) or linecache.getline(code.co_filename, line)


def address_is_loaded(frames: Sequence[FrameType]) -> bool:
    """Whether the address of the access that is being made hangs on a loaded value.

    `frames` as `kernel_frames` gives them. Told by the text: by all that is ever assigned to the
    names that the address is made of, in each function on the way; False where there is no text.
    """
    return _address_is_loaded(tuple((frame.f_code, frame.f_lasti) for frame in frames))


@functools.lru_cache(maxsize=1024)
def _address_is_loaded(places: tuple[tuple[CodeType, int], ...]) -> bool:
    is_first = True
    for code, instruction in places:
        call = _parse(_expression(code, instruction))
        if not isinstance(call, ast.Call):
            return False
        given = [*call.args, *(word.value for word in call.keywords)]
        nodes: list[ast.AST] = []
        nodes += given[:1] if is_first else given
        names = set()
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("load"):
                return True
            if isinstance(node, ast.Name) and node.id not in names:
                names.add(node.id)
                made = (a for a in _assignments(code) if node.id in _targets(a))
                nodes += [assignment.value for assignment in made if assignment.value is not None]
            nodes += ast.iter_child_nodes(node)
        if not names.intersection(code.co_varnames[: code.co_argcount]):
            return False  # nothing that the caller made
        is_first = False
    return False


def adds_to_loaded(frames: Sequence[FrameType]) -> bool:
    """Whether the store that is being made adds to what a load of the same address gave.

    Told by the text, through names that are assigned once.
    """
    return bool(frames) and _adds_to_loaded(frames[0].f_code, frames[0].f_lasti)


@functools.lru_cache(maxsize=1024)
def _adds_to_loaded(code: CodeType, instruction: int) -> bool:
    call = _parse(_expression(code, instruction))
    if not isinstance(call, ast.Call) or len(call.args) < 2:
        return False
    total = _made_once(code, call.args[1])
    if not isinstance(total, ast.BinOp) or not isinstance(total.op, ast.Add):
        return False
    address = ast.unparse(call.args[0])
    loads = [_made_once(code, operand) for operand in (total.left, total.right)]
    return any(
        isinstance(load, ast.Call)
        and ast.unparse(load.func).endswith("load")
        and [*map(ast.unparse, load.args[:1])] == [address]
        for load in loads
    )


def _made_once(code: CodeType, node: ast.expr) -> ast.expr:
    """What a name is assigned, where that is done once; else the expression itself."""
    if not isinstance(node, ast.Name):
        return node
    made = [assignment for assignment in _assignments(code) if node.id in _targets(assignment)]
    if len(made) != 1 or not isinstance(made[0], ast.Assign):
        return node
    return made[0].value


def _parse(expression: str) -> ast.expr | None:
    try:
        return ast.parse(textwrap.dedent(expression).strip(), mode="eval").body
    except SyntaxError:
        return None


def _text(code: CodeType, positions: tuple[int | None, ...]) -> str:
    """The source between two positions; columns count bytes of the line as it was compiled."""
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None:
        return ""
    indent = indent_of(code)
    lines = [linecache.getline(code.co_filename, n)[indent:] for n in range(first, last + 1)]
    encoded = [line.encode() for line in lines]
    if not all(encoded):
        return ""
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    return b"".join(encoded).decode(errors="replace")


def values_at(
    frame: FrameMoment, expression: str, lane: tuple[int, ...], shape: tuple[int, ...]
) -> dict[str, SiteValue]:
    """What each name in `expression` is at lane `lane` of a block of `shape`; pointers left out.

    Behind them come the names that the expression's own were made of. A name whose block does not
    fit `shape` gives its range as text.
    """
    try:
        tree = ast.parse(textwrap.dedent(expression).strip(), mode="eval")
    except SyntaxError:  # the middle of a statement, or shortened
        return {}
    found: dict[str, SiteValue] = {}
    named = list(_names(tree))
    behind = [pair for name, _ in named for pair in _made_of(frame, name)]
    for name, index in [*named, *behind]:
        if name in found or name not in frame.f_locals:
            continue
        value = _value(frame.f_locals[name], index, lane, shape)
        if value is not None:
            found[name] = value
    return found


def pointers_at(frame: FrameType, expression: str) -> list[int]:
    """Addresses that the pointers in the address of an access hold, at one lane each.

    `expression` is the access. What its pointers were made of counts too, but for loaded values.
    """
    try:
        tree = ast.parse(textwrap.dedent(expression).strip(), mode="eval")
    except SyntaxError:
        return []
    if not isinstance(tree.body, ast.Call) or not tree.body.args:
        return []
    names = [name for name, _ in _unloaded_names(tree.body.args[0])]
    for name in names:  # grows: what those behind were made of comes too
        made = _made_of(frame, name, _unloaded_names)
        names += [other for other, _ in made if other not in names]
    found = (frame.f_locals.get(name) for name in names)
    return [
        int(np.asarray(value.handle.data).reshape(-1)[0])
        for value in found
        if isinstance(value, tl.tensor) and value.dtype.scalar.is_ptr()
    ]


def _unloaded_names(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """As `_names`, without what stands in a load."""
    if isinstance(tree, ast.Call) and ast.unparse(tree.func).endswith("load"):
        return
    if isinstance(tree, ast.Name):
        yield tree.id, None
    for child in ast.iter_child_nodes(tree):
        yield from _unloaded_names(child)


def _made_of(
    frame: FrameMoment,
    name: str,
    names_in: Callable[[ast.AST], Iterator[tuple[str, Any]]] | None = None,
) -> list[tuple[str, Any]]:
    """The names in the assignment that gave `name` its value, if they are still what they were."""
    line = frame.f_lineno
    before = [assignment for assignment in _assignments(frame.f_code) if assignment.lineno < line]
    made = next(
        (assignment for assignment in reversed(before) if name in _targets(assignment)), None
    )
    if made is None or made.value is None:
        return []
    later = {
        target
        for assignment in before
        if assignment.lineno >= made.lineno
        for target in _targets(assignment)
    }
    return [pair for pair in (names_in or _names)(made.value) if pair[0] not in later]


@functools.cache
def _assignments(code: CodeType) -> list[ast.Assign | ast.AugAssign | ast.AnnAssign]:
    """The assignments of a function in order, with the lines of its file."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):  # its source is not to be had
        return []
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign)
    return sorted((n for n in ast.walk(tree) if isinstance(n, kinds)), key=lambda n: n.lineno)


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def _names(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """(name, index) of each name; index is that of `name[:, None]`, else None."""
    subscripted = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            index = _axes_index(node.slice)
            if index is not None:
                subscripted.add(id(node.value))
                yield node.value.id, index
        elif isinstance(node, ast.Name) and id(node) not in subscripted:
            yield node.id, None


def _axes_index(node: ast.expr) -> Any:
    """`[:, None]` as NumPy's index; None for an index that does more than add axes."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    index: list[Any] = []
    for part in parts:
        if isinstance(part, ast.Slice) and not (part.lower or part.upper or part.step):
            index.append(slice(None))
        elif isinstance(part, ast.Constant) and part.value is None:
            index.append(None)
        else:
            return None
    return tuple(index)


def _value(
    value: Any, index: Any, lane: tuple[int, ...], shape: tuple[int, ...]
) -> SiteValue | None:
    if isinstance(value, bool | int | float):
        return _plain(np.asarray(value))
    if isinstance(value, BlockPointer):
        return str(value)
    if not isinstance(value, tl.tensor) or value.dtype.is_ptr():
        return None
    data = np.asarray(value.handle.data)
    if data.size == 1:
        return _plain(data.reshape(-1)[0])
    try:
        return _plain(np.broadcast_to(data if index is None else data[index], shape)[lane])
    except (ValueError, IndexError):
        return f"{_plain(data.min())}..{_plain(data.max())}"


def _plain(number: Any) -> SiteValue:
    plain: bool | int | float = number.item()
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)  # JSON has no such numbers
    return plain
