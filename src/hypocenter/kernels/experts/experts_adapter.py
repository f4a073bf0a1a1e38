"""Low-rank adapters of routed experts: each choice of a token gets those of the expert it chose.

As `linear/adapter.py`, with a stack of A and of B in place of one. What they mean is what
`build_lora_mm_id` of llama.cpp computes: B_e (A_e x), added to the product with expert e.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Index, Rule, Scalar, live_counts, live_rows
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.experts.experts_table import ExpertsTable
from hypocenter.kernels.experts.grouping import live_choices
from hypocenter.kernels.linear.adapter_sizes import RANKS

_FLOATS = (DType.F32, DType.F16)
#: Which expert and which row a choice has, and which adapters its token has.
_CHOICES = (
    Arg(
        "ids",
        (DType.I32,),
        "num_tokens, num_used",
        index=Index("num_experts", "the experts", live=live_choices("ids")),
    ),
    Arg(
        "places",
        (DType.I32,),
        "num_tokens, num_used",
        index=Index("num_rows", "the sorted rows", live=live_choices("places"), unique=True),
    ),
    Arg("owners", (DType.I32,), "num_tiles", index=Index("num_adapters", "the adapters")),
    Arg("scales", (DType.F32,), "num_sequences, num_adapters"),
    Arg(
        "sequences",
        (DType.I32,),
        ">= num_tokens",
        index=Index("num_sequences", "the sequences", live=live_rows("sequences")),
    ),
    live_counts("num_tokens", 0),
    Rule(f"num_ranks == {RANKS} * num_tiles", f"ranks must be whole tiles of {RANKS}"),
    Rule("pitch % 64 == 0", "rows of a matrix must be padded to whole blocks of 64"),
)
DOWN = Contract(
    "experts_adapter_down",
    Arg("down", _FLOATS, "num_experts, num_ranks, pitch"),
    Arg("x", (DType.F32,), "num_rows, >= num_columns"),
    *_CHOICES,
    Arg(
        "products",
        (DType.F32,),
        "num_tokens, >= num_used * num_ranks",
        "write",
        fills="num_used * num_ranks",
    ),
    Arg("factors", (DType.F32,), "num_tiles"),
    Scalar("num_columns", "0 < num_columns <= pitch", "must be above 0 and within the matrix"),
    Apart("products", "x"),
)
UP = Contract(
    "experts_adapter_up",
    Arg("up", _FLOATS, "num_experts, num_ranks, pitch"),
    Arg("out", (DType.F32,), "num_rows, >= pitch", "both"),
    *_CHOICES,
    Arg("products", (DType.F32,), "num_tokens, >= num_used * num_ranks"),
    Apart("out", "products"),
)
_DOWN = Op(
    DOWN,
    cpu="experts.experts_adapter_cpu.experts_adapter_down",
    gpu="experts.experts_adapter_gpu.launch_down",
    work_per_row=lambda down, ids: ids.shape[1] * down.shape[1] * down.shape[2],
)
_UP = Op(
    UP,
    cpu="experts.experts_adapter_cpu.experts_adapter_up",
    gpu="experts.experts_adapter_gpu.launch_up",
    work_per_row=lambda up, ids: ids.shape[1] * up.shape[1] * up.shape[2],
)


def reference(
    x: np.ndarray[Any, Any],
    ids: np.ndarray[Any, Any],
    down: np.ndarray[Any, Any],
    up: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """B_e (A_e x) in float64 of rows x [num_rows, k], each with an expert e of ids [num_rows]; A is
    [num_experts, rank, k], B [num_experts, n, rank]."""
    wide = np.einsum("tk,trk->tr", x.astype(np.float64), down.astype(np.float64)[ids])
    out: np.ndarray[Any, Any] = np.einsum("tr,tnr->tn", wide, up.astype(np.float64)[ids])
    return out


def experts_adapter(
    plan: PlanBuilder,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    out: Tensor,
    products: Tensor,
    table: ExpertsTable,
    *,
    owners: Tensor,
    factors: Tensor,
    scales: Tensor,
    sequences: Tensor,
    counts: Tensor,
    num_columns: int,
) -> None:
    """Append out[p] += scale B_e (A_e x[p]) for each choice of a live token, of expert e, whose
    sorted row is p; rows of tokens without an adapter stay.

    x f32 [num_rows, >= num_columns], out f32 [num_rows, >= outputs padded to 64]; down f16 or f32
    [num_experts, num_ranks, num_columns padded to 64], up likewise [num_experts, num_ranks, outputs
    padded to 64]; products f32 [num_tokens, >= num_used * num_ranks] is scratch. The others are as
    in `adapter_down`. Raises LaunchRejected when shapes disagree.
    """
    shared = {"ids": table.ids, "places": table.places, "owners": owners, "scales": scales}
    shared |= {"sequences": sequences, "counts": counts, "products": products}
    plan.add(_DOWN, down=down, x=x, factors=factors, num_columns=num_columns, **shared)
    plan.add(_UP, up=up, out=out, **shared)
