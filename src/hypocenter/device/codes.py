"""More words for CPU kernels: codes of block types, and sums of one vector over several rows.

A record array holds a weight of codes: each record is 16 rows by some columns, and its fields say
how codes, scales and minima lie in it (`kernels/quant_records.py` makes them). Products of codes
are sums of integers, so they are the same whichever instructions the machine has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypocenter.device.dot import Dot
from hypocenter.device.lang import (
    ir,
    literal_word,
    models,
    register_model,
    types,
    word,
)
from hypocenter.device.vector_ir import (
    F32,
    I32,
    LANES,
    VEC_F32,
    VEC_I16,
    VEC_I32,
    Codegen,
    address_of,
    all_lanes,
    constant,
    f32x16,
    fused,
    half_to_float,
    load_vector,
)
from hypocenter.device.vector_rows import AHEAD_BYTES, LINE_BYTES, ask_for_lines, asks_ahead

#: Words of the columns whose codes are taken at once, four to a word.
_WORDS = 8
#: Rows whose sums of products grow side by side where rows are many: a sum waits for its last step,
#: and the next row's comes too late to fill the gap. Few rows, or short sums, do better one by one.
_ROWS_IN_TURN = 8
#: What the field of a record's codes is called, before the bits of its planes: codes_4_2.
CODES_FIELD = "codes"

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_VEC_I8 = ir.VectorType(_I8, LANES)
_CODES = ir.ArrayType(VEC_I32, _WORDS)


class _Codes(types.Type):  # type: ignore[misc]
    """32 columns of 16 rows: lane r of vector j holds the columns 4 j .. 4 j + 3 of row r."""

    def __init__(self, *, is_signed: bool) -> None:
        super().__init__(name="signed codes" if is_signed else "unsigned codes")
        self.is_signed = is_signed


class _Totals(types.Type):  # type: ignore[misc]
    """A vector of f32 for each of several rows of activations."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(name=f"f32x16 x {num_rows}")
        self.num_rows = num_rows


@register_model(_Codes)
class _CodesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, codes: _Codes) -> None:
        super().__init__(manager, codes, _CODES)


@register_model(_Totals)
class _TotalsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, totals: _Totals) -> None:
        super().__init__(manager, totals, ir.ArrayType(VEC_F32, totals.num_rows))


@literal_word
def zero_totals(typing: Any, num_rows: Any) -> tuple[Any, Codegen]:
    """Zeros for `num_rows` rows, a number that is written out."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.ArrayType(VEC_F32, num_rows.literal_value), None)

    return _Totals(num_rows.literal_value)(num_rows), build


def _each(builder: Any, totals: Any, change: Callable[[int, Any], Any]) -> Any:
    """The totals with each row's vector changed."""
    made = ir.Constant(totals.type, ir.Undefined)
    for row in range(totals.type.count):
        made = builder.insert_value(made, change(row, builder.extract_value(totals, row)), row)
    return made


def _at(builder: Any, index: Any, step: int) -> Any:
    return builder.add(index, ir.Constant(_I64, step))


def _scalar(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.load(address_of(context, builder, array_type, array, index))


@word
def add_scaled(
    typing: Any, totals: Any, vector: Any, array: Any, index: Any, pitch: Any
) -> tuple[Any, Codegen]:
    """totals[i] + vector * array[index + i * pitch], each sum one fused step."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, vector, array, index, pitch = args

        def change(row: int, total: Any) -> Any:
            at = builder.add(index, builder.mul(pitch, ir.Constant(_I64, row)))
            scalar = _scalar(context, builder, signature.args[2], array, at)
            return fused(builder, vector, all_lanes(builder, scalar, VEC_F32), total)

        return _each(builder, totals, change)

    return totals(totals, f32x16, array, types.intp, types.intp), build


@word
def add_to_each(typing: Any, totals: Any, vector: Any) -> tuple[Any, Codegen]:
    """totals[i] + vector."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _each(builder, args[0], lambda row, total: builder.fadd(total, args[1]))

    return totals(totals, f32x16), build


@word
def add_stored(typing: Any, totals: Any, array: Any, index: Any, pitch: Any) -> tuple[Any, Codegen]:
    """array[index + i * pitch ...] + totals[i], 16 elements each."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, array, index, pitch = args

        def change(row: int, total: Any) -> Any:
            at = builder.add(index, builder.mul(pitch, ir.Constant(_I64, row)))
            address = address_of(context, builder, signature.args[1], array, at)
            return builder.fadd(load_vector(builder, address, VEC_F32, 4), total)

        return _each(builder, totals, change)

    return totals(totals, array, types.intp, types.intp), build


@word
def store_totals(
    typing: Any, array: Any, index: Any, pitch: Any, totals: Any
) -> tuple[Any, Codegen]:
    """array[index + i * pitch ...] = totals[i], 16 elements each."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, pitch, totals = args
        for row in range(totals.type.count):
            at = builder.add(index, builder.mul(pitch, ir.Constant(_I64, row)))
            address = address_of(context, builder, signature.args[0], array, at)
            value = builder.extract_value(totals, row)
            builder.store(value, builder.bitcast(address, value.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, totals), build


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the type of a record says: it is known when a kernel is compiled."""

    codes: str
    planes: tuple[int, ...]
    num_steps: int
    is_halved: bool
    has_minima: bool

    @classmethod
    def of(cls, record: Any) -> _Shape:
        lengths = {name: field.type.shape[0] for name, field in record.fields.items()}
        codes = next(name for name in lengths if name.startswith(CODES_FIELD))
        planes = tuple(int(bits) for bits in codes.split("_")[1:])
        num_scales = lengths.get("pairs") or lengths.get("scales") or lengths["scale"]
        is_halved = num_scales > lengths[codes]
        return cls(codes, planes, lengths[codes], is_halved, "minimum" in lengths)

    @property
    def is_signed(self) -> bool:
        return self.planes == (8,)


class _Record:
    """The fields of one record of an array, as vectors of 16 lanes."""

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> None:
        self.builder, self.kind = builder, array_type.dtype
        self._base = builder.bitcast(
            address_of(context, builder, array_type, array, index), _I8.as_pointer()
        )

    def has(self, field: str) -> bool:
        return field in self.kind.fields

    def vector(self, field: str, kind: Any, index: Any, step: int = 0) -> Any:
        """Vector `index` + `step` of a field; `index` is a value of the program."""
        width = LANES * kind.element.width // 8
        at = self.builder.mul(index, ir.Constant(_I64, width))
        at = self.builder.add(at, ir.Constant(_I64, self.kind.offset(field) + step * width))
        address = self.builder.gep(self._base, [at])
        return load_vector(self.builder, address, kind, kind.element.width // 8)

    def factor(self, single: str, index: Any) -> Any:
        """A `scale` or `minimum`: an f16, or the record's f16 times a small integer; or zero."""
        if not self.has(single):
            return constant(0.0)
        if self.has("pairs"):
            small = self._of_pair(index, is_minimum=single == "minimum")
        elif self.has("scales"):
            small = self.builder.sext(self.vector("scales", _VEC_I8, index), VEC_I32)
        else:
            return half_to_float(self.builder, self.vector(single, VEC_I16, index))
        whole = half_to_float(self.builder, self.vector(single, VEC_I16, ir.Constant(_I64, 0)))
        return self.builder.fmul(whole, self.builder.sitofp(small, VEC_F32))

    def _of_pair(self, index: Any, *, is_minimum: bool) -> Any:
        """Four bits of a byte of `pairs`, and the two above them from a half byte of `tops`."""
        builder = self.builder
        pair = builder.zext(self.vector("pairs", _VEC_I8, index), VEC_I32)
        four, low = constant(4, VEC_I32), constant(15, VEC_I32)
        small = builder.lshr(pair, four) if is_minimum else builder.and_(pair, low)
        if not self.has("tops"):
            return small
        place = builder.lshr(index, ir.Constant(_I64, 1))
        tops = builder.zext(self.vector("tops", _VEC_I8, place), VEC_I32)
        shift = builder.mul(builder.and_(index, ir.Constant(_I64, 1)), ir.Constant(_I64, 4))
        shift = builder.add(shift, ir.Constant(_I64, 2 * is_minimum))
        tops = builder.lshr(tops, all_lanes(builder, builder.trunc(shift, I32), VEC_I32))
        above = builder.and_(tops, constant(3, VEC_I32))
        return builder.or_(small, builder.shl(above, four))


def _fact(name: str, kind: Any) -> Any:
    """A word that answers from the type of a record array."""

    def typed(typing: Any, blocks: Any) -> tuple[Any, Codegen]:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return context.get_constant(kind, getattr(_Shape.of(blocks.dtype), name))

        return kind(blocks), build

    typed.__doc__ = f"{name} of a record array, a constant."
    return word(typed)


num_steps = _fact("num_steps", types.intp)
is_halved = _fact("is_halved", types.boolean)
has_minima = _fact("has_minima", types.boolean)


def _factor(single: str) -> Any:
    def typed(typing: Any, blocks: Any, record: Any, index: Any) -> tuple[Any, Codegen]:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            record = _Record(context, builder, signature.args[0], args[0], args[1])
            return record.factor(single, args[2])

        return f32x16(blocks, types.intp, types.intp), build

    typed.__doc__ = f"The {single} of group `index` of a record, f32."
    return word(typed)


load_scale = _factor("scale")
load_minimum = _factor("minimum")


@word
def fetch_early(typing: Any, blocks: Any, record: Any, step: Any) -> tuple[Any, Codegen]:
    """Ask memory for what lies `AHEAD_BYTES` behind a step; beyond the array it does no harm.

    Codes that are whole bytes are read so fast that the hardware's own guess is the better one.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0].dtype
        if _Shape.of(kind).is_signed or not asks_ahead():
            return context.get_dummy_value()
        num_lines = -(-kind.size // (_Shape.of(kind).num_steps * LINE_BYTES))
        first = address_of(context, builder, signature.args[0], args[0], args[1])
        first = builder.bitcast(first, _I8.as_pointer())
        at = builder.mul(args[2], ir.Constant(_I64, num_lines * LINE_BYTES))
        ask_for_lines(builder, builder.gep(first, [at]), AHEAD_BYTES, num_lines)
        return context.get_dummy_value()

    return types.void(blocks, types.intp, types.intp), build


@word
def load_codes(typing: Any, blocks: Any, record: Any, step: Any) -> tuple[Any, Codegen]:
    """32 columns of 16 rows: signed bytes, or what planes of bits add up to.

    The planes of a step lie one behind the other, the lowest bits first: one of 4 bits (vector i
    holds the columns 8 i .. 8 i + 3 in the low halves of its bytes and the next four in the high
    ones), of 2 (columns 16 i + 4 m .. + 3 at bit 2 m), of 1 (columns 4 j .. 4 j + 3 at bit j).
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        record = _Record(context, builder, signature.args[0], args[0], args[1])
        shape = _Shape.of(signature.args[0].dtype)
        first = builder.mul(args[2], ir.Constant(_I64, sum(shape.planes)))
        words: list[Any] = [None] * _WORDS
        low = 0
        for bits in shape.planes:
            # A plane has as many vectors as bits.
            vectors = [record.vector(shape.codes, VEC_I32, first, low + i) for i in range(bits)]
            if shape.is_signed:
                words = vectors
            else:
                _add_plane(builder, words, vectors, low)
            low += bits
        made = ir.Constant(_CODES, ir.Undefined)
        for j, found in enumerate(words):
            made = builder.insert_value(made, found, j)
        return made

    is_signed = _Shape.of(blocks.dtype).is_signed
    return _Codes(is_signed=is_signed)(blocks, types.intp, types.intp), build


def _add_plane(builder: Any, words: list[Any], vectors: Sequence[Any], low: int) -> None:
    """Put the bits of a plane into the words, at bit `low` of each byte."""
    bits = len(vectors)
    mask = constant((((1 << bits) - 1) << low) * 0x01010101, VEC_I32)
    per_vector = _WORDS // bits
    for j in range(_WORDS):
        shift = bits * (j % per_vector) - low
        moved = vectors[j // per_vector]
        if shift > 0:
            moved = builder.lshr(moved, constant(shift, VEC_I32))
        elif shift < 0:
            moved = builder.shl(moved, constant(-shift, VEC_I32))
        moved = builder.and_(moved, mask)
        words[j] = moved if words[j] is None else builder.or_(words[j], moved)


@literal_word
def add_products(
    typing: Any, totals: Any, codes: Any, part: Any, scale: Any, x_codes: Any, x_scales: Any,
    x_sums: Any, zero: Any, tile: Any, group: Any, row: Any,
) -> tuple[Any, Codegen]:  # fmt: skip
    """totals[i] + scale * x_scale * the sum of (code - zero) * x_code, for rows row + i of a tile.

    `part` 0 or 1: the first or last 16 columns of the step; 2: all. `group` counts the steps of
    x: x_codes i32 [.., group, tile rows, 8], x_scales f32 [.., group, tile], x_sums i32 [.., group,
    3, tile] for the three parts. The sum is one of integers; then come two products and one fused
    step.
    """
    which = part.literal_value
    first, last = ((0, 4), (4, 8), (0, 8))[which]

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, codes, _, scale, x_codes, x_scales, x_sums, zero, tile, group, row = args
        kinds = signature.args

        def spread(kind: Any, array: Any, at: Any, vector: Any) -> Any:
            return all_lanes(builder, _scalar(context, builder, kind, array, at), vector)

        weights = [builder.extract_value(codes, j) for j in range(first, last)]
        dot = Dot(builder, weights, is_signed=kinds[1].is_signed)
        offset = builder.mul(zero, ir.Constant(_I64, -1))
        offset = builder.trunc(builder.sub(offset, ir.Constant(_I64, dot.lift)), I32)
        before = builder.mul(group, tile)
        rows = builder.add(before, row)
        words = builder.mul(rows, ir.Constant(_I64, _WORDS))
        sums = builder.mul(before, ir.Constant(_I64, 3))
        sums = builder.add(sums, builder.mul(tile, ir.Constant(_I64, which)))
        sums = builder.add(sums, row)

        def begun(i: int) -> Any:
            start = _scalar(context, builder, kinds[6], x_sums, _at(builder, sums, i))
            return all_lanes(builder, builder.mul(start, offset), VEC_I32)

        def ended(i: int, products: Any) -> Any:
            x_scale = spread(kinds[5], x_scales, _at(builder, rows, i), VEC_F32)
            factor, products = builder.fmul(scale, x_scale), builder.sitofp(products, VEC_F32)
            return fused(builder, products, factor, builder.extract_value(totals, i))

        made, num_rows = totals, totals.type.count
        at_once = _ROWS_IN_TURN if num_rows > _ROWS_IN_TURN and which == 2 else 1
        for begin in range(0, num_rows, at_once):
            turn = range(begin, begin + at_once)
            products = {i: begun(i) for i in turn}
            for j in range(first, last):
                for i in turn:
                    x = spread(kinds[4], x_codes, _at(builder, words, _WORDS * i + j), VEC_I32)
                    products[i] = dot.add(products[i], j - first, x)
            for i in turn:
                made = builder.insert_value(made, ended(i, products[i]), i)
        return made

    signature = totals(
        *(totals, codes, part, f32x16, x_codes, x_scales, x_sums),
        *(types.intp, types.intp, types.intp, types.intp),
    )
    return signature, build


@literal_word
def store_values(
    typing: Any, array: Any, index: Any, codes: Any, part: Any, zero: Any, scale: Any, low: Any,
    lane: Any,
) -> tuple[Any, Codegen]:  # fmt: skip
    """array[index ..] = (code - zero) * scale + low in 16 columns (half `part`) of row `lane`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, codes, _, zero, scale, low, lane = args
        lane, zero = builder.trunc(lane, I32), builder.trunc(zero, I32)
        scale, low = (builder.extract_element(one, lane) for one in (scale, low))
        first = 4 * signature.args[3].literal_value
        extend = builder.sext if signature.args[2].is_signed else builder.zext
        for j in range(first, first + 4):
            bits = builder.extract_element(builder.extract_value(codes, j), lane)
            for byte in range(4):
                code = builder.trunc(builder.lshr(bits, ir.Constant(I32, 8 * byte)), _I8)
                value = builder.sitofp(builder.sub(extend(code, I32), zero), F32)
                value = fused(builder, value, scale, low)
                at = _at(builder, index, 4 * (j - first) + byte)
                builder.store(value, address_of(context, builder, signature.args[0], array, at))
        return context.get_dummy_value()

    kinds = (array, types.intp, codes, part, types.intp, f32x16, f32x16, types.intp)
    return types.void(*kinds), build
