"""rms_norm: each row, or each head of a row, divided by its root mean square and scaled.

Formula: y = x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich, arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels import norm_cpu
from hypocenter.kernels.contract import COUNT, Arg, Contract, Scalar, live_counts
from hypocenter.tensor import DType, Tensor

CONTRACT = Contract(
    "rms_norm",
    Arg("x", (DType.F32,), "num_rows, >= num_heads * width"),
    Arg("out", (DType.F32,), "num_rows, >= num_heads * width", "both"),
    Arg("weight", (DType.F32,), ">= width"),
    live_counts("num_rows"),
    COUNT,
    Scalar("num_heads", "num_heads > 0", "must be above 0"),
    Scalar("width", "width > 0", "must be above 0"),
    Scalar("eps", "eps > 0", "must be above 0"),
)


def reference(
    x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], eps: float
) -> np.ndarray[Any, Any]:
    """RMS norm over the last axis in float64."""
    wide = x.astype(np.float64)
    mean_square = np.mean(wide**2, axis=-1, keepdims=True)
    out: np.ndarray[Any, Any] = wide / np.sqrt(mean_square + eps) * weight
    return out


def rms_norm(
    plan: PlanBuilder,
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    counts: Tensor,
    *,
    width: int,
    count: int = 0,
    num_heads: int = 1,
    accumulate: bool = False,
) -> None:
    """Append out (+)= rms_norm(x) over `num_heads` stretches of `width` columns in each row.

    x and out f32 [num_rows, >= num_heads * width] (may be the same tensor), weight f32 [>= width].
    """
    facts = {
        "x": x,
        "out": out,
        "weight": weight,
        "counts": counts,
        "count": count,
        "num_heads": num_heads,
        "width": width,
        "eps": eps,
    }
    if plan.device != "cpu":
        from hypocenter.kernels import norm_gpu

        norm_gpu.launch(plan, CONTRACT, facts, count, accumulate)
        return
    plan.launch(
        norm_cpu.rms_norm,
        *(x, counts, count, weight, np.float32(eps), out, num_heads, width, accumulate),
        contract=CONTRACT,
        facts=facts,
        work_per_row=2 * num_heads * width,
    )
