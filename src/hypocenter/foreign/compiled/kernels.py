"""What Inductor notes of a kernel in the file that launches it, joined with the program's graph.

Before each kernel stand its operations, with the nodes of the program's graph that they come from;
its launch passes buffers by name (torch/_inductor/utils.py, `get_kernel_metadata`; the same in
torch 2.5 to 2.13).
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypocenter.foreign.compiled.graphs import UserGraph
from hypocenter.record.compiled_graph import GraphOp

#: Of one file of Inductor's, and of one kernel.
MAX_FILE_BYTES, MAX_OPS, MAX_TEXT = 16 << 20, 256, 200
_MAX_DECORATED = 200
_DEFINED = re.compile(r"^(\w+) = async_compile\.")
_FROM = re.compile(r"^#   (\S+) => (.+)$")
_OP = re.compile(
    r"^#   %(\w+) : .*?call_function\[target=(?:torch\.ops\.)?([\w.]+)\]\(args = (.*)$"
)
_BACKWARD = re.compile(r"^# AOT ID: \['\d+_backward'\]|\btangents_\d", re.M)
_ORIGINAL = re.compile(r"^# Original path: (.+):(\d+)$")
_INPUT = re.compile(r'^#   %(\w+) : (?:Tensor "\w+\[([^\]]*)\].*)?.*= PlaceHolder\[')
#: How torch numbers the inputs of a graph: from 1 on where there is a backward half, else from 0.
_NUMBERED = (re.compile(r"^primals_(\d+)$"), 1), (re.compile(r"^arg(\d+)_1$"), 0)


@dataclass(slots=True)
class NotedKernel:
    """A kernel as its file notes it: operations, the nodes behind each, inputs with their sizes.

    `original` is the `def` of one that the program itself wrote.
    """

    ops: list[GraphOp] = field(default_factory=list)
    comes_from: dict[str, list[str]] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    original: str = ""


@dataclass(frozen=True, slots=True)
class WrapperFile:
    """A file of Inductor's: its kernels by name, and what each launch passes, by its line.

    `num_inputs` is how many inputs its graph has. `is_backward`: of a backward half, whose nodes
    have names of their own.
    """

    kernels: Mapping[str, NotedKernel]
    launches: Mapping[int, tuple[str, tuple[str, ...]]]
    num_inputs: int
    is_backward: bool


@functools.lru_cache(maxsize=256)
def read_wrapper(file: str) -> WrapperFile | None:
    """What a file of Inductor's says of its kernels; None for what cannot be read."""
    try:
        if Path(file).stat().st_size > MAX_FILE_BYTES:
            return None
        text = Path(file).read_text()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return None
    is_backward = _BACKWARD.search(text) is not None
    return WrapperFile(_kernels(text), _launches(tree), _num_inputs(tree), is_backward)


def _kernels(text: str) -> dict[str, NotedKernel]:
    found: dict[str, NotedKernel] = {}
    noted = NotedKernel()
    for line in text.splitlines():
        if (defined := _DEFINED.match(line)) is not None:
            found[defined[1]], noted = noted, NotedKernel()
        elif not line.startswith("#"):
            noted = NotedKernel()
        elif (pair := _FROM.match(line)) is not None:
            for node in pair[2].split(", "):
                noted.comes_from.setdefault(node, []).append(pair[1])
        elif (one := _INPUT.match(line)) is not None:
            noted.inputs[one[1]] = one[2] or ""
        elif (one := _ORIGINAL.match(line)) is not None:
            noted.original = _def_line(one[1], int(one[2]))
        elif (one := _OP.match(line)) is not None and len(noted.ops) < MAX_OPS:
            operands = tuple(re.findall(r"%(\w+)", one[3]))
            noted.ops.append(GraphOp(node=one[1], op=one[2], operands=operands))
    return found


def _def_line(file: str, line: int) -> str:
    """Where the `def` of a function stands, whose decorators begin at a line; "" if it does not."""
    lines = linecache.getlines(file)[line - 1 : line - 1 + _MAX_DECORATED]
    offsets = (n for n, text in enumerate(lines) if text.lstrip().startswith("def "))
    offset = next(offsets, None)
    return f"{file}:{line + offset}" if offset is not None else ""


def _launches(tree: ast.AST) -> dict[int, tuple[str, tuple[str, ...]]]:
    """By each of its lines the kernel and what it is passed, in order: names of buffers."""
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        target = node.func
        if isinstance(target, ast.Attribute) and target.attr == "run":
            target = target.value
        if isinstance(target, ast.Name):
            passed = tuple(map(_buffer, node.args))
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                found.setdefault(line, (target.id, passed))
    return found


def _num_inputs(tree: ast.AST) -> int:
    """How many inputs `call` takes apart: `arg0_1, arg1_1 = args`."""
    calls = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"
    )
    taken = (
        len(node.targets[0].elts)
        for call in calls
        for node in call.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and ast.unparse(node.value) == "args"
    )
    return next(taken, 0)


def _buffer(value: ast.expr) -> str:
    """The buffer that is passed, whole or as a view of it; "" for anything else."""
    if isinstance(value, ast.Call) and value.args:
        return _buffer(value.args[0])
    return value.id if isinstance(value, ast.Name) else ""


def facts_of(
    file: str,
    line: int,
    parameters: Sequence[str],
    graph: UserGraph | None,
    sites: Mapping[str, str],
    *,
    is_numbered: bool,
) -> dict[str, Any] | None:
    """The fields of a FusedKernel but for its name and text, of the launch in a line of a file.

    `sites` are lines of the program by node, as far as Inductor had them. `is_numbered`: the graph
    that was compiled has the inputs of `graph`, in its order. None where the file tells nothing.
    """
    wrapper = read_wrapper(file)
    launch = wrapper.launches.get(line) if wrapper is not None else None
    noted = wrapper.kernels.get(launch[0]) if wrapper is not None and launch else None
    if wrapper is None or launch is None or noted is None:
        return None
    passed = dict(zip(parameters, launch[1], strict=False))
    nodes = {*noted.inputs, *filter(None, passed.values())}
    of = graph if is_numbered else None
    names = {node: name for node in nodes if (name := name_of(node, noted.inputs, of))}
    ops = tuple(
        _with_lines(op, _sources(op, noted, is_backward=wrapper.is_backward), graph, sites)
        for op in noted.ops
    )
    return {
        "ops": ops,
        "parameters": {name: node for name, node in passed.items() if node},
        "names": names,
        "original": noted.original,
    }


def name_of(node: str, sizes: Mapping[str, str], graph: UserGraph | None) -> str:
    """What the program calls an input of its graph; "" where that is not sure."""
    for pattern, first in _NUMBERED:
        found = pattern.match(node)
        number = int(found[1]) - first if found is not None else -1
        if graph is not None and 0 <= number < len(graph.inputs):
            given = graph.inputs[number]
            size = sizes.get(node, "")
            return given.name if not given.is_number and _agree(given.shape, size) else ""
    return ""


def _agree(shape: tuple[Any, ...], size: str) -> bool:
    """Whether a shape of Dynamo's and one of Inductor's may be the same: numbers must be."""
    if not size:
        return True
    sizes = size.split(", ")
    return len(sizes) == len(shape) and all(
        not (isinstance(one, int) and other.isdigit()) or one == int(other)
        for one, other in zip(shape, sizes, strict=True)
    )


def _sources(op: GraphOp, noted: NotedKernel, *, is_backward: bool) -> list[str]:
    """The nodes of the program's graph that an operation comes from.

    A node of a backward half is noted to come from itself, which is none of that graph's.
    """
    found = noted.comes_from.get(op.node, [])
    return [name for name in found if not (is_backward and name == op.node)]


def _with_lines(
    op: GraphOp, sources: Sequence[str], graph: UserGraph | None, sites: Mapping[str, str]
) -> GraphOp:
    found = [graph.sites[name] for name in sources if name in graph.sites] if graph else []
    if not found and op.node in sites:
        found = [sites[op.node]]
    return op_at(op, tuple(dict.fromkeys(found)))


def op_at(op: GraphOp, sites: tuple[str, ...]) -> GraphOp:
    """An operation with the lines that asked for it, and the text of the one if it is one."""
    text = ""
    if len(sites) == 1:
        file, _, line = sites[0].rpartition(":")
        text = linecache.getline(file, int(line)).strip()[:MAX_TEXT]
    return GraphOp(node=op.node, op=op.op, operands=op.operands, sites=sites, text=text)
