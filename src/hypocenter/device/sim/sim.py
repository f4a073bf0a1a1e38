"""A GPU that is not there: its limits, its memory, its order of work and its way to report a fault.

Kernels run on the CPU through `interpret.py`. What is simulated is behaviour, never speed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypocenter.base.dtypes import RECORD_NAMES, TORCH_NAMES, TRITON_NAMES
from hypocenter.base.errors import (
    DeviceFault,
    ErrorKind,
    LaunchRejected,
    NotShareable,
    OutOfMemory,
    UsageError,
)
from hypocenter.base.refusals import AnyRefusal, HostArgument, NotCompiled, Refused
from hypocenter.base.tensor import DType
from hypocenter.device.backend import Bytes
from hypocenter.device.forms import Compilable, distinct, form_of
from hypocenter.device.graph import Graph, Graphs
from hypocenter.device.helper_processes import never
from hypocenter.device.interpret.interpret import Interpretation, Pointer, interpreting
from hypocenter.device.limits import SIMULATED as NAMES
from hypocenter.device.limits import GpuLimits, launch_check, named_gpu, simulated_name
from hypocenter.device.offline.specimen import Specimen
from hypocenter.device.sim.memory import PAGE_BYTES, BadAccess, CachingAllocator, SimMemory
from hypocenter.device.sim.queue import (
    Copy,
    EventRecord,
    Item,
    Mark,
    QueuedCall,
    QueuedLaunch,
    SimEvent,
    Streams,
    Wait,
    shuffle,
)
from hypocenter.device.triton_lang import interpreter
from hypocenter.record.recorder import Recorder, current
from hypocenter.record.ring import CELL_COMPLETED, CELL_PLACE
from hypocenter.settings.config import OnProgress

log = logging.getLogger("hypocenter.sim")

# Addresses beyond what any processor of today gives to a process (2^57), so that no host address
# is one of a simulated GPU; and each kind of GPU has its own.
_FIRST_BASE, _BASE_STEP = 1 << 60, 1 << 48

#: Integer operations and accesses after which a launch is taken for one that never ends.
MAX_STEPS = 1 << 26
#: What waits at most; then the host waits too, as it does for a full queue of a GPU.
_MAX_QUEUED = 4096
_MAX_STAGED_BYTES = 64 << 20

# Sources of the words: cudaGetErrorString of the CUDA runtime, and for AMD's line the page fault
# handler of its runtime (ROCR-Runtime, runtime.cpp: VMFaultHandler). A page that is not there is
# reported in the same words for a read and for a write.
_NVIDIA_ILLEGAL = "an illegal memory access was encountered"
_NVIDIA_MISALIGNED = "misaligned address"
_AMD_LINE = "Memory access fault by GPU node-1 (Agent handle: {agent:#x}) on address {page}. Reason: Page not present or supervisor privilege.\n"  # noqa: E501
_AMD_PAGE_BYTES = 4096
_UNFINISHED = "the launch did not finish"


#: What a launch may say to the compiler; the interpreter has no use for it.
_COMPILE_OPTIONS = frozenset(
    {
        "num_stages",
        "num_ctas",
        "maxnreg",
        "enable_fp_fusion",
        "waves_per_eu",
        "matrix_instr_nonkdim",
        "kpack",
        "schedule_hint",
    }
)


def open_sim(name: str, seed: int = 0, **options: Any) -> SimGpu:
    """A fresh simulated GPU by its name, as in NAMES; `options` are fields of SimMode.

    Raises UsageError for an unknown name.
    """
    key = simulated_name(name)
    return SimGpu(key, named_gpu(key.removeprefix("sim:")), seed, **options)


class Unfinished(Exception):
    pass


@dataclass(frozen=True, slots=True)
class SimMode:
    """How a simulated GPU runs launches.

    `blocking` runs each launch at once, as HIP_LAUNCH_BLOCKING and CUDA_LAUNCH_BLOCKING do.
    `compile_check` compiles each launch for the named GPU first and refuses what it would refuse.
    `graphs` has plans captured as on a real GPU; a replay is no quicker here. `on_abort` is what an
    AMD fault ends in; it is os.abort but for tests.
    """

    blocking: bool = False
    compile_check: bool = False
    graphs: bool = False
    max_steps: int = MAX_STEPS
    on_abort: Callable[[], object] = os.abort


class SimGpu:
    """A Backend whose launches wait until the host waits for them, and then run in a seeded order.

    `options` are fields of SimMode.
    """

    def __init__(self, name: str, limits: GpuLimits, seed: int = 0, **options: Any) -> None:
        mode = SimMode(**options)
        self.limits = limits
        self._name, self._blocking, self._compile_check = name, mode.blocking, mode.compile_check
        self._max_steps, self._on_abort = mode.max_steps, mode.on_abort
        self.name_of: Callable[[int], str] = hex
        self.runs_ahead = self._captures = mode.graphs and not mode.blocking
        self.kernel_folder = ""
        #: Whether forms of kernels are named before they are launched; those that are met count.
        self.compiles = self.has_all_forms = False
        self._forms: set[Hashable] = set()
        self._graphs = Graphs(name)
        self._captured: list[QueuedLaunch | QueuedCall | int] | None = (
            None  # while a capture is under way
        )
        self._random = random.Random(seed)
        self._agent = 0x550000000000 + self._random.randrange(1 << 36) * 16
        is_amd = limits.vendor == "amd"
        # Address space is twice the memory, so that its gaps take none of it. AMD's runtime leaves
        # a page between allocations (HSA_SVM_GUARD_PAGES), NVIDIA's does not.
        whole = limits.memory_bytes // PAGE_BYTES * PAGE_BYTES
        base = self._base_of(name)
        native = interpreter()._interpreter
        self._memory = SimMemory(base, 2 * whole, native, requires_alignment=not is_amd)
        self.allocator = CachingAllocator(self._memory, name, whole, int(is_amd))
        self._check = launch_check(limits)
        self._streams = Streams()
        self._running: tuple[QueuedLaunch, int] | None = None
        self._machine: Interpretation | None = None
        self._lost, self._lost_kind = "", ErrorKind.OTHER
        self._compiled: dict[Any, tuple[AnyRefusal, ...]] = {}

    @property
    def name(self) -> str:
        return self._name

    #: What is done with a kernel, for a message.
    _is_run = "interpreted"

    @staticmethod
    def _base_of(name: str) -> int:
        """Where its memory begins."""
        return _FIRST_BASE + NAMES.index(name) * _BASE_STEP if name in NAMES else _FIRST_BASE

    # -- memory ---------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> int:
        """Address of fresh memory, a multiple of 512; its contents are poison, or what an overrun
        left there. Zero bytes are at address 0. Raises OutOfMemory and UsageError."""
        self._graphs.refuse_call("allocate")
        self._refuse_if_lost("allocate")
        if num_bytes < 0:
            raise UsageError(f"{self._name}: {num_bytes} bytes asked for; ask for 0 or more")
        if num_bytes == 0:
            return 0
        try:
            return self._memory.base + self.allocator.allocate(num_bytes)
        except OutOfMemory:
            self.release_cached()
            return self._memory.base + self.allocator.allocate(num_bytes)

    def allocate_shared(self, num_bytes: int) -> tuple[int, bytes]:
        raise NotShareable(self.name, "it is memory of this process")

    def begin_map(self, handle: bytes) -> None:
        pass

    def map_shared(self, handle: bytes, num_bytes: int) -> int:
        raise NotShareable(self.name, "it is memory of this process")

    def free(self, address: int) -> None:
        """Waits, then gives the block back; raises UsageError when it is not there, or captured."""
        self._drain("free")
        if address:
            if block := self.allocator.block_at(address - self._memory.base):
                self._graphs.refuse_free(address, block[1], self.name_of)
            self.allocator.free(address - self._memory.base)

    def release_cached(self) -> int:
        """Wait, then unmap the segments that hold nothing; returns their bytes."""
        self._drain("release_cached")
        return self.allocator.release_cached()

    def copy_in(self, address: int, data: Bytes, *, pinned: bool = False) -> None:
        """Copy `data` (uint8, one axis) in the order of the current stream.

        A `pinned` host buffer is read when the stream gets there, and not before.
        """
        self._graphs.refuse_call("copy_in")
        self._refuse_if_lost("copy_in")
        self._refuse_unmapped("copy_in", address, data.size)
        if pinned:
            self._streams.add(Copy(address, data))
        elif data.size > _MAX_STAGED_BYTES:
            # As drivers do with pageable memory that does not fit the staging buffer.
            self._drain("copy_in")
            self._memory.write_bytes(address, data)
        else:
            self._streams.add(Copy(address, data.copy()), data.size)
        self._wait_if_full("copy_in")

    def scratch(self, data: Bytes) -> Bytes:
        return data

    def bytes_at(self, address: int, num_bytes: int) -> Bytes:
        self._drain("bytes_at")
        self._refuse_unmapped("bytes_at", address, num_bytes)
        return self._memory.bytes_at(address, num_bytes)

    def compute(self, work: Callable[[], Any], num_bytes: int) -> Any:
        return work()

    def clear(self, address: int, num_bytes: int) -> None:
        self._drain("clear")
        self._refuse_unmapped("clear", address, num_bytes)
        self._memory.clear_bytes(address, num_bytes)

    def copy_out(self, address: int, num_bytes: int) -> Bytes:
        self._drain("copy_out")
        self._refuse_unmapped("copy_out", address, num_bytes)
        return self._memory.read_bytes(address, num_bytes)

    def copy_out_later(self, address: int, num_bytes: int) -> Callable[[], Bytes]:
        """See Backend. All that was launched before runs now: it may, and nobody can tell."""
        values = self.copy_out(address, num_bytes)
        return lambda: values

    def synchronise(self) -> None:
        self._drain("synchronise")

    def room(self) -> None:
        """Its memory is the host's."""

    def copy_bandwidth(self) -> None:
        """A simulation has no speed."""

    def _refuse_unmapped(self, call: str, address: int, num_bytes: int) -> None:
        """The runtimes refuse such a copy at once, and live on."""
        if not self._memory.is_mapped(address, num_bytes):
            raise DeviceFault(self._name, call, "invalid argument", is_asynchronous=False)

    def allocate_pinned(self, num_bytes: int) -> Bytes:
        """Host bytes that the device reads when a stream gets to the copy."""
        return np.zeros(num_bytes, np.uint8)

    # -- streams --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Launches and copies in the block go to the stream `name`, which waits for no other."""
        before, self._streams.current = self._streams.current, name
        try:
            yield
        finally:
            self._streams.current = before

    def record(self) -> SimEvent:
        """An event at the end of the current stream."""
        self._refuse_if_lost("record")
        event = SimEvent()
        self._streams.add(EventRecord(event))
        return event

    def wait(self, event: SimEvent) -> None:
        """What follows in the current stream runs after `event`."""
        self._refuse_if_lost("wait")
        self._streams.add(Wait(event))

    # -- launches -------------------------------------------------------------------------------

    def argument(self, address: int, dtype: DType, num_elements: int) -> Pointer:
        """Packed weights are bytes to a kernel."""
        return Pointer(address, TORCH_NAMES.get(dtype.name, "uint8"))

    def launcher(self, jit: Any) -> Callable[..., None]:
        """See Backend; further keywords are the kernel's constants or the compiler's options.

        The launch raises LaunchRejected for arguments that do not fit the kernel, too.
        """
        signature = inspect.signature(jit.fn)
        names = signature.parameters.keys()

        def launch(*args: Any, grid: Any, num_warps: int = 4, **given: Any) -> None:
            call = f"launch of {jit.__name__}"
            self._refuse_if_lost(call, jit.__name__)
            self._check(jit.__name__, grid, num_warps, 0)
            if self.compiles:
                self._forms.add(form_of(jit, args, {"num_warps": num_warps, **given}))
            options = {key: given.pop(key) for key in given.keys() & _COMPILE_OPTIONS - names}
            try:
                bound = signature.bind(*args, **given)
            except TypeError as error:
                raise LaunchRejected(jit.__name__, Refused(what=str(error))) from error
            bound.apply_defaults()
            arguments = {k: plain(jit, k, value) for k, value in bound.arguments.items()}
            if self._compile_check:
                self._refuse_uncompilable(jit, arguments, {"num_warps": num_warps, **options})
            x, y, z = (int(size) for size in (*grid, 1, 1)[:3])
            code = self._code_of(jit, arguments, {"num_warps": num_warps, **options})
            item = QueuedLaunch(jit, (x, y, z), arguments, iter(()), code=code)
            if self._captured is not None:
                self._captured.append(item)
                return
            log.debug(
                "Launch: kernel=%s, grid=(%d,%d,%d), block=(%d,1,1)",
                jit.__name__,
                x,
                y,
                z,
                num_warps * self.limits.wavefront,
            )
            item.order = self._order((x, y, z))
            self._streams.add(item)
            if self._blocking:
                self._drain(call, is_asynchronous=False, kernel=jit.__name__)
            self._wait_if_full(call, jit.__name__)

        return launch

    def load_forms(self, name: str) -> int:
        return 0

    def compile(
        self,
        launches: Sequence[Compilable],
        progress: OnProgress | None = None,
        is_over: Callable[[], bool] = never,
    ) -> bool:
        """See Backend: the interpreter needs no machine code, so forms are only counted."""
        for launch in distinct(launches):
            self._forms.add(form_of(launch.jit, launch.args, launch.options))
        return True

    @property
    def num_compiled(self) -> int:
        return len(self._forms)

    def caller(
        self, name: str, function: Callable[..., None], num_bytes: Sequence[int]
    ) -> Callable[..., None]:
        """See Backend; it is called when the stream gets there."""

        def call(*args: Pointer) -> None:
            self._refuse_if_lost(f"call of {name}", name)
            item = QueuedCall(name, function, tuple(zip(args, num_bytes, strict=True)))
            if self._captured is not None:
                self._captured.append(item)
                return
            self._queue_call(item)

        return call

    def _queue_call(self, item: QueuedCall) -> None:
        self._streams.add(item)
        if self._blocking:
            self._drain(f"call of {item.name}", is_asynchronous=False, kernel=item.name)
        self._wait_if_full(f"call of {item.name}", item.name)

    def _code_of(self, jit: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """What a launch executes in place of the interpreter: here nothing."""

    def specimen_of(
        self, jit: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Specimen:
        """What Triton would compile for this launch."""
        constants = {p.name: arguments[p.name] for p in jit.params if p.is_constexpr}
        constants |= {name: value for name, value in arguments.items() if value is None}
        values = {k: v for k, v in arguments.items() if k not in constants}
        signature = {p.name: triton_type(p, values[p.name]) for p in jit.params if p.name in values}
        whole = {k: v.address if isinstance(v, Pointer) else v for k, v in values.items()}
        free = {
            p.name for p in jit.params if p.do_not_specialize or p.do_not_specialize_on_alignment
        }
        divisible = tuple(
            k for k, v in whole.items() if type(v) is int and v % 16 == 0 and k not in free
        )
        return Specimen(jit, signature, constants, divisible, options)

    def _refuse_uncompilable(
        self, jit: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        from hypocenter.device.offline.compile import compile_specimen

        specimen = self.specimen_of(jit, arguments, options)
        key = specimen.key()
        if key not in self._compiled:
            self._compiled[key] = compile_specimen(specimen, self.limits.arch).problems
        if problems := self._compiled[key]:
            raise LaunchRejected(jit.__name__, NotCompiled(reasons=problems))

    def _wait_if_full(self, call: str, kernel: str = "") -> None:
        streams = self._streams
        if streams.num_queued >= _MAX_QUEUED or streams.staged_bytes > _MAX_STAGED_BYTES:
            self._drain(call, kernel=kernel)

    def _order(self, grid: tuple[int, int, int]) -> Iterator[int]:
        return shuffle(math.prod(grid), self._random)

    # -- graphs ---------------------------------------------------------------------------------

    #: The interpreter runs one launch after the other.
    overlaps = False
    #: Small tiles are quicker there, whatever the GPU.
    has_wide_tiles = False

    @property
    def captures(self) -> bool:
        return self._captures and self._captured is None

    def capture(self, run: Callable[[], None]) -> Graph:
        """See Backend. A replay queues the same launches, their programs in an order of its own."""
        self._graphs.refuse_call("capture")
        run()
        if self._blocking:
            return Graph(run, frozenset(), 0)
        captured: list[QueuedLaunch | QueuedCall | int] = []
        bases: set[int] = set()
        self._captured, self._graphs.open_bases = captured, bases
        try:
            run()
        finally:
            self._captured = self._graphs.open_bases = None
        base = self._memory.base
        launches = [entry for entry in captured if isinstance(entry, QueuedLaunch)]
        for value in {
            v for launch in launches for v in launch.arguments.values() if isinstance(v, Pointer)
        }:
            if block := self.allocator.block_at(value.address - base):
                bases.add(base + block[0])
        return self._graphs.add(functools.partial(self._replay, captured), bases, len(launches))

    def _replay(self, captured: list[QueuedLaunch | QueuedCall | int]) -> None:
        self._refuse_if_lost("replay of a graph")
        log.debug(
            "Graph: replay of %d launches", sum(type(entry) is QueuedLaunch for entry in captured)
        )
        for entry in captured:
            if isinstance(entry, int):
                self.mark(entry)
                continue
            if isinstance(entry, QueuedCall):
                self._queue_call(entry)
                continue
            self._streams.add(replace(entry, order=self._order(entry.grid), values=None))
            self._wait_if_full("replay of a graph")

    def mark(self, number: int) -> None:
        """Once the stream gets here, launch `number` of the plan submitted now has ended."""
        if self._captured is not None:
            self._captured.append(number)
        elif isinstance(recorder := current(), Recorder):
            header = recorder.header
            self._streams.add(Mark(header, header[CELL_PLACE] & ~0xFFFF | number))

    # -- running --------------------------------------------------------------------------------

    def _drain(self, call: str, *, is_asynchronous: bool = True, kernel: str = "") -> None:
        """Run all that waits. Raises DeviceFault, or aborts, when some of it faults."""
        self._graphs.refuse_call(call)
        self._refuse_if_lost(call, kernel)
        if not self._streams.num_queued:
            return
        with interpreting(self._memory, on_step=self._refuse_endless) as self._machine:
            try:
                while ready_queues := self._streams.ready_queues():
                    self._advance(self._random.choice(ready_queues))
                if self._streams.is_stuck():
                    raise Unfinished
                self._streams.clear()
            except BadAccess as bad:
                self._fault(bad, call, is_asynchronous, kernel)
            except DeviceFault:  # of a call of a library, which leaves the GPU as it is
                self._streams.clear()
                raise
            except Unfinished:
                self._lose(_UNFINISHED, call, is_asynchronous, ErrorKind.ENDLESS, kernel)
            except BaseException as error:
                # What the interpreter cannot run, a compiler would hardly have taken; what waits
                # behind it would work on results that are not there.
                name = self._running[0].jit.__name__ if self._running else call
                if not isinstance(error, Exception):
                    self._lost = f"{name} was interrupted"
                    raise
                self._lose(
                    f"cannot be {self._is_run}: {error}",
                    f"launch of {name}",
                    False,
                    kernel=name,
                    cause=error,
                )
            finally:
                self._running = self._machine = None

    def _advance(self, items: deque[Item]) -> None:
        """One program of a launch, or one other item."""
        item = items[0]
        if isinstance(item, QueuedLaunch):
            program = next(item.order, None)
            if program is not None:
                self._run_program(item, program)
                return
        elif isinstance(item, Mark):
            item.header[CELL_COMPLETED] = item.place_word
        elif isinstance(item, QueuedCall):
            self._run_call(item)
        elif isinstance(item, Copy):
            self._memory.write_bytes(item.address, item.data)
        elif isinstance(item, EventRecord):
            item.event.is_reached = True
        items.popleft()

    def _run_call(self, item: QueuedCall) -> None:
        arrays = [
            self._memory.read_bytes(pointer.address, num_bytes).view(pointer.dtype)
            for pointer, num_bytes in item.arguments
        ]
        item.function(*arrays)
        for (pointer, _), array in zip(item.arguments, arrays, strict=True):
            self._memory.write_bytes(pointer.address, array.view(np.uint8))

    def _run_program(self, launch: QueuedLaunch, program: int) -> None:
        machine = self._machine
        assert machine is not None
        before = machine.steps
        self._running = launch, before
        machine.set_grid(launch.grid)
        if launch.values is None:
            launch.values = machine.bind(launch.jit, launch.arguments)
        x, y, _ = launch.grid
        machine.run(launch.jit, launch.values, (program % x, program // x % y, program // (x * y)))
        launch.num_steps += machine.steps - before
        self._running = None

    def _refuse_endless(self) -> None:
        if self._running is not None and self._machine is not None:
            launch, before = self._running
            if launch.num_steps + self._machine.steps - before > self._max_steps:
                raise Unfinished

    # -- faults ---------------------------------------------------------------------------------

    def _fault(self, bad: BadAccess, call: str, is_asynchronous: bool, kernel: str) -> None:
        if self.limits.vendor == "amd":
            page = bad.address // _AMD_PAGE_BYTES * _AMD_PAGE_BYTES
            # As C's %p writes it.
            shown = f"{page:#x}" if page else "(nil)"
            # The runtime writes it in C, past everything that Python may have put in its place.
            os.write(2, _AMD_LINE.format(agent=self._agent, page=shown).encode())
            self._on_abort()
            aborted = f"the process was aborted for a {bad.what} of {page:#x}"
            self._lose(aborted, call, True, ErrorKind.FOUND_LATER, kernel)
        reason = _NVIDIA_MISALIGNED if bad.is_misaligned else _NVIDIA_ILLEGAL
        self._lose(reason, call, is_asynchronous, ErrorKind.FOUND_LATER, kernel)

    def _lose(
        self,
        reason: str,
        call: str,
        is_asynchronous: bool,
        kind: ErrorKind = ErrorKind.OTHER,
        kernel: str = "",
        cause: Exception | None = None,
    ) -> None:
        """Nothing runs from now on, as in a CUDA context after a fault."""
        self._lost, self._lost_kind = reason, kind
        self._streams.clear()
        raise DeviceFault(
            self._name, call, reason, is_asynchronous=is_asynchronous, kernel=kernel, kind=kind
        ) from cause

    def _refuse_if_lost(self, call: str, kernel: str = "") -> None:
        if self._lost:
            raise DeviceFault(
                self._name,
                call,
                self._lost,
                is_asynchronous=True,
                kernel=kernel,
                kind=self._lost_kind,
            )


def plain(jit: Any, name: str, value: Any) -> Any:
    """A copy of an argument that nobody changes later; arrays of the host are refused."""
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__array__") or hasattr(value, "data_ptr"):
        given = HostArgument(
            argument=name,
            type_name=type(value).__name__,
            way_out="copy it in and pass argument(...)",
        )
        raise LaunchRejected(jit.__name__, given)
    return value


def triton_type(parameter: Any, value: Any) -> str:
    """The type that Triton gives to an argument."""
    if isinstance(value, Pointer):
        return f"*{TRITON_NAMES[RECORD_NAMES[value.dtype]]}"
    if parameter.annotation_type:
        return str(parameter.annotation_type)
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    return "fp32"
