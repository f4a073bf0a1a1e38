"""What the host does in the middle of a step of a GPU: rows come to it, and go back changed.

It waits for all that was launched before, so no graph holds such a launch: `Plan` cuts its graphs
there. Knows nothing of what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hypocenter.base.tensor import Tensor
from hypocenter.device import copies, launch
from hypocenter.device.arrays import AnyArray
from hypocenter.device.cpu.native import NativeLaunches
from hypocenter.device.launch import Launch


class HostWork:
    """Calls of ops on the CPU (`OpCall` of `plan.py`, which imports this) that change rows of `x`
    f32 [num_rows, pitch], of which the first of `counts` i32 [2] are live. Those of the host stand
    for a GPU's, `on_gpu`, in that order."""

    def __init__(
        self,
        calls: Sequence[Any],
        x: Tensor,
        counts: Tensor,
        on_gpu: tuple[Tensor, Tensor],
    ) -> None:
        self.calls = tuple(calls)
        self.launches: tuple[Launch, ...] = tuple(made for call in calls for made in call.launches)
        self._rows, self._counts = x.data, counts.data
        self._on_gpu = on_gpu
        self._native: NativeLaunches | None = None
        #: Where these note how far they are, which nobody reads.
        self._word = np.zeros(1, np.uint64)

    def __call__(self, x: AnyArray, counts: AnyArray) -> None:
        """Do it with the arrays of the GPU's tensors, flat, of as many elements."""
        on_gpu, counts_on_gpu = self._on_gpu
        self._counts[:] = copies.array_to_host(counts_on_gpu, counts)
        num_live = int(self._counts[0]) * self._rows.shape[1]
        rows = self._rows.reshape(-1)[:num_live]
        rows[:] = copies.array_to_host(on_gpu, x[:num_live])
        if self._native is None:
            launch.compile_all(self.launches)
            self._native = launch.native(tuple(enumerate(self.launches)))
        launch.run_within(self._native, self.launches, self._word.ctypes.data)
        copies.array_to_device(on_gpu, x[:num_live], rows)
