"""What low-rank adapters must add to products, with one weight and with weights of experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.kernels.linear.adapter_sizes import RANKS
from hypocenter.verify.attending import as_numbers
from hypocenter.verify.bounds import EPS, of_chain
from hypocenter.verify.expected import Expected, OpInputs


def _scales_of(given: OpInputs) -> Array:
    """What each rank counts for the compared rows, f64 [num_rows, num_ranks]; 0: nothing."""
    values = given.values
    of_rows = values["scales"][values["sequences"][given.rows]].astype(np.float64)
    found: Array = np.repeat(of_rows[:, values["owners"]], RANKS, axis=1)
    return found


def _products(x: Array, down: Array, factors: Array, num_columns: int) -> tuple[Array, Array]:
    """Rows times ranks, times `factors`: f64 [num_rows, num_ranks]; and how far they may be off."""
    x, down = x[:, :num_columns], down[..., :num_columns]
    exact = np.einsum("tk,trk->tr", x, down) * factors
    sizes = np.einsum("tk,trk->tr", np.abs(x), np.abs(down)) * np.abs(factors)
    # 16 chains of columns or more, which a tree adds.
    return exact, of_chain(-(-num_columns // 16) + 8) * sizes


def _sums(before: Array, products: Array, up: Array, scales: Array) -> tuple[Array, Array]:
    """`before` and what ranks that count add to it: f64 [num_rows, num_outputs]; and how far that
    may be off. A row without an adapter keeps its bits."""
    products = np.where(scales != 0, products, 0)
    exact = before + np.einsum("tr,trn->tn", products, up)
    sizes = np.einsum("tr,trn->tn", np.abs(products), np.abs(up))
    bound = of_chain(scales.shape[1]) * sizes + EPS * (np.abs(before) + np.abs(exact))
    return exact, bound * (scales != 0).any(axis=1)[:, None]


def down_rows(given: OpInputs) -> list[Expected]:
    """`adapter_down`."""
    values, rows = given.values, given.rows
    factors = np.repeat(values["factors"].astype(np.float64), RANKS) * _scales_of(given)
    x, down = values["x"][rows].astype(np.float64), as_numbers(values["down"])
    downs = np.broadcast_to(down, (len(rows), *down.shape))
    exact, bound = _products(x, downs, factors, given.number("num_columns"))
    return [Expected("products", exact, bound, rows)]


def up_rows(given: OpInputs) -> list[Expected]:
    """`adapter_up`."""
    values, rows, up = given.values, given.rows, as_numbers(given.values["up"])
    products = values["products"][rows, : len(up)].astype(np.float64)
    before = values["out"][rows, : up.shape[1]].astype(np.float64)
    ups = np.broadcast_to(up, (len(rows), *up.shape))
    exact, bound = _sums(before, products, ups, _scales_of(given))
    return [Expected("out", exact, bound, rows)]


def expert_down_rows(given: OpInputs) -> list[Expected]:
    """`experts_adapter_down`: ranks of one choice behind those of another."""
    values, rows = given.values, given.rows
    down, ids = as_numbers(values["down"]), values["ids"][rows]
    factors = np.repeat(values["factors"].astype(np.float64), RANKS) * _scales_of(given)
    num_columns, found = given.number("num_columns"), []
    for slot in range(ids.shape[1]):
        x = values["x"][values["places"][rows, slot]].astype(np.float64)
        found.append(_products(x, down[ids[:, slot]], factors, num_columns))
    exact, bound = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
    return [Expected("products", exact, bound, rows)]


def expert_up_rows(given: OpInputs) -> list[Expected]:
    """`experts_adapter_up`: what each choice adds to its own sorted row."""
    values, rows = given.values, given.rows
    up, ids, places = as_numbers(values["up"]), values["ids"][rows], values["places"][rows]
    num_ranks, found = up.shape[1], []
    for slot in range(ids.shape[1]):
        of_slot = slice(slot * num_ranks, (slot + 1) * num_ranks)
        products = values["products"][rows, of_slot].astype(np.float64)
        before = values["out"][places[:, slot], : up.shape[2]].astype(np.float64)
        found.append(_sums(before, products, up[ids[:, slot]], _scales_of(given)))
    exact, bound = (np.concatenate(part) for part in zip(*found, strict=True))
    return [Expected("out", exact, bound, places.T.reshape(-1))]


REFERENCES: dict[str, Callable[[OpInputs], list[Expected]]] = {
    "adapter_down": down_rows,
    "adapter_up": up_rows,
    "experts_adapter_down": expert_down_rows,
    "experts_adapter_up": expert_up_rows,
}
