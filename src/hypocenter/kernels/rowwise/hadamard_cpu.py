"""numba kernel of `hadamard`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, prange
from hypocenter.device.cpu.vector import (
    add,
    get,
    load,
    mul,
    splat,
    store,
    sub,
)
from hypocenter.device.cpu.vector_ir import LANES
from hypocenter.device.cpu.vector_steps import sums_and_differences


@cpu_kernel
def hadamard(x: Any, counts: Any, width: int, size: int, factor: float) -> None:
    """Formula: y = H x factor of each `size` columns, in place, H[i, j] = (-1)**(ones of i & j).
    Shapes: x f32 [num_rows, >= width]; counts i32 [2].
    Source: Sylvester's construction; as a step before rounding QuaRot, arXiv 2404.00456.
    """
    last = splat(np.float32(factor))
    for row in prange(get(counts, 0)):
        first = row * x.shape[1]
        for at in range(first, first + width, LANES):
            store(x, at, sums_and_differences(load(x, at)))
        step = LANES
        while step < size:
            for begin in range(first, first + width, 2 * step):
                for at in range(begin, begin + step, LANES):
                    a, b = load(x, at), load(x, at + step)
                    store(x, at, add(a, b))
                    store(x, at + step, sub(a, b))
            step *= 2
        for at in range(first, first + width, LANES):
            store(x, at, mul(load(x, at), last))
