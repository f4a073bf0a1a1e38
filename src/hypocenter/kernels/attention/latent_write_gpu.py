"""Triton kernel of `latent_write`: one program is one token."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.attention.kv_write_gpu import key_at, value_at
from hypocenter.kernels.blocks_gpu import block_bytes, write_blocks
from hypocenter.kernels.shared_gpu import as_offset, follow


@triton.jit
def latent_write_kernel(
    rotated_ptr,
    latent_ptr,
    counts_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_rotated,
    rank,
    block_size,
    value_pitch,
    rotated_stride,
    latent_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: the key of slots[t] = (rotated[t], latent[t]), and its value = latent[t].
    Shapes: rotated f32 [num_tokens, >= num_rotated]; latent f32 [num_tokens, >= rank]; slots i32
    [num_tokens]; counts i32 [2]; k_cache [num_blocks, 1, num_rotated + rank, block_size] and
    v_cache [num_blocks, 1, block_size, value_pitch], f16 or f32.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """
    follow(OVERLAPS)
    token, head_dim = tl.program_id(0), num_rotated + rank
    if token >= tl.load(counts_ptr):
        return
    slot, row = as_offset(tl.load(slots_ptr + token), WIDE), as_offset(token, WIDE)
    d = tl.arange(0, ROTATED)
    live = d < num_rotated
    first = tl.load(rotated_ptr + row * rotated_stride + d, mask=live, other=0.0)
    at = key_at(slot, 0, d, 1, head_dim, block_size)
    tl.store(k_cache_ptr + at, first.to(k_cache_ptr.dtype.element_ty), mask=live)
    d = tl.arange(0, BLOCK)
    live = d < rank
    latent = tl.load(latent_ptr + row * latent_stride + d, mask=live, other=0.0)
    at = key_at(slot, 0, num_rotated + d, 1, head_dim, block_size)
    tl.store(k_cache_ptr + at, latent.to(k_cache_ptr.dtype.element_ty), mask=live)
    at = value_at(slot, 0, d, 1, block_size, value_pitch)
    tl.store(v_cache_ptr + at, latent.to(v_cache_ptr.dtype.element_ty), mask=live)


@triton.jit
def latent_write_blocks_kernel(
    rotated_ptr,
    latent_ptr,
    counts_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_rotated,
    num_blocks,
    block_size,
    rotated_stride,
    latent_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    ROTATED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Formula: the key of slots[t] = blocks of (rotated[t], latent[t]), and its value = blocks of
    latent[t], rounded as in kv_write_blocks; num_rotated and num_blocks count blocks.
    Shapes: rotated f32 [num_tokens, >= 32 * num_rotated]; latent f32 [num_tokens, >= 32 *
    num_blocks]; slots i32 [num_tokens]; counts i32 [2]; k_cache u8 [pages, 1, row bytes,
    block_size]; v_cache u8 [pages, 1, block_size, row bytes].
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """
    follow(OVERLAPS)
    token = tl.program_id(0)
    if token >= tl.load(counts_ptr):
        return
    slot, row = as_offset(tl.load(slots_ptr + token), WIDE), as_offset(token, WIDE)
    page, within = slot // block_size, slot % block_size
    at = page * ((num_rotated + num_blocks) * BLOCK_BYTES * block_size) + within
    rotated, latent = rotated_ptr + row * rotated_stride, latent_ptr + row * latent_stride
    write_blocks(rotated, k_cache_ptr, at, block_size, num_rotated, BLOCK_BYTES, ROTATED)
    at += num_rotated * BLOCK_BYTES * block_size
    write_blocks(latent, k_cache_ptr, at, block_size, num_blocks, BLOCK_BYTES, NUM_BLOCKS)
    at = slot * (num_blocks * BLOCK_BYTES)
    write_blocks(latent, v_cache_ptr, at, 1, num_blocks, BLOCK_BYTES, NUM_BLOCKS)


def launch(plan: BoundPlan, rotated: Tensor, k_cache: Tensor, v_cache: Tensor, rank: int) -> None:
    """Append latent_write for every token of the bucket."""
    _, _, head_dim, block_size = k_cache.shape
    plan.add_gpu(
        latent_write_kernel,
        grid=(rotated.shape[0],),
        num_rotated=head_dim - rank,
        block_size=block_size,
        value_pitch=v_cache.shape[3],
        ROTATED=triton.next_power_of_2(head_dim - rank),
        BLOCK=triton.next_power_of_2(rank),
    )


def launch_blocks(plan: BoundPlan, rotated: Tensor, k_cache: Tensor, rank: int) -> None:
    """Append latent_write_blocks for every token of the bucket."""
    _, _, head_dim, block_size = k_cache.shape
    num_rotated, num_blocks = (head_dim - rank) // 32, rank // 32
    plan.add_gpu(
        latent_write_blocks_kernel,
        grid=(rotated.shape[0],),
        num_rotated=num_rotated,
        num_blocks=num_blocks,
        block_size=block_size,
        BLOCK_BYTES=block_bytes(k_cache),
        ROTATED=triton.next_power_of_2(num_rotated),
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
        # As in kv_write.
        enable_fp_fusion=False,
    )
