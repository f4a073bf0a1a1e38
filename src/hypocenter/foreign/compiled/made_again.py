"""A compiled graph of the CPU that failed at an index: which operation of the program it is.

C++ that Inductor writes fuses the operations and checks an index by a name of its own (`tmp7`). The
graph is run again on copies of its inputs, operation by operation as torch does uncompiled; the
first that fails is the one, and its index is at hand.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from hypocenter.foreign.compiled.graphs import UserGraph
from hypocenter.foreign.compiled.kernels import op_at, read_wrapper
from hypocenter.record.compiled_graph import GraphOp

#: Of all inputs of a graph that are copied.
MAX_INPUT_BYTES = 2 << 30
_CHECK = re.compile(r"index out of bounds: 0 <= \w+ < (\w+)")
_MAX_CHARS = 300
#: Functions and methods whose third argument is an index along their second, and not negative.
_ALONG = frozenset(
    {"gather", "index_select", "scatter", "scatter_", "scatter_add", "scatter_add_"}
    | {"scatter_reduce", "scatter_reduce_", "index_add", "index_add_", "index_copy", "index_copy_"}
    | {"index_fill", "index_fill_"}
)
_BRACKETS = frozenset({"getitem", "setitem", "index_put", "index_put_"})


@dataclass(frozen=True, slots=True)
class _Index:
    """An index of an operation: `at` is its node in the graph, `low` the least that is allowed."""

    at: Any
    values: Any
    target: Any
    dimension: int
    bound: int
    low: int


def made_again(
    error: BaseException,
    trace: TracebackType | None,
    graph_of: Callable[[str], UserGraph | None],
) -> dict[str, Any] | None:
    """The fields of an IndexMadeAgain; None where the error is no such one, or nothing follows."""
    said = _CHECK.search(f"{error}")
    frames = [(frame, line) for frame, line in traceback.walk_tb(trace)]
    at = next((n for n, (frame, _) in enumerate(frames) if graph_of(_file(frame))), None)
    if said is None or at is None:
        return None
    frame, line = frames[at]
    graph, wrapper = graph_of(_file(frame)), read_wrapper(_file(frame))
    if graph is None or graph.module is None or wrapper is None:
        return None
    # Of a backward half there is none: its inputs were at hand in the forward one alone.
    own = (frame for frame, _ in reversed(frames[:at]) if graph.is_of(frame.f_code))
    caller = next(own, None)
    if caller is None or wrapper.is_backward:
        return None
    inputs = _inputs(graph, caller)
    failed = _first_failure(graph, inputs) if inputs is not None else None
    if failed is None:
        return None
    bound = said[1].rstrip("L")
    kernel = wrapper.launches.get(line, ("", ()))[0]
    for index in failed.indices():
        is_it = not bound.isdigit() or index.bound == int(bound)
        found = failed.outside(index) if is_it else None
        if found is not None:
            return {"kernel": kernel, **failed.facts(graph, index), **found}
    return None


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _inputs(graph: UserGraph, frame: FrameType) -> list[Any] | None:
    """Copies of what the graph was given, as Dynamo gets at it; None where that cannot be had."""
    scope = {"L": frame.f_locals, "G": frame.f_globals, "__builtins__": {}}
    given, num_bytes = [], 0
    for given_input in graph.inputs:
        try:
            value = eval(
                given_input.spelled, scope
            )  # the text is Dynamo's own, as its guards have it
        except Exception:
            return None
        if hasattr(value, "untyped_storage"):
            num_bytes += value.untyped_storage().nbytes()
        given.append(value)
    if num_bytes > MAX_INPUT_BYTES:
        return None
    return [value.detach().clone() if hasattr(value, "detach") else value for value in given]


def _first_failure(graph: UserGraph, inputs: list[Any]) -> _Failed | None:
    torch = sys.modules["torch"]

    class Run(torch.fx.Interpreter):  # type: ignore[misc,name-defined]
        failed: _Failed | None = None

        def run_node(self, node: Any) -> Any:
            try:
                return super().run_node(node)
            except (IndexError, RuntimeError) as error:
                args, options = self.fetch_args_kwargs_from_env(node)
                self.failed = _Failed(self, node, args, options, error)
                raise

    run = Run(graph.module)
    versions = [getattr(value, "_version", 0) for value in inputs]
    try:
        with torch.no_grad():
            run.run(*inputs)
    except Exception:
        # What changes an input in place may have done so when it failed, and would do it twice.
        same = versions == [getattr(value, "_version", 0) for value in inputs]
        return run.failed if same else None
    return None


@dataclass(frozen=True, slots=True)
class _Failed:
    """An operation that failed, with what it was given."""

    run: Any
    node: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    error: BaseException

    def indices(self) -> Iterator[_Index]:
        """Its indices, in order; nothing of an operation that is not known."""
        target = self.node.target
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        nodes, args = self.node.args, self.args
        if name in _BRACKETS and len(args) > 1:
            yield from _in_brackets(args[0], _items(nodes[1]), _items(args[1]), nodes[0])
        elif name == "embedding" and len(args) > 1:
            at, table = (1, 0) if args[0].is_floating_point() else (0, 1)
            yield _Index(nodes[at], args[at], nodes[table], 0, args[table].shape[0], 0)
        elif name in _ALONG and len(args) > 2:
            along = args[1] % max(args[0].ndim, 1)
            yield _Index(nodes[2], args[2], nodes[0], along, args[0].shape[along], 0)

    def outside(self, index: _Index) -> dict[str, Any] | None:
        """What of an index is outside, and whether the operation is clean with all of it inside."""
        torch = sys.modules["torch"]
        wrong = (index.values < index.low) | (index.values >= index.bound)
        places = torch.nonzero(wrong, as_tuple=False)
        if not len(places):
            return None
        first = tuple(int(n) for n in places[0])
        inside = index.values.clamp(index.low, index.bound - 1)
        return {
            "element": first,
            "value": int(index.values[first]),
            "dimension": index.dimension,
            "bound": int(index.bound),
            "num_outside": len(places),
            "is_clean_inside": self._is_clean_with(index.values, inside),
        }

    def _is_clean_with(self, index: Any, inside: Any) -> bool:
        torch = sys.modules["torch"]

        def swap(value: Any) -> Any:
            return inside if value is index else value

        args, options = torch.utils._pytree.tree_map(swap, (self.args, self.options))
        call = getattr(self.run, self.node.op)
        try:
            with torch.no_grad():
                call(self.node.target, args, options)
        except (IndexError, RuntimeError):
            return False
        return True

    def facts(self, graph: UserGraph, index: _Index) -> dict[str, Any]:
        """Operation and names, as the program has them."""
        site = graph.sites.get(self.node.name, "")
        op = GraphOp(
            node=self.node.name,
            op=str(getattr(self.node.target, "__name__", self.node.target)),
            operands=tuple(str(node) for node in self.node.all_input_nodes),
        )
        return {
            "op": op_at(op, (site,) if site else ()),
            "said": f"{type(self.error).__name__}: {self.error}".partition("\n")[0][:_MAX_CHARS],
            "index_name": _name(graph, index.at),
            "target_name": _name(graph, index.target),
        }


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _in_brackets(
    target: Any, nodes: Sequence[Any], items: Sequence[Any], table: Any
) -> Iterator[_Index]:
    """The index tensors of `target[items]`, each with the dimension that it indexes."""
    taken = sum(_num_dimensions(item) for item in items)
    dimension = 0
    for node, item in zip(nodes, items, strict=True):
        if item is Ellipsis:
            dimension += target.ndim - taken
            continue
        if hasattr(item, "dtype") and _num_dimensions(item) == 1 and dimension < target.ndim:
            bound = target.shape[dimension]
            if str(item.dtype) in ("torch.int64", "torch.int32"):
                yield _Index(node, item, table, dimension, bound, -bound)
        dimension += _num_dimensions(item)


def _num_dimensions(item: Any) -> int:
    """How many dimensions an item in brackets takes."""
    if item is None or item is Ellipsis:
        return 0
    is_mask = str(getattr(item, "dtype", "")) in ("torch.bool", "torch.uint8")
    return int(item.ndim) if is_mask else 1


def _name(graph: UserGraph, node: Any) -> str:
    """What the program calls an input of the graph; "" of what is made inside."""
    inputs = [made for made in graph.module.graph.nodes if made.op == "placeholder"]
    number = next((n for n, made in enumerate(inputs) if made is node), None)
    return graph.inputs[number].name if number is not None else ""
