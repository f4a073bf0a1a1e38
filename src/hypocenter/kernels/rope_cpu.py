"""numba kernel of `rope`."""

from __future__ import annotations

from typing import Any

from hypocenter.device.lang import cpu_kernel, inline, prange
from hypocenter.device.vector import get, put


@inline
def _turn(x: Any, first: int, second: int, cos: float, sin: float) -> None:
    a, b = get(x, first), get(x, second)
    put(x, first, a * cos - b * sin)
    put(x, second, a * sin + b * cos)


@cpu_kernel
def rope(
    x: Any, counts: Any, positions: Any, cos: Any, sin: Any, num_heads: int, head_dim: int,
    neighbours: bool,
) -> None:  # fmt: skip
    half = cos.shape[1]
    for token in prange(get(counts, 0)):
        angles = get(positions, token) * half
        for head in range(num_heads):
            at = token * x.shape[1] + head * head_dim
            for i in range(half):
                c, s = get(cos, angles + i), get(sin, angles + i)
                if neighbours:
                    _turn(x, at + 2 * i, at + 2 * i + 1, c, s)
                else:
                    _turn(x, at + i, at + half + i, c, s)
