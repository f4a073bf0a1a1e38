"""Guarded launches: a plan runs its kernels' guarded variants and reads their faults once per run.

Deriving a variant is `guard.py`'s work; this file gives it extents and slots on a device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hypocenter.device import memory
from hypocenter.device.backend import Backend
from hypocenter.device.guard import SLOTS, Guarded, guard
from hypocenter.device.guard_derive import OURS
from hypocenter.device.guard_slots import SlotRing, describe
from hypocenter.errors import AccessRefused
from hypocenter.tensor import DType

if TYPE_CHECKING:
    from hypocenter.device.launch import Launch

_NUM_WORDS = 1 << 16

_rings: weakref.WeakKeyDictionary[Backend, SlotRing] = weakref.WeakKeyDictionary()


class _DeviceWords:
    """The words of a slot ring in a device's memory."""

    def __init__(self, device: str) -> None:
        self._tensor = memory.allocate(
            "guard_slots", "guard", DType.I64, (_NUM_WORDS,), device=device
        )

    def __len__(self) -> int:
        return _NUM_WORDS

    def __getitem__(self, window: slice) -> Any:
        return memory.rows(self._tensor, window.start, window.stop).data

    def __setitem__(self, window: slice, value: int) -> None:
        memory.to_device(self._tensor, np.full(_NUM_WORDS, value, np.int64))

    def tolist(self) -> list[int]:
        words: list[int] = memory.to_host(self._tensor).tolist()
        return words


def guarded_run(
    jit: Any, args: tuple[Any, ...], options: Mapping[str, Any], extents: Mapping[str, int],
    device: str,
) -> Callable[[], None]:  # fmt: skip
    """What a launch in guarded mode runs; `extents`: bytes by the pointer parameter's name.

    Raises Unguardable when the kernel has a construct without guarded form.
    """
    guarded = _derived(jit, tuple(extents))
    launcher = memory.backend_of(device).launcher(guarded.fn)
    keywords = {f"{OURS}{name}_bytes": extents[name] for name in guarded.pointers}
    ring, grid = ring_of(device), options["grid"]

    def run() -> None:
        launcher(*args, **keywords, **{SLOTS: guarded.claim(ring, grid)}, **options)

    return run


def settle(device: str, launches: Sequence[Launch]) -> None:
    """Read the slots of `launches`, which have run; raises AccessRefused when one had a fault."""
    ring = ring_of(device)
    # What an interrupted step left unread comes first, and counts from below 0.
    first = ring.num_pending - len(launches)
    faults = [
        msgspec.structs.replace(fault, launch=fault.launch - first) for fault in ring.settle()
    ]
    if faults:
        texts = [describe(fault) for fault in faults]
        raise AccessRefused(device, tuple(faults), texts, tuple(launches))


def ring_of(device: str) -> SlotRing:
    """The slot ring of an opened device, made when it is first asked for."""
    backend = memory.backend_of(device)
    if backend not in _rings:
        _rings[backend] = SlotRing(_DeviceWords(device))
    return _rings[backend]


@functools.cache
def _derived(jit: Any, pointers: tuple[str, ...]) -> Guarded:
    return guard(jit, pointers)
