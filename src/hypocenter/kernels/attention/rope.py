"""rope: rotary position embedding of query and key heads, in place.

Formula: the pair (a, b) at position p becomes (a cos - b sin, a sin + b cos) with the angle
p / base**(2 i / rope_dim) (Su et al., arXiv 2104.09864). `normal` pairs neighbours (2i, 2i + 1),
`neox` pairs (i, i + rope_dim / 2); columns from rope_dim on stay.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.refusals import WrongScalar
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Index, Rule, Scalar, live_counts, live_rows
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder

CONTRACT = Contract(
    "rope",
    Arg("x", (DType.F32,), "num_tokens, >= num_heads * head_dim", "both"),
    Arg(
        "positions",
        (DType.I32,),
        ">= num_tokens",
        index=Index("num_positions", "the table", live=live_rows("positions")),
    ),
    Arg("cos", (DType.F32,), "num_positions, half"),
    Arg("sin", (DType.F32,), "num_positions, half"),
    live_counts("num_tokens", 0),
    Scalar("num_heads", "num_heads > 0", "must be above 0"),
    Scalar("head_dim", "head_dim > 0 and head_dim % 2 == 0", "must be even and above 0"),
    Rule("0 < 2 * half <= head_dim", "the table must turn 1 to head_dim / 2 pairs"),
)
ROPE = Op(
    CONTRACT,
    cpu="attention.rope_cpu.rope",
    gpu="attention.rope_gpu.launch",
    work_per_row=lambda num_heads, cos: 4 * num_heads * cos.shape[1],
)


def reference(
    x: np.ndarray[Any, Any], cos: np.ndarray[Any, Any], sin: np.ndarray[Any, Any], style: str
) -> np.ndarray[Any, Any]:
    """x [num_tokens, num_heads, head_dim] rotated by cos, sin [num_tokens, rope_dim / 2], in f64"""
    out = x.astype(np.float64)
    half = cos.shape[-1]
    normal = style == "normal"
    first = slice(0, 2 * half, 2) if normal else slice(0, half)
    second = slice(1, 2 * half, 2) if normal else slice(half, 2 * half)
    a, b = out[..., first].copy(), out[..., second].copy()
    cos, sin = cos[:, None, :], sin[:, None, :]
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


def tables(
    num_positions: int,
    dim: int,
    base: float,
    *,
    scaling: str = "none",
    factor: float = 1.0,
    original_context: int = 0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    divisors: np.ndarray[Any, Any] | None = None,
    rounds_ramp: bool = True,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Cosines and sines, f32 [num_positions, dim / 2], of all angles, computed in float64.

    `divisors` [dim / 2] divide the frequencies one by one (Llama 3.1, Phi 3). `linear` divides
    all by `factor`; `yarn` does so for the slow ones only (Peng et al., arXiv 2309.00071, with
    ggml's ramp: the pair of index i is blended between the pairs that turn beta_fast and
    beta_slow times within original_context, these rounded to whole pairs if `rounds_ramp`). Raises
    LaunchRejected for a base that turns nothing.
    """
    if not 0 < base < np.inf:
        wrong = WrongScalar(argument="rope_base", value=base, limit="must be above 0 and finite")
        raise LaunchRejected("rope", wrong)
    pair = np.arange(dim // 2, dtype=np.float64)
    frequency = base ** (-2 * pair / dim) / (1.0 if divisors is None else divisors)
    if scaling == "linear":
        frequency = frequency / factor
    elif scaling == "yarn":
        bounds = [
            dim * np.log(original_context / (turns * 2 * np.pi)) / (2 * np.log(base))
            for turns in (beta_fast, beta_slow)
        ]
        if rounds_ramp:
            bounds = [np.floor(bounds[0]), np.ceil(bounds[1])]
        low, high = max(bounds[0], 0.0), min(bounds[1], dim - 1.0)
        plain = 1 - np.clip((pair - low) / max(high - low, 0.001), 0, 1)
        frequency = frequency / factor * (1 - plain) + frequency * plain
        attn_factor *= 1 + 0.1 * np.log(factor)
    angle = np.arange(num_positions, dtype=np.float64)[:, None] * frequency
    cos, sin = np.cos(angle) * attn_factor, np.sin(angle) * attn_factor
    return cos.astype(np.float32), sin.astype(np.float32)


def require_style(kernel: str, style: str) -> None:
    """Raises LaunchRejected for a way of pairing that nobody has."""
    if style not in ("normal", "neox"):
        wrong = WrongScalar(argument="style", value=repr(style), limit="must be normal or neox")
        raise LaunchRejected(kernel, wrong)


def rotate(
    plan: PlanBuilder,
    x: Tensor,
    positions: Tensor,
    table: tuple[Tensor, Tensor],
    counts: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    style: str,
) -> None:
    """Append the rotation of x f32 [num_tokens, >= num_heads * head_dim] by its positions.

    `table`: cosines and sines, f32 [context_length, rope_dim / 2].
    """
    cos, sin = table
    require_style("rope", style)
    plan.add(
        ROPE,
        x=x,
        positions=positions,
        cos=cos,
        sin=sin,
        counts=counts,
        num_heads=num_heads,
        head_dim=head_dim,
        neighbours=style == "normal",
    )
