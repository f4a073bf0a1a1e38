"""What the rows of experts must come to: who reads which, and products with experts' weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import Tensor
from hypocenter.kernels.experts import grouping
from hypocenter.verify.bounds import EPS, chain_of_product, of_chain
from hypocenter.verify.drawing import GROUP_INPUTS
from hypocenter.verify.expected import MAX_OUTPUTS, Expected, OpInputs, places_to_compare
from hypocenter.verify.file_weights import NotInFile, expert_matrices_of
from hypocenter.verify.products import product_rows
from hypocenter.verify.rowwise import gate_result, result

_MARKS = ("", "_2")


def _experts_of_rows(given: OpInputs) -> tuple[Array, Array]:
    """The rows of groups that are compared, and the expert of each."""
    values = given.values
    by_row = np.full(given.unit.num_rows, -1)
    for expert, first, size in zip(
        values["experts"], values["firsts"], values["sizes"], strict=True
    ):
        by_row[first : first + size] = expert
    rows = given.rows[by_row[given.rows] >= 0]
    return rows, by_row[rows]


def expert_rows(given: OpInputs) -> list[Expected]:
    """`experts`, of one weight or two: each row times the weight of its expert."""
    names = {arg.name for arg in given.unit.given}
    return [_product(given, mark) for mark in _MARKS if f"weight{mark}" in names]


def _product(given: OpInputs, mark: str) -> Expected:
    arguments = given.unit.arguments
    weight: Tensor = arguments[f"weight{mark}"]
    (matrix,) = expert_matrices_of(given.file, weight)
    num_outputs = weight.shape[1]
    columns = places_to_compare(num_outputs, MAX_OUTPUTS)
    rows, experts = _experts_of_rows(given)
    x, is_float = product_rows(given, matrix.num_columns)
    x = x[np.isin(given.rows, rows)]
    exact, sizes = np.zeros((2, len(rows), len(columns)))
    for expert in np.unique(experts):
        of = experts == expert
        numbers = matrix.exact(expert * num_outputs + columns)
        if not given.on_cpu:
            numbers = matrix.on_gpu(expert * num_outputs + columns)
        exact[of], sizes[of] = x[of] @ numbers.T, np.abs(x[of]) @ np.abs(numbers).T
    if arguments[f"bias{mark}"] is not None:
        padded = -(-num_outputs // 64) * 64
        places = experts[:, None] * padded + columns[None, :]
        added = given.values[f"bias{mark}"][places].astype(np.float64)
        exact, sizes = exact + added, sizes + np.abs(added)
    share = of_chain(chain_of_product(matrix.num_columns, on_cpu_as_floats=is_float))
    return Expected(f"out{mark}", exact, share * sizes, rows, columns)


def gated_expert_rows(given: OpInputs) -> list[Expected]:
    """`experts_gate_codes`: both products of a row's expert, the gate, and codes of what it lets
    through."""
    weight: Tensor = given.unit.arguments["weight"]
    both = expert_matrices_of(given.file, weight)
    if len(both) != 2:
        raise NotInFile(f"{weight.name} is not two tensors of the file")
    width, num_columns = given.number("width"), both[0].num_columns
    rows, experts = _experts_of_rows(given)
    if not len(rows):
        return []
    x, _ = product_rows(given, num_columns)
    share = of_chain(chain_of_product(num_columns, on_cpu_as_floats=False))
    sums, offs = np.zeros((2, 2, len(rows), width))
    for expert in np.unique(experts):
        of = experts == expert
        for at, matrix in enumerate(both):
            numbers = matrix.exact(expert * width + np.arange(width))
            sums[at][of] = x[of] @ numbers.T
            offs[at][of] = share * (np.abs(x[of]) @ np.abs(numbers).T)
    exact, bound = gate_result(sums[0], sums[1], given.number("kind"))
    through, _ = gate_result(sums[0], np.ones_like(sums[1]), given.number("kind"))
    bound = bound + 2.1 * offs[0] * (np.abs(sums[1]) + offs[1] + 1) + np.abs(through) * offs[1]
    return [result(given, "gated_codes", exact, bound + EPS * np.abs(exact))]


def grouped_rows(given: OpInputs) -> list[Expected]:
    """`group`: the row of each choice, the token of each row, and the rows of each group."""
    values, arguments = given.values, given.unit.arguments
    ids, alignment = values["ids"][: given.live], given.number("alignment")
    group_rows = 0 if given.on_cpu else arguments["shape"].group_rows
    groups, places, sources = grouping.reference(ids, alignment, group_rows)
    rows = np.flatnonzero(sources >= 0)
    of_groups = np.array(groups, np.float64).reshape(-1, 3).T
    expected = [
        _whole_numbers("places", places[given.rows], given.rows),
        _whole_numbers("sources", sources[rows], rows),
        _whole_numbers("sorted_counts", np.full(2, len(sources)), np.arange(2)),
    ]
    at = np.arange(len(groups))
    if not given.on_cpu and given.unit.kernels == "group":
        # Each expert has groups to itself, of which some are empty (`routing_gpu.group_kernel`).
        own, firsts = of_groups[0].astype(np.int64), of_groups[1].astype(np.int64)
        starts = np.array([firsts[own == expert].min() for expert in own], np.int64)
        at = starts // group_rows + own + (firsts - starts) // group_rows
    for name, numbers in zip(GROUP_INPUTS, of_groups, strict=False):
        expected.append(_whole_numbers(name, numbers, at))
    return expected


def _whole_numbers(name: str, numbers: Array, rows: Array) -> Expected:
    """Whole numbers, which are right or wrong."""
    exact = np.asarray(numbers, np.float64)
    return Expected(name, exact, np.full(exact.shape, 0.25), rows)


REFERENCES: dict[str, Callable[[OpInputs], list[Expected]]] = {
    "experts": expert_rows,
    "experts_gate_codes": gated_expert_rows,
    "group": grouped_rows,
}
