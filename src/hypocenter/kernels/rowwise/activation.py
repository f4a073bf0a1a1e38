"""activation: what happens to a row element by element: activating, gating, scaling, capping.

Formulas: silu(x) = x / (1 + e**-x); gelu(x) in its tanh form, x / (1 + e**-2u) with
u = sqrt(2 / pi) (x + 0.044715 x**3) (Hendrycks and Gimpel, arXiv 1606.08415); gelu_erf(x) = x
times the normal distribution's integral up to x, by a formula that is 1.5e-7 off at most
(Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26);
relu2(x) = max(x, 0)**2 (So et al., arXiv 2109.08668); sigmoid(x) = 1 / (1 + e**-x); plain(x) = x.
The gate of gpt-oss, "clamped", lets x / (1 + e**-1.702x) (u + 1) through, with x up to 7 and u
within -7 .. 7 (OpenAI's reference, gpt_oss/torch/model.py, `swiglu`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.refusals import WrongScalar
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import COUNT, Apart, Arg, Rule, Scalar, live_counts
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.linear.quantise import INTO_ROUNDED, INTO_TILES

_WHOLE_VECTORS = Rule("width % 16 == 0", "rows must be padded to whole vectors")
GATE = Contract(
    "gate",
    Arg("gate", (DType.F32,), "num_rows, width", "both"),
    Arg("up", (DType.F32,), "num_rows, width"),
    live_counts("num_rows", 0),
    Apart("gate", "up"),
    _WHOLE_VECTORS,
)
#: On a GPU, and on the CPU.
GATE_ROUND, GATE_TILES = (
    Contract(
        f"gate_{kind}",
        Arg("gate", (DType.F32,), "num_rows, gate_pitch"),
        Arg("up", (DType.F32,), "num_rows, gate_pitch"),
        *into,
        live_counts("num_rows", 0),
        Scalar("width", "0 < width <= gate_pitch", "must be above 0 and within the rows"),
    )
    for kind, into in (("round", INTO_ROUNDED), ("codes", INTO_TILES))
)
ACTIVATE = Contract(
    "activate",
    Arg("x", (DType.F32,), "num_rows, width", "both"),
    live_counts("num_rows", 0),
    _WHOLE_VECTORS,
)
#: On a GPU, and on the CPU.
ACTIVATE_ROUND, ACTIVATE_TILES = (
    Contract(
        f"activate_{kind}",
        Arg("x", (DType.F32,), "num_rows, x_pitch"),
        *into,
        live_counts("num_rows", 0),
        Scalar("width", "0 < width <= x_pitch", "must be above 0 and within the rows"),
    )
    for kind, into in (("round", INTO_ROUNDED), ("codes", INTO_TILES))
)
SCALE = Contract(
    "scale",
    Arg("x", (DType.F32,), "num_rows, width", "both"),
    live_counts("num_rows"),
    COUNT,
    Scalar("factor"),
    _WHOLE_VECTORS,
)
SOFTCAP = Contract(
    "softcap",
    Arg("x", (DType.F32,), "num_rows, width", "both"),
    live_counts("num_rows"),
    COUNT,
    Scalar("cap", "cap > 0", "must be above 0"),
    _WHOLE_VECTORS,
)

_GATE = Op(
    GATE,
    cpu="rowwise.activation_cpu.gate",
    gpu="rowwise.activation_gpu.launch_gate",
    work_per_row=lambda gate: 16 * gate.shape[1],
)
_GATE_CODES = Op(
    GATE_TILES,
    gpu_contract=GATE_ROUND,
    cpu="rowwise.activation_cpu.gate_codes",
    gpu="rowwise.activation_gpu.launch_gate_rounded",
    work_per_row=lambda width: 20 * width,
)
_ACTIVATE = Op(
    ACTIVATE,
    cpu="rowwise.activation_cpu.activate",
    gpu="rowwise.activation_gpu.launch_activate",
    work_per_row=lambda x: 16 * x.shape[1],
)
_ACTIVATE_CODES = Op(
    ACTIVATE_TILES,
    gpu_contract=ACTIVATE_ROUND,
    cpu="rowwise.activation_cpu.activate_codes",
    gpu="rowwise.activation_gpu.launch_activate_rounded",
    work_per_row=lambda width: 20 * width,
)
_SCALE = Op(
    SCALE,
    cpu="rowwise.activation_cpu.scale",
    gpu="rowwise.activation_gpu.launch_scale",
    work_per_row=lambda x: x.shape[1],
)
_SOFTCAP = Op(
    SOFTCAP,
    cpu="rowwise.activation_cpu.softcap",
    gpu="rowwise.activation_gpu.launch_softcap",
    work_per_row=lambda x: 16 * x.shape[1],
)

#: Kinds of gates, and what kernels call them.
GATES = {"silu": 0, "gelu": 1, "clamped": 2, "sigmoid": 4, "plain": 5}
#: The same of what is activated where there is no gate.
ACTIVATIONS = {"gelu": 1, "relu2": 3, "gelu_erf": 6}


def reference(
    gate: np.ndarray[Any, Any], up: np.ndarray[Any, Any], kind: str
) -> np.ndarray[Any, Any]:
    """kind(gate) * up in float64."""
    x = gate.astype(np.float64)
    if kind == "clamped":
        x, up = np.minimum(x, 7), np.clip(up.astype(np.float64), -7, 7)
        clamped: np.ndarray[Any, Any] = x / (1 + np.exp(-1.702 * x)) * (up + 1)
        return clamped
    if kind == "sigmoid":
        weighed: np.ndarray[Any, Any] = up / (1 + np.exp(-x))
        return weighed
    if kind == "plain":
        product: np.ndarray[Any, Any] = x * up
        return product
    u = x if kind == "silu" else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    out: np.ndarray[Any, Any] = x / (1 + np.exp(-u)) * up
    return out


def activated_reference(x: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """kind(x) in float64."""
    if kind == "gelu":
        return reference(x, np.ones_like(x), kind)
    if kind == "gelu_erf":
        integrals = [0.5 * (1 + math.erf(value / math.sqrt(2))) for value in np.ravel(x)]
        product: np.ndarray[Any, Any] = x * np.reshape(integrals, x.shape)
        return product
    out: np.ndarray[Any, Any] = np.maximum(x.astype(np.float64), 0) ** 2
    return out


def gate(plan: PlanBuilder, gate: Tensor, up: Tensor, kind: str, counts: Tensor) -> None:
    """Append gate = kind(gate) * up; f32 [num_tokens, width]; kind is one of GATES."""
    require_kind(kind)
    plan.add(_GATE, gate=gate, up=up, counts=counts, kind=GATES[kind])


def gate_codes(
    plan: PlanBuilder,
    gate: Tensor,
    up: Tensor,
    kind: str,
    into: Operands,
    counts: Tensor,
    *,
    width: int,
) -> None:
    """Append the codes of kind(gate) * up or, on a GPU, its halves: every bit as `quantise` makes
    them of that.

    gate and up f32 [num_tokens, >= width], kind as in `gate`; `into` as in `quantise.Operands`.
    """
    require_kind(kind)
    plan.add(
        _GATE_CODES, gate=gate, up=up, counts=counts, width=width, kind=GATES[kind], **into.written
    )


def activate(plan: PlanBuilder, x: Tensor, kind: str, counts: Tensor) -> None:
    """Append x = kind(x), in place; f32 [num_tokens, width]; kind is one of ACTIVATIONS."""
    require_kind(kind, ACTIVATIONS)
    plan.add(_ACTIVATE, x=x, counts=counts, kind=ACTIVATIONS[kind])


def activate_codes(
    plan: PlanBuilder, x: Tensor, kind: str, into: Operands, counts: Tensor, *, width: int
) -> None:
    """Append the codes of kind(x) or, on a GPU, its halves: every bit as `quantise` makes them of
    that.

    x f32 [num_tokens, >= width], kind as in `activate`; `into` as in `quantise.Operands`.
    """
    require_kind(kind, ACTIVATIONS)
    plan.add(
        _ACTIVATE_CODES, x=x, counts=counts, width=width, kind=ACTIVATIONS[kind], **into.written
    )


def require_kind(kind: str, kinds: Collection[str] = GATES) -> None:
    """Raise LaunchRejected for a kind of gate, or of activation, that there is not."""
    if kind not in kinds:
        limit = f"must be {' or '.join(kinds)}"
        wrong = WrongScalar(argument="kind", value=repr(kind), limit=limit)
        raise LaunchRejected("gate" if kinds is GATES else "activate", wrong)


def scale(plan: PlanBuilder, x: Tensor, factor: float, counts: Tensor, *, count: int = 0) -> None:
    """Append x *= factor, in place; x f32 [num_rows, width]."""
    plan.add(_SCALE, x=x, counts=counts, count=count, factor=factor)


def softcap(plan: PlanBuilder, x: Tensor, cap: float, counts: Tensor, *, count: int = 0) -> None:
    """Append x = cap * tanh(x / cap), in place; x f32 [num_rows, width]."""
    plan.add(_SOFTCAP, x=x, counts=counts, count=count, cap=cap)
