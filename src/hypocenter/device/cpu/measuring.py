"""What figures of tensors are made of on the CPU, and those of arrays of the host in one pass.

`kernels/rowwise/figures_cpu.py` measures tensors of a plan by the same words. What the figures are
is said in `device/digests.py` and `trace/points.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hypocenter.base.dtypes import Array, Float32s
from hypocenter.device.cpu.lang import host_function, inline
from hypocenter.device.cpu.vector import (
    absolute,
    add,
    fma,
    get,
    larger,
    load_first,
    max_lanes,
    pick,
    put,
    smaller,
    splat,
    sum_lanes,
)
from hypocenter.device.cpu.vector_digest import (
    bits_of_number,
    digest_of_lanes,
    mix_places,
    number_of_bits,
    signed_by,
)
from hypocenter.device.digests import (
    DIGEST,
    HIGH,
    LOW,
    NUM_INF,
    NUM_NAN,
    NUM_SKETCHES,
    NUM_WORDS,
    SKETCH,
    SQUARES,
    TOTAL,
)

#: Elements that are summed as f32 before the sums are.
TILE = 256
_LANES = 16
#: Between these f32 holds the squares of the largest element, and of those that count beside it.
_LEAST, _MOST = np.float32(1e-12), np.float32(1e15)
_ZERO = np.float32(0)


class ArrayFigures(NamedTuple):
    """The figures of each array, an entry for each: 16 hex digits of `digests`, a row of
    `sketches` f32."""

    digests: str
    low: list[float]
    high: list[float]
    mean: list[float]
    rms: list[float]
    num_nan: list[int]
    num_inf: list[int]
    sketches: Float32s

    def some(self, start: int, stop: int) -> ArrayFigures:
        """Those of some arrays, one behind the other."""
        of = slice(start, stop)
        return ArrayFigures(
            self.digests[16 * start : 16 * stop],
            self.low[of],
            self.high[of],
            self.mean[of],
            self.rms[of],
            self.num_nan[of],
            self.num_inf[of],
            self.sketches[of],
        )


@inline
def clear_words(words: Any, at: Any) -> None:
    """The words of no element, from words[at] on."""
    for i in range(NUM_WORDS):
        put(words, at + i, np.int64(0))
    put(words, at + LOW, bits_of_number(np.inf))
    put(words, at + HIGH, bits_of_number(-np.inf))


@inline
def _add_number(words: Any, at: Any, value: Any) -> None:
    put(words, at, bits_of_number(number_of_bits(get(words, at)) + value))


@inline
def _widen(words: Any, at: Any, low: Any, high: Any) -> None:
    """Let the range of words[at] and the next one hold low and high."""
    put(words, at, bits_of_number(min(number_of_bits(get(words, at)), low)))
    put(words, at + 1, bits_of_number(max(number_of_bits(get(words, at + 1)), high)))


@inline
def _one_by_one(x: Any, first: Any, num: Any, place: Any, words: Any, at: Any) -> None:
    """As `_measure_tile`, but for the digest: what is not finite is counted, all else is f64."""
    for start in range(0, num, _LANES):
        mix = mix_places(place + start)
        for lane in range(min(_LANES, num - start)):
            value = np.float64(get(x, first + start + lane))
            if value != value:
                put(words, at + NUM_NAN, get(words, at + NUM_NAN) + np.int64(1))
            elif value - value != 0.0:
                put(words, at + NUM_INF, get(words, at + NUM_INF) + np.int64(1))
            else:
                _widen(words, at + LOW, value, value)
                _add_number(words, at + TOTAL, value)
                _add_number(words, at + SQUARES, value * value)
                sign = np.float64(pick(signed_by(splat(np.float32(1)), mix), lane))
                _add_number(words, at + SKETCH + lane % NUM_SKETCHES, value * sign)


@inline
def _measure_tile(x: Any, first: Any, num: Any, place: Any, words: Any, at: Any) -> None:
    """Add to words[at:] the figures of `num` <= TILE elements from x[first] on, from a column that
    is a multiple of 16 on; `place` is that of the first in its tensor."""
    low, high = splat(np.float32(np.inf)), splat(np.float32(-np.inf))
    total = squares = sketch = zeros = most = splat(_ZERO)
    digest = np.int64(0)
    for start in range(0, num, _LANES):
        left = num - start
        value = load_first(x, first + start, left)
        mix = mix_places(place + start)
        digest += digest_of_lanes(value, mix)
        # What is not finite gives NaN here, and it is looked at one by one.
        zeros = fma(value, splat(_ZERO), zeros)
        most = larger(most, absolute(value))
        low, high = smaller(value, low), larger(value, high)
        total, squares = add(total, value), fma(value, value, squares)
        sketch = add(sketch, signed_by(value, mix))
    put(words, at + DIGEST, get(words, at + DIGEST) + digest)
    top = max_lanes(most)
    is_plain = num % _LANES == 0 and sum_lanes(zeros) == _ZERO
    if not (is_plain and (top == _ZERO or _LEAST < top < _MOST)):
        _one_by_one(x, first, num, place, words, at)
        return
    for lane in range(_LANES):
        _widen(words, at + LOW, np.float64(pick(low, lane)), np.float64(pick(high, lane)))
        _add_number(words, at + SKETCH + lane % NUM_SKETCHES, np.float64(pick(sketch, lane)))
    _add_number(words, at + TOTAL, np.float64(sum_lanes(total)))
    _add_number(words, at + SQUARES, np.float64(sum_lanes(squares)))


@inline
def measure_stretch(x: Any, first: Any, num: Any, place: Any, words: Any, at: Any) -> None:
    """Add to words[at:] i64 [NUM_WORDS] the figures of `num` elements of a row, from x[first] on;
    `place` is that of the first in its tensor, and its column a multiple of 16."""
    for start in range(0, num, TILE):
        _measure_tile(x, first + start, min(TILE, num - start), place + start, words, at)


@inline
def add_words(words: Any, at: Any, others: Any, first: Any) -> None:
    """Add to words[at:] the words from others[first] on, of other elements of the same tensor."""
    low, high = get(others, first + LOW), get(others, first + HIGH)
    _widen(words, at + LOW, number_of_bits(low), number_of_bits(high))
    for i in (NUM_NAN, NUM_INF, DIGEST):
        put(words, at + i, get(words, at + i) + get(others, first + i))
    for i in range(TOTAL, SQUARES + 1):
        _add_number(words, at + i, number_of_bits(get(others, first + i)))
    for i in range(SKETCH, NUM_WORDS):
        _add_number(words, at + i, number_of_bits(get(others, first + i)))


@host_function
def _measure(x: Any, words: Any) -> None:
    """Formula: words[i] = the figures of x[i], summed row by row.
    Shapes: x f32 [num_arrays, num_rows, width]; words i64 [num_arrays, NUM_WORDS].
    """
    num_rows, width = x.shape[1], x.shape[2]
    for array in range(x.shape[0]):
        at = array * NUM_WORDS
        clear_words(words, at)
        for row in range(num_rows):
            place = row * width
            measure_stretch(x, array * num_rows * width + place, width, place, words, at)


def words_of(values: Float32s) -> Array:
    """Words i64 [num_arrays, NUM_WORDS] of each of `values` f32 [num_arrays, num_rows, width]."""
    words = np.empty((len(values), NUM_WORDS), np.int64)
    _measure(np.ascontiguousarray(values, np.float32), words)
    return words


def figures_of(values: Float32s) -> ArrayFigures:
    """The figures of each of `values`, f32 [num_arrays, num_rows, width]; 0 where there is no
    finite element.

    A digest stands for the bits: one element that changes always changes it. It is no defence
    against who wants two to be equal.
    """
    return figures_of_words(words_of(values), [values[0].size] * len(values))


def figures_of_words(words: Array, sizes: Sequence[int]) -> ArrayFigures:
    """The figures that words i64 [num_arrays, NUM_WORDS] hold, of so many elements each."""
    numbers, num_elements = words.view(np.float64), np.array(sizes, np.float64)
    counts = num_elements - words[:, NUM_NAN] - words[:, NUM_INF]
    # Of no element the range is from infinity to minus infinity.
    found = np.where(counts[:, None] == 0, 0.0, numbers[:, : SQUARES + 1])
    at_least_one = np.maximum(counts, 1)
    scales = np.sqrt(NUM_SKETCHES / np.maximum(num_elements, 1))[:, None]
    return ArrayFigures(
        words[:, DIGEST].astype(">i8").tobytes().hex(),
        found[:, LOW].tolist(),
        found[:, HIGH].tolist(),
        (found[:, TOTAL] / at_least_one).tolist(),
        np.sqrt(found[:, SQUARES] / at_least_one).tolist(),
        words[:, NUM_NAN].tolist(),
        words[:, NUM_INF].tolist(),
        (numbers[:, SKETCH:] * scales).astype("<f4"),
    )
