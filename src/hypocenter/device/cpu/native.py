"""The launches of a CPU plan as one call into machine code, with no Python between kernels.

Python takes about a microsecond to launch a kernel, which a step of a small batch has hundreds of.
Here the arguments of each launch lie unboxed in a block of 8-byte slots; a small function per
signature (`spreaders.py`) spreads a block over the registers and the stack.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.refusals import Refused
from hypocenter.device.cpu import pool
from hypocenter.device.cpu.kernel_forms import KernelForm
from hypocenter.device.cpu.shared_state import ITEM_BYTES, NEXT, NUM_FIELDS, STRETCHES
from hypocenter.device.cpu.slots import slots_of

#: A kernel's one way to fail is that it finds no memory for its own arrays.
KERNEL_FAILED = "the kernel found no memory for its scratch; free some, or use fewer threads"
_SPREADER = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 4)


class NativeLaunches:
    """Launches that one call runs, each after writing its number where the recorder wants it."""

    def __init__(self, launches: Sequence[tuple[int, KernelForm, tuple[Any, ...]]]) -> None:
        """`launches`: number, form of a kernel, and arguments."""
        self._kept = tuple(launches)  # the arguments' memory must outlive the blocks
        self._blocks = []
        table = np.zeros((len(launches), NUM_FIELDS), np.int64)
        for row, (number, form, args) in zip(table, launches, strict=True):
            entry, slots = form.entry(args), slots_of(args)
            self._blocks.append(slots)
            row[:NEXT] = entry.spread, entry.kernel, slots.ctypes.data, number, form.is_shared
            if form.is_shared:
                _note_weights(row, form.reads)
        is_reader = table[:, ITEM_BYTES] > 0
        readers = np.append(np.flatnonzero(is_reader), len(table))
        table[:, NEXT] = readers[np.searchsorted(readers, np.arange(len(table)), "right")]
        self._steps = pool.StepTable(table)

    def run(self, place: int, word: int) -> int:
        """Run them, writing `word` + number at the address `place` before each.

        Returns how many ended well: all of them, or the index of one that failed.
        """
        return self._steps.run(place, word)


class BoundLaunch:
    """A launch of a form with its arguments for good, by itself."""

    __slots__ = ("_args", "_form", "_native", "_run", "_word")

    def __init__(self, form: KernelForm, args: tuple[Any, ...]) -> None:
        self._form, self._args = form, args
        self._native: NativeLaunches | None = None
        self._run: Any = None
        self._word = np.zeros(1, np.uint64)

    def __call__(self) -> None:
        if self._run is None:
            self._run = self._run_shared if self._form.is_shared else self._alone()
        if not self._run():
            raise LaunchRejected(self._form.kernel.function, Refused(what=KERNEL_FAILED))

    def _run_shared(self) -> bool:
        if self._native is None:
            self._native = NativeLaunches([(0, self._form, self._args)])
        return self._native.run(self._word.ctypes.data, 0) == 1

    def _alone(self) -> Any:
        """By the thread that asks for it, which need not wait for others to come."""
        entry, slots = self._form.entry(self._args), slots_of(self._args)
        spread, kernel, block = _SPREADER(entry.spread), entry.kernel, slots.ctypes.data

        def run(kept: Any = slots) -> bool:
            return int(spread(kernel, block, 0)) == 0

        return run


def _note_weights(row: Any, reads: Sequence[tuple[Any, int]]) -> None:
    """What threads need to ask early for the part that they will read."""
    places = row[STRETCHES:].reshape(-1, 2)
    for place, (array, num_items) in zip(places, reads, strict=False):
        place[:] = array.ctypes.data, num_items
        row[ITEM_BYTES] = array.nbytes // num_items
