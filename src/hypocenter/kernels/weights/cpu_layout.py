"""The packed layouts in which CPU kernels read a weight, made of GGUF bytes with numpy.

A weight of codes is records [num_rows / 64, records, 4], each 16 rows by 64 or 256 columns, those
of four groups of rows side by side. Codes lie as bytes or in planes of bits, those of 32 columns
together, in the order in which `packed_codes.py` reads them, so that a thread reads memory in one
stream. Scales and minima are kept as the file has them, an f16 for a group of columns, or an f16
for 256 columns and small integers for groups. Parts of an f16 are kept as f32, powers of two as
bf16, e4m3 as bytes beside an f32. Those of a group
share a byte, its low half the scale's, and the two bits that six have above that lie by two groups
to a byte. So a packed weight is about as large as in the file. Float weights are [num_rows / 64,
num_columns, 64]; those of bf16 [num_rows / 64, num_columns / 2, 64] words of two columns, the even
one low.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array, factors_of_products
from hypocenter.base.tensor import DType
from hypocenter.device.cpu import large_pages
from hypocenter.device.cpu.code_fields import (
    MINI_FACTOR,
    MINIS_FIELD,
    POWERS_FIELD,
    codes_field,
)
from hypocenter.kernels.weights.block_types import E2M1_VALUES, Blocks, dequantise, unpack
from hypocenter.kernels.weights.grid_types import (
    IQ1_SIZES,
    IQ2_SIZES,
    IQ3_S_SIZES,
    IQ3_XXS_SIZES,
)
from hypocenter.kernels.weights.row_groups import (
    GROUPS_PER_ITEM,
    LANES,
    ROWS_PER_ITEM,
    in_groups,
    padded_rows,
    side_by_side,
    slabs,
)

#: Gives the array of a shape and a type of numpy that was packed before, or None.
Kept = Callable[[tuple[int, ...], Any], Array | None]
#: What is told of rows that have been read.
Read = Callable[[Array], None]
#: Columns of a record.
_WIDE, _NARROW = 256, 64
#: Columns of float weights that are turned at a time.
_COLUMNS_AT_ONCE = 128
_E2M1_SIZES = E2M1_VALUES[:8]


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """How a block type is packed: the bits of its planes (8: bytes) and what was added to a code.

    `num_columns`: columns of a record, which fill whole cache lines. `group`: columns that share a
    scale. `is_nested`: scales are small integers times one of the record. Where they have minima
    beside them, both are of `pair_bits`. `sizes`: a code is the number of one of them, and its
    highest bit a sign. `scale`: the field of scales, which says what numbers they are, and
    `scale_kind` what those of the record, or of the groups, are kept as.
    """

    dtype: DType
    planes: tuple[int, ...]
    zero: int = 0
    group: int = 32
    has_minima: bool = False
    pair_bits: int = 0
    num_columns: int = _WIDE
    sizes: tuple[int, ...] = ()
    scale: str = "scale"
    scale_kind: str = "<u2"

    @property
    def is_nested(self) -> bool:
        return self.group < self.dtype.block_elements == _WIDE

    @property
    def has_minis(self) -> bool:
        """Whether scales are e4m3, times an f32 of the record."""
        return self.scale == MINIS_FIELD

    @property
    def record(self) -> np.dtype[Any]:
        """The fields of a record, each of vectors of 16 rows."""
        num_groups = self.num_columns // self.group
        num_wholes = 1 if self.is_nested else num_groups
        fields: list[tuple[str, str, tuple[int, ...]]] = []
        if self.has_minis:
            fields.append(("scale", "<f4", (1, LANES)))
        fields.append((self.scale, self.scale_kind, (num_wholes, LANES)))
        if self.has_minima:
            fields.append(("minimum", "<u2", (num_wholes, LANES)))
        if self.pair_bits:
            fields.append(("pairs", "u1", (num_groups, LANES)))
        elif self.is_nested:
            fields.append(("scales", "i1", (num_groups, LANES)))
        if self.pair_bits > 4:
            fields.append(("tops", "u1", (num_groups // 2, LANES)))
        used = sum(np.dtype(entry[1:]).itemsize for entry in fields)
        if used % large_pages.LINE_BYTES:
            fields.append(("padding", "u1", (1, -used % large_pages.LINE_BYTES)))
        fields.append((self.codes, "<i4", (self.num_columns // 32, sum(self.planes), LANES)))
        return np.dtype(fields)

    @property
    def codes(self) -> str:
        """The name of the field of codes, which says what planes there are, and what they mean."""
        return codes_field(self.planes, self.zero, self.sizes)

    @property
    def meanings(self) -> Array:
        """What codes of sizes stand for, i8; numbers beyond the last size for nothing."""
        sizes = np.zeros(1 << (sum(self.planes) - 1), np.int8)
        sizes[: len(self.sizes)] = self.sizes
        return np.concatenate([sizes, -sizes])


def _of_sizes(
    dtype: DType, sizes: tuple[int, ...], group: int, scale_kind: str = "<f4"
) -> RecordLayout:
    planes = (2, 1) if len(sizes) <= 4 else (4,)
    return RecordLayout(dtype, planes, group=group, sizes=sizes, scale_kind=scale_kind)


RECORDS: dict[DType, RecordLayout] = {
    layout.dtype: layout
    for layout in (
        RecordLayout(DType.Q4_0, (4,), zero=8, num_columns=_NARROW),
        RecordLayout(DType.Q4_1, (4,), has_minima=True, num_columns=_NARROW),
        RecordLayout(DType.Q5_0, (4, 1), zero=16),
        RecordLayout(DType.Q5_1, (4, 1), has_minima=True),
        RecordLayout(DType.Q8_0, (8,)),
        RecordLayout(DType.Q2_K, (2,), group=16, has_minima=True, pair_bits=4),
        RecordLayout(DType.Q3_K, (2, 1), zero=4, group=16),
        RecordLayout(DType.Q4_K, (4,), has_minima=True, pair_bits=6),
        RecordLayout(DType.Q5_K, (4, 1), has_minima=True, pair_bits=6),
        RecordLayout(DType.Q6_K, (6,), zero=32, group=16),
        RecordLayout(DType.IQ4_NL, (8,)),
        RecordLayout(DType.IQ4_XS, (8,)),
        RecordLayout(DType.MXFP4, (4,), num_columns=_NARROW, sizes=_E2M1_SIZES, scale=POWERS_FIELD),
        RecordLayout(
            DType.NVFP4, (4,), group=16, sizes=_E2M1_SIZES, scale=MINIS_FIELD, scale_kind="u1"
        ),
        _of_sizes(DType.IQ3_S, IQ3_S_SIZES, 32, "<u2"),
        _of_sizes(DType.IQ3_XXS, IQ3_XXS_SIZES, 32),
        _of_sizes(DType.IQ2_S, IQ2_SIZES, 16),
        _of_sizes(DType.IQ2_XS, IQ2_SIZES, 16),
        _of_sizes(DType.IQ2_XXS, IQ2_SIZES, 32),
        _of_sizes(DType.IQ1_M, IQ1_SIZES, 16),
        _of_sizes(DType.IQ1_S, IQ1_SIZES, 32),
        RecordLayout(DType.TQ2_0, (2,), zero=1, group=256),
        RecordLayout(DType.TQ1_0, (2,), zero=1, group=256),
        RecordLayout(DType.Q2_0, (2,), zero=1, group=64),
        RecordLayout(DType.Q1_0, (2,), zero=1, group=128),
    )
}


def layout_of(dtype: DType, num_columns: int) -> RecordLayout:
    """How rows of `num_columns` of a block type are packed.

    Records are wide where they fit, which Q8_0 is read 3 to 20 % faster by on a Zen 4; four bits
    with scales of their own do 1 to 3 % better with narrow ones.
    """
    layout = RECORDS[dtype]
    if num_columns % _WIDE == 0:
        return layout
    return replace(layout, num_columns=max(_NARROW, layout.group))


def held_as(dtype: DType, num_columns: int, *, in_bf16: bool = False) -> DType:
    """The type that the CPU holds a weight of `dtype` as, if it is to multiply floats in bf16.

    An odd number of columns makes no pairs, so bf16 is then held as F32, and F16 stays.
    """
    if dtype is DType.BF16 or (in_bf16 and dtype is DType.F16):
        if num_columns % 2 == 0:
            return DType.BF16
        return DType.F32 if dtype is DType.BF16 else dtype
    return dtype


def packed_bytes(dtype: DType, *shape: int) -> int:
    """Bytes of a packed weight [num_rows, num_columns], or of a stack of experts [num_experts,
    num_rows, num_columns]."""
    *stacked, num_rows, num_columns = shape
    if stacked:
        num_rows = math.prod(stacked) * padded_rows(num_rows)
    if not dtype.is_quantised:
        return padded_rows(num_rows) * num_columns * held_as(dtype, num_columns).block_bytes
    layout = layout_of(dtype, num_columns)
    num_records = padded_rows(num_rows) // LANES * -(-num_columns // layout.num_columns)
    return num_records * layout.record.itemsize


def pack_records(
    raws: Sequence[Array],
    dtype: DType,
    num_columns: int,
    *,
    in_bf16: bool = False,
    kept: Kept | None = None,
    read: Read | None = None,
    factors: Sequence[Array | None] = (),
) -> tuple[Any, ...]:
    """Rows of GGUF bytes as (weights,), or (records,) for block types; floats as `held_as` says.

    Of several matrices of one shape the items, 64 rows each, lie by turns. What `kept` gives is
    taken as it is. `read` is told of rows that are wanted no more, from several threads. `factors`
    (of NVFP4): of each matrix f32 [n], each for an equal part of its items.
    """
    if not dtype.is_quantised:
        return (_float_items(raws, dtype, num_columns, in_bf16=in_bf16, kept=kept, read=read),)
    layout, num_items = layout_of(dtype, num_columns), _num_items(raws)
    width = -(-num_columns // layout.num_columns) * layout.num_columns
    shape = (num_items, width // layout.num_columns, GROUPS_PER_ITEM)
    if kept and (found := kept(shape, layout.record)) is not None:
        return (found,)
    records = large_pages.zeros(shape, layout.record)

    def fill(slab: Array, place: Array) -> None:
        _fill(place, unpack(slab, dtype, num_columns), layout)

    _by_slabs(fill, raws, records, read)
    for index, own in enumerate(factors):
        if own is not None:
            of_items = np.repeat(own, num_items // len(raws) // len(own))
            records["scale"][index :: len(raws)] *= of_items[:, None, None, None, None]
    return (records,)


def _float_items(
    raws: Sequence[Array],
    dtype: DType,
    num_columns: int,
    *,
    in_bf16: bool,
    kept: Kept | None,
    read: Read | None,
) -> Array:
    held = held_as(dtype, num_columns, in_bf16=in_bf16)
    kind = {DType.F32: np.float32, DType.F16: np.uint16, DType.BF16: np.int32}[held]
    num_steps = num_columns // (2 if held is DType.BF16 else 1)
    shape = (_num_items(raws), num_steps, ROWS_PER_ITEM)
    if kept and (found := kept(shape, kind)) is not None:
        return found
    items: Array = large_pages.zeros(shape, kind)
    rounded = _round_to_bf16(dtype) if in_bf16 and held is DType.BF16 else None

    def turn(slab: Array, place: Array) -> None:
        if held is DType.F32:
            slab = dequantise(slab, dtype, num_columns)
        rows = in_groups(slab.view(kind), num_steps, ROWS_PER_ITEM)
        for step in range(0, num_steps, _COLUMNS_AT_ONCE):
            # A copy first: rows apart by powers of two would take one another's cache lines.
            some = np.ascontiguousarray(rows[..., step : step + _COLUMNS_AT_ONCE])
            if rounded is not None:
                some = rounded[some.view(np.uint16)].view(kind)
            place[:, step : step + _COLUMNS_AT_ONCE] = some.transpose(0, 2, 1)

    _by_slabs(turn, raws, items, read)
    return items


def _num_items(raws: Sequence[Array]) -> int:
    return len(raws) * padded_rows(len(raws[0])) // ROWS_PER_ITEM


def _by_slabs(
    work: Callable[[Array, Array], None], raws: Sequence[Array], items: Array, read: Read | None
) -> None:
    """`work` on some rows and the items that they become, side by side; then they are `read`."""

    def do(part: tuple[Array, Array]) -> None:
        work(*part)
        if read is not None:
            read(part[0])

    side_by_side(do, _places(raws, items))


@functools.cache
def _round_to_bf16(dtype: DType) -> Array:
    """What products in bf16 take, uint16, by the bits of a number of two bytes."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    return factors_of_products(dequantise(numbers, dtype, 1 << 16))


def _places(raws: Sequence[Array], items: Array) -> Iterator[tuple[Array, Array]]:
    """Some rows at a time, and the items of the packed weight that they become."""
    for index, raw in enumerate(raws):
        own = items[index :: len(raws)]
        for rows in slabs(len(raw)):
            slab, at = raw[rows], rows.start // ROWS_PER_ITEM
            yield slab, own[at : at + -(-len(slab) // ROWS_PER_ITEM)]


def _fill(records: Array, blocks: Blocks, layout: RecordLayout) -> None:
    """Write rows into records [items, records, 4]."""
    numbers: dict[str, Array] = {}
    for field, values in ((layout.scale, blocks.scale), ("minimum", blocks.minimum)):
        if field == POWERS_FIELD:
            numbers[field] = (blocks.scale.view(np.uint32) >> 16).astype(np.uint16)
        elif field == MINIS_FIELD:
            halves = (blocks.scale / (MINI_FACTOR / 2)).astype(np.float16).view(np.uint16)
            numbers[field] = (halves >> 7).astype(np.uint8)
        elif values is not None and layout.scale_kind == "<f4":
            numbers[field] = values
        elif values is not None:  # the way back to f16 is exact
            numbers[field] = values.astype(np.float16).view(np.uint16)
    if layout.pair_bits:
        assert blocks.small_scales is not None
        assert blocks.small_minima is not None
        small = (blocks.small_scales, blocks.small_minima)
        numbers |= _pairs(*small, layout.pair_bits, layout.num_columns // layout.group)
    elif blocks.small_scales is not None:
        numbers["scales"] = blocks.small_scales.view(np.int8)
    for field, values in numbers.items():
        records[field] = _by_record(values, records.shape[1], records[field].shape[3])
    if layout.has_minis:
        records["scale"] = MINI_FACTOR / 2
    codes = (blocks.codes + np.int8(layout.zero)).view(np.uint8)
    if layout.sizes:
        codes = _codes_of(layout)[codes]
    low = 0
    for bits in layout.planes:
        words = _plane_words(codes, low, bits)
        plane = _by_record(words, records.shape[1], layout.num_columns // 32 * bits)
        of_steps = plane.reshape(*plane.shape[:3], -1, bits, LANES)
        records[layout.codes][..., low : low + bits, :] = of_steps
        low += bits


@functools.cache
def _codes_of(layout: RecordLayout) -> Array:
    """The code of each i8, by its bits, as u8 [256]."""
    found = np.zeros(256, np.uint8)
    for code, meaning in reversed(list(enumerate(layout.meanings))):
        found[meaning.view(np.uint8)] = code
    return found


def _pairs(scales: Array, minima: Array, bits: int, num_groups: int) -> dict[str, Array]:
    """Small integers [num_rows, records * num_groups] as `packed_codes.py` reads them."""
    low, high = scales.view(np.uint8), minima.view(np.uint8)
    found = {"pairs": (low & 15) | (high & 15) << 4}
    if bits > 4:
        tops = (low >> 4 | (high >> 4) << 2).reshape(len(low), -1, 2, num_groups // 2)
        found["tops"] = (tops[:, :, 0] | tops[:, :, 1] << 4).reshape(len(low), -1)
    return found


def _by_record(rows: Array, num_records: int, per_record: int) -> Array:
    """[num_rows, n] to [items, records, 4, per_record, 16], what is missing zero."""
    items: Array = in_groups(rows, num_records * per_record, ROWS_PER_ITEM)
    shape = (len(items), GROUPS_PER_ITEM, LANES, num_records, per_record)
    return items.reshape(shape).transpose(0, 3, 1, 4, 2)


def _plane_words(codes: Array, low: int, bits: int) -> Array:
    """Bits low .. low + bits of each code, i32 [num_rows, num_columns / 32 * bits]."""
    if bits == 8:
        return codes.view(np.int32)
    if bits == 6:
        fours = codes.view(np.uint32).reshape(len(codes), -1, 4).copy()
        for i in range(3):
            above = (fours[..., 3] >> np.uint32(2 * i)) & np.uint32(0x03030303)
            fours[..., i] |= above << np.uint32(6)
        return fours[..., :3].reshape(len(codes), -1).view(np.int32)
    parts = codes.view(np.uint32).reshape(len(codes), -1, 8 // bits)
    mask = np.uint32(((1 << bits) - 1) * 0x01010101)
    words = np.zeros(parts.shape[:2], np.uint32)
    for i in range(8 // bits):
        words |= ((parts[..., i] >> np.uint32(low)) & mask) << np.uint32(bits * i)
    return words.view(np.int32)
