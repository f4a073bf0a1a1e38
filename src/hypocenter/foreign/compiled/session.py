"""The look at torch.compile in one process: which graphs it made, and what its kernels are of."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hypocenter.foreign.compiled.graphs import CompiledGraphs, UserGraph
from hypocenter.foreign.compiled.kernels import facts_of, read_wrapper
from hypocenter.foreign.compiled.made_again import made_again
from hypocenter.foreign.inductor import MadeIn
from hypocenter.record.compiled_graph import IndexMadeAgain

if TYPE_CHECKING:
    from hypocenter.foreign.recorder import ForeignRecorder

_COMPILE_FX, _CODE_CACHE = "torch._inductor.compile_fx", "torch._inductor.codecache"
_LOWERING = "torch._inductor.graph"
#: What of torch.compile is watched.
COMPILER_MODULES = frozenset({_COMPILE_FX, _CODE_CACHE, _LOWERING})


class CompiledSession:
    """`recorder` opens the recording; `attempt` calls what may fail, and keeps it to itself."""

    def __init__(
        self, recorder: Callable[[], ForeignRecorder | None], attempt: Callable[..., None]
    ) -> None:
        self._recorder, self._attempt = recorder, attempt
        self._graphs = CompiledGraphs(attempt)
        #: Lines of Inductor's that were told of.
        self._told: set[tuple[str, int]] = set()
        #: By the id of a graph, which lives as long as this, whether its inputs are those compiled.
        self._numbered: dict[int, bool] = {}

    def watch(self, module: Any) -> None:
        """Watch one of COMPILER_MODULES."""
        if module.__name__ == _COMPILE_FX:
            self._graphs.watch_compiler(module)
        elif module.__name__ == _LOWERING:
            self._graphs.watch_lowering(module)
        else:
            self._graphs.watch_files(module)

    def tell(self, jit: Any, made_in: MadeIn) -> None:
        """A kernel was launched; what it is made of is told with its first launch in that line."""
        place = made_in.file, made_in.line
        if place in self._told or not made_in.file:
            return
        self._told.add(place)
        self._attempt(self._tell, jit, made_in)

    def _tell(self, jit: Any, made_in: MadeIn) -> None:
        opened, graph = self._recorder(), self._graphs.of_file(made_in.file)
        sites, place = self._graphs.sites_in(made_in.file), (made_in.file, made_in.line)
        numbered = self._is_numbered(made_in.file, graph)
        facts = facts_of(*place, made_in.names, graph, sites, is_numbered=numbered)
        if opened is not None and facts is not None:
            opened.record_compiled(jit, facts)

    def _is_numbered(self, file: str, graph: UserGraph | None) -> bool:
        """Whether torch compiled a graph with its own inputs: of aliases it makes others.

        The file of the forward half says so, which runs first.
        """
        wrapper = read_wrapper(file)
        if wrapper is None or graph is None:
            return False
        if not wrapper.is_backward:
            self._numbered[id(graph)] = wrapper.num_inputs == len(graph.inputs)
        return self._numbered.get(id(graph), False)

    def note_end(self, error: BaseException, trace: TracebackType | None) -> None:
        """An exception ends the program: of a compiled graph of the CPU find the operation."""
        found = made_again(error, trace, self._graphs.of_file)
        opened = self._recorder() if found is not None else None
        if opened is not None and found is not None:
            opened.record_number(IndexMadeAgain, **found)
