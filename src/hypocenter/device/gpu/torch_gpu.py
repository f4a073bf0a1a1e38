"""A GPU of NVIDIA or AMD through torch: memory, copies, launches, graphs; knows no kernel.

This room and `limits.py` touch `torch.cuda`, which is also how torch names HIP; so do the hooks of
`foreign/`, in programs that are not ours. Everything runs on the current stream, so what is asked
for runs in that order.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from hypocenter.base.errors import (
    DeviceFault,
    HypoError,
    NotShareable,
    OutOfMemory,
    UsageError,
)
from hypocenter.base.tensor import DType
from hypocenter.device.arrays import AnyArray, is_host
from hypocenter.device.backend import Bytes, Room
from hypocenter.device.forms import Compilable
from hypocenter.device.gpu.errors import failed_launch, launch_failure, runtime_fault
from hypocenter.device.gpu.host import TorchStreams, host_tensor, map_host
from hypocenter.device.gpu.presence import find_gpu
from hypocenter.device.gpu.sharing import Foreign, SharingDriver
from hypocenter.device.gpu.staging import Staging
from hypocenter.device.graph import CaptureWatch, Graph, Graphs
from hypocenter.device.helper_processes import never
from hypocenter.device.limits import GpuLimits, present_gpu
from hypocenter.settings.config import OnProgress
from hypocenter.settings.environment import launch_blocking

if TYPE_CHECKING:
    from hypocenter.device.gpu.ahead import Compiled, FormIndex

log = logging.getLogger("hypocenter.gpu")

#: Host copies up to so many bytes go through pinned memory of their own; larger ones by parts
#: (`staging.py`), and back to the host through memory that is not pinned.
PINNED_BYTES = 1 << 20

_TORCH_TYPES: Mapping[DType, str] = {
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.I8: "int8",
    DType.I16: "int16",
    DType.I32: "int32",
    DType.I64: "int64",
    DType.U8: "uint8",
}
_COPY_BYTES, _NUM_COPIES = 2 << 30, 10


def open_gpu(name: str) -> TorchGpu:
    """The GPU that users call cuda, cuda:1, hip or hip:0. Raises what `find_gpu` raises."""
    torch, vendor, index = find_gpu(name)
    try:
        torch.cuda.set_device(index)
        limits = present_gpu()
    except RuntimeError as error:  # it was there a moment ago, or its driver says so
        fault = runtime_fault(vendor, error)
        why = str(fault) if fault is not None else str(error).strip().splitlines()[0]
        raise DeviceFault(name, "open", why, is_asynchronous=False) from error
    assert limits is not None, "torch has just said that there is a GPU"
    return TorchGpu(f"{vendor}:{index}" if index else vendor, torch, index, limits)


class TorchGpu:
    """`Backend` for one GPU. `name_of` names an allocation by its address, for messages."""

    def __init__(
        self,
        name: str,
        torch: Any,
        index: int,
        limits: GpuLimits,
        *,
        name_of: Callable[[int], str] = hex,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.limits = limits
        self.name_of = name_of
        #: NAME=value of the variable that asks for a wait after each launch, or None.
        self.blocking = launch_blocking(environ)
        self.runs_ahead = not self.blocking
        self.overlaps = limits.overlaps and not self.blocking
        self.has_wide_tiles = limits.has_wide_tiles
        self._name, self._vendor = name, name.partition(":")[0]
        self._torch, self._index = torch, index
        self._device = torch.device("cuda", index)
        self._types = {dtype: getattr(torch, word) for dtype, word in _TORCH_TYPES.items()}
        self._tensors: dict[int, Any] = {}  # address of an allocation to its bytes
        self._addresses: list[int] = []  # the same addresses, sorted
        self._graphs = Graphs(name)
        streams = TorchStreams(torch, self._device)
        self.stream, self.record, self.wait = streams.stream, streams.record, streams.wait
        self.allocate_pinned, self._copied = streams.allocate_pinned, streams.begin_copy
        self._mapping: dict[bytes, Future[int]] = {}  # by their handles, what is being mapped
        self._jits: dict[int, Any] = {}  # everything that has a launcher
        self._seen: CaptureWatch | None = None  # while a capture is under way
        self._compiled: Compiled | None = None  # from the first `compile` on
        self._forms: FormIndex | None = None  # that of `load_forms`
        if self.blocking:
            log.warning("%s: %s: a wait after each launch, graphs off", name, self.blocking)

    @property
    def name(self) -> str:
        return self._name

    @property
    def index(self) -> int:
        """Which of the machine's GPUs it is, as torch counts them."""
        return self._index

    # Memory.

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the live allocations begin, in order."""
        return tuple(self._addresses)

    def allocate(self, num_bytes: int) -> int:
        """Address of fresh memory, aligned to 512 bytes; raises OutOfMemory."""
        self._graphs.refuse_call("allocate")
        with self._calling("allocate", num_bytes):
            # At least one byte, or else empty tensors would all share the address 0.
            memory = self._torch.empty(
                max(num_bytes, 1), dtype=self._torch.uint8, device=self._device
            )
        return self._know(memory)

    def allocate_shared(self, num_bytes: int) -> tuple[int, bytes]:
        """See Backend. It comes from the driver, since torch gives out parts of larger pieces."""
        shared = self._shared_memory()
        if (address := shared.allocate(num_bytes)) is None:
            free, total = self._torch.cuda.mem_get_info(self._device)
            raise OutOfMemory(self._name, num_bytes, total - free, total)
        handle = shared.export(address)
        return self._know(self._foreign(address, num_bytes)), handle

    def begin_map(self, handle: bytes) -> None:
        """In a thread of its own: the driver needs a second for the KV cache of a large GPU."""
        address: Future[int] = Future()

        def open_handle() -> None:
            try:
                address.set_result(self._shared_memory().open(handle))
            except Exception as error:  # whoever maps it hears of that
                address.set_exception(error)

        self._mapping[handle] = address
        threading.Thread(target=open_handle, name="mapping", daemon=True).start()

    def map_shared(self, handle: bytes, num_bytes: int) -> int:
        begun = self._mapping.pop(handle, None)
        address = self._shared_memory().open(handle) if begun is None else begun.result()
        return self._know(self._foreign(address, num_bytes))

    def require_atomics(self, other: int) -> None:
        """Raises NotShareable where kernels take no atomic steps in memory of GPU `other`."""
        if not self._shared_memory().has_atomics(self._index, other):
            raise NotShareable(self._name, f"GPU {other} is reached without atomics")

    def _shared_memory(self) -> SharingDriver:
        with self._calling("share memory"):
            self._torch.cuda.set_device(self._index)
            self._torch.cuda.synchronize(self._device)  # which makes its context this thread's own
        return SharingDriver(self._name)

    def _foreign(self, address: int, num_bytes: int) -> Any:
        return self._torch.as_tensor(Foreign(address, num_bytes), device=self._device)

    def _know(self, memory: Any) -> int:
        """Remember where the bytes of `memory` lie, which is returned."""
        address = int(memory.data_ptr())
        if address not in self._tensors:
            self._tensors[address] = memory
            insort(self._addresses, address)
        return address

    def free(self, address: int) -> None:
        """Give memory back; raises UsageError while a captured graph uses it.

        Later allocations run behind what was launched before, so they may have it at once.
        """
        if address not in self._tensors:
            raise UsageError(f"{self._name}: free of {address:#x}, where no allocation begins")
        num_bytes = self._tensors[address].numel()
        self._graphs.refuse_free(address, num_bytes, self.name_of)
        del self._tensors[address]
        self._addresses.remove(address)

    def release_cached(self) -> int:
        cuda = self._torch.cuda
        with self._calling("release_cached"):
            before = cuda.memory_reserved(self._device)
            cuda.empty_cache()
            return int(before - cuda.memory_reserved(self._device))

    def map_host(self, host: memoryview) -> int | None:
        """The address at which kernels may write to `host`, which begins at a page; None: nowhere.

        It stays mapped, and is never freed.
        """
        mapped = map_host(self._torch, host)
        return None if mapped is None else self._know(mapped)

    def copy_in(self, address: int, data: AnyArray, *, pinned: bool = False) -> None:
        """See Backend; a `pinned` buffer is read when the stream gets there."""
        self._graphs.refuse_call("copy_in")
        if not is_host(data):
            with self._calling("copy_in"):
                self._bytes(address, len(data)).copy_(data)
            return
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if not len(flat):
            return
        target = self._bytes(address, len(flat))
        with self._calling("copy_in"):
            if pinned:
                target.copy_(host_tensor(self._torch, flat), non_blocking=True)
                return
            if len(flat) > PINNED_BYTES:
                self._staging.copy(flat, target)
                return
            # torch does not hand this memory out again before the copy has run.
            staged = self._torch.empty(len(flat), dtype=self._torch.uint8, pin_memory=True)
            staged.numpy()[:] = flat
            target.copy_(staged, non_blocking=True)

    def scratch(self, data: Bytes) -> AnyArray:
        flat = np.ascontiguousarray(data).reshape(-1)
        there = self._torch.empty(len(flat), dtype=self._torch.uint8, device=self._device)
        if len(flat) > PINNED_BYTES:
            self._staging.copy(flat, there)
        elif len(flat):
            there.copy_(host_tensor(self._torch, flat))
        return there.reshape(data.shape)

    @functools.cached_property
    def _staging(self) -> Staging:
        def allocate(num_bytes: int) -> Any:
            return self._torch.empty(num_bytes, dtype=self._torch.uint8, pin_memory=True)

        return Staging(allocate, self.record)

    def bytes_at(self, address: int, num_bytes: int) -> AnyArray:
        return self._bytes(address, num_bytes)

    def compute(self, work: Callable[[], Any], num_bytes: int) -> Any:
        with self._calling("compute", num_bytes):
            return work()

    def clear(self, address: int, num_bytes: int) -> None:
        self._graphs.refuse_call("clear")
        if num_bytes:
            with self._calling("clear"):
                self._bytes(address, num_bytes).zero_()

    def copy_out(self, address: int, num_bytes: int) -> Bytes:
        return self.copy_out_later(address, num_bytes)()

    def copy_out_later(self, address: int, num_bytes: int) -> Callable[[], Bytes]:
        self._graphs.refuse_call("copy_out")
        if not num_bytes:
            return lambda: np.zeros(0, np.uint8)
        with self._calling("copy_out"):
            copied = self._copied(self._bytes(address, num_bytes), num_bytes <= PINNED_BYTES)
        return self._calling("copy_out")(copied)

    def argument(self, address: int, dtype: DType, num_elements: int) -> Any:
        """A torch view of `num_elements` elements at `address`, which may lie inside.

        Raises UsageError when they are not inside one allocation or not aligned to their type.
        """
        if dtype not in self._types:
            raise UsageError(
                f"{self._name}: {dtype.name} is no type that a kernel takes; pass its packed parts "
                f"as {', '.join(known.name for known in self._types)}"
            )
        if address % dtype.block_bytes:
            raise UsageError(
                f"{self._name}: {address:#x} is not aligned to the {dtype.block_bytes} bytes of "
                f"{dtype.name}"
            )
        return self._bytes(address, dtype.num_bytes(num_elements)).view(self._types[dtype])

    def base_of(self, address: int) -> int:
        """Where the allocation that holds `address` begins; raises UsageError when none does."""
        return self._find(address, 1)

    def _find(self, address: int, num_bytes: int) -> int:
        """Where the allocation around a stretch begins. An empty one may stand at the very end."""
        at = bisect_right(self._addresses, address) - 1
        base = self._addresses[at] if at >= 0 else 0
        room = base + self._tensors[base].numel() - address if at >= 0 else -1
        if 0 <= num_bytes <= room:
            return base
        if room <= 0:
            raise UsageError(f"{self._name}: {address:#x} lies in no allocation; was it freed?")
        raise UsageError(
            f"{self._name}: {num_bytes} bytes at {address:#x}, but {self.name_of(base)} ends "
            f"{room} bytes on"
        )

    def _bytes(self, address: int, num_bytes: int) -> Any:
        base = self._find(address, num_bytes)
        return self._tensors[base][address - base : address - base + num_bytes]

    # Launches.

    #: Triton compiles a kernel when it is first launched.
    compiles = True

    def load_forms(self, name: str) -> int:
        from hypocenter.device.gpu.ahead import FormIndex  # needs Triton

        self._watch_compiler()
        self._forms = FormIndex(name)
        return self._forms.load()

    @property
    def has_all_forms(self) -> bool:
        return self._forms is not None and self._forms.is_whole

    def compile(
        self,
        launches: Sequence[Compilable],
        progress: OnProgress | None = None,
        is_over: Callable[[], bool] = never,
    ) -> bool:
        from hypocenter.device.gpu.ahead import compile_ahead  # needs Triton

        self._watch_compiler()
        return compile_ahead(launches, progress, self._forms, is_over)

    def _watch_compiler(self) -> None:
        from hypocenter.device.gpu.ahead import Compiled

        if self._compiled is None:
            self._compiled = Compiled()
        self._torch.cuda.set_device(self._index)

    @property
    def num_compiled(self) -> int:
        return self._compiled.number if self._compiled is not None else 0

    @property
    def kernel_folder(self) -> str:
        if self._compiled is None:
            return ""
        from hypocenter.device.gpu.ahead import kernel_folder

        return kernel_folder()

    def launcher(self, jit: Any) -> Callable[..., None]:
        """The function that launches a Triton kernel; what it does besides is decided here, once.

        Raises LaunchRejected for a configuration that the GPU refuses and for an address of the
        host, DeviceFault when the launch finds that something before it has faulted.
        """
        self._jits[id(jit)] = jit
        if self._seen is not None:
            self._seen.watch(jit)
        launch = self._plain_launcher(jit)
        if log.isEnabledFor(logging.DEBUG):
            launch = self._log_launches(jit, launch)
        if self.blocking:
            launch = self._await_launches(jit, launch)
        if self._index:
            # The current GPU is a thread's own, and Triton takes that one.
            return _after(functools.partial(self._torch.cuda.set_device, self._index), launch)
        return launch

    def caller(
        self, name: str, function: Callable[..., None], num_bytes: Sequence[int]
    ) -> Callable[..., None]:
        """See Backend; a capture takes what the library launches."""

        def call(*args: Any) -> None:
            self._torch.cuda.set_device(self._index)
            with self._calling(f"call of {name}", kernel=name):
                function(*args)
                if self.blocking:
                    self._torch.cuda.synchronize(self._device)

        return call

    def _plain_launcher(self, jit: Any) -> Callable[..., None]:
        # As much work as Triton's own `jit[grid]`, which makes such a function for each launch; a
        # `try` that catches nothing is free.
        run, errors = jit.run, _launch_errors()

        def launch(*args: Any, grid: tuple[int, ...], **keywords: Any) -> None:
            try:
                run(*args, grid=grid, warmup=False, **keywords)
            except errors as error:
                failure = self._launch_failure(error, _name_of(jit), self._shape(grid, keywords))
                if failure is None:
                    raise
                raise failure from error

        return launch

    def _log_launches(self, jit: Any, launch: Callable[..., None]) -> Callable[..., None]:
        def launch_and_log(*args: Any, grid: tuple[int, ...], **keywords: Any) -> None:
            if self._seen is None:  # what is captured has just run, and been told
                # Compiles without launching, so that the line stands before the launch.
                compiled = jit.run(*args, grid=grid, warmup=True, **keywords)
                log.debug(
                    "Launch: kernel=%s, grid=(%s), block=(%d,1,1), shared=%d bytes",
                    _name_of(jit),
                    ",".join(map(str, (*grid, 1, 1)[:3])),
                    compiled.metadata.num_warps * self.limits.wavefront,
                    compiled.metadata.shared,
                )
            launch(*args, grid=grid, **keywords)

        return launch_and_log

    def _await_launches(self, jit: Any, launch: Callable[..., None]) -> Callable[..., None]:
        def launch_and_wait(*args: Any, grid: tuple[int, ...], **keywords: Any) -> None:
            launch(*args, grid=grid, **keywords)
            # Everything before was waited for too, so what is found now is this launch's fault.
            call = failed_launch(_name_of(jit), self._shape(grid, keywords))
            with self._calling(call, is_maker=True, kernel=_name_of(jit)):
                self._torch.cuda.synchronize(self._device)

        return launch_and_wait

    def _launch_failure(self, error: Exception, kernel: str, shape: str) -> HypoError | None:
        # With blocking the runtime itself waits too, and what it finds is this launch's fault.
        return launch_failure(
            self._name, self.limits.product, error, kernel, shape, is_maker=bool(self.blocking)
        )

    def _shape(self, grid: tuple[int, ...], keywords: Mapping[str, Any]) -> str:
        x, y, z = (*grid, 1, 1)[:3]
        # Triton takes 4 warps when nothing is said.
        threads = keywords.get("num_warps", 4) * self.limits.wavefront
        return f"(grid=({x},{y},{z}), block=({threads},1,1))"

    def synchronise(self) -> None:
        self._graphs.refuse_call("synchronise")
        with self._calling("synchronise"):
            self._torch.cuda.synchronize(self._device)

    def room(self) -> Room:
        """What the driver has free, and what torch keeps of freed memory."""
        cuda = self._torch.cuda
        with self._calling("room"):
            free, total = cuda.mem_get_info(self._device)
            kept = cuda.memory_reserved(self._device) - cuda.memory_allocated(self._device)
        return Room(free + kept, total)

    def copy_bandwidth(self) -> float:
        """The best of ten copies, timed by the GPU's own events; of up to 2 GiB, as far as is free.

        Caches hold a fraction of that, so that what is measured is the memory.
        """
        cuda = self._torch.cuda
        with self._calling("copy_bandwidth"):
            free_bytes, _ = cuda.mem_get_info(self._device)
            num_bytes = min(_COPY_BYTES, free_bytes // 4)
            source = self._torch.zeros(num_bytes, dtype=self._torch.uint8, device=self._device)
            target = self._torch.empty_like(source)
            best = math.inf
            for _ in range(_NUM_COPIES):
                begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                target.copy_(source)
                end.record()
                end.synchronize()
                best = min(best, begin.elapsed_time(end) / 1000)
        return float(2 * num_bytes / best)

    # Graphs.

    @property
    def captures(self) -> bool:
        """Whether a step is to be captured: not with a wait after each launch, nor in a capture."""
        return not self.blocking and self._seen is None

    def capture(self, run: Callable[[], None]) -> Graph:
        """Run `run` once, capture what it launches, and return the graph that replays it.

        `run` may only launch. What it launches must give the same when it runs twice. The memory
        of its arguments cannot be freed while the result lives. With a wait after each launch
        graphs are off, and the result calls `run` itself.
        """
        self._graphs.refuse_call("capture")
        run()  # compiles and loads: neither is possible during the capture
        self.synchronise()
        if self.blocking:
            log.warning("%s: no graph is captured, because of %s", self._name, self.blocking)
            return Graph(run, frozenset(), 0)
        graph = self._torch.cuda.CUDAGraph()
        seen = self._record(graph, run)
        replay: Callable[[], None] = functools.partial(self._replay, graph.replay)
        if log.isEnabledFor(logging.DEBUG):
            replay = _after(
                functools.partial(log.debug, "Graph: replay of %d launches", seen.num_launches),
                replay,
            )
        captured = self._graphs.add(replay, seen.bases, seen.num_launches)
        log.debug("Graph: launches=%d, buffers=%d", captured.num_launches, len(captured.bases))
        return captured

    def _record(self, graph: Any, run: Callable[[], None]) -> CaptureWatch:
        """Run `run` into `graph` and note what it launches with."""
        self._seen = seen = CaptureWatch(self.base_of)
        self._graphs.open_bases = seen.bases
        failed: list[Exception] = []
        try:
            for jit in self._jits.values():
                seen.watch(jit)
            with (
                self._calling("capture"),
                # Other threads may go on using the GPU.
                self._torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                try:
                    run()
                except Exception as error:
                    failed.append(error)
                    raise
        except Exception:
            # Ending a capture that broke raises once more, and with less to say.
            if failed:
                raise failed[0] from failed[0].__cause__
            raise
        finally:
            seen.unwatch()
            self._seen = self._graphs.open_bases = None
        return seen

    def _replay(self, replay: Callable[[], None]) -> None:
        try:
            replay()
        except RuntimeError as error:
            self._raise("replay of a graph", error)
            raise

    # Errors.

    @contextlib.contextmanager
    def _calling(
        self, call: str, num_bytes: int = 0, *, is_maker: bool = False, kernel: str = ""
    ) -> Iterator[None]:
        """Runs one call of the runtime; what it reports becomes an exception of ours.

        `is_maker`: nothing else can have caused what is reported. `kernel`: it is a launch of that.
        """
        try:
            yield
        except self._torch.OutOfMemoryError as error:
            free, total = self._torch.cuda.mem_get_info(self._device)
            raise OutOfMemory(self._name, num_bytes, total - free, total) from error
        except RuntimeError as error:
            self._raise(call, error, is_maker=is_maker, kernel=kernel)
            raise

    def _raise(
        self, call: str, error: RuntimeError, *, is_maker: bool = False, kernel: str = ""
    ) -> None:
        fault = runtime_fault(self._vendor, error)
        if fault is not None:
            later = fault.is_found_later and not is_maker
            raise DeviceFault(
                self._name, call, str(fault), is_asynchronous=later, kernel=kernel, kind=fault.kind
            ) from error


def _after(first: Callable[[], object], launch: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any, **keywords: Any) -> None:
        first()
        launch(*args, **keywords)

    return run


def _launch_errors() -> tuple[type[Exception], ...]:
    """What a launch through Triton raises for what the runtime reports, or Triton refuses."""
    try:
        from hypocenter.device.triton_lang import triton
    except HypoError:
        return (RuntimeError, ValueError)  # no Triton, so only a test's kernels
    return (RuntimeError, ValueError, triton.runtime.errors.OutOfResources)


def _name_of(jit: Any) -> str:
    return str(getattr(jit, "__name__", None) or type(jit).__name__)
