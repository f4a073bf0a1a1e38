"""kv_read: the keys and values of a step's tokens, read back out of the pages in which `kv_write`
put them. It is for who looks on, and no step needs it.
"""

from __future__ import annotations

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Index, Rule, Scalar, live_counts, live_rows
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention.kv_write import FLOATS


def _contract(layout: str) -> Contract:
    keys = "num_blocks, num_kv_heads, head_dim, block_size"
    values = "num_blocks, num_kv_heads, block_size, value_pitch"
    return Contract(
        "kv_read",
        Arg("k_cache", FLOATS, keys, "read", layout),
        Arg("v_cache", FLOATS, values, "read", layout),
        Arg("k", (DType.F32,), "num_tokens, >= num_kv_heads * head_dim", "both"),
        Arg("v", (DType.F32,), "num_tokens, >= num_kv_heads * value_dim", "both"),
        Arg(
            "slots",
            (DType.I32,),
            ">= num_tokens",
            index=Index("num_blocks * block_size", "the cache", live=live_rows("slots")),
        ),
        live_counts("num_tokens", 0),
        Scalar("value_dim", "0 < value_dim <= value_pitch", "must fit the rows of values"),
        Rule("block_size % 16 == 0", "16 keys are read together"),
    )


#: On a GPU, and on the CPU.
CONTRACT, PAGES = _contract("contiguous"), _contract("pages")
_KV_READ = Op(
    PAGES,
    gpu_contract=CONTRACT,
    cpu="attention.kv_read_cpu.kv_read",
    gpu="attention.kv_read_gpu.launch",
    work_per_row=lambda k: 4 * k.shape[1],
)


def kv_read(
    plan: PlanBuilder,
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    *,
    value_dim: int,
) -> None:
    """Append k[t] and v[t] = the keys and the values at slots[t]; of a head's values the first
    `value_dim`.

    `caches` are those of keys and of values, f16 or f32, as `kv_write` has them; k f32 [num_tokens,
    >= num_kv_heads * head_dim], v f32 [num_tokens, >= num_kv_heads * value_dim].
    """
    k_cache, v_cache = caches
    plan.add(
        _KV_READ,
        k_cache=k_cache,
        v_cache=v_cache,
        slots=slots,
        counts=counts,
        k=k,
        v=v,
        value_dim=value_dim,
    )
