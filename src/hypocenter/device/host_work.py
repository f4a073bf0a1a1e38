"""What the host does in the middle of a step of a GPU: rows come to it, and go back changed.

It waits for all that was launched before, so no graph holds such a launch: `Plan` cuts its graphs
there. Knows nothing of what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import Tensor
from hypocenter.device import launch
from hypocenter.device.arrays import AnyArray, constants, is_host
from hypocenter.device.cpu.native import NativeLaunches
from hypocenter.device.launch import Launch


class HostWork:
    """Launches of CPU kernels that change rows of `x` f32 [num_rows, pitch], of which the first of
    `counts` i32 [2] are live; both lie on the host, and stand for tensors of a GPU."""

    def __init__(self, launches: Sequence[Launch], x: Tensor, counts: Tensor) -> None:
        self.launches = tuple(launches)
        self._rows, self._counts = x.data, counts.data
        self._native: NativeLaunches | None = None
        #: Where these note how far they are, which nobody reads.
        self._word = np.zeros(1, np.uint64)

    def __call__(self, x: AnyArray, counts: AnyArray) -> None:
        """Do it with a GPU's `x` and `counts`, flat, of as many elements."""
        self._counts[:] = _on_host(counts)
        num_live = int(self._counts[0]) * self._rows.shape[1]
        rows = self._rows.reshape(-1)[:num_live]
        rows[:] = _on_host(x[:num_live])
        if self._native is None:
            launch.compile_all(self.launches)
            self._native = launch.native(tuple(enumerate(self.launches)))
        launch.run_within(self._native, self.launches, self._word.ctypes.data)
        x[:num_live] = rows if is_host(x) else constants(rows, "float32", x)


def _on_host(array: AnyArray) -> Array:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()
