"""Triton kernel of `latent_write`: one program is one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.contracts.contract import Contract
from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.attention.kv_write_gpu import key_at, value_at
from hypocenter.kernels.blocks_gpu import block_bytes, write_blocks
from hypocenter.kernels.shared_gpu import as_offset, follow


@triton.jit
def latent_write_kernel(
    turned_ptr,
    latent_ptr,
    counts_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_turned,
    rank,
    block_size,
    value_pitch,
    turned_stride,
    latent_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    follow(OVERLAPS)
    token, head_dim = tl.program_id(0), num_turned + rank
    if token >= tl.load(counts_ptr):
        return
    slot, row = as_offset(tl.load(slots_ptr + token), WIDE), as_offset(token, WIDE)
    d = tl.arange(0, TURNED)
    live = d < num_turned
    first = tl.load(turned_ptr + row * turned_stride + d, mask=live, other=0.0)
    at = key_at(slot, 0, d, 1, head_dim, block_size)
    tl.store(k_cache_ptr + at, first.to(k_cache_ptr.dtype.element_ty), mask=live)
    d = tl.arange(0, BLOCK)
    live = d < rank
    latent = tl.load(latent_ptr + row * latent_stride + d, mask=live, other=0.0)
    at = key_at(slot, 0, num_turned + d, 1, head_dim, block_size)
    tl.store(k_cache_ptr + at, latent.to(k_cache_ptr.dtype.element_ty), mask=live)
    at = value_at(slot, 0, d, 1, block_size, value_pitch)
    tl.store(v_cache_ptr + at, latent.to(v_cache_ptr.dtype.element_ty), mask=live)


@triton.jit
def latent_write_blocks_kernel(
    turned_ptr,
    latent_ptr,
    counts_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_turned,
    num_blocks,
    block_size,
    turned_stride,
    latent_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    TURNED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Both numbers are of blocks."""
    follow(OVERLAPS)
    token = tl.program_id(0)
    if token >= tl.load(counts_ptr):
        return
    slot, row = as_offset(tl.load(slots_ptr + token), WIDE), as_offset(token, WIDE)
    page, within = slot // block_size, slot % block_size
    at = page * ((num_turned + num_blocks) * BLOCK_BYTES * block_size) + within
    turned, latent = turned_ptr + row * turned_stride, latent_ptr + row * latent_stride
    write_blocks(turned, k_cache_ptr, at, block_size, num_turned, BLOCK_BYTES, TURNED)
    at += num_turned * BLOCK_BYTES * block_size
    write_blocks(latent, k_cache_ptr, at, block_size, num_blocks, BLOCK_BYTES, NUM_BLOCKS)
    at = slot * (num_blocks * BLOCK_BYTES)
    write_blocks(latent, v_cache_ptr, at, 1, num_blocks, BLOCK_BYTES, NUM_BLOCKS)


def add(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append latent_write for every token of the bucket."""
    turned, latent, k_cache = facts["turned"], facts["latent"], facts["k_cache"]
    v_cache, rank = facts["v_cache"], facts["rank"]
    _, _, head_dim, block_size = k_cache.shape
    if num_bytes := block_bytes(k_cache):
        sizes = (head_dim - rank) // 32, rank // 32
        plan.add_gpu(
            latent_write_blocks_kernel,
            *(turned, latent, facts["counts"], facts["slots"], k_cache, v_cache, *sizes),
            *(block_size, turned.strides[0], latent.strides[0]),
            grid=(turned.shape[0],),
            contract=contract,
            facts=facts,
            BLOCK_BYTES=num_bytes,
            TURNED=triton.next_power_of_2(sizes[0]),
            NUM_BLOCKS=triton.next_power_of_2(sizes[1]),
            # As in kv_write.
            enable_fp_fusion=False,
        )
        return
    plan.add_gpu(
        latent_write_kernel,
        *(turned, latent, facts["counts"], facts["slots"], k_cache, v_cache, head_dim - rank),
        *(rank, block_size, v_cache.shape[3], turned.strides[0], latent.strides[0]),
        grid=(turned.shape[0],),
        contract=contract,
        facts=facts,
        TURNED=triton.next_power_of_2(head_dim - rank),
        BLOCK=triton.next_power_of_2(rank),
    )
