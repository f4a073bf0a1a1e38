"""Searches for the scale, or the scale and minimum, of a group of columns.

Each tries several scales and keeps the one whose weighted error is smallest. `fit_scale` computes
all that it tries side by side, in vectors. Each is added up in the order of ggml's `ggml-quants.c`,
so the result is the same bit for bit. Functions there: make_qx_quants, make_q3_quants,
make_qp_quants. Lines, which have a minimum beside the scale, are in `lines_cpu.py`. `room` is f32
[NUM_ROWS, NUM_TRIES] to work in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import inline_allocating
from hypocenter.device.cpu.rounding import nearest, nearest_integer

#: Rows of `room`, and the most scales that a search tries.
NUM_ROWS, NUM_TRIES = 3, 19
_ZERO, _ONE = np.float32(0), np.float32(1)
_TENTH = np.float32(0.1)
#: A group whose numbers are all smaller is taken for zeros (GROUP_MAX_EPS).
LEAST = np.float32(1e-15)
#: Scales that `fit_scale` tries beside the first: 0.1, 0.2 ... 0.9 more and less.
_NUM_BESIDE = 9
_NUM_SCALES = 2 * _NUM_BESIDE
#: Likewise of `fit_small_scales`.
_NUM_SMALL_BESIDE = 4
#: How often codes are improved one by one.
_NUM_ROUNDS = 5


@inline_allocating
def clamp(value: Any, low: Any, high: Any) -> Any:
    """`value`, but at least `low` and at most `high`."""
    return low if value < low else high if value > high else value


@inline_allocating
def largest_size(x: Any) -> Any:
    """The largest size of a number of x, and the first number that has it."""
    size, found = _ZERO, _ZERO
    for i in range(x.shape[0]):
        if abs(x[i]) > size:
            size, found = abs(x[i]), x[i]
    return size, found


@inline_allocating
def fit_scale(x: Any, weights: Any, most: Any, codes: Any, room: Any) -> Any:
    """The scale with which codes from -most to most - 1 are nearest to x, by weighted squares.

    Stores code + most of each number. `weights` has as many.
    """
    num = weights.shape[0]
    size, extreme = largest_size(x)
    if size < LEAST:
        codes[:] = 0
        return _ZERO
    inverses, products, squares = room[0], room[1], room[2]
    inverses[0] = -most / extreme
    for k in range(_NUM_SCALES):
        shift = np.float32(k - _NUM_BESIDE + (k >= _NUM_BESIDE))
        inverses[1 + k] = -(most + _TENTH * shift) / extreme
    for k in range(_NUM_SCALES + 1):
        products[k] = squares[k] = _ZERO
    for i in range(num):
        value, weight = x[i], weights[i]
        by_value = weight * value
        for k in range(_NUM_SCALES + 1):
            code = clamp(nearest(inverses[k] * value), -most, most - _ONE)
            products[k] += by_value * code
            squares[k] += weight * code * code
    chosen = 0
    scale = products[0] / squares[0] if squares[0] != _ZERO else _ZERO
    best = scale * products[0]
    for k in range(1, _NUM_SCALES + 1):
        if squares[k] > _ZERO and products[k] * products[k] > best * squares[k]:
            chosen, scale = k, products[k] / squares[k]
            best = scale * products[k]
    for i in range(num):
        codes[i] = clamp(nearest(inverses[chosen] * x[i]), -most, most - _ONE) + most
    return scale


@inline_allocating
def fit_small_scales(x: Any, weights: Any, most: Any, codes: Any) -> Any:
    """The scale with which codes from 0 to `most` are nearest to x, the scales of a block.

    Stores them as bytes, of a negative one its low byte.
    """
    num = x.shape[0]
    highest = _ZERO
    for i in range(num):
        highest = x[i] if x[i] > highest else highest
    if highest < LEAST:
        codes[:] = 0
        return _ZERO
    inverse = most / highest
    best = _error_of(x, weights, inverse, np.float32(256))
    for k in range(-_NUM_SMALL_BESIDE, _NUM_SMALL_BESIDE + 1):
        if k != 0:
            other = (_TENTH * np.float32(k) + most) / highest
            error = _error_of(x, weights, other, most)
            if error < best:
                best, inverse = error, other
    products, squares = _ZERO, _ZERO
    for i in range(num):
        code = nearest(inverse * x[i])
        code = most if code > most else code
        codes[i] = np.int64(code) & 255
        products += weights[i] * x[i] * code
        squares += weights[i] * code * code
    return _improve(x, weights, most, codes, products, squares)


@inline_allocating
def _error_of(x: Any, weights: Any, inverse: Any, most: Any) -> Any:
    """The weighted squares of what is left of x. A `most` of 256 has codes that are low bytes."""
    scale, error = _ONE / inverse, _ZERO
    for i in range(x.shape[0]):
        code = nearest(inverse * x[i])
        if most == np.float32(256):
            code = np.float32(np.int64(code) & 255)
        elif code > most:
            code = most
        rest = x[i] - scale * code
        error += weights[i] * rest * rest
    return error


@inline_allocating
def _improve(x: Any, weights: Any, most: Any, codes: Any, products: Any, squares: Any) -> Any:
    """Change one code after the other where that brings the scale nearer; the scale."""
    for _ in range(_NUM_ROUNDS):
        num_changed = 0
        for i in range(x.shape[0]):
            weight, code = weights[i], np.float32(codes[i])
            other_products = products - weight * x[i] * code
            other_squares = squares - weight * code * code
            if not (other_products > _ZERO and other_squares > _ZERO):
                continue
            new = nearest(x[i] * other_squares / other_products)
            new = most if new > most else new
            if new != code:
                other_products += weight * x[i] * new
                other_squares += weight * new * new
                gain = other_products * other_products * squares
                if gain > products * products * other_squares:
                    codes[i] = np.int64(new) & 255
                    products, squares = other_products, other_squares
                    num_changed += 1
        if num_changed == 0:
            break
    return products / squares if squares > _ZERO else _ZERO


@inline_allocating
def fit_by_turns(x: Any, most: Any, codes: Any) -> Any:
    """The scale with which codes from -most to most - 1 are nearest to x, by squares weighted with
    squares of x, found by changing one code after the other. Stores code + most of each."""
    num = x.shape[0]
    size, extreme = largest_size(x)
    if size < LEAST:
        codes[:] = 0
        return _ZERO
    inverse = -most / extreme
    products, squares = _ZERO, _ZERO
    for i in range(num):
        code = clamp(nearest(inverse * x[i]), -most, most - _ONE)
        codes[i] = code
        weight = x[i] * x[i]
        products += weight * x[i] * code
        squares += weight * code * code
    for _ in range(_NUM_ROUNDS):
        num_changed = 0
        for i in range(num):
            weight, code = x[i] * x[i], np.float32(codes[i])
            other_products = products - weight * x[i] * code
            if not other_products > _ZERO:
                continue
            other_squares = squares - weight * code * code
            new = clamp(nearest(x[i] * other_squares / other_products), -most, most - _ONE)
            if new != code:
                other_products += weight * x[i] * new
                other_squares += weight * new * new
                gain = other_products * other_products * squares
                if other_squares > _ZERO and gain > products * products * other_squares:
                    codes[i] = new
                    products, squares = other_products, other_squares
                    num_changed += 1
        if num_changed == 0:
            break
    for i in range(num):
        codes[i] += np.int64(most)
    return products / squares if squares > _ZERO else _ZERO


@inline_allocating
def code_of(value: Any, low: int, high: int) -> Any:
    """The nearest integer of an f32 from `low` to `high`."""
    return clamp(nearest_integer(value), low, high)
