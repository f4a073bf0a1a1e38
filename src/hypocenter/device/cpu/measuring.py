"""Figures of many arrays in one pass, compiled: what a trace tells of tensors (`trace/points.py`).

Launches nothing on a device: the arrays are the host's.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hypocenter.base.dtypes import Array, Float32s
from hypocenter.device.cpu.lang import host_function, inline
from hypocenter.device.cpu.vector import add, fma, get, larger, load, mul, pick, smaller, splat

#: Numbers in the sketch of an array, elements with signs and factors of their own, and elements
#: that are summed as f32 before the sums are.
NUM_SKETCHES, BLOCK, TILE = 8, 1 << 14, 256
#: Columns of what `measure` finds: range, sums, counts, and behind them the sketch.
_LOW, _HIGH, _TOTAL, _SQUARES, _NUM_NAN, _NUM_INF, _SKETCH = range(7)
#: Of the bits of an f32.
_EXPONENT, _ONE, _SIGN = (np.uint64(bits) for bits in (0x7F800000, 0x00800000, 0x80000000))
_LANES = 16
#: Between these f32 holds the squares of the largest element, and of those that count beside it.
_LEAST, _MOST = np.float32(1e-12), np.float32(1e15)


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


@inline
def _whole_tile(values: Any, at: Any, signs: Any, sign_at: Any, first: Any, found: Any) -> Any:
    """Formula: adds to found f64 [14] what `measure` wants of the TILE finite elements from
    values[at] on, whose signs begin at signs[sign_at] and whose sketch begins with number `first`.
    False, with nothing added, where squares would leave what f32 holds.
    """
    low = high = load(values, at)
    total = mul(low, splat(np.float32(0)))
    squares = sketch = total
    for i in range(0, TILE, _LANES):
        x = load(values, at + i)
        low, high = smaller(low, x), larger(high, x)
        total, squares = add(total, x), fma(x, x, squares)
        sketch = fma(x, load(signs, sign_at + i), sketch)
    most = np.float32(0)
    for lane in range(_LANES):
        most = max(most, -pick(low, lane), pick(high, lane))
    if not (most == 0 or _LEAST < most < _MOST):
        return False
    for lane in range(_LANES):
        found[0] = min(found[0], np.float64(pick(low, lane)))
        found[1] = max(found[1], np.float64(pick(high, lane)))
        found[2] += np.float64(pick(total, lane))
        found[3] += np.float64(pick(squares, lane))
        found[6 + (first + lane) % NUM_SKETCHES] += np.float64(pick(sketch, lane))
    return True


@inline
def _some(values: Any, at: Any, num: Any, signs: Any, sign_at: Any, first: Any, found: Any) -> None:
    """Formula: as `_whole_tile` of `num` elements, one by one; what is not finite is counted."""
    for i in range(num):
        x = np.float64(get(values, at + i))
        if x != x:
            found[4] += 1
        elif x - x != 0.0:
            found[5] += 1
        else:
            found[0], found[1] = min(found[0], x), max(found[1], x)
            found[2] += x
            found[3] += x * x
            found[6 + (first + i) % NUM_SKETCHES] += x * np.float64(get(signs, sign_at + i))


@host_function
def measure(values: Any, bits: Any, factors: Any, signs: Any, found: Any, digests: Any) -> None:
    """Formula: of each row the least and the greatest finite element, the sums of these and of
    their squares, how many are NaN and infinite, and 8 sums of the finite ones times signs, each of
    every eighth element; digest = sum of bits[i] * factors[i mod BLOCK] * (2 * (i div BLOCK) + 1)
    modulo 2**64.
    Shapes: values f32 and bits u32 [num_rows, num_elements], the same memory; factors u64 and signs
    f32 [BLOCK]; found f64 [num_rows, 14] and digests u64 [num_rows], both written.
    """
    num_elements = values.shape[1]
    for row in range(values.shape[0]):
        of_row, digest = found[row], np.uint64(0)
        of_row[:] = 0.0
        of_row[0], of_row[1] = np.inf, -np.inf
        for start in range(0, num_elements, TILE):
            num, number, at = min(TILE, num_elements - start), start // BLOCK, start % BLOCK
            part, exponents = np.uint64(0), np.uint64(0)
            for i in range(num):
                of_one = np.uint64(bits[row, start + i])
                part += of_one * factors[at + i]
                # All ones, and so one too many for the bits of an exponent, is what is not finite.
                exponents |= (of_one & _EXPONENT) + _ONE
            digest += part * np.uint64(2 * number + 1)
            first = row * num_elements + start
            # Of each block the sums change places, so that equal blocks are told apart.
            is_plain = num == TILE and not exponents & _SIGN
            if not (is_plain and _whole_tile(values, first, signs, at, number, of_row)):
                _some(values, first, num, signs, at, number, of_row)
        digests[row] = digest


def figures_of(values: Float32s) -> ArrayFigures:
    """The figures of each row of `values`, f32 [num_arrays, num_elements]; 0 where there is no
    finite element.

    A digest stands for the bits: one element that changes always changes it. It is no defence
    against who wants two to be equal.
    """
    return figures_of_groups([values])[0]


def figures_of_groups(groups: Sequence[Float32s]) -> list[ArrayFigures]:
    """`figures_of` of each of these, in one go: for few elements most of the time is around it."""
    ends = np.cumsum([len(values) for values in groups]).tolist()
    found, digests = np.empty((ends[-1], 14)), np.empty(ends[-1], np.uint64)
    sizes = np.empty(ends[-1])
    for values, end in zip(groups, ends, strict=True):
        values = np.ascontiguousarray(values, np.float32)
        of = slice(end - len(values), end)
        sizes[of] = values.shape[1]
        bits = values.view(np.uint32)
        measure(values, bits, _factors(), _signs(), found[of], digests[of])
    counts = sizes - found[:, _NUM_NAN] - found[:, _NUM_INF]
    found[counts == 0, :_TOTAL] = 0
    at_least_one = np.maximum(counts, 1)
    hexed = digests.astype(">u8").tobytes().hex()
    low, high = found[:, _LOW].tolist(), found[:, _HIGH].tolist()
    mean = (found[:, _TOTAL] / at_least_one).tolist()
    rms = np.sqrt(found[:, _SQUARES] / at_least_one).tolist()
    num_nan, num_inf = (found[:, at].astype(int).tolist() for at in (_NUM_NAN, _NUM_INF))
    scales = np.sqrt(NUM_SKETCHES / np.maximum(sizes, 1))[:, None]
    sketches = (found[:, _SKETCH:] * scales).astype("<f4")
    return [
        ArrayFigures(
            hexed[16 * start : 16 * end],
            low[start:end],
            high[start:end],
            mean[start:end],
            rms[start:end],
            num_nan[start:end],
            num_inf[start:end],
            sketches[start:end],
        )
        for start, end in zip([0, *ends], ends, strict=False)
    ]


@functools.cache
def _signs() -> Float32s:
    """Signs f32 [BLOCK], the same in every run and version."""
    bits = hashlib.shake_256(b"hypocenter trace signs").digest(BLOCK // 8)
    return np.unpackbits(np.frombuffer(bits, np.uint8)).astype(np.float32) * 2 - 1


@functools.cache
def _factors() -> Array:
    """Odd factors u64 [BLOCK], the same in every run and version."""
    raw = hashlib.shake_256(b"hypocenter trace factors").digest(8 * BLOCK)
    return np.frombuffer(raw, "<u8").astype(np.uint64) | np.uint64(1)
