"""rope_write: `rope` of queries and keys and `kv_write` in one launch; on a GPU heads may be normed
in it before.

The result has the bits that rms_norm and rope of q and of k and kv_write give one after the other,
but for k itself: what its heads have become goes to the cache alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Scalar
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import kv_write, rope
from hypocenter.kernels.attention.kv_write import FLOATS
from hypocenter.kernels.rowwise.norm import rms_norm


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights f32 [head_dim] by which each head of q and of k is normed; None: it is not."""

    q: Tensor | None
    k: Tensor | None
    eps: float


_ROPE = {arg.name: arg for arg in rope.CONTRACT.args}
_NORMS = tuple(
    Arg(name, (DType.F32,), ">= head_dim", optional=True) for name in ("q_norm", "k_norm")
)


def _contract(write: Contract, *norms: Arg | Scalar) -> Contract:
    of_write = {arg.name: arg for arg in write.args}
    return Contract(
        "rope_write",
        replace(_ROPE["x"], name="q"),
        *(_ROPE[name] for name in ("positions", "cos", "sin", "counts")),
        # Blocks are made of heads that have been rotated whole.
        *(replace(of_write[name], dtypes=FLOATS) for name in ("k_cache", "v_cache")),
        *(of_write[name] for name in ("k", "v", "slots")),
        # Programs that turn q and those that read k and v run at the same time.
        Apart("q", "k"),
        Apart("q", "v"),
        *rope.CONTRACT.scalars,
        *rope.CONTRACT.rules,
        *write.rules,
        *norms,
    )


NORMED = _contract(kv_write.CONTRACT, *_NORMS, Scalar("eps", "eps > 0", "must be above 0"))
#: On a GPU, and on the CPU.
CONTRACT, PAGES = _contract(kv_write.CONTRACT), _contract(kv_write.PAGES)

_NO_NORMS: dict[str, Any] = {}
#: On a GPU with norms, and everywhere without.
_ROPE_WRITE_NORMED = Op(NORMED, gpu="attention.rope_write_gpu.launch")
_ROPE_WRITE = Op(
    PAGES,
    gpu_contract=CONTRACT,
    cpu="attention.rope_write_cpu.rope_write",
    gpu="attention.rope_write_gpu.launch_plain",
    work_per_row=lambda num_heads, cos, k_cache: (
        4 * (num_heads * cos.shape[1] + k_cache.shape[1] * k_cache.shape[2])
    ),
)


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
    norms: HeadNorms | None = None,
) -> None:
    """Append the rotation of q f32 [num_tokens, >= num_heads * head_dim] by its positions, and
    the write of k, rotated likewise, and v at `slots`; arguments as in `rotate` and `kv_write`.
    With `norms` heads are normed before, on the CPU by launches of their own.
    """
    rope.require_style("rope_write", style)
    cos, sin = table
    op, of_norms = _ROPE_WRITE, _NO_NORMS
    if norms is not None and plan.device != "cpu":
        op, of_norms = _ROPE_WRITE_NORMED, {"q_norm": norms.q, "k_norm": norms.k, "eps": norms.eps}
    elif norms is not None:
        for x, norm, num in ((q, norms.q, num_heads), (k, norms.k, k_cache.shape[1])):
            if norm is not None:
                rms_norm(plan, x, norm, norms.eps, x, counts, width=head_dim, num_heads=num)
    plan.add(
        op,
        q=q,
        k=k,
        v=v,
        positions=positions,
        slots=slots,
        cos=cos,
        sin=sin,
        k_cache=k_cache,
        v_cache=v_cache,
        counts=counts,
        num_heads=num_heads,
        head_dim=head_dim,
        neighbours=style == "normal",
        **of_norms,
    )
