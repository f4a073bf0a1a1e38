"""measure: the figures of what activations hold, for who looks on; no step needs them.

Each tensor's figures are words of 64 bits, as `device/digests.py` has them. `measure` leaves those
of parts of tensors, and `join_figures` those of whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import COUNT, Arg, Index, Rule, Scalar, live_counts
from hypocenter.device.digests import BLOCK, NUM_WORDS
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder

#: Tensors that one launch measures, and parts of each of them.
MAX_TENSORS, MAX_PARTS = 5, 128

_MORE = range(1, MAX_TENSORS)
MEASURE = Contract(
    "measure",
    Arg("x", (DType.F32,), "num_rows, >= width"),
    *(Arg(f"x{i}", (DType.F32,), f"num_rows, >= width{i}", optional=True) for i in _MORE),
    Arg("parts", (DType.I64,), f"num_parts, {NUM_WORDS}", "write", alignment_bytes=8),
    live_counts("num_rows"),
    COUNT,
    Scalar("width", "width > 0", "must be above 0"),
    *(Scalar(f"width{i}", f"width{i} >= 0", "must be 0 or above") for i in _MORE),
    Scalar("parts_each", "parts_each > 0", "must be above 0"),
    Rule(
        "num_parts == parts_each * (1 + (width1 > 0) + (width2 > 0) + (width3 > 0) + (width4 > 0))",
        "each tensor must have its parts",
    ),
)
JOIN = Contract(
    "join_figures",
    Arg("parts", (DType.I64,), f"num_parts, {NUM_WORDS}", alignment_bytes=8),
    Arg("figures", (DType.I64,), f"num_tensors, {NUM_WORDS}", "write", alignment_bytes=8),
    Arg(
        "firsts",
        (DType.I32,),
        "num_tensors + 1",
        index=Index("num_parts + 1", "the parts", monotone=True),
    ),
)
_MEASURE = Op(
    MEASURE,
    cpu="rowwise.figures_cpu.measure",
    gpu="rowwise.figures_gpu.launch",
    work_per_row=lambda width, width1, width2, width3, width4: (
        4 * (width + width1 + width2 + width3 + width4)
    ),
)
_JOIN = Op(
    JOIN,
    cpu="rowwise.figures_cpu.join_figures",
    gpu="rowwise.figures_gpu.launch_join",
)


def num_parts_of(num_rows: int, width: int) -> int:
    """Parts in which tensors f32 [num_rows, width] are measured, the widest of a launch."""
    return min(num_rows * -(-width // BLOCK), MAX_PARTS)


def measure(
    plan: PlanBuilder,
    tensors: Sequence[tuple[Tensor, int]],
    parts: Tensor,
    counts: Tensor,
    *,
    count: int = 0,
) -> None:
    """Append parts[i * n + p] = the figures of the units p, p + n, ... of tensor i, n for each.

    `tensors`, up to MAX_TENSORS: f32 [num_rows, >= width], each with its width; a unit is BLOCK
    columns of a live row. parts i64 [num_tensors * n, NUM_WORDS].
    """
    (x, width), *others = tensors
    more: dict[str, Tensor | int | None] = {}
    for i in _MORE:
        more[f"x{i}"], more[f"width{i}"] = others[i - 1] if i <= len(others) else (None, 0)
    each = parts.shape[0] // len(tensors)
    plan.add(
        _MEASURE,
        x=x,
        width=width,
        parts=parts,
        counts=counts,
        count=count,
        parts_each=each,
        **more,
    )


def join_figures(plan: PlanBuilder, parts: Tensor, firsts: Tensor, figures: Tensor) -> None:
    """Append figures[i] = those of parts firsts[i] to firsts[i + 1] - 1 together.

    parts i64 [num_parts, NUM_WORDS], firsts i32 [num_tensors + 1], figures i64 [num_tensors,
    NUM_WORDS].
    """
    plan.add(_JOIN, parts=parts, firsts=firsts, figures=figures)
