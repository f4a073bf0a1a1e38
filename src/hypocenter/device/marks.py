"""Where marks are written to: they say how far a device has come, also after the process has died.

A mark is an item of the stream that comes after some launches of a plan. On a GPU it is a kernel of
one program (`kernels/mark.py`), which writes into the mapped header of the ring; a simulated GPU
writes there itself.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.tensor import Allocation, DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.record import ring
from hypocenter.record.recorder import Recorder, current
from hypocenter.settings.config import is_simulated

log = logging.getLogger("hypocenter.recorder")


@dataclass(frozen=True, slots=True, eq=False)
class MarkMemory:
    """For the marks of a GPU: `runs` counts runs of plans there, `cell` is where a mark writes."""

    runs: Tensor
    cell: Tensor


@dataclass(frozen=True, slots=True)
class SimMark:
    """A mark on a simulated GPU, as something that `launch.walk` takes."""

    run: Callable[[], None]


def sim_mark(device: str, number: int) -> SimMark:
    """The mark behind launch `number` of a plan."""
    backend: Any = devices.backend_of(device)
    return SimMark(functools.partial(backend.mark, number))


def mark_memory(device: str) -> MarkMemory | None:
    """What the marks of a GPU write; None where nothing is recorded, or it cannot be mapped."""
    if devices.backend_of(device).limits is None:  # what is only compiled for
        return MarkMemory(
            *(
                memory.allocate_undefined(name, "marks", DType.I64, (1,), device=device)
                for name in ("runs", "cell")
            )
        )
    recorder = current()
    return _of_recorder(recorder, device) if isinstance(recorder, Recorder) else None


@functools.lru_cache(maxsize=ring.NUM_SLOTS)
def _of_recorder(recorder: Recorder, device: str) -> MarkMemory | None:
    backend: Any = devices.backend_of(device)
    slot = recorder.mark_runs.claim(device)
    address = None
    if slot is not None and hasattr(backend, "map_host"):
        address = backend.map_host(recorder.header_page)
    if slot is None or address is None:
        log.info("%s: no marks, for it cannot write to the record of this run", device)
        return None
    recorder.device(device, backend.limits, slot)
    at = address + 8 * (ring.CELL_MARK + slot)
    allocation = Allocation(0, device, 8, __file__, at)
    cell = Tensor(
        "cell", "marks", DType.I64, (1,), (1,), 0, allocation, backend.argument(at, DType.I64, 1)
    )
    return MarkMemory(memory.allocate("runs", "marks", DType.I64, (1,), device=device), cell)


def catch_up(device: str) -> None:
    """Bring the device's count of runs in line, after one that may have ended before its marks."""
    recorder = current()
    found = None if is_simulated(device) else mark_memory(device)
    if isinstance(recorder, Recorder) and found is not None:
        num_runs = np.array([recorder.mark_runs.count(device)], np.int64)
        copies.to_device(found.runs, num_runs, is_recorded=True)
