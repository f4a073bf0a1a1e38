"""The graphs that torch.compile is given: the line of each operation, the name of each input.

Dynamo notes both, whatever caches come after it. A file that Inductor writes, or finds in its
cache, belongs to the graph that is being compiled, or to the one of the same compilation: torch
compiles the backward half when it first runs.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from hypocenter.foreign.caller import innermost_line

#: Graphs, and files of Inductor's, of one process.
MAX_GRAPHS, MAX_FILES = 512, 8192
_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+), in (\S+)', re.M)
_SCOPED = re.compile(r"^[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of a graph: how Dynamo spells it, and its shape; () with `is_number`."""

    spelled: str
    shape: tuple[Any, ...]
    is_number: bool = False

    @property
    def name(self) -> str:
        """As the program writes it: `ids`, `self.table.weight`."""
        return _MEMBER.sub(r".\1", _SCOPED.sub(r"\1", self.spelled))


@dataclass(frozen=True, slots=True)
class UserGraph:
    """What Dynamo made of a function: by operation its lines (file:line), and the inputs in order.

    `module` runs it, operation by operation; None where a tensor of it is not the CPU's.
    `function` is the compiled one: its file and its name.
    """

    sites: dict[str, str]
    inputs: tuple[GraphInput, ...]
    module: Any = None
    function: tuple[str, str] = ("", "")

    def is_of(self, code: CodeType) -> bool:
        """Whether a code is that of the function, or of what Dynamo made of its rest."""
        file, name = self.function
        rest = f"torch_dynamo_resume_in_{name}_at_"
        is_named = code.co_name == name or code.co_name.startswith(rest)
        return bool(name) and code.co_filename == file and is_named


class CompiledGraphs:
    """The graphs of this process, and which of Inductor's files belongs to which.

    `attempt` calls what may fail, and keeps the program out of it.
    """

    def __init__(self, attempt: Callable[..., None]) -> None:
        self._attempt = attempt
        self._now = threading.local()
        self._by_compilation: dict[str, list[UserGraph]] = {}
        self._of_file: dict[str, UserGraph] = {}
        self._sites_in_file: dict[str, dict[str, str]] = {}

    def watch_compiler(self, module: Any) -> None:
        """Note each graph that `torch._inductor.compile_fx` is given."""
        original = module.compile_fx

        @functools.wraps(original)
        def compile_fx(model_: Any, *args: Any, **options: Any) -> Any:
            if getattr(self._now, "graph", None) is not None:  # it calls itself with other settings
                return original(model_, *args, **options)
            self._attempt(self._begin, model_)
            try:
                return original(model_, *args, **options)
            finally:
                self._now.graph = None

        module.compile_fx = compile_fx

    def watch_files(self, module: Any) -> None:
        """Note which graph each file is of that `torch._inductor.codecache` loads."""
        kind = module.PyCodeCache
        original = kind.load_by_key_path.__func__

        @functools.wraps(original)
        def load_by_key_path(cls: Any, key: str, path: str, *args: Any, **options: Any) -> Any:
            self._attempt(self._note_file, path)
            return original(cls, key, path, *args, **options)

        kind.load_by_key_path = classmethod(load_by_key_path)

    def watch_lowering(self, module: Any) -> None:
        """Note the lines of what Inductor makes code of: of a backward half no other note has them.

        A file that comes out of a cache has none.
        """
        kind = module.GraphLowering
        original = kind.compile_to_module

        @functools.wraps(original)
        def compile_to_module(lowering: Any, *args: Any, **options: Any) -> Any:
            made = original(lowering, *args, **options)
            self._attempt(self._note_lines, lowering, made)
            return made

        kind.compile_to_module = compile_to_module

    def sites_in(self, file: str) -> dict[str, str]:
        """The lines of the program by the nodes that a file of Inductor's was made of."""
        return self._sites_in_file.get(file, {})

    def of_file(self, file: str) -> UserGraph | None:
        """The graph whose launches a file of Inductor's makes."""
        return self._of_file.get(file)

    def _note_lines(self, lowering: Any, made: Any) -> None:
        if len(self._sites_in_file) < MAX_FILES:
            nodes = (node for node in lowering.module.graph.nodes if node.op == "call_function")
            sites = {node.name: _site_of(node) for node in nodes}
            self._sites_in_file[str(made.__file__)] = {n: site for n, site in sites.items() if site}

    def _begin(self, model: Any) -> None:
        if not hasattr(model, "graph"):
            return
        graph = self._now.graph = _read(model)
        compilation = _compilation()
        if compilation and len(self._by_compilation) < MAX_GRAPHS:
            self._by_compilation.setdefault(compilation, []).append(graph)

    def _note_file(self, path: str) -> None:
        graph = getattr(self._now, "graph", None)
        if graph is None:
            same = self._by_compilation.get(_compilation(), [])
            graph = same[0] if len(same) == 1 else None
        if graph is not None and len(self._of_file) < MAX_FILES:
            self._of_file[path] = graph


def _compilation() -> str:
    """The number of what is being compiled; "" where nothing is."""
    found = sys.modules["torch._guards"].CompileContext.current_compile_id()
    return str(found) if found is not None else ""


def _read(model: Any) -> UserGraph:
    sites, inputs, is_of_cpu, function = {}, [], True, ("", "")
    for node in model.graph.nodes:
        example = node.meta.get("example_value")
        is_of_cpu &= getattr(getattr(example, "device", None), "type", "cpu") == "cpu"
        if node.op == "placeholder":
            shape = getattr(example, "shape", None)
            sizes = tuple(shape) if shape is not None else ()
            inputs.append(GraphInput(_spelling_of(node), sizes, shape is None))
        elif node.op.startswith("call") and (site := _site_of(node)):
            sites[node.name] = site
            file, _, name = _frames_of(node)[0]
            function = file, name
    return UserGraph(sites, tuple(inputs), model if is_of_cpu else None, function)


def _spelling_of(node: Any) -> str:
    """How Dynamo gets at an input: `L['ids']`."""
    source = getattr(node, "_dynamo_source", None)
    source = source or getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _frames_of(node: Any) -> list[tuple[str, str, str]]:
    """File, line and function of the program's stack at an operation, the compiled one first."""
    return _FRAME.findall(getattr(node, "stack_trace", None) or "")


def _site_of(node: Any) -> str:
    return innermost_line([(file, int(line)) for file, line, _ in _frames_of(node)])
