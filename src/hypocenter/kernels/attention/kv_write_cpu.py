"""numba kernel of `kv_write`."""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import get, load_first, put_half, store


@inline
def page_steps(cache: Any) -> Any:
    """From a block to the next and from a head to the next, in elements: either may be larger."""
    return cache.strides[0] // cache.itemsize, cache.strides[1] // cache.itemsize


@inline
def page_at(cache: Any, block: int, head: int) -> int:
    """Where the page of a head begins, in elements."""
    of_block, of_head = page_steps(cache)
    at: int = block * of_block + head * of_head
    return at


@inline
def write_values(v: Any, at: int, v_cache: Any, row: int, head_dim: int) -> None:
    """The values of a head to where its row of the cache begins."""
    for d in range(0, head_dim, 16):
        store(v_cache, row + d, load_first(v, at + d, head_dim - d))


@cpu_kernel
def kv_write(k: Any, v: Any, counts: Any, slots: Any, k_cache: Any, v_cache: Any) -> None:
    num_heads, head_dim, block_size = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    for token in prange(get(counts, 0)):
        slot = get(slots, token)
        block, offset = slot // block_size, slot % block_size
        for head in range(num_heads):
            at = token * k.shape[1] + head * head_dim
            place = page_at(k_cache, block, head) + offset
            for d in range(head_dim):
                put_half(k_cache, place + d * block_size, get(k, at + d))
            row = page_at(v_cache, block, head) + offset * v_cache.shape[3]
            write_values(v, token * v.shape[1] + head * head_dim, v_cache, row, head_dim)
