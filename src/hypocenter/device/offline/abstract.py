"""A device that runs nothing and remembers how each kernel is launched.

A plan made on it shows every launch of a model of any size without its weights: what to compile
for GPUs that are not there, and which kernels a model reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import TRITON_NAMES
from hypocenter.base.errors import NotShareable
from hypocenter.base.tensor import DType
from hypocenter.device.backend import Bytes
from hypocenter.device.forms import Compilable
from hypocenter.device.graph import Graph
from hypocenter.device.group import Group
from hypocenter.device.helper_processes import never
from hypocenter.device.launch import Launch
from hypocenter.device.offline.specimen import Specimen
from hypocenter.settings.config import OnProgress

# What plans ask for where vendors differ is how a name begins. Hopper stands for NVIDIA's GPUs that
# take wide tiles.
_NAMES = {"amd": "hip:abstract", "nvidia": "cuda:abstract", "hopper": "cuda:hopper"}


@dataclass(frozen=True, slots=True)
class AbstractPointer:
    """Stands for a pointer argument: its element type and alignment are all that is known."""

    address: int
    dtype: DType


def _launch_nothing(*args: Any, **options: Any) -> None:
    """A launch on a device that is not there."""


class AbstractGpu:
    """Implements `Backend` without memory, for GPUs of a vendor: amd, nvidia or hopper."""

    limits = None
    captures = overlaps = runs_ahead = compiles = has_all_forms = False
    num_compiled, kernel_folder = 0, ""

    def __init__(self, vendor: str) -> None:
        self.name = _NAMES[vendor]
        self.has_wide_tiles = vendor == "hopper"
        self.name_of: Callable[[int], str] = hex
        self._next = 1 << 40

    def allocate(self, num_bytes: int) -> int:
        address = self._next
        self._next += -(-max(num_bytes, 1) // 256) * 256
        return address

    def allocate_shared(self, num_bytes: int) -> tuple[int, bytes]:
        raise NotShareable(self.name, "it is memory of this process")

    def begin_map(self, handle: bytes) -> None:
        pass

    def map_shared(self, handle: bytes, num_bytes: int) -> int:
        raise NotShareable(self.name, "it is memory of this process")

    def free(self, address: int) -> None:
        """Addresses are never given again."""

    def release_cached(self) -> int:
        return 0

    def copy_in(self, address: int, data: Bytes, *, pinned: bool = False) -> None:
        """There is nothing to copy to."""

    def scratch(self, data: Bytes) -> Bytes:
        return data

    def bytes_at(self, address: int, num_bytes: int) -> Bytes:
        return np.zeros(num_bytes, np.uint8)

    def compute(self, work: Callable[[], Any], num_bytes: int) -> Any:
        return work()

    def allocate_pinned(self, num_bytes: int) -> Bytes:
        return np.zeros(num_bytes, np.uint8)

    def stream(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self) -> None:
        """There is no event."""

    def wait(self, event: Any) -> None:
        """There is nothing to wait for."""

    def clear(self, address: int, num_bytes: int) -> None:
        """There is nothing to clear."""

    def copy_out(self, address: int, num_bytes: int) -> Bytes:
        return np.zeros(num_bytes, np.uint8)

    def copy_out_later(self, address: int, num_bytes: int) -> Callable[[], Bytes]:
        return lambda: self.copy_out(address, num_bytes)

    def argument(self, address: int, dtype: DType, num_elements: int) -> AbstractPointer:
        return AbstractPointer(address, dtype)

    def launcher(self, jit: Any) -> Callable[..., None]:
        return _launch_nothing

    def load_forms(self, name: str) -> int:
        return 0

    def compile(
        self,
        launches: Sequence[Compilable],
        progress: OnProgress | None = None,
        is_over: Callable[[], bool] = never,
    ) -> bool:
        """Nothing is launched."""
        return True

    def caller(
        self, name: str, function: Callable[..., None], num_bytes: Sequence[int]
    ) -> Callable[..., None]:
        return _launch_nothing

    def capture(self, run: Callable[[], None]) -> Graph:
        return Graph(run, frozenset(), 0)

    def synchronise(self) -> None:
        """Nothing runs."""

    def room(self) -> None:
        """It holds nothing."""

    def copy_bandwidth(self) -> None:
        """Nothing is copied."""


class AbsentGroup(Group):
    """Says how many parts a model has; no process holds them, and no call of it is made."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.peer_sum = rank, num_ranks, None


def specimens(launches: Iterable[Launch], label: str) -> list[Specimen]:
    """How the launches of a plan made on an abstract device specialise their kernels."""
    return [_specimen(launch, label) for launch in launches if launch.jit is not None]


def _specimen(launch: Launch, label: str) -> Specimen:
    jit = launch.jit
    constants = {name: value for name, value in launch.options.items() if name in jit.arg_names}
    options = {
        name: value
        for name, value in launch.options.items()
        if name not in constants and name != "grid"
    }
    run_time = [parameter for parameter in jit.params if parameter.name not in constants]
    signature, divisible = {}, []
    for parameter, value in zip(run_time, launch.args, strict=True):
        name = parameter.name
        is_number = isinstance(value, int) and not isinstance(value, bool)
        # As Triton specialises a launch.
        if is_number and value == 1 and not parameter.do_not_specialize:
            constants[name] = value
            continue
        signature[name] = _type_of(value)
        is_free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        place = value.address if isinstance(value, AbstractPointer) else value
        if not is_free and (is_number or place is not value) and place % 16 == 0:
            divisible.append(name)
    vendor = next(vendor for vendor, name in _NAMES.items() if name == launch.device)
    return Specimen(jit, signature, constants, tuple(divisible), options, label, vendor=vendor)


def _type_of(value: Any) -> str:
    if isinstance(value, AbstractPointer):
        return f"*{TRITON_NAMES[value.dtype.name]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return "fp32"
