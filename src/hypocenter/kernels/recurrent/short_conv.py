"""short_conv: a causal convolution over the last few tokens of a sequence, each channel by itself.

Formula: y[t] = f(bias + sum over i of weight[i] x[t - num_taps + 1 + i]), with zeros before the
sequence, f being silu (Yang et al., arXiv 2412.06464, section 3.4) or nothing. Between steps a
state keeps the inputs of the last num_taps - 1 tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Rule, Scalar
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.recurrent.sequences import SEQUENCES, Sequences

_F32 = (DType.F32,)
CONTRACT = Contract(
    "short_conv",
    Arg("state", _F32, "num_slots, num_kept, channels", "both"),
    Arg("weight", _F32, "num_kept + 1, channels"),
    Arg("bias", _F32, "channels", optional=True),
    Arg("x", _F32, "num_tokens, channels"),
    Arg("out", _F32, "num_tokens, channels", "write"),
    *SEQUENCES,
    Apart("out", "x"),
    Apart("out", "state"),
    Scalar("activates", "activates in (0, 1)", "must be 0 or 1"),
    Rule("num_kept > 0", "a convolution of one token keeps nothing"),
    Rule("channels % 64 == 0", "rows must be padded to whole blocks of 64"),
)
SHORT_CONV = Op(
    CONTRACT,
    cpu="recurrent.short_conv_cpu.short_conv",
    gpu="recurrent.short_conv_gpu.launch",
    work_per_row=lambda weight, x: (weight.shape[0] + 16) * x.shape[1],
    gpu_alone=("num_sequences",),
)


def reference(
    x: np.ndarray[Any, Any],
    weight: np.ndarray[Any, Any],
    bias: np.ndarray[Any, Any] | None = None,
    *,
    activates: bool = True,
) -> np.ndarray[Any, Any]:
    """A whole sequence in float64: x [num_tokens, channels], weight [num_taps, channels], bias
    [channels]."""
    num_kept = len(weight) - 1
    padded = np.concatenate([np.zeros((num_kept, x.shape[1])), x.astype(np.float64)])
    total = np.zeros(x.shape) if bias is None else np.zeros(x.shape) + bias
    for tap, factor in enumerate(weight.astype(np.float64)):
        total += factor * padded[tap : tap + len(x)]
    out: np.ndarray[Any, Any] = total / (1 + np.exp(-total)) if activates else total
    return out


def short_conv(
    plan: PlanBuilder,
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    out: Tensor,
    sequences: Sequences,
    *,
    bias: Tensor | None = None,
    activates: bool = True,
    num_sequences: int | None = None,
) -> None:
    """Append the convolution of x f32 [num_tokens, channels] into out of that shape; with
    `activates` silu of it.

    weight f32 [num_taps, channels], the oldest token's first; bias f32 [channels]; state f32
    [num_slots, num_taps - 1, channels] is read and left behind the last token. Channels are padded
    to 64. `num_sequences` is how many there may be (all of `sequences` when None); it changes no
    bit.
    """
    plan.add(
        SHORT_CONV,
        x=x,
        weight=weight,
        bias=bias,
        state=state,
        out=out,
        activates=int(activates),
        num_sequences=num_sequences or sequences.max_sequences,
        **sequences.arguments,
    )
