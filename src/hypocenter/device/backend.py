"""What a GPU, real or simulated, must be able to do; `gpu/torch_gpu.py` and `sim/sim.py` do it.

Memory is bytes at addresses here; names, shapes and owners are `memory.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hypocenter.base.tensor import DType
from hypocenter.device.arrays import AnyArray
from hypocenter.device.forms import Compilable
from hypocenter.device.graph import Graph
from hypocenter.device.helper_processes import never
from hypocenter.device.limits import GpuLimits
from hypocenter.settings.config import OnProgress

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that may still be taken, of how many in all."""

    available_bytes: int
    limit_bytes: int


class Backend(Protocol):
    """One device. Calls come from one thread at a time."""

    #: Tensor and owner of the allocation that begins at an address; `memory.py` sets it.
    name_of: Callable[[int], str]

    @property
    def name(self) -> str:
        """As users write it: cuda, hip, sim:mi300x."""
        ...

    @property
    def limits(self) -> GpuLimits | None:
        """What a launch must keep within; None for a device that runs nothing."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """Address of fresh memory, aligned to 256 bytes; its contents are undefined.

        Raises OutOfMemory when the device has no room left.
        """
        ...

    def allocate_shared(self, num_bytes: int) -> tuple[int, bytes]:
        """The same, and the handle by which other processes map it; it is never freed.

        Raises NotShareable where memory cannot be given to another process.
        """
        ...

    def begin_map(self, handle: bytes) -> None:
        """`map_shared` will be called with this handle; what takes long of that may begin."""
        ...

    def map_shared(self, handle: bytes, num_bytes: int) -> int:
        """Where the memory of a handle of another process lies here. Raises NotShareable."""
        ...

    def free(self, address: int) -> None:
        """Give memory back, after everything that was launched before has run.

        Raises UsageError while a captured graph uses it.
        """
        ...

    def release_cached(self) -> int:
        """Give freed memory that is kept for later back to other processes; how many bytes."""
        ...

    def copy_in(self, address: int, data: AnyArray, *, pinned: bool = False) -> None:
        """Copy host bytes, or such of `scratch`, to an address, behind what was launched before.

        `data` may change at once, unless it is `pinned`: that is read when the stream gets there.
        """
        ...

    def scratch(self, data: Bytes) -> AnyArray:
        """Host bytes where the device computes with them, in memory that is no allocation of ours.

        An array of torch on a GPU; `data` itself where the host stands for the device. Called by
        what `compute` runs.
        """
        ...

    def compute(self, work: Callable[[], Any], num_bytes: int) -> Any:
        """What `work` returns, which computes with arrays of `scratch`, made of `num_bytes`.

        Raises OutOfMemory and DeviceFault.
        """
        ...

    def bytes_at(self, address: int, num_bytes: int) -> AnyArray:
        """Bytes of an allocation as `compute` sees them, uint8: no copy."""
        ...

    def allocate_pinned(self, num_bytes: int) -> Bytes:
        """Host memory that the device reads and writes by itself."""
        ...

    def stream(self, name: str) -> AbstractContextManager[None]:
        """Launches and copies in the block go to the stream `name`, which waits for no other."""
        ...

    def record(self) -> Any:
        """An event at the end of the current stream."""
        ...

    def wait(self, event: Any) -> None:
        """What follows in the current stream runs after `event`."""
        ...

    def clear(self, address: int, num_bytes: int) -> None:
        """Set device bytes to zero, in order with what was launched before."""
        ...

    def copy_out(self, address: int, num_bytes: int) -> Bytes:
        """Wait for everything launched before, then copy device bytes to the host.

        Raises DeviceFault when something that was launched before has faulted.
        """
        ...

    def copy_out_later(self, address: int, num_bytes: int) -> Callable[[], Bytes]:
        """The same without the wait: what is returned waits for this copy, for nothing later."""
        ...

    def argument(self, address: int, dtype: DType, num_elements: int) -> Any:
        """What a launch passes for a pointer to `num_elements` elements at `address`."""
        ...

    def launcher(self, jit: Any) -> Callable[..., None]:
        """The function that launches `jit`: launcher(*args, grid=, num_warps=, **constants).

        It returns before the kernel has run, and raises LaunchRejected for a configuration that
        the device refuses.
        """
        ...

    @property
    def compiles(self) -> bool:
        """Whether a launch waits for machine code that `compile` could have made before."""
        ...

    def load_forms(self, name: str) -> int:
        """Load the machine code that processes before this one needed under the same name, as far
        as it lies on disk; how many forms. `compile` then has them."""
        ...

    @property
    def has_all_forms(self) -> bool:
        """Whether `load_forms` has loaded all that was needed under its name."""
        ...

    def compile(
        self,
        launches: Sequence[Compilable],
        progress: OnProgress | None = None,
        is_over: Callable[[], bool] = never,
    ) -> bool:
        """Have the machine code of every form of `launches` ready, as far as that goes until the
        time `is_over`; whether all of it is. Nothing is launched."""
        ...

    @property
    def num_compiled(self) -> int:
        """How many forms of kernels were compiled, or loaded from disk, so far."""
        ...

    @property
    def kernel_folder(self) -> str:
        """Where the machine code of kernels is kept on disk; empty where there is none."""
        ...

    def caller(
        self, name: str, function: Callable[..., None], num_bytes: Sequence[int]
    ) -> Callable[..., None]:
        """The function that calls `function` in the current stream: caller(*args).

        It gets arrays of torch, or of NumPy where the host stands for the device; `num_bytes` are
        their sizes. It raises DeviceFault when it cannot do its part.
        """
        ...

    @property
    def overlaps(self) -> bool:
        """Whether launches whose kernels wait for it themselves begin while others end."""
        ...

    @property
    def has_wide_tiles(self) -> bool:
        """Whether products are launched in the tiles of GPUs with much shared memory."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether it pays to launch a step while the one before it runs."""
        ...

    @property
    def captures(self) -> bool:
        """Whether a plan should be captured here and now, because a replay is quicker."""
        ...

    def capture(self, run: Callable[[], None]) -> Graph:
        """Run `run` once, and return the graph of what it launched.

        `run` may only launch, and what it launches must give the same when it runs twice.
        """
        ...

    def synchronise(self) -> None:
        """Wait for everything launched; raises DeviceFault when something has faulted."""
        ...

    def room(self) -> Room | None:
        """What allocations may still take; None where that is the host's memory."""
        ...

    def copy_bandwidth(self) -> float | None:
        """Bytes read and written per second by a copy within its memory; None where that is no
        figure of a GPU's."""
        ...
