"""gate_norm: a row gated by silu, and then normed, each group of columns by itself.

Formula: y = rms_norm(x silu(gate)) weight, groups apart (Dao and Gu, arXiv 2405.21060, section
7.2).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Scalar, live_counts
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder

_F32 = (DType.F32,)
CONTRACT = Contract(
    "gate_norm",
    Arg("gate", _F32, "num_rows, >= num_groups * width", "both"),
    Arg("x", _F32, "num_rows, >= num_groups * width"),
    Arg("weight", _F32, ">= num_groups * width"),
    live_counts("num_rows", 0),
    Apart("gate", "x"),
    Scalar("num_groups", "num_groups > 0", "must be above 0"),
    Scalar("width", "width > 0", "must be above 0"),
    Scalar("eps", "eps > 0", "must be above 0"),
)
GATE_NORM = Op(
    CONTRACT,
    cpu="rowwise.gate_norm_cpu.gate_norm",
    gpu="rowwise.gate_norm_gpu.launch",
    work_per_row=lambda num_groups, width: 16 * num_groups * width,
)


def reference(
    gate: np.ndarray[Any, Any],
    x: np.ndarray[Any, Any],
    weight: np.ndarray[Any, Any],
    eps: float,
    num_groups: int,
) -> np.ndarray[Any, Any]:
    """The formula in float64: gate and x [num_rows, num_groups * width], weight of as many
    columns."""
    z = gate.astype(np.float64)
    gated = (x * z / (1 + np.exp(-z))).reshape(len(x), num_groups, -1)
    mean_square = np.mean(gated**2, axis=-1, keepdims=True)
    out: np.ndarray[Any, Any] = (gated / np.sqrt(mean_square + eps)).reshape(x.shape) * weight
    return out


def gate_norm(
    plan: PlanBuilder,
    gate: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    counts: Tensor,
    *,
    width: int,
    num_groups: int,
) -> None:
    """Append gate = the norm of x silu(gate), over `num_groups` stretches of `width` columns.

    gate and x f32 [num_rows, >= num_groups * width], weight f32 [>= num_groups * width].
    """
    plan.add(
        GATE_NORM,
        gate=gate,
        x=x,
        weight=weight,
        counts=counts,
        num_groups=num_groups,
        width=width,
        eps=eps,
    )
