"""The search for the scale and the minimum of each of eight groups of columns, side by side.

A group is a column of the arrays here, [num, LANES], so that each step is one of vectors and each
group is added up in the order of ggml's make_qkx2_quants and make_qkx3_quants (`ggml-quants.c`).
They cannot try their scales side by side: a minimum that was found is the next one's beginning.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import inline_allocating
from hypocenter.device.cpu.rounding import nearest
from hypocenter.kernels.blocks.searches_cpu import clamp

#: Groups that are searched together.
LANES = 8
_ZERO, _ONE = np.float32(0), np.float32(1)
_INFINITY = np.float32(np.inf)
#: Rows of `state`, f32 [NUM_STATES, LANES]. What was found: a scale and a minimum, and what codes
#: came of; the least error; what is tried, its line and its error; sums of the group; sums of what
#: is tried.
SCALE, LOW = 0, 1
_INVERSE, _BASE, _LEAST = 2, 3, 4
_TRIED, _NEW_SCALE, _NEW_LOW, _ERROR = 5, 6, 7, 8
_HIGH, _WEIGHTS, _VALUES = 9, 10, 11
_CODES, _SQUARES, _PRODUCTS = 12, 13, 14
#: The minimum before any was found.
_FIRST = 15
NUM_STATES = 16


@inline_allocating
def fit_lines(x: Any, weights: Any, search: Any, codes: Any, state: Any) -> None:
    """Find for each group the line scale * code + minimum that is nearest to x, codes being whole
    from 0 to `most`. x and weights f32, codes f32 [num, LANES], written.

    `search` is (most, the first shift of `most` that is tried, the step to the next, how many
    steps, whether errors count by their size and not by their square). Leaves scales in
    state[SCALE] and minima in state[LOW].
    """
    most, shift, step, num_steps, by_size = search
    _survey(x, weights, state)
    for k in range(LANES):
        state[_FIRST, k] = state[_BASE, k] = state[LOW, k]
        state[_INVERSE, k] = most / (state[_HIGH, k] - state[LOW, k])
        state[SCALE, k] = _ONE / state[_INVERSE, k]
    _code(x, most, codes, state[_INVERSE], state)
    _measure(x, weights, by_size, codes, state[SCALE], state[LOW], state)
    for k in range(LANES):
        state[_LEAST, k] = state[_ERROR, k]
    for n in range(num_steps + 1):
        wanted = shift + step * np.float32(n) + most
        for k in range(LANES):
            state[_TRIED, k] = wanted / (state[_HIGH, k] - state[LOW, k])
        _code(x, most, codes, state[_TRIED], state)
        _draw(x, weights, codes, state)
        _measure(x, weights, by_size, codes, state[_NEW_SCALE], state[_NEW_LOW], state)
        _keep_better(state)
    _finish(x, most, codes, state)


@inline_allocating
def _survey(x: Any, weights: Any, state: Any) -> None:
    """The lowest, or 0 where it is above, and the highest; the sums of weights and of products."""
    for k in range(LANES):
        state[LOW, k] = state[_HIGH, k] = x[0, k]
        state[_WEIGHTS, k] = weights[0, k]
        state[_VALUES, k] = weights[0, k] * x[0, k]
    for i in range(1, x.shape[0]):
        for k in range(LANES):
            value = x[i, k]
            state[LOW, k] = value if value < state[LOW, k] else state[LOW, k]
            state[_HIGH, k] = value if value > state[_HIGH, k] else state[_HIGH, k]
            state[_WEIGHTS, k] += weights[i, k]
            state[_VALUES, k] += weights[i, k] * value
    for k in range(LANES):
        state[LOW, k] = _ZERO if state[LOW, k] > _ZERO else state[LOW, k]


@inline_allocating
def _code(x: Any, most: Any, codes: Any, inverses: Any, state: Any) -> None:
    for i in range(x.shape[0]):
        for k in range(LANES):
            code = nearest(inverses[k] * (x[i, k] - state[LOW, k]))
            codes[i, k] = clamp(code, _ZERO, most)


@inline_allocating
def _draw(x: Any, weights: Any, codes: Any, state: Any) -> None:
    """The line through the codes with the least weighted squares, its minimum at most 0."""
    for row in (_CODES, _SQUARES, _PRODUCTS):
        for k in range(LANES):
            state[row, k] = _ZERO
    for i in range(x.shape[0]):
        for k in range(LANES):
            by_code = weights[i, k] * codes[i, k]
            state[_CODES, k] += by_code
            state[_SQUARES, k] += by_code * codes[i, k]
            state[_PRODUCTS, k] += by_code * x[i, k]
    for k in range(LANES):
        of_weights, of_values = state[_WEIGHTS, k], state[_VALUES, k]
        of_codes, squares, products = state[_CODES, k], state[_SQUARES, k], state[_PRODUCTS, k]
        spread = of_weights * squares - of_codes * of_codes
        scale = (of_weights * products - of_values * of_codes) / spread
        low = (squares * of_values - of_codes * products) / spread
        state[_NEW_SCALE, k] = products / squares if low > _ZERO else scale
        state[_NEW_LOW, k] = _ZERO if low > _ZERO else low
        if not spread > _ZERO:  # no line: no error is above infinity
            state[_NEW_SCALE, k] = _INFINITY


@inline_allocating
def _measure(
    x: Any, weights: Any, by_size: bool, codes: Any, scales: Any, lows: Any, state: Any
) -> None:
    for k in range(LANES):
        state[_ERROR, k] = _ZERO if scales[k] < _INFINITY else _INFINITY
    for i in range(x.shape[0]):
        for k in range(LANES):
            error = scales[k] * codes[i, k] + lows[k] - x[i, k]
            error = abs(error) if by_size else error * error
            state[_ERROR, k] += weights[i, k] * error


@inline_allocating
def _keep_better(state: Any) -> None:
    for k in range(LANES):
        if state[_ERROR, k] < state[_LEAST, k]:
            state[_LEAST, k], state[_BASE, k] = state[_ERROR, k], state[LOW, k]
            state[_INVERSE, k], state[SCALE, k] = state[_TRIED, k], state[_NEW_SCALE, k]
            state[LOW, k] = state[_NEW_LOW, k]


@inline_allocating
def _finish(x: Any, most: Any, codes: Any, state: Any) -> None:
    """The codes that were best; of a group without a span they are 0."""
    for k in range(LANES):
        if state[_HIGH, k] <= state[_FIRST, k]:
            state[SCALE, k], state[LOW, k] = _ZERO, state[_FIRST, k]
    for i in range(x.shape[0]):
        for k in range(LANES):
            code = nearest(state[_INVERSE, k] * (x[i, k] - state[_BASE, k]))
            code = clamp(code, _ZERO, most)
            codes[i, k] = _ZERO if state[_HIGH, k] <= state[_FIRST, k] else code
