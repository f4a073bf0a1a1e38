"""The packed layouts in which GPU kernels read a weight, made of GGUF bytes there or on the host.

Floats lie in units of 64 columns, missing ones zero: weights [num_rows / 16, units, 16, 64].
Two layouts of codes hold every block type: codes of a byte in units of 64 columns, of four bits in
units of 128. A row has four words for each of four lanes in a unit, i32 [num_rows / 8, units, 8,
lane, word], so that a lane of a matrix unit reads 16 bytes and has what it feeds to that unit: of
16 columns those from 2 * lane and those from 8 + 2 * lane on, two each. A word has the codes of 16
columns, one byte each, or of twice 16: then column 2 * lane + 1 is four nibbles from its neighbour.
Scales and minima are f16 [num_rows / 8, units, 8, groups] over a power of two of the weight,
`factor`, that brings its largest number near the end of f16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType
from hypocenter.device.arrays import (
    AnyArray,
    bits_as,
    cast,
    constants,
    in_order,
    is_host,
    largest_size,
    stack,
    turn,
    zeros,
)
from hypocenter.kernels.weights.block_types import Blocks, unpack
from hypocenter.kernels.weights.row_groups import (
    LANES,
    ROWS_PER_ITEM,
    in_groups,
    padded_rows,
    side_by_side,
    slabs,
)

#: Rows of codes that lie side by side: as many as the smallest program takes, which so reads memory
#: in one stream.
CODE_LANES = 8
#: Stretches of a row whose products are added up apart, and then one after another.
CHAINS = 8
_COLUMNS = 64
#: Weights that are packed at a time on a device, which takes up to twelve bytes of each meanwhile.
_DEVICE_SLAB = 1 << 25
#: Of an f16 whose largest number is below twice this one no code times scale overflows.
_LARGEST = 14


@dataclass(frozen=True, slots=True)
class Units:
    """How one GGUF type is packed: `codes_per_word` 0 is the float layout, elements of `dtype`.

    `zero` is what was added to a code to make it unsigned.
    """

    dtype: DType
    codes_per_word: int = 0
    zero: int = 0
    group: int = 0
    has_minima: bool = False

    @property
    def is_float(self) -> bool:
        return self.codes_per_word == 0

    @property
    def unit_columns(self) -> int:
        """Columns of a unit, which takes 64 bytes of a row of codes."""
        return 16 * self.codes_per_word or _COLUMNS


UNITS: dict[DType, Units] = {
    layout.dtype: layout
    for layout in (
        Units(DType.F32),
        Units(DType.F16),
        Units(DType.BF16),
        Units(DType.Q4_0, 8, zero=8, group=32),
        Units(DType.Q4_1, 8, group=32, has_minima=True),
        Units(DType.Q5_0, 4, group=32),
        Units(DType.Q5_1, 4, group=32, has_minima=True),
        Units(DType.Q8_0, 4, group=32),
        Units(DType.Q2_K, 8, group=16, has_minima=True),
        Units(DType.Q3_K, 8, zero=4, group=16),
        Units(DType.Q4_K, 8, group=32, has_minima=True),
        Units(DType.Q5_K, 4, group=32, has_minima=True),
        Units(DType.Q6_K, 4, group=16),
        Units(DType.IQ4_NL, 4, group=32),
        Units(DType.IQ4_XS, 4, group=32),
        Units(DType.MXFP4, 4, group=32),
        Units(DType.NVFP4, 4, group=16),
        Units(DType.IQ3_S, 4, group=32),
        Units(DType.IQ3_XXS, 4, group=32),
        Units(DType.IQ2_S, 4, group=16),
        Units(DType.IQ2_XS, 4, group=16),
        Units(DType.IQ2_XXS, 4, group=32),
        Units(DType.IQ1_M, 4, group=16),
        Units(DType.IQ1_S, 4, group=32),
        Units(DType.TQ2_0, 8, zero=8, group=32),
        Units(DType.TQ1_0, 8, zero=8, group=32),
        Units(DType.Q2_0, 8, zero=8, group=32),
        Units(DType.Q1_0, 8, zero=8, group=32),
    )
}


def pack_units(
    raw: Array,
    dtype: DType,
    num_columns: int,
    there: Callable[[Array], AnyArray] = np.asarray,
    *,
    factors: Array | None = None,
) -> tuple[Any, ...]:
    """Rows of GGUF bytes as (weights,) or (words, scales, minima, zero, factor); no minima is an
    empty array, zero and factor are f32 numbers.

    `there` brings bytes to where they are packed, on which the result lies. `factors`: f32
    [num_matrices], each for an equal part of the rows; a single one becomes part of the factor.
    """
    layout, num_rows = UNITS[dtype], raw.shape[0]
    width = -(-num_columns // layout.unit_columns) * layout.unit_columns
    beside = there(raw[:0])
    if layout.is_float:
        lead = (padded_rows(num_rows) // LANES, width // _COLUMNS)
        kind = {DType.F32: "float32", DType.F16: "float16", DType.BF16: "int16"}[dtype]
        weights = zeros((*lead, LANES, _COLUMNS), kind, beside)

        def put(rows: slice) -> None:
            _put(weights, rows.start, bits_as(there(raw[rows]), kind), width)

        _by_slabs(put, num_rows, num_columns, beside)
        return (weights,)
    lead = (padded_rows(num_rows) // CODE_LANES, width // layout.unit_columns)
    words = zeros((*lead, CODE_LANES, 4, 4), "int32", beside)
    groups = layout.unit_columns // layout.group
    exact = zeros((*lead, CODE_LANES, groups), "float32", beside)
    low_shape = (*lead, CODE_LANES, groups) if layout.has_minima else (0, 0, CODE_LANES, 0)
    exact_minima = zeros(low_shape, "float32", beside)

    def fill(rows: slice) -> None:
        start, blocks = rows.start, unpack(there(raw[rows]), dtype, num_columns)
        packed = _words(blocks, layout, width)
        words[start // CODE_LANES : start // CODE_LANES + len(packed)] = packed
        _put(exact, start, _of_groups(blocks, layout), width // layout.group)
        if (lows := blocks.minima) is not None:
            _put(exact_minima, start, lows, width // layout.group)

    _by_slabs(fill, num_rows, num_columns, beside)
    if factors is not None and len(factors) > 1:
        own = constants(np.repeat(factors, len(exact) // len(factors)), "float32", exact)
        exact = exact * own[:, None, None, None]
    factor = _factor(exact, exact_minima, layout)
    halves = [cast(array / float(factor), "float16") for array in (exact, exact_minima)]
    if factors is not None and len(factors) == 1:
        factor = factor * factors[0]
    return words, *halves, np.float32(layout.zero), factor


def _by_slabs(
    work: Callable[[slice], None], num_rows: int, num_columns: int, beside: AnyArray
) -> None:
    """Packs on the host by threads; a device has lanes enough, and memory for one slab."""
    if is_host(beside):
        side_by_side(work, slabs(num_rows))
        return
    slab_rows = max(_DEVICE_SLAB // num_columns // ROWS_PER_ITEM, 1) * ROWS_PER_ITEM
    for rows in slabs(num_rows, slab_rows):
        work(rows)


def reference(raw: Array, dtype: DType, num_columns: int) -> Array:
    """Rows of GGUF bytes of a block type as products multiply them, in float64: code times scale
    plus minimum in f16, over the factor, each rounded once."""
    blocks, layout = unpack(raw, dtype, num_columns), UNITS[dtype]
    scales, minima = _of_groups(blocks, layout), blocks.minima
    factor = float(_factor(scales, scales[:0] if minima is None else minima, layout))
    codes = blocks.codes.reshape(len(raw), -1, layout.group).astype(np.float64)
    values = codes * (scales / factor).astype(np.float16).astype(np.float64)[..., None]
    if minima is not None:
        values += (minima / factor).astype(np.float16).astype(np.float64)[..., None]
    found: Array = values.astype(np.float16).astype(np.float64).reshape(len(raw), -1) * factor
    return found[:, :num_columns]


def _of_groups(blocks: Blocks, layout: Units) -> AnyArray:
    """Scales of the groups of a layout, which may be smaller than those of the file."""
    scales, times = blocks.scales, blocks.group // layout.group
    return scales if times == 1 else stack([scales] * times, -1).reshape(len(scales), -1)


def _factor(scales: AnyArray, minima: AnyArray, layout: Units) -> np.float32:
    """The power of two over which code times scale plus minimum has room in f16."""
    largest = (128 if layout.codes_per_word == 4 else 16) * largest_size(scales)
    largest += largest_size(minima)
    if largest == 0:
        return np.float32(1)
    # Within f32, and its inverse too.
    exponent = min(max(int(np.floor(np.log2(largest))) - _LARGEST, -120), 120)
    return np.float32(2.0**exponent)


def _put(into: AnyArray, start: int, rows: AnyArray, width: int) -> None:
    """Write rows [n, <= width] into [groups, units, lanes, size] from row `start` on."""
    lanes, size = into.shape[2:]
    grouped = in_groups(rows, width, lanes)
    units = turn(grouped.reshape(len(grouped), lanes, -1, size), (0, 2, 1, 3))
    into[start // lanes : start // lanes + len(units)] = units


def _words(blocks: Blocks, layout: Units, width: int) -> AnyArray:
    """i32 [groups, units, rows, lanes, words]."""
    codes, rows = blocks.codes, CODE_LANES
    if layout.codes_per_word == 4:
        # [groups, rows, units, word, pair, lane, even and odd]
        split = in_groups(codes, width, rows).reshape(-1, rows, width // 64, 4, 2, 4, 2)
        return _as_words(turn(split, (0, 2, 1, 5, 3, 4, 6)))
    raised = in_groups(bits_as(codes + layout.zero, "uint8"), width, rows)
    # [groups, rows, units, word, chunk, pair, lane, even and odd]
    split = raised.reshape(-1, rows, width // 128, 4, 2, 2, 4, 2)
    pairs = split[..., 0, :, :] | (split[..., 1, :, :] << 4)
    # [groups, units, rows, lane, word, even and odd, chunk]
    return _as_words(turn(pairs, (0, 2, 1, 5, 3, 6, 4)))


def _as_words(codes: AnyArray) -> AnyArray:
    """[..., 2, 2] bytes as i32 [...]."""
    return bits_as(in_order(codes).reshape(*codes.shape[:-2], 4), "int32")[..., 0]
