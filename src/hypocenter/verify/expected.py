"""What an op must have written, in float64, and how far each number may be off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.verify import operands
from hypocenter.verify.block_caches import is_of_blocks, numbers_of_cache
from hypocenter.verify.bounds import LEAST
from hypocenter.verify.form import Unit

#: Of a result with more rows, or a weight with more outputs, so many are compared.
MAX_ROWS, MAX_OUTPUTS = 48, 1024


@dataclass(frozen=True, slots=True)
class OpInputs:
    """What an op was given: tensors as they were before it ran, and how many rows are live."""

    unit: Unit
    values: Mapping[str, Array]
    live: int
    file: GGUFFile

    @property
    def on_cpu(self) -> bool:
        return self.unit.device == "cpu"

    def number(self, name: str) -> Any:
        """An argument that is no tensor."""
        return self.unit.arguments[name]

    @property
    def rows(self) -> Array:
        """The live rows that are compared: all, or the first, the last and some between."""
        return places_to_compare(self.live, MAX_ROWS)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the rows `rows` and the columns `columns` of the tensor `name` must be.

    `as_operands`: what is written are operands of these numbers, under the names that
    `operands.py` has for this word; then `columns` are all, and `bound` is without their rounding.
    """

    name: str
    exact: Array
    bound: Array
    rows: Array
    columns: Array | None = None
    as_operands: str = ""


@dataclass(frozen=True, slots=True)
class Miss:
    """How far a result is off as a share of its bound, and where that is worst.

    `what` says what does not belong together, where that is not a matter of size.
    """

    share: float
    tensor: str
    place: tuple[int, ...]
    got: float
    exact: float
    what: str = ""


def places_to_compare(number: int, most: int) -> Array:
    """Up to `most` of `number` places: the first and the last ones, and some between."""
    if number <= most:
        return np.arange(number)
    between = np.linspace(0, number - 1, most - 16).astype(np.int64)
    ends = [np.arange(8), np.arange(number - 8, number), between]
    return np.unique(np.concatenate(ends))


def compare(expected: Expected, unit: Unit, after: Mapping[str, Array]) -> Miss:
    """Hold what was written against what it must be."""
    if expected.as_operands:
        return _compare_operands(expected, unit, after)
    got = numbers_of(after[expected.name], unit.arguments[expected.name])[expected.rows]
    got = got[..., : expected.exact.shape[-1]] if expected.columns is None else _take(got, expected)
    return _worst(expected, got, expected.bound)


def _take(got: Array, expected: Expected) -> Array:
    taken: Array = got[..., expected.columns]
    return taken


def numbers_of(values: Array, tensor: Any) -> Array:
    """A tensor's host copy as float64."""
    if values.dtype == np.uint16:
        return values.view(np.float16).astype(np.float64)
    if is_of_blocks(tensor):
        name = "k_cache" if tensor.name.startswith("k") else "v_cache"
        return numbers_of_cache(name, values, tensor.dtype)
    return values.astype(np.float64)


def _worst(expected: Expected, got: Array, bound: Array) -> Miss:
    if got.size == 0:
        return Miss(0.0, expected.name, (), 0.0, 0.0)
    with np.errstate(all="ignore"):
        shares = np.abs(got - expected.exact) / (np.broadcast_to(bound, got.shape) + LEAST)
    shares = np.where(np.isnan(shares), np.inf, shares)
    at = np.unravel_index(int(shares.argmax()), shares.shape)
    row, *others = (int(i) for i in at)
    if expected.columns is not None:
        others[-1] = int(expected.columns[others[-1]])
    place = (int(expected.rows[row]), *others)
    return Miss(float(shares[at]), expected.name, place, float(got[at]), float(expected.exact[at]))


def _compare_operands(expected: Expected, unit: Unit, after: Mapping[str, Array]) -> Miss:
    kind, num_rows = expected.as_operands, int(expected.rows.max(initial=-1)) + 1
    width = expected.exact.shape[1]
    if kind == "rounded":
        dtype = unit.arguments["rounded"].dtype
        found = operands.half_rows(after, dtype, num_rows, width)
    else:
        found = operands.tiles(after, kind, num_rows, width)
    values, steps = found.values[expected.rows], found.half_steps[expected.rows]
    miss = _worst(expected, values, steps + expected.bound)
    if found.disagree:
        return Miss(np.inf, expected.name, (), miss.got, miss.exact, found.disagree)
    if kind != "rounded" and len(expected.rows):
        # A scale that is too large would widen the steps by which it is judged.
        bound = np.broadcast_to(expected.bound, expected.exact.shape)
        low, high = operands.scale_limits(expected.exact, bound)
        scales = operands.scales_of_tiles(after, kind, num_rows, width)[expected.rows]
        wrong = ~((scales >= low) & (scales <= high)) & ~((high < 1e-29) & (scales == 0))
        if wrong.any():
            row, group = (int(i) for i in np.argwhere(wrong)[0])
            place = (int(expected.rows[row]), group)
            got, right = float(scales[row, group]), float(high[row, group])
            return Miss(np.inf, "scales", place, got, right, "a scale is not that of its group")
    if kind == "rounded" and "row_scales" in after and len(expected.rows):
        down = after["row_scales"][expected.rows].astype(np.float64)
        largest = np.abs(expected.exact).max(axis=1) / np.where(down > 0, down, np.nan)
        # A row is brought to 2**14 .. 2**15, or left as it is; one far below loses its small ones.
        wrong = ~((largest >= 2.0**12) | (down == 1) | (np.abs(expected.exact).max(axis=1) < 1e-30))
        if wrong.any():
            row = int(expected.rows[int(wrong.argmax())])
            right = float(np.abs(expected.exact).max())
            return Miss(np.inf, "row_scales", (row,), float(down[wrong][0]), right, "a row's scale")
    return miss
