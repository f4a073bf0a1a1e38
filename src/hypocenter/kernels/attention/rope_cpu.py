"""numba kernel of `rope`."""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import get, put


@inline
def rotate(a: float, b: float, cos: float, sin: float) -> tuple[float, float]:
    return a * cos - b * sin, a * sin + b * cos


@inline
def pair(i: int, half: int, neighbours: bool) -> tuple[int, int]:
    """The columns of the pair of index `i`."""
    return (2 * i, 2 * i + 1) if neighbours else (i, half + i)


@inline
def turn_head(
    x: Any, at: int, cos: Any, sin: Any, angles: int, half: int, neighbours: bool
) -> None:
    """Turn a head in place by the angles of its position."""
    for i in range(half):
        first, second = pair(i, half, neighbours)
        c, s = get(cos, angles + i), get(sin, angles + i)
        a, b = rotate(get(x, at + first), get(x, at + second), c, s)
        put(x, at + first, a)
        put(x, at + second, b)


@cpu_kernel
def rope(
    x: Any,
    counts: Any,
    positions: Any,
    cos: Any,
    sin: Any,
    num_heads: int,
    head_dim: int,
    neighbours: bool,
) -> None:
    """Formula: (a, b) = (a cos - b sin, a sin + b cos) for each pair of columns, in place, with
    the angles of the token's position; pairs are neighbours, or halves.
    Shapes: x f32 [num_tokens, >= num_heads * head_dim]; counts i32 [2]; positions i32
    [num_tokens]; cos and sin f32 [num_positions, half].
    Source: Su et al., arXiv 2104.09864.
    """
    half = cos.shape[1]
    for token in prange(get(counts, 0)):
        angles = get(positions, token) * half
        for head in range(num_heads):
            at = token * x.shape[1] + head * head_dim
            turn_head(x, at, cos, sin, angles, half, neighbours)
