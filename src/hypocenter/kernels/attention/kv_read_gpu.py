"""Triton kernel of `kv_read`: one program is one head of one token."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.attention.kv_write_gpu import key_at, value_at
from hypocenter.kernels.shared_gpu import as_offset, follow


@triton.jit
def kv_read_kernel(
    k_ptr,
    v_ptr,
    counts_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_heads,
    head_dim,
    value_dim,
    block_size,
    value_pitch,
    k_stride,
    v_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: k[t, h, d] = k_cache[slot // block_size, h, d, slot % block_size], and v[t, h, d] =
    v_cache[slot // block_size, h, slot % block_size, d], with slot = slots[t].
    Shapes: k f32 [num_tokens, >= num_heads * head_dim]; v f32 [num_tokens, >= num_heads *
    value_dim];
    slots i32 [num_tokens]; counts i32 [2]; k_cache [num_blocks, num_heads, head_dim, block_size]
    and v_cache [num_blocks, num_heads, block_size, value_pitch], f16 or f32.
    """
    follow(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    d = tl.arange(0, BLOCK)
    slot = as_offset(tl.load(slots_ptr + token), WIDE)
    k_at = key_at(slot, head, d, num_heads, head_dim, block_size)
    v_at = value_at(slot, head, d, num_heads, block_size, value_pitch)
    k = tl.load(k_cache_ptr + k_at, mask=d < head_dim, other=0.0).to(tl.float32)
    v = tl.load(v_cache_ptr + v_at, mask=d < value_dim, other=0.0).to(tl.float32)
    row = as_offset(token, WIDE)
    tl.store(k_ptr + row * k_stride + head * head_dim + d, k, mask=d < head_dim)
    tl.store(v_ptr + row * v_stride + head * value_dim + d, v, mask=d < value_dim)


def launch(plan: BoundPlan, k: Tensor, k_cache: Tensor, v_cache: Tensor, value_dim: int) -> None:
    """Append kv_read for every KV head of every token of the bucket."""
    _, num_heads, head_dim, block_size = k_cache.shape
    plan.add_gpu(
        kv_read_kernel,
        grid=(k.shape[0], num_heads),
        num_heads=num_heads,
        head_dim=head_dim,
        block_size=block_size,
        value_pitch=v_cache.shape[3],
        BLOCK=triton.next_power_of_2(max(head_dim, value_dim)),
    )
