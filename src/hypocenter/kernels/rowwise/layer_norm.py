"""layer_norm: each row less its mean, divided by its standard deviation, scaled and shifted.

Formula: y = (x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps) * weight + bias (Ba, Kiros and
Hinton, arXiv 1607.06450).
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

_SCALARS = (
    live_counts("num_rows"),
    COUNT,
    Scalar("width", "width > 0", "must be above 0"),
    Scalar("eps", "eps > 0", "must be above 0"),
)
_PARTS = (Arg("weight", (DType.F32,), ">= width"), Arg("bias", (DType.F32,), ">= width"), *_SCALARS)
CONTRACT = Contract(
    "layer_norm",
    Arg("x", (DType.F32,), "num_rows, >= num_heads * width"),
    Arg("out", (DType.F32,), "num_rows, >= num_heads * width", "both"),
    Arg("weight", (DType.F32,), ">= num_heads * width"),
    Arg("bias", (DType.F32,), ">= num_heads * width"),
    *_SCALARS,
    Scalar("num_heads", "num_heads > 0", "must be above 0"),
)
#: On a GPU, and on the CPU.
ROUNDED, TILES = (
    Contract(f"layer_norm_{kind}", Arg("x", (DType.F32,), "num_rows, >= width"), *into, *_PARTS)
    for kind, into in (("round", INTO_ROUNDED), ("codes", INTO_TILES))
)
LAYER_NORM = Op(
    CONTRACT,
    cpu="rowwise.layer_norm_cpu.layer_norm",
    gpu="rowwise.layer_norm_gpu.launch",
    work_per_row=lambda num_heads, width: 4 * num_heads * width,
)
LAYER_NORM_CODES = Op(
    TILES,
    gpu_contract=ROUNDED,
    cpu="rowwise.layer_norm_cpu.layer_norm_codes",
    gpu="rowwise.layer_norm_gpu.launch_rounded",
    work_per_row=lambda width: 8 * width,
)


def reference(
    x: np.ndarray[Any, Any],
    weight: np.ndarray[Any, Any],
    bias: np.ndarray[Any, Any],
    eps: float,
) -> np.ndarray[Any, Any]:
    """Layer norm over the last axis in float64."""
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = np.mean(centred**2, axis=-1, keepdims=True)
    out: np.ndarray[Any, Any] = centred / np.sqrt(variance + eps) * weight + bias
    return out


def layer_norm(
    plan: PlanBuilder,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor,
    counts: Tensor,
    *,
    width: int,
    num_heads: int = 1,
    count: int = 0,
) -> None:
    """Append out = layer_norm(x) over `width` columns of each head of each row.

    x and out f32 [num_rows, >= num_heads * width] (may be the same tensor), weight and bias f32
    [>= num_heads * width]: each head has its own.
    """
    plan.add(
        LAYER_NORM,
        x=x,
        weight=weight,
        bias=bias,
        counts=counts,
        count=count,
        width=width,
        eps=eps,
        out=out,
        num_heads=num_heads,
    )


def layer_norm_codes(
    plan: PlanBuilder,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    into: Operands,
    counts: Tensor,
    *,
    width: int,
    count: int = 0,
) -> None:
    """Append the codes of layer_norm(x) or, on a GPU, its halves: every bit as `quantise` makes
    them of its result.

    Arguments as in `layer_norm`; `into` as in `quantise.Operands`.
    """
    plan.add(
        LAYER_NORM_CODES,
        x=x,
        weight=weight,
        bias=bias,
        counts=counts,
        count=count,
        width=width,
        eps=eps,
        **into.written,
    )
