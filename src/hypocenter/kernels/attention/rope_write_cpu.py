"""numba kernel of `rope_write`."""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import get, put_half
from hypocenter.kernels.attention.kv_write_cpu import page_at, write_values
from hypocenter.kernels.attention.rope_cpu import pair, rotate, turn_head


@inline
def _write_key(
    k: Any,
    at: int,
    cos: Any,
    sin: Any,
    angles: int,
    half: int,
    neighbours: bool,
    k_cache: Any,
    place: int,
) -> None:
    """The keys of a head, rotated, to its slot, whose first element is at `place`."""
    head_dim, block_size = k_cache.shape[2], k_cache.shape[3]
    for i in range(half):
        first, second = pair(i, half, neighbours)
        c, s = get(cos, angles + i), get(sin, angles + i)
        a, b = rotate(get(k, at + first), get(k, at + second), c, s)
        put_half(k_cache, place + first * block_size, a)
        put_half(k_cache, place + second * block_size, b)
    for d in range(2 * half, head_dim):
        put_half(k_cache, place + d * block_size, get(k, at + d))


@cpu_kernel
def rope_write(
    q: Any, k: Any, v: Any, counts: Any, positions: Any, slots: Any, cos: Any, sin: Any,
    k_cache: Any, v_cache: Any, num_heads: int, neighbours: bool,
) -> None:  # fmt: skip
    """Formula: q = rope(q) in place, and kv_write of rope(k) and v.
    Shapes: q f32 [num_tokens, >= num_heads * head_dim]; k and v f32 [num_tokens, >=
    num_kv_heads * head_dim]; counts i32 [2]; positions and slots i32 [num_tokens]; cos and sin
    f32 [num_positions, half]; k_cache [num_blocks, num_kv_heads, head_dim, block_size] and
    v_cache [num_blocks, num_kv_heads, block_size, value_pitch], f16 or f32.
    Source: Su et al., arXiv 2104.09864.
    """
    num_kv_heads, head_dim, block_size = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    half = cos.shape[1]
    for token in prange(get(counts, 0)):
        angles, slot = get(positions, token) * half, get(slots, token)
        block, offset = slot // block_size, slot % block_size
        for head in range(num_heads):
            at = token * q.shape[1] + head * head_dim
            turn_head(q, at, cos, sin, angles, half, neighbours)
        for head in range(num_kv_heads):
            at = token * k.shape[1] + head * head_dim
            place = page_at(k_cache, block, head) + offset
            _write_key(k, at, cos, sin, angles, half, neighbours, k_cache, place)
            at = token * v.shape[1] + head * head_dim
            row = page_at(v_cache, block, head) + offset * v_cache.shape[3]
            write_values(v, at, v_cache, row, head_dim)
