"""What a process asked of its GPU's driver: kernels, launches, memory; facts, for a bundle.

`foreign/driver/` sees it, `record/driver_log.py` writes and reads it. Knows no vendor's
interface; numbers are those that the driver was given.
"""

from __future__ import annotations

import msgspec

#: Of one process: launches, memory and named tensors that a bundle keeps, the newest; bytes of the
#: parameters of one launch, and parameters of one kernel.
MAX_LAUNCHES, MAX_MEMORY, MAX_TENSORS = 512, 4096, 256
MAX_PARAMETER_BYTES, MAX_PARAMETERS = 880, 256

Dims = tuple[int, int, int]

#: Answers of the driver to a launch that it did not make: what was asked for is too much, or wrong.
NOT_MADE = frozenset({1, 2, 98, 200, 201, 209, 400, 701})
#: Answers from here on, but for those, are of what ran: a fault of the GPU.
FIRST_OF_FAULTS = 700
#: Of a launch that the driver has not answered: the process ended in it.
NO_ANSWER = -1


class DriverKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel by the compiler's name for it; `parameters` are (offset, bytes) of each.

    `parameters` is empty where the driver does not tell. `id` counts from 1, and `name` is what the
    source calls it, filled in when the record is read.
    """

    id: int
    symbol: str
    name: str = ""
    parameters: tuple[tuple[int, int], ...] = ()


class DriverLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A launch as the driver was asked for it, in the order of `seq`.

    `data` are its parameters as they lie in memory, the first MAX_PARAMETER_BYTES of them. `block`
    counts threads, `shared_bytes` those asked for at the launch. `site` is the line of the program
    that made it, "" where none of Python's was on the way. `is_captured` is not known to a driver:
    a launch into a graph looks like any other. `code` is what the driver answered, 0 for success;
    of one without an answer `data` is empty.
    """

    seq: int
    kernel: int
    grid: Dims
    block: Dims
    shared_bytes: int
    stream: int
    data: bytes
    site: str = ""
    code: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether the driver answered with a fault of the GPU."""
        return self.code >= FIRST_OF_FAULTS and self.code not in NOT_MADE


class DriverRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver answered to launch `seq`: `name` is its own, `sentence` what it says of it.

    `limits` are those of the GPU and of the kernel, by the names of `LIMITS` in
    `foreign/driver/library.py`; those that could be asked for.
    """

    seq: int
    code: int
    name: str
    sentence: str
    limits: dict[str, int] = {}


class DriverMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the driver gave by `call`; `freed_seq` is 0 while it is there."""

    address: int
    num_bytes: int
    call: str
    seq: int
    site: str = ""
    freed_seq: int = 0
    freed_site: str = ""

    def holds(self, address: int) -> bool:
        """Whether the byte at `address` is one of it."""
        return self.address <= address < self.address + self.num_bytes


class DriverTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a variable of the program stood for when it failed.

    `address` is that of its first element, and it ends `extent_bytes` further. `made_at` is the
    line that made it, "" where that is not sure.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int
    extent_bytes: int
    made_at: str = ""


class DriverRun(msgspec.Struct, frozen=True, kw_only=True):
    """All of one process. `why_not` says why nothing was recorded, "" where it was.

    `num_launches` counts those that are told of no more too, `num_graphs` launches of graphs, whose
    kernels are not told one by one.
    """

    kernels: tuple[DriverKernel, ...] = ()
    launches: tuple[DriverLaunch, ...] = ()
    refusals: tuple[DriverRefusal, ...] = ()
    memory: tuple[DriverMemory, ...] = ()
    tensors: tuple[DriverTensor, ...] = ()
    num_launches: int = 0
    num_graphs: int = 0
    why_not: str = ""

    @property
    def failed_launch(self) -> DriverLaunch | None:
        """The first that was answered with a fault of the GPU: the one that made it, where the
        program waits for each. Later launches are answered alike."""
        return next((launch for launch in self.launches if launch.has_failed), None)

    def kernel_of(self, launch: DriverLaunch) -> DriverKernel | None:
        """The kernel of a launch; None where it is told of no more."""
        return next((kernel for kernel in self.kernels if kernel.id == launch.kernel), None)
