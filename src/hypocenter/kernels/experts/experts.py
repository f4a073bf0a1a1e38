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
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
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


def _work_per_row(weight: Tensor, num_used: int) -> int:
    """Multiply-adds for a token; four products of codes take the time of one of floats."""
    _, num_outputs, num_columns = weight.shape
    work: int = num_used * num_outputs * num_columns
    return work // 4 if weight.dtype.is_quantised else work


_ON_CPU, _ON_GPU = ("num_used", "per_expert"), ("products", "shape")
_CODES, _ROUNDED, _FLOATS = (
    Op(
        contract,
        cpu=kernel,
        gpu="experts.experts_gpu.launch_floats",
        work_per_row=_work_per_row,
        cpu_alone=_ON_CPU,
        gpu_alone=_ON_GPU,
    )
    for contract, kernel in (
        (TILES, "experts.experts_cpu.experts_codes"),
        (ROUNDED, "experts.experts_cpu.experts_float"),
        (FLOATS, "experts.experts_cpu.experts_float"),
    )
)
#: On a GPU, of x rounded; codes by how many weights share a launch.
_GPU_ROUNDED = Op(SCALED[0], gpu="experts.experts_gpu.launch_rounded")
_GPU_CODES = tuple(Op(contract, gpu="experts.experts_gpu.launch_codes") for contract in SCALED)
_GATE_CODES = Op(
    GATE_CODES, cpu="experts.experts_cpu.experts_gate_codes", work_per_row=_work_per_row
)


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


def _arguments_of(table: ExpertsTable) -> dict[str, Any]:
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
        arguments = _arguments_of(table)
        for mark, product in zip(_MARKS, group, strict=False):
            arguments |= {
                f"weight{mark}": product.weight,
                f"out{mark}": product.out,
                f"bias{mark}": product.bias,
            }
        dtype = group[0].weight.dtype
        if (rounded := operands.rounded_for(dtype)) is None:
            op = _FLOATS
            arguments["x"] = x
        else:
            op = _GPU_CODES[len(group) - 1] if dtype.is_quantised else _GPU_ROUNDED
            arguments |= {"rounded": rounded, "row_scales": operands.row_scales}
            arguments["fragments"] = operands.fragments if dtype.is_quantised else None
        plan.add(op, **arguments, products=group, shape=table.shape)


def _add_on_cpu(
    plan: PlanBuilder, x: Tensor, product: Product, table: ExpertsTable, operands: Operands
) -> None:
    weight = product.weight
    if weight.dtype.is_quantised:
        op, read = _CODES, operands.read
    elif operands.multiplied_as(weight.dtype) is DType.BF16:
        op, read = _ROUNDED, {"rounded": operands.rounded, "x": operands.rounded}
    else:
        op, read = _FLOATS, {"x": x}
    plan.add(
        op,
        weight=weight,
        out=product.out,
        bias=product.bias,
        **_arguments_of(table),
        **read,
        per_expert=padded_rows(weight.shape[1]) // ROWS_PER_ITEM,
        num_used=table.shape.num_used,
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
    plan.add(
        _GATE_CODES,
        weight=weight,
        width=width,
        **_arguments_of(table),
        **x.read,
        **{f"gated_{name}": one for name, one in into.written.items()},
        kind=GATES[kind],
        per_expert=-(-width // ROWS_PER_ITEM),
        num_used=table.shape.num_used,
    )
