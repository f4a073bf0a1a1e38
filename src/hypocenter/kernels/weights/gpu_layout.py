"""The packed layouts in which GPU kernels read a weight, made of GGUF bytes with numpy.

Two layouts of codes hold every block type: 8-bit codes and 4-bit codes, with a scale (and
minimum) per group of columns. All lies in units of 64 columns, missing ones zero, so that a lane
reads 16 bytes: weights [num_rows / 16, units, 16, 64]; words i32 [num_rows / 4, units, chunks, 4,
4] whose chunk h holds the columns 16 h .. 16 h + 15 of each row, and in its high nibbles, where
codes have four bits, those 32 columns on; scales and minima [num_rows / 4, units, 4, groups].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hypocenter.dtypes import Array
from hypocenter.kernels.weights.block_types import Blocks, unpack
from hypocenter.kernels.weights.row_groups import LANES, in_groups, padded_rows, side_by_side, slabs
from hypocenter.tensor import DType

#: Rows of codes that lie side by side: as many as the smallest program takes, which so reads memory
#: in one stream.
CODE_LANES = 4
_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Units:
    """How one GGUF type is packed: `codes_per_word` 0 is the float layout, elements of `dtype`.

    `zero` is what was added to a code to make it unsigned; scales stay in f16 where the type has
    them so and are f32 where it multiplies two fields.
    """

    dtype: DType
    codes_per_word: int = 0
    zero: int = 0
    group: int = 0
    scale_dtype: DType = DType.F32
    has_minima: bool = False

    @property
    def is_float(self) -> bool:
        return self.codes_per_word == 0


_HALF = DType.F16
UNITS: dict[DType, Units] = {
    layout.dtype: layout
    for layout in (
        Units(DType.F32),
        Units(DType.F16),
        Units(DType.BF16),
        Units(DType.Q4_0, 8, zero=8, group=32, scale_dtype=_HALF),
        Units(DType.Q4_1, 8, group=32, scale_dtype=_HALF, has_minima=True),
        Units(DType.Q5_0, 4, group=32, scale_dtype=_HALF),
        Units(DType.Q5_1, 4, group=32, scale_dtype=_HALF, has_minima=True),
        Units(DType.Q8_0, 4, group=32, scale_dtype=_HALF),
        Units(DType.Q2_K, 8, group=16, has_minima=True),
        Units(DType.Q3_K, 8, zero=4, group=16),
        Units(DType.Q4_K, 8, group=32, has_minima=True),
        Units(DType.Q5_K, 4, group=32, has_minima=True),
        Units(DType.Q6_K, 4, group=16),
        Units(DType.IQ4_NL, 4, group=32, scale_dtype=_HALF),
        Units(DType.IQ4_XS, 4, group=32),
    )
}


def pack_units(raw: Array, dtype: DType, num_columns: int) -> tuple[Array, ...]:
    """Rows of GGUF bytes as (weights,) or (words, scales, minima); no minima is an empty array."""
    layout, num_rows = UNITS[dtype], raw.shape[0]
    width = -(-num_columns // _COLUMNS) * _COLUMNS
    if layout.is_float:
        lead = (padded_rows(num_rows) // LANES, width // _COLUMNS)
        kind = {DType.F32: np.float32, DType.F16: np.uint16, DType.BF16: np.int16}[dtype]
        weights = np.zeros((*lead, LANES, _COLUMNS), kind)
        side_by_side(
            lambda rows: _put(weights, rows.start, raw[rows].view(kind), width), slabs(num_rows)
        )
        return (weights,)
    scale_type = np.uint16 if layout.scale_dtype is DType.F16 else np.float32
    lead = (padded_rows(num_rows) // CODE_LANES, width // _COLUMNS)
    words = np.zeros((*lead, 16 // layout.codes_per_word, CODE_LANES, 4), np.int32)
    scales = np.zeros((*lead, CODE_LANES, _COLUMNS // layout.group), scale_type)
    minima = np.zeros(scales.shape if layout.has_minima else (0, 0, CODE_LANES, 0), scale_type)

    def fill(rows: slice) -> None:
        start, blocks = rows.start, unpack(raw[rows], dtype, num_columns)
        made = _words(blocks, layout, width)
        words[start // CODE_LANES : start // CODE_LANES + len(made)] = made
        _put(scales, start, _as_scale(blocks.scales, scale_type), width // layout.group)
        if (lows := blocks.minima) is not None:
            _put(minima, start, _as_scale(lows, scale_type), width // layout.group)

    side_by_side(fill, slabs(num_rows))
    return words, scales, minima


def _put(into: Array, start: int, rows: Array, width: int) -> None:
    """Write rows [n, <= width] into [groups, units, lanes, size] from row `start` on."""
    lanes, size = into.shape[2:]
    grouped = in_groups(rows, width, lanes)
    units = grouped.reshape(len(grouped), lanes, -1, size).transpose(0, 2, 1, 3)
    into[start // lanes : start // lanes + len(units)] = units


def _words(blocks: Blocks, layout: Units, width: int) -> Array:
    """i32 [groups, units, chunks, 4, 4]."""
    codes, lanes = blocks.codes, CODE_LANES
    if layout.codes_per_word == 4:
        grouped = in_groups(codes, width, lanes).reshape(-1, lanes, width // _COLUMNS, 4, 16)
        return np.ascontiguousarray(grouped.transpose(0, 2, 3, 1, 4)).view(np.int32)
    raised = in_groups((codes + np.int8(layout.zero)).view(np.uint8), width, lanes)
    halves = raised.reshape(-1, lanes, width // _COLUMNS, 2, 2, 16)
    chunks = halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)
    return np.ascontiguousarray(chunks.transpose(0, 2, 3, 1, 4)).view(np.int32)


def _as_scale(values: Array, kind: type) -> Array:
    # f16 scales come from f16 fields: the way back is exact.
    return values.astype(np.float16).view(np.uint16) if kind is np.uint16 else values
