"""mix: what a token's experts give, each times its weight, added to the token.

The choices are added in their order, the best first, and the shared expert last: the same order
whoever else is in the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Index, Scalar, live_counts
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.experts.experts_table import ExpertsTable
from hypocenter.kernels.experts.grouping import live_choices

MIX = Contract(
    "mix",
    Arg("x", (DType.F32,), "num_tokens, pitch", "both"),
    Arg("expert_rows", (DType.F32,), "num_rows, >= -(-width // 64) * 64"),
    Arg(
        "places",
        (DType.I32,),
        "num_tokens, num_used",
        index=Index("num_rows", "the sorted rows", live=live_choices("places")),
    ),
    Arg("weights", (DType.F32,), "num_tokens, num_used + 1"),
    Arg("shared", (DType.F32,), "num_tokens, >= -(-width // 64) * 64", optional=True),
    live_counts("num_tokens", 0),
    Apart("x", "expert_rows"),
    Scalar("width", "0 < width and -(-width // 64) * 64 <= pitch", "must lie within the rows"),
)
_MIX = Op(
    MIX,
    cpu="experts.mixing_cpu.mix",
    gpu="experts.mixing_gpu.launch",
    work_per_row=lambda width, places: 4 * width * places.shape[1],
)


def reference(
    x: np.ndarray[Any, Any],
    expert_rows: np.ndarray[Any, Any],
    places: np.ndarray[Any, Any],
    weights: np.ndarray[Any, Any],
    shared: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """x [num_tokens, width] plus the mixture, in float64."""
    parts = expert_rows.astype(np.float64)[places] * weights[:, :-1, None]
    total: np.ndarray[Any, Any] = parts.sum(axis=1)
    if shared is not None:
        total = total + shared * weights[:, -1:]
    mixed: np.ndarray[Any, Any] = x + total
    return mixed


def mix(
    plan: PlanBuilder,
    x: Tensor,
    expert_rows: Tensor,
    table: ExpertsTable,
    counts: Tensor,
    *,
    width: int,
    shared: Tensor | None = None,
    accumulate: bool = True,
) -> None:
    """Append x[t] (+)= the sum of weights[t, j] * expert_rows[places[t, j]] over j, plus
    weights[t, num_used] * shared[t] where there is one.

    x, shared f32 [num_tokens, >= width padded to 64], expert_rows f32 [num_rows, as much].
    """
    plan.add(
        _MIX,
        x=x,
        expert_rows=expert_rows,
        places=table.places,
        weights=table.weights,
        shared=shared,
        counts=counts,
        width=width,
        accumulate=accumulate,
    )
