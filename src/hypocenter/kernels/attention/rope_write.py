"""rope_write: `rope` of queries and keys and `kv_write` in one launch.

The result has the bits that rope of q, rope of k and kv_write give one after the other, but for
k itself: its turned heads go to the cache alone, and its own buffer stays as it was.
"""

from __future__ import annotations

from dataclasses import replace

from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import kv_write, rope, rope_write_cpu
from hypocenter.kernels.attention.kv_write import FLOATS
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.demands import Apart
from hypocenter.tensor import Tensor

_ROPE = {arg.name: arg for arg in rope.CONTRACT.args}


def _contract(write: Contract) -> Contract:
    of_write = {arg.name: arg for arg in write.args}
    return Contract(
        "rope_write",
        replace(_ROPE["x"], name="q"),
        *(_ROPE[name] for name in ("positions", "cos", "sin", "counts")),
        # Blocks are made of heads that have been turned whole.
        *(replace(of_write[name], dtypes=FLOATS) for name in ("k_cache", "v_cache")),
        *(of_write[name] for name in ("k", "v", "slots")),
        # Programs that turn q and those that read k and v run at the same time.
        Apart("q", "k"),
        Apart("q", "v"),
        *rope.CONTRACT.scalars,
        *rope.CONTRACT.rules,
        *write.rules,
    )


#: On a GPU, and on the CPU.
CONTRACT, PAGES = _contract(kv_write.CONTRACT), _contract(kv_write.PAGES)


def rope_write(
    plan: PlanBuilder,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    counts: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    style: str,
) -> None:
    """Append the rotation of q f32 [num_tokens, >= num_heads * head_dim] by its positions, and
    the write of k, turned likewise, and v at `slots`; arguments as in `rotate` and `kv_write`.
    """
    rope.require_style("rope_write", style)
    cos, sin = table
    facts = {
        "q": q,
        "k": k,
        "v": v,
        "positions": positions,
        "slots": slots,
        "cos": cos,
        "sin": sin,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "counts": counts,
        "num_heads": num_heads,
        "head_dim": head_dim,
    }
    if plan.device != "cpu":
        from hypocenter.kernels.attention import rope_write_gpu

        rope_write_gpu.add(plan, CONTRACT, facts, style == "normal")
        return
    num_kv_heads = k_cache.shape[1]
    plan.add_cpu(
        rope_write_cpu.rope_write,
        *(q, k, v, counts, positions, slots, cos, sin, k_cache, v_cache, num_heads),
        style == "normal",
        contract=PAGES,
        facts=facts,
        work_per_row=4 * (num_heads * cos.shape[1] + num_kv_heads * head_dim),
    )
