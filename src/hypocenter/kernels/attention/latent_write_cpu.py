"""numba kernels of `latent_write`: an item is a token, whose columns of the key lie a page's row
apart; it turns nothing."""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import get, put_half
from hypocenter.device.cpu.vector_blocks import BLOCK, block_bytes, num_columns
from hypocenter.kernels.attention.kv_write_cpu import page_at, write_blocks, write_values


@inline
def _write_columns(x: Any, at: int, count: int, k_cache: Any, place: int) -> None:
    """`count` numbers as columns of a key, whose first one is at `place`."""
    block_size = k_cache.shape[3]
    for d in range(count):
        put_half(k_cache, place + d * block_size, get(x, at + d))


@cpu_kernel
def latent_write(
    rotated: Any,
    latent: Any,
    counts: Any,
    slots: Any,
    k_cache: Any,
    v_cache: Any,
    rank: int,
) -> None:
    """Formula: the key of slots[t] = (rotated[t], latent[t]), and its value = latent[t].
    Shapes: rotated f32 [num_tokens, >= head_dim - rank]; latent f32 [num_tokens, >= rank];
    counts i32 [2]; slots i32 [num_tokens]; k_cache [num_blocks, 1, head_dim, block_size] and
    v_cache [num_blocks, 1, block_size, value_pitch], f16 or f32.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """
    head_dim, block_size = k_cache.shape[2], k_cache.shape[3]
    num_rotated = head_dim - rank
    for token in prange(get(counts, 0)):
        slot = get(slots, token)
        block, offset = slot // block_size, slot % block_size
        place = page_at(k_cache, block, 0) + offset
        _write_columns(rotated, token * rotated.shape[1], num_rotated, k_cache, place)
        at = token * latent.shape[1]
        _write_columns(latent, at, rank, k_cache, place + num_rotated * block_size)
        row = page_at(v_cache, block, 0) + offset * v_cache.shape[3]
        write_values(latent, at, v_cache, row, rank)


@cpu_kernel
def latent_write_blocks(
    rotated: Any,
    latent: Any,
    counts: Any,
    slots: Any,
    k_cache: Any,
    v_cache: Any,
    rank: int,
) -> None:
    """Formula: the key of slots[t] = blocks of (rotated[t], latent[t]), and its value = blocks
    of latent[t], rounded as in kv_write_blocks.
    Shapes: rotated f32 [num_tokens, >= head_dim - rank]; latent f32 [num_tokens, >= rank];
    counts i32 [2]; slots i32 [num_tokens]; k_cache and v_cache as in latent_write, of blocks of
    32.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """
    block_size = k_cache.shape[3]
    num_rotated = (num_columns(k_cache, k_cache.shape[2]) - rank) // BLOCK
    num_blocks = rank // BLOCK
    for token in prange(get(counts, 0)):
        slot = get(slots, token)
        page, offset = slot // block_size, slot % block_size
        place = page_at(k_cache, page, 0) + offset
        write_blocks(rotated, token * rotated.shape[1], num_rotated, k_cache, place, block_size)
        place += num_rotated * block_bytes(k_cache) * block_size
        at = token * latent.shape[1]
        write_blocks(latent, at, num_blocks, k_cache, place, block_size)
        row = page_at(v_cache, page, 0) + offset * v_cache.shape[3]
        write_blocks(latent, at, num_blocks, v_cache, row, 1)
