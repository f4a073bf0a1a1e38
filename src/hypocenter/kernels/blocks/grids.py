"""Grids of the types IQ1 to IQ3 as a quantiser needs them: which entry is near which codes.

The entries are those of `kernels/weights/grid_types.py`. Codes here are levels, 0 to 2 of IQ1 and
IQ2, and 0 to 7 of IQ3. They stand for 2 * level + 1, and of IQ1 for level - 1. What is near is
ggml's choice (iq2xs_init_impl and
iq3xs_init_impl in `ggml-quants.c`): all entries at the smallest distances, so many as `_NUM_NEAR`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from hypocenter.base.dtypes import Array, Int32s
from hypocenter.base.tensor import DType
from hypocenter.kernels.weights import grid_types

_NAMES = {
    **dict.fromkeys((DType.IQ1_S, DType.IQ1_M), "iq1"),
    DType.IQ2_XXS: "iq2_xxs",
    DType.IQ2_XS: "iq2_xs",
    DType.IQ2_S: "iq2_s",
    DType.IQ3_XXS: "iq3_xxs",
    DType.IQ3_S: "iq3_s",
}
#: How many different distances.
_NUM_NEAR = {
    **dict.fromkeys((DType.IQ1_S, DType.IQ1_M), 3),
    DType.IQ2_XXS: 2,
    DType.IQ2_XS: 2,
    DType.IQ2_S: 1,
    DType.IQ3_XXS: 2,
    DType.IQ3_S: 3,
}


class Grid(NamedTuple):
    """`levels` i32 [num_entries, num_columns]. For each number of codes, whose digits are levels,
    the lowest first: `exact` i32, the entry with just these or -1; and of what is near them
    near[starts[number] : starts[number + 1]], i32."""

    levels: Int32s
    exact: Int32s
    starts: Int32s
    near: Int32s


@functools.cache
def grid_of(dtype: DType) -> Grid:
    """The grid of a type."""
    sizes = grid_types.grid(_NAMES[dtype]).astype(np.int32)
    known = np.unique(sizes)
    levels = np.searchsorted(known, sizes).astype(np.int32)
    num_levels, num_columns = len(known), levels.shape[1]
    powers = num_levels ** np.arange(num_columns)
    all_codes = (np.arange(num_levels**num_columns)[:, None] // powers) % num_levels
    exact = np.full(len(all_codes), -1, np.int32)
    exact[levels @ powers] = np.arange(len(levels))
    near = [_near(codes, levels, _NUM_NEAR[dtype]) for codes in all_codes]
    starts = np.cumsum([0, *map(len, near)]).astype(np.int32)
    return Grid(levels, exact, starts, np.concatenate(near).astype(np.int32))


def _near(codes: Array, levels: Int32s, num_distances: int) -> Array:
    """Entries by their distance, and those at the same one in their order."""
    squares = ((levels - codes) ** 2).sum(axis=1)
    farthest = np.unique(squares)[:num_distances][-1]
    found = np.flatnonzero(squares <= farthest)
    return found[np.argsort(squares[found], kind="stable")]
