"""kv_write: put the keys and values of new tokens into their slots of the paged cache.

Keys lie [num_blocks, num_kv_heads, head_dim, block_size] so that 16 keys fill one vector; values
lie [num_blocks, num_kv_heads, block_size, value_pitch] with value_pitch = head_dim padded to 16.
"""

from __future__ import annotations

from hypocenter.device.plan import PlanBuilder
from hypocenter.errors import LaunchRejected
from hypocenter.kernels import kv_write_cpu
from hypocenter.tensor import Tensor


def kv_write(
    plan: PlanBuilder,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    counts: Tensor,
) -> None:
    """Append the write of k and v f32 [num_tokens, >= num_kv_heads * head_dim] at `slots`.

    slots i32 [num_tokens]: block_id * block_size + offset; caches as f16 bits or f32.
    """
    num_heads, head_dim = k_cache.shape[1], k_cache.shape[2]
    for tensor in (k, v):
        if tensor.shape[1] < num_heads * head_dim:
            raise LaunchRejected(
                "kv_write",
                f"{tensor.name} has {tensor.shape[1]} columns, but the cache takes "
                f"{num_heads} heads x {head_dim}",
            )
    plan.launch(
        kv_write_cpu.kv_write,
        *(k, v, counts, slots, k_cache, v_cache),
        work_per_row=4 * num_heads * head_dim,
    )
