"""A plan: the prepared launches of one step over static buffers, made once per shape bucket.

The decoder's plain Python runs against a PlanBuilder; what remains is a list to walk.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import Tensor
from hypocenter.device import devices, launch, marks
from hypocenter.device.cpu.kernel_forms import NamedKernel
from hypocenter.device.cpu.native import NativeLaunches
from hypocenter.device.graph import Graph
from hypocenter.device.host_work import HostWork
from hypocenter.device.launch import Demands, Launch, Runs
from hypocenter.device.op import Op
from hypocenter.device.stream_order import Writes
from hypocenter.record.recorder import current
from hypocenter.settings.config import OnProgress

if TYPE_CHECKING:
    from hypocenter.device.guard.launches import GuardedLaunches
    from hypocenter.device.tracing import Tracer

#: Multiply-adds below which a kernel is done on one thread before others would have begun.
MIN_PARALLEL_WORK = 1 << 18
#: Rows of a bucket up to which a plan on the CPU runs as one call: it takes milliseconds then, and
#: Python would be a good part of that. Longer ones listen to Ctrl-C between launches.
MAX_NATIVE_ROWS = 64
#: Launch modes in which each run does the same, so that it may become a graph.
CAPTURED_MODES = ("off", "guarded")

_tags = itertools.count(1)


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op as it was asked for, and its launches: what one says of the other is looked up here."""

    op: Op
    arguments: Mapping[str, Any]
    launches: tuple[Launch, ...]


class PlanBuilder:
    """Collects the launches that ops ask for. `num_rows` is the bucket: the most rows of a step."""

    def __init__(self, num_rows: int, device: str = "cpu") -> None:
        self.num_rows, self.device = num_rows, device
        self.launches: list[launch.Launch] = []
        #: What was asked for, in order; marks are not among it.
        self.calls: list[OpCall] = []
        #: Marks of the recorder (`kernels/mark.py`), each with the launch that it stands behind.
        self.marks: list[tuple[int, Runs]] = []
        #: What launches have the host do, each with the number of its launch.
        self.host_work: dict[int, HostWork] = {}
        #: Tells the marks of one plan from those of another.
        self.tag = next(_tags) & 0x7FFF

    def add(self, op: Op, **arguments: Any) -> None:
        """Append an op whose contract, kernel and launch take `arguments` by their names.

        Raises LaunchRejected where a name is missing or nobody's, and where the contract is broken.
        """
        num_launches = len(self.launches)
        op.bind(self, arguments)
        self.calls.append(OpCall(op, arguments, tuple(self.launches[num_launches:])))

    def add_cpu(
        self,
        kernel: NamedKernel,
        *args: Any,
        contract: Demands,
        facts: Mapping[str, Any],
        work_per_row: int,
        reads: Sequence[tuple[Any, int]] = (),
    ) -> None:
        """Append a launch whose `facts` meet its contract; raises LaunchRejected if they do not.

        `work_per_row`, about the multiply-adds per row, decides between one thread and many.
        `reads`, up to three: the arrays that its items go through, one after the other, and the
        items of each, of one size; threads that wait ask memory for them.
        """
        parallel = self.num_rows * work_per_row >= MIN_PARALLEL_WORK
        self.launches.append(
            launch.prepare(kernel, args, contract, facts, parallel=parallel, reads=reads)
        )

    def add_gpu(
        self,
        jit: Any,
        *args: Any,
        grid: tuple[int, ...],
        contract: Demands,
        facts: Mapping[str, Any],
        num_warps: int = 4,
        **constants: Any,
    ) -> None:
        """Append a launch of a Triton kernel; `constants` are its tl.constexpr parameters."""
        self.launches.append(self._prepare(jit, args, grid, contract, facts, num_warps, constants))

    def add_call(
        self,
        name: str,
        function: Callable[..., None],
        *args: Any,
        contract: Demands,
        facts: Mapping[str, Any],
    ) -> None:
        """Append a call of a library that launches on the device by itself."""
        made = launch.prepare_call(name, function, args, contract, facts, self.device)
        self.launches.append(made)

    def add_host_work(self, op: Op, work: HostWork, **arguments: Any) -> None:
        """Append an op that has the host do `work`; raises as `add` does."""
        self.host_work[len(self.launches)] = work
        self.add(op, work=work, **arguments)

    def join(self, plan: Plan) -> None:
        """Append the launches of a plan that has the host do nothing, without its marks."""
        assert not plan.host_launches, plan.name
        self.launches += plan.launches
        self.calls += plan.calls

    def mark_by(self, op: Op, **arguments: Any) -> None:
        """Place a mark that is a Triton kernel behind the launches so far; raises as `add` does."""
        num_launches = len(self.launches)
        op.bind(self, arguments)
        marks = self.launches[num_launches:]
        del self.launches[num_launches:]
        for made in marks:
            self.mark(made)

    def mark(self, mark: Runs) -> None:
        """Place a mark behind the launches so far."""
        self.marks.append((len(self.launches) - 1, mark))

    def _prepare(
        self,
        jit: Any,
        args: tuple[Any, ...],
        grid: tuple[int, ...],
        contract: Demands,
        facts: Mapping[str, Any],
        num_warps: int,
        constants: Mapping[str, Any],
    ) -> Launch:
        # Triton is about to change what it does when nobody says.
        fused = {"enable_fp_fusion": True}
        options = {"grid": grid, "num_warps": num_warps, **fused, **constants}
        return launch.prepare_gpu(jit, args, options, contract, facts, self.device)


class Plan:
    """The launches of one step, and the tensor that holds its result.

    Where the device captures, a plan in mode off or guarded that runs for the second time becomes
    a graph: its buffers cannot be freed until `release` or another mode gives that up, and a
    launch whose own mode is changed is not heard.
    """

    def __init__(self, builder: PlanBuilder, result: Tensor) -> None:
        self.launches = tuple(builder.launches)
        self.calls = tuple(builder.calls)
        self.result = result
        #: What it is, for whoever reads a record of it.
        self.name = ""
        self.tag = builder.tag
        self._marks = tuple(builder.marks)
        numbered = [*enumerate(self.launches), *self._marks]
        self._numbered = tuple(sorted(numbered, key=operator.itemgetter(0)))  # a mark comes behind
        self._device = builder.device
        self._mode = "off"
        self._guarded: GuardedLaunches | None = None
        self._has_run = False
        self._graph: _Replay | None = None
        self._writes = Writes(self.launches)
        self._host_work = builder.host_work
        self._is_short = builder.device == "cpu" and builder.num_rows <= MAX_NATIVE_ROWS
        self._native: NativeLaunches | None = None

    @property
    def device(self) -> str:
        return self._device

    @property
    def marks(self) -> tuple[Runs, ...]:
        """The recorder's marks, in order; see `PlanBuilder.marks`."""
        return tuple(mark for _, mark in self._marks)

    @property
    def every_launch(self) -> tuple[Launch, ...]:
        """The launches, those of marks, and those of what the host does."""
        marks = (mark for _, mark in self._marks if isinstance(mark, Launch))
        return (*self.launches, *marks, *self.host_launches)

    @property
    def host_calls(self) -> tuple[OpCall, ...]:
        """What was asked for of the CPU."""
        return tuple(call for work in self._host_work.values() for call in work.calls)

    @property
    def host_launches(self) -> tuple[Launch, ...]:
        """Those of the CPU that launches of the plan make."""
        return tuple(made for work in self._host_work.values() for made in work.launches)

    @functools.cached_property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that this plan runs, each once, in order of first use."""
        return tuple(dict.fromkeys(item.kernel for item in self.launches))

    @property
    def is_captured(self) -> bool:
        """Whether the next run replays a graph."""
        return self._graph is not None

    @property
    def graph(self) -> int:
        """The number in the record of the graph that the next run replays, or 0."""
        return self._graph.number if self._graph is not None else 0

    def compile(self, progress: OnProgress | None = None) -> None:
        """Have its kernels ready; those of a GPU are by now, all forms together."""
        if self._device == "cpu":
            launch.compile_all(self.launches, progress)
        elif self._host_work:
            launch.compile_all(self.host_launches, progress)
        if self._is_short:
            self._native = launch.native(self._numbered)

    def set_mode(self, mode: str) -> None:
        """Run every launch in this mode from now on: `Launch.set_mode`, or `GuardedLaunches`."""
        self.release()
        if mode == "traced":
            _tracer()  # refuses now, and not in the first step
        guarded = None
        if mode == "guarded":
            from hypocenter.device.guard.launches import GuardedLaunches  # needs Triton

            guarded = GuardedLaunches(self._device, self.launches)
        else:
            for item in self.launches:
                item.set_mode(mode)
        if self._guarded is not None:
            self._guarded.free()
        self._guarded = guarded
        self._mode = mode
        self._has_run = False

    def run(self) -> None:
        """Run the launches; in guarded mode raises AccessRefused when one left its tensors."""
        devices.will_run(self._device, self._writes)
        try:
            self._run()
        except LaunchRejected:
            if self.marks:
                marks.catch_up(self._device)
            raise

    def _run(self) -> None:
        if self._guarded is not None:
            self._guarded.begin()
        if self._graph is not None:
            self._replay(self._graph)
        elif self._has_run and self._can_capture():
            # Only now: a plan that runs once, as many a prompt's does, is not worth a graph.
            self._graph = self._capture()
        else:
            self._walk()
            self._has_run = True
        if self._guarded is not None:
            current().record_check("guard")
            self._guarded.settle()

    def capture(self) -> None:
        """Have a graph ready for the next run, where the device captures. Its launches run once,
        over what lies in their buffers."""
        if self._graph is None and self._can_capture():
            devices.will_run(self._device, self._writes)
            self._graph = self._capture()

    def release(self) -> None:
        """Give the graph up, if there is one, so that its buffers may be freed."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _can_capture(self) -> bool:
        return self._mode in CAPTURED_MODES and devices.backend_captures(self._device)

    def _walk(self) -> None:
        header, place_word = current().record_begin(self)
        if self._mode == "traced":
            _tracer().walk(tuple(enumerate(self.launches)), header, place_word)
            launch.walk(self._marks, header, place_word)
        elif self._native is not None and self._mode == "off":
            launch.walk_native(self._native, self.launches, header, place_word)
        else:
            launch.walk(self._numbered, header, place_word)

    def _capture(self) -> _Replay:
        """The launches as graphs, between which the host does its work; they run once."""
        header, place_word = current().record_begin(self)
        backend = devices.backend_of(self._device)
        bases: set[int] = set()
        found: list[tuple[int, Runs]] = []
        for (_, is_host), numbered in itertools.groupby(self._numbered, key=self._stretch):
            part = tuple(numbered)
            if is_host:
                launch.walk(part, header, place_word)
                found += part
                continue
            graph = backend.capture(functools.partial(launch.walk, part, header, place_word))
            bases |= graph.bases
            found.append((part[-1][0], _GraphRun(graph)))
        return _Replay(tuple(found), current().record_capture(self, self._device, bases))

    def _stretch(self, numbered: tuple[int, Runs]) -> tuple[int, bool]:
        """How often the host does something before a launch or a mark, and whether it does in it;
        what lies between has the same."""
        number, item = numbered
        is_host = number in self._host_work and item is self.launches[number]
        return sum(at <= number for at in self._host_work) - is_host, is_host

    def _replay(self, graph: _Replay) -> None:
        header, place_word = current().record_begin(self)
        launch.walk(graph.parts, header, place_word)


@dataclass(frozen=True, slots=True)
class _GraphRun:
    """A graph as something that `launch.walk` takes."""

    run: Graph


@dataclass(frozen=True, slots=True)
class _Replay:
    """Graphs of a plan and what stands between them, and the number in the record."""

    parts: tuple[tuple[int, Runs], ...]
    number: int

    def close(self) -> None:
        for _, part in self.parts:
            if isinstance(part, _GraphRun):
                part.run.close()


def _tracer() -> Tracer:
    from hypocenter.device.tracing import open_tracer  # needs safetensors

    return open_tracer()


def bucket(num_rows: int, max_rows: int) -> int:
    """The smallest power of two that holds `num_rows`, but at most `max_rows`."""
    return min(1 << max(num_rows - 1, 0).bit_length(), max_rows)
