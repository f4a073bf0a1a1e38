"""linear_gate_codes: kind(x @ gate.T) * (x @ up.T) as codes, in one launch on the CPU.

Both weights lie in one, by turns (`packing.pack_by_turns`), so a thread reads them in one stream;
what takes a launch of its own elsewhere is done while the products are in the core's first cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypocenter.base.tensor import WEIGHT_TYPES, DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Scalar, live_counts
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.linear.linear import X_TILES
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.linear.quantise import into_tiles
from hypocenter.kernels.rowwise.activation import GATES, require_kind

#: Codes of x, and those of what the gate makes of it, for a weight of `num_both` rows.
GATED = (
    *X_TILES,
    *into_tiles("width", prefix="gated_"),
    Apart("gated_codes", "codes"),
    Apart("gated_scales", "x_scales"),
    Apart("gated_sums", "sums"),
    Apart("gated_weighted", "weighted"),
    Scalar(
        "width",
        "width > 0 and -(-width // 64) * 128 == num_both",
        "must be that of the gate, whose rows and those of up, each padded to 64, weight has",
    ),
)
CONTRACT = Contract(
    "linear_gate_codes",
    Arg(
        "weight",
        tuple(dtype for dtype in WEIGHT_TYPES if dtype.is_quantised),
        "num_both, num_columns",
    ),
    live_counts("num_tiles * tile", 0),
    *GATED,
)
LINEAR_GATE_CODES = Op(
    CONTRACT,
    cpu="linear.linear_gate_cpu.linear_gate_codes",
    # As in `linear`: four products of codes take the time of one of floats.
    work_per_row=lambda weight: weight.data.num_rows * weight.data.num_columns // 4,
    reads=lambda weight: [(weight.data.parts[0], weight.data.parts[0].shape[0] // 2)],
)


def may_join(dtypes: Sequence[DType]) -> bool:
    """Whether weights can be multiplied so: of their types the last is that of the weight that
    reads what comes of it."""
    *gate_up, down = dtypes
    return len(set(gate_up)) == 1 and gate_up[0].is_quantised and down.is_quantised


def linear_gate_codes(
    plan: PlanBuilder,
    x: Operands,
    weight: Tensor,
    kind: str,
    into: Operands,
    counts: Tensor,
    *,
    width: int,
) -> None:
    """Append the codes of kind(x @ gate.T) * (x @ up.T): every bit as `gate_codes` makes them.

    `x` holds the codes of x, `weight` the two weights by turns, of `width` rows each; kind is one
    of GATES. Raises LaunchRejected when the shapes disagree.
    """
    require_kind(kind)
    plan.add(
        LINEAR_GATE_CODES,
        weight=weight,
        counts=counts,
        width=width,
        kind=GATES[kind],
        **x.read,
        **{f"gated_{name}": one for name, one in into.written.items()},
    )
