"""kv_write: put the keys and values of new tokens into their slots of the paged cache.

Keys lie [num_blocks, num_kv_heads, head_dim, block_size] so that 16 keys fill one vector; values
lie [num_blocks, num_kv_heads, block_size, value_pitch] with value_pitch = head_dim padded to 16.
"""

from __future__ import annotations

from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels import kv_write_cpu
from hypocenter.kernels.contract import Arg, Contract, Index, Rule, live_counts, live_rows
from hypocenter.tensor import DType, Tensor

CONTRACT = Contract(
    "kv_write",
    Arg(
        "k_cache", (DType.F16, DType.F32), "num_blocks, num_kv_heads, head_dim, block_size", "write"
    ),
    Arg(
        "v_cache",
        (DType.F16, DType.F32),
        "num_blocks, num_kv_heads, block_size, value_pitch",
        "write",
    ),
    Arg("k", (DType.F32,), "num_tokens, >= num_kv_heads * head_dim"),
    Arg("v", (DType.F32,), "num_tokens, >= num_kv_heads * head_dim"),
    Arg(
        "slots",
        (DType.I32,),
        ">= num_tokens",
        index=Index("num_blocks * block_size", "the cache", live=live_rows("slots"), unique=True),
    ),
    live_counts("num_tokens", 0),
    Rule("value_pitch >= -(-head_dim // 16) * 16", "values are written as whole vectors of 16"),
)


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
    facts = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "slots": slots,
        "counts": counts,
    }
    if plan.device != "cpu":
        from hypocenter.kernels import kv_write_gpu

        kv_write_gpu.launch(plan, CONTRACT, facts)
        return
    plan.launch(
        kv_write_cpu.kv_write,
        *(k, v, counts, slots, k_cache, v_cache),
        contract=CONTRACT,
        facts=facts,
        work_per_row=4 * num_heads * head_dim,
    )
