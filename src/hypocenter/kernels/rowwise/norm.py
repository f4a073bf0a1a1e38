"""rms_norm: each row, or each head of a row, divided by its root mean square and scaled.

Formula: y = x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich, arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import COUNT, Arg, Scalar, live_counts
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.linear.quantise import INTO_ROUNDED, INTO_TILES

_PARTS = (
    Arg("weight", (DType.F32,), ">= width"),
    live_counts("num_rows"),
    COUNT,
    Scalar("width", "width > 0", "must be above 0"),
    Scalar("eps", "eps > 0", "must be above 0"),
)
CONTRACT = Contract(
    "rms_norm",
    Arg("x", (DType.F32,), "num_rows, >= num_heads * width"),
    Arg("out", (DType.F32,), "num_rows, >= num_heads * width", "both"),
    *_PARTS,
    Scalar("num_heads", "num_heads > 0", "must be above 0"),
)
#: On a GPU, and on the CPU.
ROUNDED, TILES = (
    Contract(f"rms_norm_{kind}", Arg("x", (DType.F32,), "num_rows, >= width"), *into, *_PARTS)
    for kind, into in (("round", INTO_ROUNDED), ("codes", INTO_TILES))
)
RMS_NORM = Op(
    CONTRACT,
    cpu="rowwise.norm_cpu.rms_norm",
    gpu="rowwise.norm_gpu.launch",
    work_per_row=lambda num_heads, width: 2 * num_heads * width,
)
RMS_NORM_CODES = Op(
    TILES,
    gpu_contract=ROUNDED,
    cpu="rowwise.norm_cpu.rms_norm_codes",
    gpu="rowwise.norm_gpu.launch_rounded",
    work_per_row=lambda width: 6 * width,
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
    plan.add(
        RMS_NORM,
        x=x,
        weight=weight,
        counts=counts,
        count=count,
        width=width,
        eps=eps,
        out=out,
        num_heads=num_heads,
        accumulate=accumulate,
    )


def rms_norm_codes(
    plan: PlanBuilder,
    x: Tensor,
    weight: Tensor,
    eps: float,
    into: Operands,
    counts: Tensor,
    *,
    width: int,
    count: int = 0,
) -> None:
    """Append the codes of rms_norm(x) or, on a GPU, its halves: every bit as `quantise` makes
    them of its result.

    x f32 [num_rows, >= width], weight f32 [>= width]; `into` as in `quantise.Operands`.
    """
    plan.add(
        RMS_NORM_CODES,
        x=x,
        weight=weight,
        counts=counts,
        count=count,
        width=width,
        eps=eps,
        **into.written,
    )
