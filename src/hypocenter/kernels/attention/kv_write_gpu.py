"""Triton kernels of `kv_write`: one program is one head of one token."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.blocks_gpu import block_bytes, write_blocks
from hypocenter.kernels.shared_gpu import as_offset, follow


@triton.jit
def kv_write_kernel(
    k_ptr, v_ptr, counts_ptr, slots_ptr, k_cache_ptr, v_cache_ptr, num_heads, head_dim, block_size,
    value_pitch, k_stride, v_stride, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: k_cache[slot // block_size, h, d, slot % block_size] = k[t, h, d], and
    v_cache[slot // block_size, h, slot % block_size, d] = v[t, h, d], with slot = slots[t].
    Shapes: k and v f32 [num_tokens, >= num_heads * head_dim]; slots i32 [num_tokens]; counts
    i32 [2]; k_cache [num_blocks, num_kv_heads, head_dim, block_size] and v_cache [num_blocks,
    num_kv_heads, block_size, value_pitch], f16 or f32.
    Source: Kwon et al., arXiv 2309.06180 (paged caches).
    """
    follow(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    d = tl.arange(0, BLOCK)
    live = d < head_dim
    slot = as_offset(tl.load(slots_ptr + token), WIDE)
    k = tl.load(
        k_ptr + as_offset(token, WIDE) * k_stride + head * head_dim + d, mask=live, other=0.0
    )
    v = tl.load(
        v_ptr + as_offset(token, WIDE) * v_stride + head * head_dim + d, mask=live, other=0.0
    )
    k_at = key_at(slot, head, d, num_heads, head_dim, block_size)
    v_at = value_at(slot, head, d, num_heads, block_size, value_pitch)
    tl.store(k_cache_ptr + k_at, k.to(k_cache_ptr.dtype.element_ty), mask=live)
    tl.store(v_cache_ptr + v_at, v.to(v_cache_ptr.dtype.element_ty), mask=live)


@triton.jit
def kv_write_blocks_kernel(
    k_ptr,
    v_ptr,
    counts_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_heads,
    num_blocks,
    block_size,
    k_stride,
    v_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Formula: as kv_write, of blocks of 32 numbers x: code = round(x / scale), with scale =
    max|x| / 127 for Q8_0; Q4_0 has codes of four bits.
    Shapes: k and v f32 [num_tokens, >= num_heads * 32 * num_blocks]; slots i32 [num_tokens];
    counts i32 [2]; k_cache u8 [pages, num_heads, row bytes, block_size]; v_cache u8 [pages,
    num_heads, block_size, row bytes].
    Source: ggml, quantize_row_q8_0_ref and quantize_row_q4_0_ref.
    """
    follow(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    slot, row = as_offset(tl.load(slots_ptr + token), WIDE), as_offset(token, WIDE)
    page, within = slot // block_size * num_heads + head, slot % block_size
    num_bytes, first = num_blocks * BLOCK_BYTES, head * num_blocks * 32
    k_at = page * num_bytes * block_size + within
    k_start, v_start = k_ptr + row * k_stride + first, v_ptr + row * v_stride + first
    write_blocks(k_start, k_cache_ptr, k_at, block_size, num_blocks, BLOCK_BYTES, NUM_BLOCKS)
    v_at = (page * block_size + within) * num_bytes
    write_blocks(v_start, v_cache_ptr, v_at, 1, num_blocks, BLOCK_BYTES, NUM_BLOCKS)


@triton.jit
def key_at(slot, head, d, num_heads, head_dim, block_size):
    """Where element d of a head's key lies in the keys of a cache."""
    page = slot // block_size * num_heads + head
    return (page * head_dim + d) * block_size + slot % block_size


@triton.jit
def value_at(slot, head, d, num_heads, block_size, value_pitch):
    """Where element d of a head's value lies in the values of a cache."""
    page = slot // block_size * num_heads + head
    return (page * block_size + slot % block_size) * value_pitch + d


def launch(plan: BoundPlan, k: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Append kv_write for every KV head of every token of the bucket."""
    _, num_heads, head_dim, block_size = k_cache.shape
    plan.add_gpu(
        kv_write_kernel,
        grid=(k.shape[0], num_heads),
        num_heads=num_heads,
        head_dim=head_dim,
        block_size=block_size,
        value_pitch=v_cache.shape[3],
        BLOCK=triton.next_power_of_2(head_dim),
    )


def launch_blocks(plan: BoundPlan, k: Tensor, k_cache: Tensor) -> None:
    """Append kv_write_blocks for every KV head of every token of the bucket."""
    _, num_heads, head_dim, block_size = k_cache.shape
    num_blocks = head_dim // 32
    plan.add_gpu(
        kv_write_blocks_kernel,
        grid=(k.shape[0], num_heads),
        num_heads=num_heads,
        num_blocks=num_blocks,
        block_size=block_size,
        BLOCK_BYTES=block_bytes(k_cache),
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
        # A product and a sum in one step would round to other codes.
        enable_fp_fusion=False,
    )
