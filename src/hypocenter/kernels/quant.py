"""The packed layouts in which kernels read a weight, and the way into them from GGUF bytes.

Two layouts of codes hold every block type: 8-bit codes and 4-bit codes, with a scale (and
minimum) per group of columns. What the bytes of a block type mean is in `block_types.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypocenter.device import memory
from hypocenter.kernels.block_types import unpack
from hypocenter.tensor import DType, Tensor, contiguous_strides

Array = np.ndarray[Any, Any]

#: Rows that a packed weight interleaves in one vector, and rows that one work item handles.
LANES = 16
ROWS_PER_ITEM = 64
_SLAB_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Layout:
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

    @property
    def words_per_scale(self) -> int:
        return self.group // self.codes_per_word

    def num_bytes(self, num_rows: int, num_columns: int) -> int:
        """Bytes of a packed weight [num_rows, num_columns]."""
        num_elements = padded(num_rows) * num_columns
        if self.is_float:
            return num_elements * self.dtype.block_bytes
        scale_bytes = self.scale_dtype.block_bytes * (2 if self.has_minima else 1)
        return num_elements // self.codes_per_word * 4 + num_elements // self.group * scale_bytes


_HALF = DType.F16
LAYOUTS: dict[DType, Layout] = {
    layout.dtype: layout
    for layout in (
        Layout(DType.F32),
        Layout(DType.F16),
        Layout(DType.BF16),
        Layout(DType.Q4_0, 8, zero=8, group=32, scale_dtype=_HALF),
        Layout(DType.Q4_1, 8, group=32, scale_dtype=_HALF, has_minima=True),
        Layout(DType.Q5_0, 4, group=32, scale_dtype=_HALF),
        Layout(DType.Q5_1, 4, group=32, scale_dtype=_HALF, has_minima=True),
        Layout(DType.Q8_0, 4, group=32, scale_dtype=_HALF),
        Layout(DType.Q2_K, 8, group=16, has_minima=True),
        Layout(DType.Q3_K, 8, zero=4, group=16),
        Layout(DType.Q4_K, 8, group=32, has_minima=True),
        Layout(DType.Q5_K, 4, group=32, has_minima=True),
        Layout(DType.Q6_K, 4, group=16),
        Layout(DType.IQ4_NL, 4, group=32, scale_dtype=_HALF),
        Layout(DType.IQ4_XS, 4, group=32),
    )
}


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as the CPU kernels read it: 16 rows interleaved, rows padded to 64 with zeros.

    layout `float`: parts = (weights,), [num_rows / 16, num_columns, 16] as f32, f16 bits (uint16)
    or bf16 bits (int16). layout `codes`: parts = (words, scales, minima, zero): four 8-bit codes
    (int32) or eight 4-bit codes (uint32) to a word [num_rows / 16, num_columns / 4 or 8, 16];
    scales and minima [num_rows / 16, num_columns / group, 16] as f32 or f16 bits, minima empty
    when there are none; value = scale * (code - zero) + minimum.
    """

    layout: Layout
    parts: tuple[Any, ...]
    num_rows: int
    num_columns: int

    @property
    def num_words(self) -> int:
        """Words of codes along one row."""
        return self.num_columns // self.layout.codes_per_word

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes(self.num_rows, self.num_columns)


def pack(raw: Array, dtype: DType, num_columns: int) -> Packed:
    """Bring rows of GGUF bytes (uint8 [num_rows, row_bytes]) into their packed layout."""
    if not dtype.is_quantised:
        return _pack_float(raw, dtype, num_columns)
    layout, num_rows = LAYOUTS[dtype], raw.shape[0]
    num_groups = padded(num_rows) // LANES
    shape = (num_groups, num_columns // layout.group, LANES)
    scale_type = np.uint16 if layout.scale_dtype is DType.F16 else np.float32
    word_type = np.int32 if layout.codes_per_word == 4 else np.uint32
    words = np.zeros((num_groups, num_columns // layout.codes_per_word, LANES), word_type)
    scales = np.zeros(shape, scale_type)
    minima = np.zeros(shape if layout.has_minima else (0, 0, LANES), scale_type)
    pack_words = _words8 if layout.codes_per_word == 4 else _words4
    for start in range(0, num_rows, _SLAB_ROWS):
        blocks = unpack(raw[start : start + _SLAB_ROWS], dtype, num_columns)
        slab = slice(start // LANES, -(-(start + len(blocks.codes)) // LANES))
        words[slab] = _interleave(pack_words(blocks.codes, layout.zero))
        scales[slab] = _interleave(_as_scale(blocks.scales, scale_type))
        if blocks.minima is not None:
            minima[slab] = _interleave(_as_scale(blocks.minima, scale_type))
    return Packed(layout, (words, scales, minima, np.float32(layout.zero)), num_rows, num_columns)


def place(name: str, owner: str, dtype: DType, packed: Packed, *, device: str = "cpu") -> Tensor:
    """A packed weight as a Tensor [num_rows, num_columns] on `device`.

    On a GPU its parts lie in units of 64 columns, missing columns zero, so that a lane reads 16
    bytes: weights [num_rows / 16, units, 16, 64]; words i32 [num_rows / 16, units, chunks, 16, 4]
    whose chunk h holds the columns 16 h .. 16 h + 15 of each row, and in its high nibbles, where
    codes have four bits, those 32 columns on; scales and minima [num_rows / 16, units, 16, groups].
    """
    shape = (packed.num_rows, packed.num_columns)
    if device == "cpu":
        return memory.adopt(name, owner, dtype, shape, packed, packed.num_bytes)
    allocation, parts = memory.upload(_gpu_parts(packed), device, name, owner)
    data = replace(packed, parts=parts)
    return Tensor(name, owner, dtype, shape, contiguous_strides(shape), 0, allocation, data)


def _gpu_parts(packed: Packed) -> tuple[Any, ...]:
    layout, first = packed.layout, packed.parts[0]
    if layout.is_float:
        return (_in_units(first.transpose(0, 2, 1), 64).transpose(0, 2, 1, 3),)
    make = _chunks8 if layout.codes_per_word == 4 else _chunks4
    shape = (len(first), -(-packed.num_columns // 64), 16 // layout.codes_per_word, LANES, 4)
    words = np.zeros(shape, np.int32)
    for start in range(0, len(first), _SLAB_ROWS // LANES):
        slab = slice(start, start + _SLAB_ROWS // LANES)
        words[slab] = make(first[slab]).view(np.int32)
    scales, minima = (
        _in_units(part.transpose(0, 2, 1), 64 // layout.group).transpose(0, 2, 1, 3)
        for part in packed.parts[1:3]
    )
    return words, scales, minima, packed.parts[3]


def _in_units(rows: Array, size: int) -> Array:
    """[groups, 16, n] to [groups, 16, ceil(n / size), size], what is missing zero."""
    num_units = -(-rows.shape[2] // size)
    rows = np.pad(rows, ((0, 0), (0, 0), (0, num_units * size - rows.shape[2])))
    return rows.reshape(len(rows), rows.shape[1], num_units, size)


def _chunks8(words: Array) -> Array:
    """Words of four 8-bit codes [groups, n, 16] as bytes [groups, units, 4, 16, 16]."""
    columns = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8)
    units = _in_units(columns, 64)
    chunks = units.reshape(*units.shape[:3], 4, 16).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(chunks)


def _chunks4(words: Array) -> Array:
    """Words of eight 4-bit codes [groups, n, 16] as bytes [groups, units, 2, 16, 16]."""
    bytes_ = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8)
    bytes_ = bytes_.reshape(len(words), LANES, -1, 4)
    columns = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(len(words), LANES, -1)
    units = _in_units(columns, 64)
    halves = units.reshape(*units.shape[:3], 2, 2, 16)
    chunks = halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)
    return np.ascontiguousarray(chunks.transpose(0, 2, 3, 1, 4))


def padded(num_rows: int) -> int:
    """Rows of a packed weight, and the pitch of activations: the next multiple of 64."""
    return -(-num_rows // ROWS_PER_ITEM) * ROWS_PER_ITEM


def _pack_float(raw: Array, dtype: DType, num_columns: int) -> Packed:
    rows = raw.view({DType.F32: np.float32, DType.F16: np.uint16, DType.BF16: np.int16}[dtype])
    weights = np.zeros((padded(len(rows)) // LANES, num_columns, LANES), rows.dtype)
    for start in range(0, len(rows), _SLAB_ROWS):
        packed = _interleave(rows[start : start + _SLAB_ROWS])
        weights[start // LANES : start // LANES + len(packed)] = packed
    return Packed(LAYOUTS[dtype], (weights,), len(rows), num_columns)


def _interleave(rows: Array) -> Array:
    """[num_rows, n] to [ceil(num_rows / 16), n, 16], missing rows zero."""
    missing = -len(rows) % LANES
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), rows.dtype)])
    return rows.reshape(-1, LANES, rows.shape[1]).transpose(0, 2, 1)


def _words8(codes: Array, zero: int) -> Array:
    """Four columns to a word, the first in the lowest byte; signed, so nothing is added."""
    return np.ascontiguousarray(codes).view(np.int32)


def _words4(codes: Array, zero: int) -> Array:
    """Eight columns to a word: columns 0..3 in the low nibbles of bytes 0..3, 4..7 in the high."""
    raised = (codes + np.int8(zero)).view(np.uint8).reshape(codes.shape[0], -1, 2, 4)
    bytes_ = raised[:, :, 0] | (raised[:, :, 1] << 4)
    return bytes_.reshape(codes.shape[0], -1).view(np.uint32)


def _as_scale(values: Array, kind: type) -> Array:
    # f16 scales come from f16 fields: the way back is exact.
    return values.astype(np.float16).view(np.uint16) if kind is np.uint16 else values
