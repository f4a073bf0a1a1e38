"""Low-rank adapters: out += scale B (A x), for each row by the adapters of its own sequence.

Hu et al., arXiv 2106.09685, section 4.1. The weight that `out` is a product with is not touched. A
and B of all adapters of that weight lie in one matrix each, rank after rank, and an adapter has
whole tiles of `RANKS` ranks. A row whose scales are all zero keeps its bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import (
    COUNT,
    Apart,
    Arg,
    Index,
    Rule,
    Scalar,
    Symbols,
    live_counts,
)
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.linear.adapter_sizes import RANKS


def _live_rows(values: Symbols) -> Array:
    num_live: int = values["counts"][values["count"]]
    live: Array = np.arange(len(values["sequences"])) < num_live
    return live


_FLOATS = (DType.F32, DType.F16)
#: Whose ranks those of a tile are, what they count, and which adapters a row has.
_ROWS = (
    Arg("owners", (DType.I32,), "num_tiles", index=Index("num_adapters", "the adapters")),
    Arg("scales", (DType.F32,), "num_sequences, num_adapters"),
    Arg(
        "sequences",
        (DType.I32,),
        ">= num_rows",
        index=Index("num_sequences", "the sequences", live=_live_rows),
    ),
    live_counts("num_rows"),
    COUNT,
    Rule(f"num_ranks == {RANKS} * num_tiles", f"ranks must be whole tiles of {RANKS}"),
    Rule("pitch % 64 == 0", "rows of a matrix must be padded to whole blocks of 64"),
)
DOWN = Contract(
    "adapter_down",
    Arg("down", _FLOATS, "num_ranks, pitch"),
    Arg("x", (DType.F32,), "num_rows, >= num_columns"),
    Arg("products", (DType.F32,), "num_rows, >= num_ranks", "write", fills="num_ranks"),
    Arg("factors", (DType.F32,), "num_tiles"),
    *_ROWS,
    Scalar("num_columns", "0 < num_columns <= pitch", "must be above 0 and within the matrix"),
    Apart("products", "x"),
)
UP = Contract(
    "adapter_up",
    Arg("up", _FLOATS, "num_ranks, pitch"),
    Arg("products", (DType.F32,), "num_rows, >= num_ranks"),
    Arg("out", (DType.F32,), "num_rows, >= pitch", "both"),
    *_ROWS,
    Apart("out", "products"),
)
ADAPTER_DOWN = Op(
    DOWN,
    cpu="linear.adapter_cpu.adapter_down",
    gpu="linear.adapter_gpu.launch_down",
    work_per_row=lambda down: down.shape[0] * down.shape[1],
)
ADAPTER_UP = Op(
    UP,
    cpu="linear.adapter_cpu.adapter_up",
    gpu="linear.adapter_gpu.launch_up",
    work_per_row=lambda up: up.shape[0] * up.shape[1],
)


def reference(
    x: np.ndarray[Any, Any], down: np.ndarray[Any, Any], up: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """x [num_rows, k] by A [rank, k] and B [n, rank], in float64."""
    wide = x.astype(np.float64) @ down.astype(np.float64).T
    out: np.ndarray[Any, Any] = wide @ up.astype(np.float64).T
    return out


def adapter_down(
    plan: PlanBuilder,
    x: Tensor,
    down: Tensor,
    products: Tensor,
    *,
    owners: Tensor,
    factors: Tensor,
    scales: Tensor,
    sequences: Tensor,
    counts: Tensor,
    num_columns: int,
    count: int = 0,
) -> None:
    """Append products[t, r] = scale (A x)[r] for row t of x; 0 of ranks that t has nothing of.

    x f32 [num_rows, >= num_columns]; down f16 or f32 [num_ranks, num_columns padded to 64];
    products f32 [num_rows, >= num_ranks]. owners i32 and factors f32 [num_ranks / RANKS]: whose
    ranks those of a tile are, and what they count beside the scale of that adapter, of scales f32
    [num_sequences, num_adapters]. sequences i32 [>= num_rows]: the row of `scales` that belongs to
    each row of x. Raises LaunchRejected when shapes disagree.
    """
    plan.add(
        ADAPTER_DOWN,
        down=down,
        x=x,
        products=products,
        factors=factors,
        owners=owners,
        scales=scales,
        sequences=sequences,
        counts=counts,
        count=count,
        num_columns=num_columns,
    )


def adapter_up(
    plan: PlanBuilder,
    products: Tensor,
    up: Tensor,
    out: Tensor,
    *,
    owners: Tensor,
    scales: Tensor,
    sequences: Tensor,
    counts: Tensor,
    count: int = 0,
) -> None:
    """Append out += what `up`, B transposed, f16 or f32 [num_ranks, outputs padded to 64], makes of
    `products`; the others are as in `adapter_down`. Raises LaunchRejected when shapes disagree."""
    plan.add(
        ADAPTER_UP,
        up=up,
        products=products,
        out=out,
        owners=owners,
        scales=scales,
        sequences=sequences,
        counts=counts,
        count=count,
    )
