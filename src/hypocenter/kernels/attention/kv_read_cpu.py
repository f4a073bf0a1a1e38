"""numba kernel of `kv_read`."""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.lang import cpu_kernel, prange
from hypocenter.device.cpu.vector import get, load, pick, put, store_first
from hypocenter.kernels.attention.kv_write_cpu import page_at

_LANES = 16


@cpu_kernel
def kv_read(
    k_cache: Any, v_cache: Any, slots: Any, counts: Any, k: Any, v: Any, value_dim: int
) -> None:
    """Formula: k[t, h, d] = k_cache[slot // block_size, h, d, slot % block_size], and v[t, h, d] =
    v_cache[slot // block_size, h, slot % block_size, d], with slot = slots[t].
    Shapes: k_cache [num_blocks, num_kv_heads, head_dim, block_size] and v_cache [num_blocks,
    num_kv_heads, block_size, value_pitch], f16 or f32; slots i32 [num_tokens]; counts i32 [2]; k
    f32 [num_tokens, >= num_kv_heads * head_dim]; v f32 [num_tokens, >= num_kv_heads * value_dim].
    """
    num_heads, head_dim, block_size = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    for token in prange(get(counts, 0)):
        slot = get(slots, token)
        block, offset = slot // block_size, slot % block_size
        for head in range(num_heads):
            # Of one row of keys 16 lie side by side, and one of them is this token's.
            place = page_at(k_cache, block, head) + offset // _LANES * _LANES
            to = token * k.shape[1] + head * head_dim
            for d in range(head_dim):
                keys = load(k_cache, place + d * block_size)
                put(k, to + d, pick(keys, offset % _LANES))
            row = page_at(v_cache, block, head) + offset * v_cache.shape[3]
            to = token * v.shape[1] + head * value_dim
            for d in range(0, value_dim, _LANES):
                store_first(v, to + d, load(v_cache, row + d), value_dim - d)
