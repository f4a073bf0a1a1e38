"""kv_write: put the keys and values of new tokens into their slots of the paged cache.

Keys are [num_blocks, num_kv_heads, head_dim, block_size] so that 16 keys fill one vector; values
are [num_blocks, num_kv_heads, block_size, value_pitch] with value_pitch = head_dim padded to 16. On
a GPU they lie in that order. On the CPU pages (the last two axes) may lie anywhere, and those of a
head lie one behind the other (`memory.allocate_transposed`), since a thread reads those of one.

Pages may be of Q8_0 or Q4_0. A value's row is then the bytes of blocks as GGUF has them, one block
behind the other, and so is a key's column.
"""

from __future__ import annotations

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Index, Rule, live_counts, live_rows
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder

FLOATS = (DType.F16, DType.F32)
_OR_BLOCKS = (*FLOATS, DType.Q8_0, DType.Q4_0)


def caches(layout: str, access: str = "read") -> tuple[Arg, Arg]:
    """Both caches as arguments; `layout` is contiguous, as on a GPU, or pages."""
    keys = "num_blocks, num_kv_heads, head_dim, block_size"
    values = "num_blocks, num_kv_heads, block_size, value_pitch"
    return (
        Arg("k_cache", _OR_BLOCKS, keys, access, layout),
        Arg("v_cache", _OR_BLOCKS, values, access, layout),
    )


_OTHERS = (
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
#: On a GPU, and on the CPU.
CONTRACT, PAGES = (
    Contract("kv_write", *caches(layout, "write"), *_OTHERS) for layout in ("contiguous", "pages")
)

_KV_WRITE, _KV_WRITE_BLOCKS = (
    Op(
        PAGES,
        gpu_contract=CONTRACT,
        cpu=kernel,
        gpu=f"attention.kv_write_gpu.{launch}",
        work_per_row=lambda k_cache: 4 * k_cache.shape[1] * k_cache.shape[2],
    )
    for kernel, launch in (
        ("attention.kv_write_cpu.kv_write", "launch"),
        ("attention.kv_write_cpu.kv_write_blocks", "launch_blocks"),
    )
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

    slots i32 [num_tokens]: block_id * block_size + offset; caches as f16 bits, f32, or blocks,
    into which numbers are rounded as GGUF's reference does.
    """
    plan.add(
        _KV_WRITE_BLOCKS if k_cache.dtype.is_quantised else _KV_WRITE,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        slots=slots,
        counts=counts,
    )
