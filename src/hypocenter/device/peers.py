"""Memory by which two GPUs of one machine reach each other while their kernels run.

Each process allocates its own and maps the other's, so a kernel of the one writes what a kernel of
the other waits for. A word on the host lets kernels go that wait for a process which has ended.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypocenter.base.errors import NotShareable
from hypocenter.base.tensor import DType, Tensor, contiguous_strides
from hypocenter.device import memory
from hypocenter.device.devices import backend_of, call_device, names_of, synchronise
from hypocenter.device.group import Group

#: As long as both vendors' handles.
_NO_HANDLE = bytes(64)
#: What the driver knows of stays mapped: another page at its address would not be the one it knows.
_pages: list[mmap.mmap] = []

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaneKind:
    """What lies on each side of a lane."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.num_bytes(math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Lane:
    """Two tensors of one shape: `here` lies on this GPU, `there` is the other's `here`."""

    here: Tensor
    there: Tensor


@dataclass(frozen=True, slots=True)
class StopWord:
    """An i32 [1] of the host that kernels read; not 0: wait no longer."""

    tensor: Tensor
    page: mmap.mmap | memoryview

    @property
    def is_set(self) -> bool:
        return bool(self.page[0])

    def set(self) -> None:
        """Let all go that wait, now and later."""
        self.page[:4] = b"\1\0\0\0"


def open_lanes(group: Group, device: str, wanted: Mapping[str, LaneKind]) -> dict[str, Lane] | None:
    """Zeroed lanes of these kinds between the GPUs of both ranks of `group`, by name.

    None for both ranks where one of them cannot give or map memory, or has no atomics there. What
    they take is given back when the process ends, and not before. Both ranks make this call.
    """
    backend: Any = backend_of(device)
    numbers = group.swap(bytes([backend.index]))
    given = _give(device, numbers[1 - group.rank][0], wanted)
    handles = b"".join(given[name][1] if name in given else _NO_HANDLE for name in wanted)
    told = group.swap(handles)
    if any(_NO_HANDLE in _pieces(word) for word in told):
        return None
    lanes = {}
    for (name, kind), handle in zip(wanted.items(), _pieces(told[1 - group.rank]), strict=True):
        try:
            there = backend_of(device).map_shared(handle, kind.num_bytes)
        except NotShareable as error:
            log.info("%s", error)
            break
        lanes[name] = Lane(
            _tensor(f"{name} here", device, given[name][0], kind, "device"),
            _tensor(f"{name} there", device, there, kind, "mapped"),
        )
    return lanes if group.agrees(len(lanes) == len(wanted)) else None


def _give(device: str, other: int, wanted: Mapping[str, LaneKind]) -> dict[str, tuple[int, bytes]]:
    """Address and handle of zeroed memory of each kind, as far as there is some to share."""
    given: dict[str, tuple[int, bytes]] = {}
    backend: Any = backend_of(device)  # not by `call_device`: a refusal is no failure of this run
    try:
        backend.require_atomics(other)
        for name, kind in wanted.items():
            given[name] = backend.allocate_shared(kind.num_bytes)
            call_device(device, "clear", given[name][0], kind.num_bytes)
    except NotShareable as error:
        log.info("%s", error)
    synchronise(device)  # the other one writes there as soon as it has the handle
    return given


def _pieces(handles: bytes) -> list[bytes]:
    return [handles[at : at + len(_NO_HANDLE)] for at in range(0, len(handles), len(_NO_HANDLE))]


def stop_word(device: str) -> StopWord | None:
    """A word that is 0; None where `device` does not read memory of the host."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    _pages.append(page)
    backend: Any = backend_of(device)
    address = backend.map_host(memoryview(page))
    if address is None:
        return None
    return StopWord(_tensor("stop", device, address, LaneKind(DType.I32, (1,)), "pinned"), page)


def _tensor(name: str, device: str, address: int, kind: LaneKind, memory_kind: str) -> Tensor:
    names_of(device)[address] = f"{name} (peers)"
    allocation = memory.note_allocation(device, kind.num_bytes, address, name, "peers", memory_kind)
    data = backend_of(device).argument(address, kind.dtype, math.prod(kind.shape))
    strides = contiguous_strides(kind.shape)
    return Tensor(name, "peers", kind.dtype, kind.shape, strides, 0, allocation, data)
