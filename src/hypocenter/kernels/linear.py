"""linear: out = x @ weight.T (+ bias) (+ out), for every weight type of the reader."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.plan import PlanBuilder
from hypocenter.errors import LaunchRejected
from hypocenter.kernels import linear_cpu
from hypocenter.kernels.quant import Packed, padded
from hypocenter.tensor import Tensor

_KERNELS = {"float": linear_cpu.linear_float, "codes": linear_cpu.linear_codes}
_NO_BIAS = np.zeros(0, np.float32)


def reference(
    x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], bias: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """x [num_rows, k] @ weight [n, k].T (+ bias [n]) in float64."""
    out: np.ndarray[Any, Any] = x.astype(np.float64) @ weight.astype(np.float64).T
    return out if bias is None else out + bias


def linear(
    plan: PlanBuilder,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    counts: Tensor,
    *,
    count: int = 0,
    bias: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Append out[:rows, :n] (+)= x[:rows, :k] @ weight.T (+ bias), with rows = counts[count].

    x f32 [num_rows, >= k], weight packed [n, k], bias f32 [>= n padded to 64],
    out f32 [num_rows, >= n padded to 64]. Sums run over the columns in order.
    Raises LaunchRejected when the shapes disagree.
    """
    packed: Packed = weight.data
    num_outputs = padded(packed.num_rows)
    if x.shape[1] < packed.num_columns:
        raise LaunchRejected(
            "linear", f"{x.name} has {x.shape[1]} columns, {weight.name} needs {packed.num_columns}"
        )
    if out.shape[1] < num_outputs:
        raise LaunchRejected(
            "linear", f"{out.name} has {out.shape[1]} columns, {weight.name} gives {num_outputs}"
        )
    if bias is not None and bias.shape[0] < num_outputs:
        raise LaunchRejected(
            "linear", f"{bias.name} has {bias.shape[0]} entries, {weight.name} gives {num_outputs}"
        )
    plan.launch(
        _KERNELS[packed.layout],
        *(x, counts, count, weight, _NO_BIAS if bias is None else bias, out, accumulate),
        work_per_row=packed.num_rows * packed.num_columns,
    )
