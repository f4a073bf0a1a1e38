"""Guarded launches: a plan runs its kernels' guarded variants and reads their faults once per run.

Deriving a variant is `guard.py`'s work; this file gives it extents and slots on a device.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hypocenter.base.errors import AccessRefused, UsageError
from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices, memory
from hypocenter.device.guard.derive import OURS
from hypocenter.device.guard.guard import SLOTS, Guarded, describe, guard
from hypocenter.device.guard.rows import ViewRows
from hypocenter.record.guard_faults import AccessFault

if TYPE_CHECKING:
    from hypocenter.device.launch import Launch

log = logging.getLogger("hypocenter.launch")


class GuardedLaunches:
    """Has `launches` run in guarded form from now on, each with slots of its own.

    A call of a library on a GPU has no such form, and runs as it is. Raises Unguardable for a
    kernel with a construct without guarded form, UsageError for one that runs on the CPU; then no
    launch has changed.
    """

    def __init__(self, device: str, launches: Sequence[Launch]) -> None:
        self._device, self._launches = device, tuple(launches)
        self._is_running = False
        for launch in launches:
            if launch.jit is None and device == "cpu":
                raise UsageError(
                    f"{launch.kernel} runs on the CPU; guarded launches are for GPU kernels"
                )
        self._rows = [_rows_of(launch) for launch in launches]
        self._forms = [
            None if launch.jit is None else _derive(launch.jit, tuple(launch.extents), tuple(rows))
            for launch, rows in zip(launches, self._rows, strict=True)
        ]
        sizes = [0 if form is None else form.num_slots for form in self._forms]
        self._starts = [0, *itertools.accumulate(sizes)]
        self._words = memory.allocate(
            "guard_slots", "guard", DType.I64, (self._starts[-1],), device=device
        )
        runs = [
            (launch, self._run_of(launch, self._rows[number], form, slots))
            for number, launch, form, slots in self._all()
        ]
        for launch, run in runs:
            launch.run = run

    def begin(self) -> None:
        """The launches are about to run.

        What a run left that ended before its `settle`, as Ctrl-C does, is logged: it must not be
        told of this one.
        """
        if self._is_running:
            for text in map(describe, self._faults()):
                log.warning("a run that did not end had a fault: %s", text)
        self._is_running = True

    def settle(self) -> None:
        """Read the slots of the launches, which have run; raises AccessRefused for a fault."""
        self._is_running = False
        if faults := self._faults():
            texts = [describe(fault) for fault in faults]
            raise AccessRefused(self._device, tuple(faults), texts, self._launches)

    def _run_of(
        self, launch: Launch, rows: Mapping[str, ViewRows], form: Guarded, window: slice
    ) -> Callable[[], None]:
        return functools.partial(
            devices.backend_of(self._device).launcher(form.fn),
            *launch.args,
            **{f"{OURS}{name}_bytes": launch.extents[name] for name in form.pointers},
            **{f"{OURS}{name}_rows": rows[name].word for name in form.with_rows},
            **{SLOTS: memory.rows(self._words, window.start, window.stop).data},
            **launch.options,
        )

    def _faults(self) -> list[AccessFault]:
        """What the slots say; they are zero afterwards."""
        faults: list[AccessFault] = []
        words = copies.to_host(self._words)
        if not words.any():
            return faults
        copies.to_device(self._words, np.zeros(words.shape, np.int64))
        for number, launch, form, window in self._all():
            found = form.decode(words[window], launch.options["grid"])
            faults += (msgspec.structs.replace(fault, launch=number) for fault in found)
        return faults

    def free(self) -> None:
        """Give the slots back; the launches must run in another form by then."""
        memory.free(self._words)

    def _all(self) -> Iterator[tuple[int, Launch, Guarded, slice]]:
        """Each launch that has a guarded form, with its number and the slots that are its own."""
        windows = itertools.pairwise(self._starts)
        together = zip(self._launches, self._forms, windows, strict=True)
        for number, (launch, form, window) in enumerate(together):
            if form is not None:
                yield number, launch, form, slice(*window)


@functools.cache
def _derive(jit: Any, pointers: tuple[str, ...], with_rows: tuple[str, ...]) -> Guarded:
    return guard(jit, pointers, with_rows=with_rows)


def _rows_of(launch: Launch) -> dict[str, ViewRows]:
    """Those of the views that its pointer parameters get, where rows tell what is theirs."""
    found = {
        name: ViewRows.of(tensor.shape, tensor.strides, tensor.dtype.block_bytes)
        for name, tensor in launch.views.items()
    }
    return {name: rows for name, rows in found.items() if rows is not None}
