"""experts_linear: out = x @ weight.T (+ bias) for sorted rows, each with the weight of its expert.

`experts_table.py` says which rows are whose. An expert that no token takes is not read, and one
that is taken is read once for all its rows. Sums run as in `linear`, whatever the company.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import WEIGHT_TYPES, DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Index, Reach, Rule, Symbols
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.experts import experts_cpu
from hypocenter.kernels.experts.experts_table import ExpertsTable
from hypocenter.kernels.linear.linear import X_SCALED, X_TILES
from hypocenter.kernels.linear.linear_gate import GATED
from hypocenter.kernels.linear.operands import Operands, Product
from hypocenter.kernels.rowwise.activation import GATES, require_kind
from hypocenter.kernels.weights.row_groups import ROWS_PER_ITEM, padded_rows


def _groups(num_rows: str) -> tuple[Arg, ...]:
    """The groups of a table whose sorted rows a contract counts by that name."""
    return (
        Arg("experts", (DType.I32,), "most_groups", index=Index("num_experts", "the experts")),
        Arg("firsts", (DType.I32,), "most_groups", index=Index(num_rows, "the sorted rows")),
        Arg(
            "sizes", (DType.I32,), "most_groups", index=Index(f"{num_rows} + 1", "a group of rows")
        ),
        Arg("found", (DType.I32,), "1", index=Index("most_groups + 1", "the groups")),
    )


def _rows_of_groups(values: Symbols) -> Array:
    mask = np.zeros(values["num_rows"], bool)
    for first, size in zip(values["firsts"], values["sizes"], strict=True):
        mask[first : first + size] = True
    return mask[:, None]


_OF_GROUPS = Reach("the rows of groups", _rows_of_groups)
_MARKS = ("", "_2")


def _weight(mark: str) -> tuple[Arg, ...]:
    """A weight and what belongs to it; in a launch of two, names of the second end in `mark`."""
    # Whole vectors are stored: outputs take a multiple of 64 columns.
    outputs, padded = f"num_outputs{mark}", f"(-(-num_outputs{mark} // 64) * 64)"
    return (
        Arg(f"weight{mark}", WEIGHT_TYPES, f"num_experts, {outputs}, num_columns"),
        Arg(f"out{mark}", (DType.F32,), f"num_rows, >= {padded}", "write", reach=_OF_GROUPS),
        # Those of an expert lie behind those of the experts before, as its rows do.
        Arg(f"bias{mark}", (DType.F32,), f">= num_experts * {padded}", optional=True),
    )


_PRODUCT = (*_weight(""), *_groups("num_rows"))
FLOATS = Contract(
    "experts",
    *_PRODUCT,
    Arg("x", (DType.F32,), "num_rows, >= num_columns"),
    Apart("out", "x"),
)
TILES = Contract(
    "experts",
    *_PRODUCT,
    *X_TILES,
    Rule("num_tiles * tile >= num_rows", "the tiles of x must hold its rows"),
)
#: By how many weights share a launch.
SCALED = (
    Contract("experts", *_PRODUCT, *X_SCALED),
    Contract("experts", *_PRODUCT, *_weight("_2"), Apart("out", "out_2"), *X_SCALED),
)
ROUNDED = Contract(
    "experts",
    *_PRODUCT,
    Arg("rounded", (DType.BF16,), "num_rows, >= num_columns"),
)
GATE_CODES = Contract(
    "experts_gate_codes",
    Arg(
        "weight",
        tuple(dtype for dtype in WEIGHT_TYPES if dtype.is_quantised),
        "num_experts, num_both, num_columns",
    ),
    *_groups("num_tiles * tile"),
    *GATED,
)

_NO_BIAS = np.zeros(0, np.float32)


def reference(
    x: Array, weights: Array, groups: list[tuple[int, int, int]], biases: Array | None = None
) -> Array:
    """x [num_rows, k] of each group (expert, first row, rows) @ weights [num_experts, n, k], plus
    biases [num_experts, n], in float64; rows of no group are 0."""
    out = np.zeros((len(x), weights.shape[1]))
    for expert, first, size in groups:
        rows = slice(first, first + size)
        out[rows] = x[rows].astype(np.float64) @ weights[expert].astype(np.float64).T
        if biases is not None:
            out[rows] += biases[expert]
    return out


def _facts_of(table: ExpertsTable) -> dict[str, Any]:
    return {
        "experts": table.experts,
        "firsts": table.firsts,
        "sizes": table.sizes,
        "found": table.num_groups,
    }


def experts_linear(
    plan: PlanBuilder,
    x: Tensor,
    products: Sequence[Product],
    table: ExpertsTable,
    operands: Operands,
) -> None:
    """Append out[row, :n] = x[row, :k] @ weight[expert].T (+ bias[expert]) of each product, for
    each row of a group of `table`.

    x and out f32 [num_rows, >= k], [num_rows, >= n padded to 64]; weight packed [num_experts, n,
    k]; bias f32, n padded to 64 for each expert. `operands` holds what `prepare_operands` makes of
    x for the weights; those that read codes or rounded numbers do not read x. Two weights share a
    launch on a GPU where rows are few. Raises LaunchRejected when the shapes disagree.
    """
    if plan.device == "cpu":
        for product in products:
            _add_on_cpu(plan, x, product, table, operands)
        return
    from hypocenter.kernels.experts import experts_gpu

    several = len(products) == len(_MARKS) and experts_gpu.takes_both(products, operands, table)
    for group in (products,) if several else ((product,) for product in products):
        facts = _facts_of(table)
        for mark, product in zip(_MARKS, group, strict=False):
            facts |= {
                f"weight{mark}": product.weight,
                f"out{mark}": product.out,
                f"bias{mark}": product.bias,
            }
        dtype = group[0].weight.dtype
        contract = FLOATS
        if (rounded := operands.rounded_for(dtype)) is None:
            facts["x"] = x
        else:
            contract = SCALED[len(group) - 1]
            facts |= {"rounded": rounded, "row_scales": operands.row_scales}
            facts["fragments"] = operands.fragments if dtype.is_quantised else None
        experts_gpu.add(plan, contract, facts, group, table.shape)


def _add_on_cpu(
    plan: PlanBuilder, x: Tensor, product: Product, table: ExpertsTable, operands: Operands
) -> None:
    weight, out, bias = product.weight, product.out, product.bias
    facts: dict[str, Any] = {"weight": weight, "out": out, "bias": bias} | _facts_of(table)
    dtype = weight.dtype
    if dtype.is_quantised:
        contract, kernel = TILES, experts_cpu.experts_codes
        made = {
            "x_scales" if name == "scales" else name: one for name, one in operands.made.items()
        }
    elif operands.multiplied_as(dtype) is DType.BF16:
        contract, kernel, made = ROUNDED, experts_cpu.experts_float, {"rounded": operands.rounded}
    else:
        contract, kernel, made = FLOATS, experts_cpu.experts_float, {"x": x}
    groups = (table.experts, table.firsts, table.sizes, table.num_groups)
    per_expert = padded_rows(weight.shape[1]) // ROWS_PER_ITEM
    plan.add_cpu(
        kernel,
        *(*made.values(), *groups, weight, per_expert, _NO_BIAS if bias is None else bias, out),
        contract=contract,
        facts=facts | made,
        work_per_row=_work_per_row(weight, table),
    )


def experts_gate_codes(
    plan: PlanBuilder,
    x: Operands,
    weight: Tensor,
    kind: str,
    into: Operands,
    table: ExpertsTable,
    *,
    width: int,
) -> None:
    """Append the codes of kind(x @ gate.T) * (x @ up.T) for each row of a group, on the CPU.

    `x` holds the codes of the sorted rows; `weight` both weights of each expert by turns, of
    `width` rows each. As `linear_gate_codes` makes them of one weight.
    """
    require_kind(kind)
    facts: dict[str, Any] = {"weight": weight, "width": width} | _facts_of(table)
    read = {"codes": x.codes, "x_scales": x.scales, "sums": x.sums, "weighted": x.weighted}
    made = {f"gated_{name}": one for name, one in into.made.items()}
    plan.add_cpu(
        experts_cpu.experts_gate_codes,
        *(*read.values(), table.experts, table.firsts, table.sizes, table.num_groups),
        *(weight, -(-width // ROWS_PER_ITEM), GATES[kind], width, *made.values()),
        contract=GATE_CODES,
        facts=facts | read | made,
        work_per_row=_work_per_row(weight, table),
    )


def _work_per_row(weight: Tensor, table: ExpertsTable) -> int:
    """Multiply-adds for a token; four products of codes take the time of one of floats."""
    _, num_outputs, num_columns = weight.shape
    work: int = table.shape.num_used * num_outputs * num_columns
    return work // 4 if weight.dtype.is_quantised else work
