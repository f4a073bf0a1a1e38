"""delta_rule: the recurrence of a Gated Delta Net, a head's state being a matrix of keys by values.

Formula, for each token: S = decay S; S += beta k (v - k S); o = q S (Yang et al., arXiv 2412.06464,
equation 10), with q and k divided by their lengths, q by the root of its size as well,
beta = sigmoid(b) and decay = e**(rate softplus(a + bias)), rate being below 0. Tokens are taken one
after the other, in prompts too: what comes of several at once would depend on where they begin.
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
    "delta_rule",
    Arg("state", _F32, "num_slots, num_heads, key_dim, value_pitch", "both"),
    Arg("x", _F32, "num_tokens, >= 2 * num_key_heads * key_dim + num_heads * value_dim"),
    Arg("betas", _F32, "num_tokens, >= num_heads"),
    Arg("steps", _F32, "num_tokens, >= num_heads"),
    Arg("step_bias", _F32, ">= num_heads"),
    Arg("rates", _F32, ">= num_heads"),
    Arg(
        "out", _F32, "num_tokens, >= num_heads * value_dim", "write", fills="num_heads * value_dim"
    ),
    *SEQUENCES,
    Apart("out", "x"),
    Scalar("num_key_heads", "num_key_heads > 0", "must be above 0"),
    Scalar("value_dim", "0 < value_dim <= value_pitch", "must be above 0 and fit the state"),
    Scalar("heads_in_turn", "heads_in_turn > 0", "must be above 0"),
    Rule("num_heads % num_key_heads == 0", "value heads must share key heads evenly"),
    Rule("value_pitch % 64 == 0", "rows of the state must be padded to whole blocks of 64"),
)
DELTA_RULE = Op(
    CONTRACT,
    cpu="recurrent.delta_rule_cpu.delta_rule",
    gpu="recurrent.delta_rule_gpu.launch",
    work_per_row=lambda state: 3 * math.prod(state.shape[1:]),
    gpu_alone=("num_sequences",),
)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """How many heads of keys there are, columns of a value, and which key head a value head has.

    `heads_in_turn` value heads, one behind the other, share a key head, and the next ones the next;
    behind the last key head comes the first again.
    """

    num_key_heads: int
    value_dim: int
    heads_in_turn: int


def reference(
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    beta: np.ndarray[Any, Any],
    decay: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """A whole sequence in float64: q and k [num_tokens, num_heads, key_dim], one for each value
    head, v [num_tokens, num_heads, value_dim], beta and decay [num_tokens, num_heads]."""
    queries, keys, values = (x.astype(np.float64) for x in (q, k, v))
    queries = queries / np.sqrt((queries**2).sum(-1, keepdims=True) + 1e-6) / q.shape[-1] ** 0.5
    keys = keys / np.sqrt((keys**2).sum(-1, keepdims=True) + 1e-6)
    state = np.zeros((q.shape[1], q.shape[2], v.shape[2]))
    out = np.zeros(v.shape)
    for token, key in enumerate(keys):
        state *= decay[token][:, None, None]
        delta = values[token] - np.einsum("hk,hkv->hv", key, state)
        state += np.einsum("hk,hv->hkv", key, beta[token][:, None] * delta)
        out[token] = np.einsum("hk,hkv->hv", queries[token], state)
    return out


def delta_rule(
    plan: PlanBuilder,
    x: Tensor,
    betas: Tensor,
    steps: Tensor,
    step_bias: Tensor,
    rates: Tensor,
    state: Tensor,
    out: Tensor,
    sequences: Sequences,
    *,
    heads: DeltaHeads,
    num_sequences: int | None = None,
) -> None:
    """Append the recurrence over x f32 [num_tokens, ..] into out f32 [num_tokens, ..].

    A row of x has q of each key head, then k of each, then v of each value head; a row of out has
    what comes of each value head. betas and steps f32 [num_tokens, >= num_heads] are b and a of the
    formula; step_bias and rates f32 [>= num_heads]. state f32 [num_slots, num_heads, key_dim,
    value_dim padded to 64] is read and left behind the last token. `num_sequences` is how many
    there may be (all of `sequences` when None); it changes no bit.
    """
    plan.add(
        DELTA_RULE,
        x=x,
        betas=betas,
        steps=steps,
        step_bias=step_bias,
        rates=rates,
        state=state,
        out=out,
        num_key_heads=heads.num_key_heads,
        value_dim=heads.value_dim,
        heads_in_turn=heads.heads_in_turn,
        num_sequences=num_sequences or sequences.max_sequences,
        **sequences.arguments,
    )
