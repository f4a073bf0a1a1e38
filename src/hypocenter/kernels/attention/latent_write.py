"""latent_write: put what new tokens' keys and values are made of into their slots of the cache.

The one KV head has a key of the part that is rotated, then the latent, and the latent for a value
(DeepSeek-V2, arXiv 2405.04434, section 2.1). Caches lie as in `kv_write`. The latent stands in
both, for keys are read column by column and values row by row.
"""

from __future__ import annotations

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Index, Rule, Scalar, live_counts, live_rows
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention.kv_write import caches

_OTHERS = (
    Scalar("rank", "rank > 0", "must be above 0"),
    Arg("rotated", (DType.F32,), "num_tokens, >= head_dim - rank"),
    Arg("latent", (DType.F32,), "num_tokens, >= -(-rank // 16) * 16"),
    Arg(
        "slots",
        (DType.I32,),
        ">= num_tokens",
        index=Index("num_blocks * block_size", "the cache", live=live_rows("slots"), unique=True),
    ),
    live_counts("num_tokens", 0),
    Rule("num_kv_heads == 1", "all heads read the same latent"),
    Rule("rank < head_dim", "a key must have a part that is rotated"),
    Rule("value_pitch >= -(-rank // 16) * 16", "values are written as whole vectors of 16"),
)
#: On a GPU, and on the CPU.
CONTRACT, PAGES = (
    Contract("latent_write", *caches(layout, "write"), *_OTHERS)
    for layout in ("contiguous", "pages")
)

_LATENT_WRITE, _LATENT_WRITE_BLOCKS = (
    Op(
        PAGES,
        gpu_contract=CONTRACT,
        cpu=kernel,
        gpu=f"attention.latent_write_gpu.{launch}",
        work_per_row=lambda k_cache, rank: 2 * (k_cache.shape[2] + rank),
    )
    for kernel, launch in (
        ("attention.latent_write_cpu.latent_write", "launch"),
        ("attention.latent_write_cpu.latent_write_blocks", "launch_blocks"),
    )
)


def latent_write(
    plan: PlanBuilder,
    rotated: Tensor,
    latent: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    counts: Tensor,
    *,
    rank: int,
) -> None:
    """Append the write of rotated f32 [num_tokens, >= head_dim - rank] and latent f32 [num_tokens,
    >= rank] at `slots`, which are as in `kv_write`; caches of one KV head, as in `kv_write`."""
    plan.add(
        _LATENT_WRITE_BLOCKS if k_cache.dtype.is_quantised else _LATENT_WRITE,
        k_cache=k_cache,
        v_cache=v_cache,
        rank=rank,
        rotated=rotated,
        latent=latent,
        slots=slots,
        counts=counts,
    )
