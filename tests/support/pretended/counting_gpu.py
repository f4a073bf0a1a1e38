"""A GPU that runs nothing and counts the forms of kernels that it is named and launched with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hypocenter.device.forms import Compilable, distinct, form_of
from hypocenter.device.graph import Graph
from hypocenter.device.helper_processes import never
from hypocenter.device.offline.abstract import AbstractGpu
from hypocenter.settings.config import OnProgress


class CountingGpu(AbstractGpu):
    """All tokens are 0 there, at once. `met` has the kernels that were launched without a name."""

    captures = compiles = True
    kernel_folder = "/a/folder"

    def __init__(self, name: str = "cuda:7") -> None:
        super().__init__("hopper")
        self.name = name
        self.named: set[Hashable] = set()
        self.met: dict[Hashable, str] = {}
        self.num_graphs = 0

    def compile(
        self,
        launches: Sequence[Compilable],
        progress: OnProgress | None = None,
        is_over: Callable[[], bool] = never,
    ) -> bool:
        self.named |= {form_of(one.jit, one.args, one.options) for one in distinct(launches)}
        return True

    @property
    def num_compiled(self) -> int:  # type: ignore[override]
        return len(self.named) + len(self.met)

    def launcher(self, jit: Any) -> Callable[..., None]:
        def launch(*args: Any, grid: tuple[int, ...], **options: Any) -> None:
            form = form_of(jit, args, options)
            if form not in self.named:
                self.met[form] = jit.__name__

        return launch

    def capture(self, run: Callable[[], None]) -> Graph:
        run()
        self.num_graphs += 1
        return Graph(lambda: None, frozenset(), 1)
