"""What products with weights must come to; weights are those of the file, activations as the device
holds them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor
from hypocenter.verify import operands
from hypocenter.verify.bounds import EPS, chain_of_product, of_chain
from hypocenter.verify.expected import MAX_OUTPUTS, Expected, OpInputs, places_to_compare
from hypocenter.verify.file_weights import FileMatrix, NotInFile, matrices_of
from hypocenter.verify.rowwise import gate_result, result

_MARKS = ("", "_2", "_3")


def product_rows(given: OpInputs, num_columns: int) -> tuple[Array, bool]:
    """The live rows that are compared, as a product reads them, f64 [num_rows, num_columns]; and
    whether they are floats as they were."""
    values, live, arguments = given.values, given.live, given.unit.arguments
    kind = operands.kind_of([arg.name for arg in given.unit.given])
    if kind == "read":
        rows = operands.tiles(values, "read", live, num_columns).values
    elif kind == "rounded":
        rows = operands.half_rows(values, arguments["rounded"].dtype, live, num_columns).values
    else:
        return values["x"][given.rows, :num_columns].astype(np.float64), True
    return rows[given.rows], False


def linear_rows(given: OpInputs) -> list[Expected]:
    """`linear`, of up to three weights."""
    found = []
    names = {arg.name for arg in given.unit.given}
    for mark in _MARKS:
        if f"weight{mark}" in names:
            found.append(_product(given, mark))
    return found


def _product(given: OpInputs, mark: str) -> Expected:
    arguments = given.unit.arguments
    weight: Tensor = arguments[f"weight{mark}"]
    (matrix,) = matrices_of(given.file, weight)
    columns = places_to_compare(weight.shape[0], MAX_OUTPUTS)
    x, is_float = product_rows(given, matrix.num_columns)
    numbers = as_multiplied(given, matrix, weight, columns)
    exact = x @ numbers.T
    sizes = np.abs(x) @ np.abs(numbers).T
    bias, out = arguments[f"bias{mark}"], f"out{mark}"
    if bias is not None:
        added = given.values[f"bias{mark}"][columns].astype(np.float64)
        exact, sizes = exact + added, sizes + np.abs(added)
    if arguments["accumulate"]:
        before = given.values[out][np.ix_(given.rows, columns)].astype(np.float64)
        exact, sizes = exact + before, sizes + np.abs(before)
    chain = chain_of_product(matrix.num_columns, on_cpu_as_floats=is_float)
    bound = of_chain(chain) * sizes + _lost_below(given, weight)
    return Expected(out, exact, bound, given.rows, columns)


def as_multiplied(given: OpInputs, matrix: FileMatrix, weight: Tensor, rows: Array) -> Array:
    """Rows of a weight as kernels of the device multiply them."""
    if not given.on_cpu:
        return matrix.on_gpu(rows)
    numbers = matrix.exact(rows)
    if weight.dtype is DType.BF16 and matrix.dtype is not DType.BF16:
        raise NotInFile(f"{weight.name} is rounded to bf16 here")
    return numbers


def _lost_below(given: OpInputs, weight: Tensor) -> float:
    """Products in bf16 on a CPU take numbers below 2**-50 for zero."""
    is_bf16 = given.on_cpu and weight.dtype is DType.BF16
    return 2.0**-50 * weight.shape[1] if is_bf16 else 0.0


def gated_products(given: OpInputs) -> list[Expected]:
    """`linear_gate_codes`: both products, the gate, and codes of what it lets through."""
    weight: Tensor = given.unit.arguments["weight"]
    both = matrices_of(given.file, weight)
    if len(both) != 2:
        raise NotInFile(f"{weight.name} is not two tensors of the file")
    width, num_columns = given.number("width"), both[0].num_columns
    x, _ = product_rows(given, num_columns)
    share = of_chain(chain_of_product(num_columns, on_cpu_as_floats=False))
    sums, offs = [], []
    for matrix in both:
        numbers = matrix.exact(np.arange(width))
        sums.append(x @ numbers.T)
        offs.append(share * (np.abs(x) @ np.abs(numbers).T))
    exact, bound = gate_result(sums[0], sums[1], given.number("kind"))
    through, _ = gate_result(sums[0], np.ones_like(sums[1]), given.number("kind"))
    # No gate is steeper than 1.2 (the clamped one 1.7 times that).
    bound = bound + 2.1 * offs[0] * (np.abs(sums[1]) + offs[1] + 1) + np.abs(through) * offs[1]
    return [result(given, "gated_codes", exact, bound + EPS * np.abs(exact))]


REFERENCES: dict[str, Callable[[OpInputs], list[Expected]]] = {
    "linear": linear_rows,
    "linear_gate_codes": gated_products,
}
