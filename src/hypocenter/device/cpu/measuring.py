"""Figures of many arrays in one pass, compiled: what a trace tells of tensors (`trace/points.py`).

Launches nothing on a device: the arrays are the host's.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

import numpy as np

from hypocenter.base.dtypes import Array, Float32s
from hypocenter.device.cpu.lang import host_function

#: Numbers in the sketch of an array, and elements with signs and factors of their own.
NUM_SKETCHES, BLOCK = 8, 1 << 14
#: Columns of what `measure` finds: range, sums, counts, and behind them the sketch.
_LOW, _HIGH, _TOTAL, _SQUARES, _NUM_NAN, _NUM_INF, _SKETCH = range(7)


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


@host_function
def measure(values: Any, bits: Any, factors: Any, signs: Any, found: Any, digests: Any) -> None:
    """Formula: of each row the least and the greatest finite element, the sums of these and of
    their squares, how many are NaN and infinite, and 8 sums of the finite ones times signs; digest
    = sum of bits[i] * factors[i mod BLOCK] * (2 * (i div BLOCK) + 1) modulo 2**64.
    Shapes: values f32 and bits u32 [num_rows, num_elements], the same memory; factors u64 [BLOCK];
    signs f64 [BLOCK, 8]; found f64 [num_rows, 14] and digests u64 [num_rows], both written.
    """
    num_elements, block = values.shape[1], factors.shape[0]
    for row in range(values.shape[0]):
        low, high, total, squares = np.inf, -np.inf, 0.0, 0.0
        num_nan, num_inf, digest = 0, 0, np.uint64(0)
        found[row, 6:] = 0.0
        for start in range(0, num_elements, block):
            number = start // block
            part = np.uint64(0)
            a0, a1, a2, a3, a4, a5, a6, a7 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            for i in range(min(block, num_elements - start)):
                part += np.uint64(bits[row, start + i]) * factors[i]
                x = np.float64(values[row, start + i])
                if x != x:
                    num_nan += 1
                    continue
                if x - x != 0.0:
                    num_inf += 1
                    continue
                low, high = min(low, x), max(high, x)
                total, squares = total + x, squares + x * x
                a0 += x * signs[i, 0]
                a1 += x * signs[i, 1]
                a2 += x * signs[i, 2]
                a3 += x * signs[i, 3]
                a4 += x * signs[i, 4]
                a5 += x * signs[i, 5]
                a6 += x * signs[i, 6]
                a7 += x * signs[i, 7]
            digest += part * np.uint64(2 * number + 1)
            # Of each block the sums change places, so that equal blocks are told apart.
            found[row, 6 + number % 8] += a0
            found[row, 6 + (number + 1) % 8] += a1
            found[row, 6 + (number + 2) % 8] += a2
            found[row, 6 + (number + 3) % 8] += a3
            found[row, 6 + (number + 4) % 8] += a4
            found[row, 6 + (number + 5) % 8] += a5
            found[row, 6 + (number + 6) % 8] += a6
            found[row, 6 + (number + 7) % 8] += a7
        found[row, 0], found[row, 1], found[row, 2], found[row, 3] = low, high, total, squares
        found[row, 4], found[row, 5] = num_nan, num_inf
        digests[row] = digest


def figures_of(values: Float32s) -> ArrayFigures:
    """The figures of each row of `values`, f32 [num_arrays, num_elements]; 0 where there is no
    finite element.

    A digest stands for the bits: one element that changes always changes it. It is no defence
    against who wants two to be equal.
    """
    values = np.ascontiguousarray(values, np.float32)
    num_arrays, num_elements = values.shape
    found, digests = np.empty((num_arrays, 14)), np.empty(num_arrays, np.uint64)
    measure(values, values.view(np.uint32), _factors(), _signs(), found, digests)
    counts = num_elements - found[:, _NUM_NAN] - found[:, _NUM_INF]
    found[counts == 0, :_TOTAL] = 0
    at_least_one = np.maximum(counts, 1)
    return ArrayFigures(
        digests.astype(">u8").tobytes().hex(),
        found[:, _LOW].tolist(),
        found[:, _HIGH].tolist(),
        (found[:, _TOTAL] / at_least_one).tolist(),
        np.sqrt(found[:, _SQUARES] / at_least_one).tolist(),
        found[:, _NUM_NAN].astype(int).tolist(),
        found[:, _NUM_INF].astype(int).tolist(),
        (found[:, _SKETCH:] / max(num_elements, 1) ** 0.5).astype("<f4"),
    )


@functools.cache
def _signs() -> Array:
    """Signs f64 [BLOCK, NUM_SKETCHES], the same in every run and version."""
    bits = hashlib.shake_256(b"hypocenter trace signs").digest(BLOCK * NUM_SKETCHES // 8)
    ones = np.unpackbits(np.frombuffer(bits, np.uint8)).reshape(BLOCK, NUM_SKETCHES)
    return 2.0 * ones - 1.0


@functools.cache
def _factors() -> Array:
    """Odd factors u64 [BLOCK], the same in every run and version."""
    raw = hashlib.shake_256(b"hypocenter trace factors").digest(8 * BLOCK)
    return np.frombuffer(raw, "<u8").astype(np.uint64) | np.uint64(1)
