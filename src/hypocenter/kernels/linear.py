"""linear: out = x @ weight.T (+ bias) (+ out), for every weight type of the reader.

A GPU multiplies block types by activations made codes (`quantise.py`), the CPU by x itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels import linear_cpu
from hypocenter.kernels.contract import COUNT, Apart, Arg, Contract, live_counts
from hypocenter.kernels.quant import Packed
from hypocenter.kernels.quantise import Operands, present
from hypocenter.tensor import WEIGHT_TYPES, DType, Tensor

# Whole vectors are stored: outputs take a multiple of 64 columns.
_PADDED = ">= -(-num_outputs // 64) * 64"
_PARTS = (
    Arg("weight", WEIGHT_TYPES, "num_outputs, num_columns"),
    Arg("x", (DType.F32,), "num_rows, >= num_columns"),
    Arg("out", (DType.F32,), f"num_rows, {_PADDED}", "both"),
    Arg("bias", (DType.F32,), _PADDED, optional=True),
    live_counts("num_rows"),
    COUNT,
    Apart("out", "x"),
)
CONTRACT = Contract("linear", *_PARTS)

# What a GPU kernel reads beside: x as codes, or as pieces.
_PITCH = ">= -(-num_columns // 64)"
CODES = Contract(
    "linear",
    *_PARTS,
    Arg("codes", (DType.I32,), f"num_rows, {_PITCH} * 16"),
    Arg("x_scales", (DType.F32,), f"num_rows, {_PITCH} * 2"),
    Arg("sums", (DType.I32,), f"num_rows, {_PITCH} * 2"),
)
PIECES = Contract(
    "linear",
    *_PARTS,
    Arg("pieces", (DType.F16, DType.I16), f"num_rows, num_pieces, {_PITCH} * 64"),
    Arg("row_scales", (DType.F32,), "num_rows"),
)

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
    operands: Operands | None = None,
) -> None:
    """Append out[:rows, :n] (+)= x[:rows, :k] @ weight.T (+ bias), with rows = counts[count].

    x f32 [num_rows, >= k], weight packed [n, k], bias f32 [>= n padded to 64],
    out f32 [num_rows, >= n padded to 64]. `operands`: what `present` made of x for a GPU, made here
    when None. Sums run in one order whatever the number of rows.
    Raises LaunchRejected when the shapes disagree.
    """
    packed: Packed = weight.data
    facts: dict[str, Any] = {"weight": weight, "x": x, "out": out, "bias": bias}
    facts |= {"counts": counts, "count": count}
    if plan.device != "cpu":
        from hypocenter.kernels import linear_gpu

        CONTRACT.check(**facts)
        if operands is None:
            num_rows, width = x.shape[0], packed.num_columns
            operands = Operands.allocate([weight.dtype], num_rows, width, device=plan.device)
            present(plan, x, [weight], operands, counts, count=count)
        contract = CONTRACT
        if weight.dtype.is_quantised:
            contract = CODES
            facts |= {"codes": operands.codes, "x_scales": operands.scales, "sums": operands.sums}
        elif (pieces := operands.pieces(weight.dtype)) is not None:
            contract = PIECES
            facts |= {"pieces": pieces, "row_scales": operands.row_scales}
        linear_gpu.launch(plan, contract, facts, count, accumulate)
        return
    plan.launch(
        linear_cpu.linear_float if packed.layout.is_float else linear_cpu.linear_codes,
        *(x, counts, count, weight, _NO_BIAS if bias is None else bias, out, accumulate),
        contract=CONTRACT,
        facts=facts,
        work_per_row=packed.num_rows * packed.num_columns,
    )
