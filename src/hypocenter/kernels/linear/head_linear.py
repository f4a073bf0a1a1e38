"""head_linear: a product for each head of activations, by a weight of its own.

Formula: out[t, h] = x[t, h, num_inputs:] followed by weight[h].T x[t, h, :num_inputs]. It is what
keys and values that lie compressed are multiplied by, on the side of the queries and of attention's
result (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). Weights are floats on all devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Rule, Scalar, live_counts
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder

CONTRACT = Contract(
    "head_linear",
    Arg("weight", (DType.F32, DType.F16), "num_heads, num_inputs, pitch"),
    Arg("x", (DType.F32,), "num_tokens, >= num_heads * (num_inputs + num_kept)"),
    Arg("out", (DType.F32,), "num_tokens, >= num_heads * (num_kept + num_outputs)", "write"),
    live_counts("num_tokens", 0),
    Scalar("num_kept", "num_kept >= 0", "must not be negative"),
    Scalar("num_outputs", "0 < num_outputs <= pitch", "must be above 0 and within the weight"),
    Rule("pitch % 64 == 0", "rows of a weight must be padded to whole blocks of 64"),
    Apart("out", "x"),
)
HEAD_LINEAR = Op(
    CONTRACT,
    cpu="linear.head_linear_cpu.head_linear",
    gpu="linear.head_linear_gpu.launch",
    work_per_row=lambda weight, num_outputs: weight.shape[0] * weight.shape[1] * num_outputs,
)


def reference(x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """x [num_tokens, num_heads, >= num_inputs] by weight [num_heads, num_inputs, num_outputs], in
    float64: [num_tokens, num_heads, what is left of x and num_outputs]."""
    num_inputs = weight.shape[1]
    wide = x.astype(np.float64)
    product = np.einsum("thi,hio->tho", wide[..., :num_inputs], weight.astype(np.float64))
    out: np.ndarray[Any, Any] = np.concatenate([wide[..., num_inputs:], product], axis=2)
    return out


def head_linear(
    plan: PlanBuilder,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    counts: Tensor,
    *,
    num_outputs: int,
    num_kept: int = 0,
) -> None:
    """Append out = what each head's weight makes of x, behind what it keeps of it.

    weight f16 or f32 [num_heads, num_inputs, num_outputs padded to 64]; x f32 [num_tokens, >=
    num_heads * (num_inputs + num_kept)]; out f32 [num_tokens, >= num_heads * (num_kept +
    num_outputs)]. Each output adds its inputs in order. Raises LaunchRejected when shapes disagree.
    """
    plan.add(
        HEAD_LINEAR,
        weight=weight,
        x=x,
        out=out,
        counts=counts,
        num_kept=num_kept,
        num_outputs=num_outputs,
    )
