"""linear: out = x @ weight.T (+ bias) (+ out), for every weight type of the reader.

On the CPU block types are multiplied by activations made codes (`quantise.py`), float types by x
itself, or BF16 by x rounded where that is asked for. On a GPU all but F32 take x rounded: BF16 to
its type, the others to f16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hypocenter.base.tensor import WEIGHT_TYPES, DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import COUNT, Apart, Arg, Rule, live_counts
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.linear.operands import Operands, Product
from hypocenter.kernels.linear.quantise import prepare_operands
from hypocenter.kernels.weights.row_groups import ROWS_PER_ITEM, padded_rows


def _product(mark: str) -> tuple[Arg, ...]:
    """A weight and what belongs to it; in a launch of several, names from the second on end in
    `mark`."""
    # Whole vectors are stored: outputs take a multiple of 64 columns.
    padded = f">= -(-num_outputs{mark} // 64) * 64"
    return (
        Arg(f"weight{mark}", WEIGHT_TYPES, f"num_outputs{mark}, num_columns"),
        Arg(f"out{mark}", (DType.F32,), f"num_rows, {padded}", "both"),
        Arg(f"bias{mark}", (DType.F32,), padded, optional=True),
    )


_MARKS = ("", "_2", "_3")
_PARTS = (live_counts("num_rows"), COUNT)
# What is read of x: itself, x rounded or, on the CPU, tiles of codes.
_FLOATS = (Arg("x", (DType.F32,), "num_rows, >= num_columns"),)
X_TILES = (
    Arg("codes", (DType.I32,), "num_tiles, num_groups, tile, 8"),
    Arg("x_scales", (DType.F32,), "num_tiles, num_groups, tile"),
    Arg("sums", (DType.I32,), "num_tiles, num_groups, 3, tile"),
    Arg("weighted", (DType.F32,), "num_tiles, num_groups, 3, tile"),
    Rule("-(-num_columns // 64) * 2 <= num_groups", "the groups of x must hold a row"),
)
_TILES = (*X_TILES, Rule("num_tiles * tile >= num_rows", "the tiles of x must hold its rows"))
X_SCALED = (
    Arg("rounded", (DType.F16, DType.I16), "num_rows, >= -(-num_columns // 128) * 128"),
    Arg("row_scales", (DType.F32,), "num_rows"),
    Arg("fragments", (DType.F16,), "num_rows, >= -(-num_columns // 128) * 128", optional=True),
)
_ROUNDED = (Arg("rounded", (DType.BF16,), "num_rows, >= num_columns"),)


def _up_to_three(operands: tuple[Arg | Rule, ...]) -> tuple[Contract, ...]:
    """The contracts, by how many weights share a launch."""
    contracts: list[Contract] = []
    products: list[Arg | Apart] = []
    for mark in _MARKS:
        products += _product(mark)
        if operands is _FLOATS:
            products.append(Apart(f"out{mark}", "x"))
        contracts.append(Contract("linear", *products, *_PARTS, *operands))
    return tuple(contracts)


FLOATS, TILES, SCALED, ROUNDED = map(_up_to_three, (_FLOATS, _TILES, X_SCALED, _ROUNDED))
CONTRACT = FLOATS[0]
_MOST = len(_MARKS)


def _work(products: Sequence[Product]) -> int:
    num_rows: int = sum(product.weight.data.num_rows for product in products)
    return num_rows * int(products[0].weight.data.num_columns)


def _work_of_codes(products: Sequence[Product]) -> int:
    return _work(products) // 4  # four products of codes take the time of one of floats


def _weights_read(products: Sequence[Product]) -> list[tuple[Any, int]]:
    """The arrays of weights, and the items of each."""
    weights = [product.weight.data for product in products]
    return [(weight.parts[0], padded_rows(weight.num_rows) // ROWS_PER_ITEM) for weight in weights]


# By how many weights share a launch, as contracts are. Products of codes read codes of x on the CPU
# and x rounded to f16 on GPUs, those of two bytes x rounded or, with F16 on the CPU, itself.
_OF_CODES, _OF_ROUNDED, _OF_FLOATS = (
    tuple(
        Op(
            on_cpu,
            gpu_contract=on_gpu,
            cpu=kernel,
            gpu=f"linear.linear_gpu.{launch}",
            work_per_row=work,
            reads=_weights_read,
        )
        for on_cpu, on_gpu in zip(contracts, gpu_contracts, strict=True)
    )
    for contracts, gpu_contracts, kernel, launch, work in (
        (
            TILES,
            SCALED,
            "linear.linear_cpu.linear_codes",
            "launch_codes",
            lambda products: _work(products) // 4,
        ),
        (ROUNDED, SCALED, "linear.linear_cpu.linear_float", "launch_rounded", _work),
        (FLOATS, FLOATS, "linear.linear_cpu.linear_float", "launch_floats", _work),
    )
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
    in_bf16: bool = False,
) -> None:
    """Append out[:rows, :n] (+)= x[:rows, :k] @ weight.T (+ bias), with rows = counts[count].

    As `linear_several` of one product, with operands made for it alone; `in_bf16`: those of a
    BF16 weight are rounded.
    """
    num_rows, width = x.shape[0], weight.data.num_columns
    CONTRACT.check(weight=weight, x=x, out=out, bias=bias, counts=counts, count=count)
    operands = Operands.allocate(
        [weight.dtype], num_rows, width, device=plan.device, in_bf16=in_bf16
    )
    operands = operands.first(num_rows)
    product = Product(weight, out, bias)
    linear_several(plan, x, [product], counts, operands, count=count, accumulate=accumulate)


def linear_several(
    plan: PlanBuilder,
    x: Tensor,
    products: Sequence[Product],
    counts: Tensor,
    operands: Operands,
    *,
    count: int = 0,
    accumulate: bool = False,
    is_ready: bool = False,
) -> None:
    """Append products of x f32 [num_rows, >= k] with several weights, x made ready once.

    `operands` are buffers for what `prepare_operands` makes of x, and hold it already where
    `is_ready`. Up to three weights of one type share a launch, on a GPU where rows are few. Sums
    run in one order whatever the number of rows. Raises LaunchRejected when the shapes disagree.
    """
    if not is_ready:
        prepare_operands(
            plan, x, [product.weight for product in products], operands, counts, count=count
        )
    alike: dict[Any, list[Product]] = {}
    for product in products:
        alike.setdefault((product.weight.dtype, product.bias is None), []).append(product)
    for (dtype, _), group in alike.items():
        most = _MOST
        if plan.device != "cpu":
            from hypocenter.kernels.linear import linear_gpu

            most = _MOST if linear_gpu.takes_several(x.shape[0], dtype, plan.device) else 1
        for start in range(0, len(group), most):
            _launch(plan, x, group[start : start + most], counts, operands, count, accumulate)


def _launch(
    plan: PlanBuilder,
    x: Tensor,
    products: Sequence[Product],
    counts: Tensor,
    operands: Operands,
    count: int,
    accumulate: bool,
) -> None:
    arguments: dict[str, Any] = {"counts": counts, "count": count}
    for mark, product in zip(_MARKS, products, strict=False):
        arguments |= {
            f"weight{mark}": product.weight,
            f"out{mark}": product.out,
            f"bias{mark}": product.bias,
        }
    dtype, on_cpu = products[0].weight.dtype, plan.device == "cpu"
    if dtype.is_quantised:
        ops = _OF_CODES
        arguments |= operands.read if on_cpu else operands.written
    elif (rounded := operands.rounded_for(dtype)) is not None:
        ops = _OF_ROUNDED
        arguments |= {"rounded": rounded, "row_scales": operands.row_scales, "fragments": None}
    elif operands.multiplied_as(dtype) is DType.BF16:
        ops = _OF_ROUNDED
        arguments |= {"rounded": operands.rounded, "x": operands.rounded}
    else:
        ops = _OF_FLOATS
        arguments["x"] = x
    if on_cpu:
        # A kernel takes three weights, of which some have no rows.
        for mark in _MARKS[len(products) :]:
            arguments[f"weight{mark}"] = products[0].weight.data.parts[0][:0]
            arguments |= {f"bias{mark}": _NO_BIAS, f"out{mark}": products[0].out}
    plan.add(ops[len(products) - 1], **arguments, accumulate=accumulate, products=products)
