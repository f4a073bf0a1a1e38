"""ssm_scan: the recurrence of Mamba-2, a head's state being a matrix of state columns by values.

Formula, for each token: S = decay S + t B x; y = C S + skip x (Dao and Gu, arXiv 2405.21060,
section 6), with t = softplus(a + bias) and decay = e**(rate t), rate being below 0. Tokens are
taken one after the other, in prompts too: what comes of several at once would depend on where they
begin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    "ssm_scan",
    Arg("state", _F32, "num_slots, num_heads, state_dim, value_pitch", "both"),
    Arg("x", _F32, "num_tokens, >= num_heads * value_dim + 2 * num_groups * state_dim"),
    Arg("steps", _F32, "num_tokens, >= num_heads"),
    Arg("step_bias", _F32, ">= num_heads"),
    Arg("rates", _F32, ">= num_heads"),
    Arg("skips", _F32, ">= num_heads"),
    Arg(
        "out", _F32, "num_tokens, >= num_heads * value_dim", "write", fills="num_heads * value_dim"
    ),
    *SEQUENCES,
    Apart("out", "x"),
    Scalar("num_groups", "num_groups > 0", "must be above 0"),
    Scalar("value_dim", "0 < value_dim <= value_pitch", "must be above 0 and fit the state"),
    Rule("num_heads % num_groups == 0", "heads must share groups evenly"),
    Rule("value_pitch % 64 == 0", "rows of the state must be padded to whole blocks of 64"),
)
SSM_SCAN = Op(
    CONTRACT,
    cpu="recurrent.ssm_scan_cpu.ssm_scan",
    gpu="recurrent.ssm_scan_gpu.launch",
    work_per_row=lambda state: 2 * math.prod(state.shape[1:]),
    gpu_alone=("num_sequences",),
)


@dataclass(frozen=True, slots=True)
class ScanHeads:
    """How many groups of B and C there are, each for as many heads one behind the other, and the
    columns of a head's values."""

    num_groups: int
    value_dim: int


def reference(
    x: np.ndarray[Any, Any],
    of_state: np.ndarray[Any, Any],
    read_by: np.ndarray[Any, Any],
    steps: np.ndarray[Any, Any],
    rates: np.ndarray[Any, Any],
    skips: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """A whole sequence in float64: x [num_tokens, num_heads, value_dim], B and C [num_tokens,
    num_heads, state_dim], one for each head, steps [num_tokens, num_heads] above 0."""
    values, keys, queries = (part.astype(np.float64) for part in (x, of_state, read_by))
    state = np.zeros((x.shape[1], of_state.shape[2], x.shape[2]))
    out = np.zeros(x.shape)
    for token, step in enumerate(steps.astype(np.float64)):
        state *= np.exp(rates * step)[:, None, None]
        state += np.einsum("hn,hv->hnv", keys[token], step[:, None] * values[token])
        out[token] = np.einsum("hn,hnv->hv", queries[token], state)
        out[token] += skips[:, None] * values[token]
    return out


def ssm_scan(
    plan: PlanBuilder,
    x: Tensor,
    steps: Tensor,
    step_bias: Tensor,
    rates: Tensor,
    skips: Tensor,
    state: Tensor,
    out: Tensor,
    sequences: Sequences,
    *,
    heads: ScanHeads,
    num_sequences: int | None = None,
) -> None:
    """Append the recurrence over x f32 [num_tokens, ..] into out f32 [num_tokens, ..].

    A row of x has the values of each head, then B of each group, then C of each; a row of out has
    what comes of each head. steps f32 [num_tokens, >= num_heads] are a of the formula; step_bias,
    rates and skips f32 [>= num_heads]. state f32 [num_slots, num_heads, state_dim, value_dim padded
    to 64] is read and left behind the last token. `num_sequences` is how many there may be (all of
    `sequences` when None); it changes no bit.
    """
    plan.add(
        SSM_SCAN,
        x=x,
        steps=steps,
        step_bias=step_bias,
        rates=rates,
        skips=skips,
        state=state,
        out=out,
        num_groups=heads.num_groups,
        value_dim=heads.value_dim,
        num_sequences=num_sequences or sequences.max_sequences,
        **sequences.arguments,
    )
