"""Words of CPU kernels that read a weight of codes: its codes, scales and minima, as vectors.

A record array holds such a weight: each record is 16 rows by some columns, and its fields say how
codes, scales and minima lie in it (`cpu_layout.py` makes them). A vector has one row in
each lane. These words ask the array's type which fields there are, so one kernel reads all types.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypocenter.device.cpu.cache_lines import AHEAD_BYTES, ask_for_lines, asks_ahead
from hypocenter.device.cpu.code_fields import (
    CODES_FIELD,
    LESS,
    MINIS_FIELD,
    POWERS_FIELD,
    SIZES,
)
from hypocenter.device.cpu.lang import (
    cgutils,
    intrinsic,
    ir,
    models,
    register_model,
    types,
)
from hypocenter.device.cpu.large_pages import LINE_BYTES
from hypocenter.device.cpu.target import cpu_features
from hypocenter.device.cpu.vector_ir import (
    I32,
    LANES,
    VEC_F32,
    VEC_I16,
    VEC_I32,
    Codegen,
    address_of,
    call_llvm,
    constant,
    f32x16,
    half_to_float,
    load_vector,
)

#: Words of the columns whose codes are taken at once, four to a word.
NUM_WORDS = 8
_I8, _I64 = ir.IntType(8), ir.IntType(64)
_VEC_I8 = ir.VectorType(_I8, LANES)
_CODES = ir.ArrayType(VEC_I32, NUM_WORDS)
_HALVES = ir.LiteralStructType([VEC_F32, VEC_I32, VEC_I32])
_FIRST = ir.Constant(_I64, 0)
_TWO_SCALES = ir.ArrayType(VEC_F32, 2)


class Codes(types.Type):  # type: ignore[misc]
    """32 columns of 16 rows: lane r of vector j holds the columns 4 j .. 4 j + 3 of row r."""

    def __init__(self, *, is_signed: bool, zero: int) -> None:
        super().__init__(name=f"{'signed' if is_signed else 'unsigned'} codes less {zero}")
        self.is_signed, self.zero = is_signed, zero


class Factors(types.Type):  # type: ignore[misc]
    """What sums of products are multiplied by: a scale; or, where `is_halved`, that of the record
    and small integers for the first and the last 16 columns, which `is_float` scales are instead.
    """

    def __init__(self, *, is_halved: bool, is_float: bool) -> None:
        super().__init__(name=f"factors of {1 + is_halved}, {is_float}")
        self.is_halved, self.is_float = is_halved, is_float


class _Smalls(types.Type):  # type: ignore[misc]
    """Where the small integers of a record lie one by one, if it holds them otherwise."""


_smalls = _Smalls(name="small integers")


@register_model(Codes)
class _CodesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, codes: Codes) -> None:
        super().__init__(manager, codes, _CODES)


@register_model(Factors)
class _FactorsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, factors: Factors) -> None:
        halves = _TWO_SCALES if factors.is_float else _HALVES
        super().__init__(manager, factors, halves if factors.is_halved else VEC_F32)


@register_model(_Smalls)
class _SmallsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, smalls: _Smalls) -> None:
        super().__init__(manager, smalls, _I8.as_pointer())


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the type of a record says: it is known when a kernel is compiled."""

    codes: str
    planes: tuple[int, ...]
    zero: int
    num_steps: int
    num_groups: int
    num_wholes: int
    has_minima: bool
    has_minis: bool
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, record: Any) -> _Shape:
        lengths = {name: field.type.shape[0] for name, field in record.fields.items()}
        codes = next(name for name in lengths if name.startswith(CODES_FIELD))
        facts, _, sizes = codes.removeprefix(f"{CODES_FIELD}_").partition(f"_{SIZES}_")
        planes, _, zero = facts.partition(f"_{LESS}_")
        numbers = tuple(map(int, sizes.split("_"))) if sizes else ()
        of_groups = ("pairs", "scales", POWERS_FIELD, MINIS_FIELD, "scale")
        num_groups = next(lengths[name] for name in of_groups if name in lengths)
        return cls(
            codes,
            tuple(map(int, planes.split("_"))),
            max(numbers, default=int(zero or 0)),
            lengths[codes],
            num_groups,
            lengths.get("scale", num_groups),
            "minimum" in lengths,
            MINIS_FIELD in lengths,
            numbers,
        )

    @property
    def sign(self) -> int:
        """The highest bit of a code."""
        return 1 << (sum(self.planes) - 1)

    @property
    def is_halved(self) -> bool:
        return self.num_groups > self.num_steps

    @property
    def is_signed(self) -> bool:
        return self.planes == (8,)


class _Record:
    """The fields of one record of an array, as vectors of 16 lanes."""

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> None:
        self.builder, self.kind = builder, array_type.dtype
        self.shape = _Shape.of(self.kind)
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

    def own_factor(self, single: str, index: Any = _FIRST) -> Any:
        """The record's own `scale` or `minimum`, or one of them: f16, or f32."""
        if self.kind.fields[single].type.dtype == types.float32:
            return self.builder.bitcast(self.vector(single, VEC_I32, index), VEC_F32)
        return half_to_float(self.builder, self.vector(single, VEC_I16, index))

    def small(self, index: Any, smalls: Any, *, is_minimum: bool = False) -> Any:
        """The small integer of group `index`, i32."""
        builder = self.builder
        if not self.has("pairs"):
            return builder.sext(self.vector("scales", _VEC_I8, index), VEC_I32)
        if self.has("tops"):
            at = builder.mul(index, ir.Constant(_I64, LANES))
            at = builder.add(at, ir.Constant(_I64, LANES * self.shape.num_groups * is_minimum))
            return builder.zext(
                load_vector(builder, builder.gep(smalls, [at]), _VEC_I8, 1), VEC_I32
            )
        pair = builder.zext(self.vector("pairs", _VEC_I8, index), VEC_I32)
        if is_minimum:
            return builder.lshr(pair, constant(4, VEC_I32))
        return builder.and_(pair, constant(15, VEC_I32))

    def factor(self, single: str, index: Any, smalls: Any) -> Any:
        """A `scale` or `minimum` of a group: an f16, or the record's times a small one; or 0."""
        if single == "scale" and self.has(POWERS_FIELD):
            bits = self.builder.zext(self.vector(POWERS_FIELD, VEC_I16, index), VEC_I32)
            return self.builder.bitcast(_shift(self.builder, bits, -16), VEC_F32)
        if not self.has(single):
            return constant(0.0)
        if self.shape.has_minis:
            bits = self.builder.zext(self.vector(MINIS_FIELD, _VEC_I8, index), VEC_I16)
            half = self.builder.shl(bits, constant(7, VEC_I16))
            return self.builder.fmul(self.own_factor(single), half_to_float(self.builder, half))
        if not (self.has("pairs") or self.has("scales")):
            per_whole = ir.Constant(_I64, self.shape.num_steps // self.shape.num_wholes)
            return self.own_factor(single, self.builder.udiv(index, per_whole))
        small = self.small(index, smalls, is_minimum=single == "minimum")
        return self.builder.fmul(self.own_factor(single), self.builder.sitofp(small, VEC_F32))


def _fact(name: str, kind: Any) -> Any:
    """A word that answers from the type of a record array."""

    def implement(typing: Any, blocks: Any) -> tuple[Any, Codegen]:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return context.get_constant(kind, getattr(_Shape.of(blocks.dtype), name))

        return kind(blocks), build

    implement.__doc__ = f"{name} of a record array, a constant."
    return intrinsic(implement)


num_steps = _fact("num_steps", types.intp)
is_halved = _fact("is_halved", types.boolean)
has_minima = _fact("has_minima", types.boolean)


@intrinsic
def load_smalls(typing: Any, blocks: Any, record: Any) -> tuple[Any, Codegen]:
    """Small integers of six bits as bytes, all of a record at once, for the words that want one.

    Byte 16 i + r of `pairs` has the low four bits of the scale of group i and of its minimum. What
    is above lies in a quarter of a byte each: byte 16 (i % 4) + r of `tops` has the scale's at bit
    4 (i / 4) and the minimum's two bits higher. Taken one by one they were a third of what decode
    of Q4_K has to do. Other records are read where they are.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        read = _Record(context, builder, signature.args[0], args[0], args[1])
        if not read.has("tops"):
            return ir.Constant(_I8.as_pointer(), None)
        none, num_parts = ir.Constant(_I64, 0), LANES * read.shape.num_groups // 64
        room = ir.ArrayType(VEC_I32, 2 * num_parts)
        smalls = cgutils.alloca_once(builder, room)
        tops = read.vector("tops", VEC_I32, none)
        low, high = constant(0x0F0F0F0F, VEC_I32), constant(0x30303030, VEC_I32)
        for part in range(num_parts):
            pairs = read.vector("pairs", VEC_I32, none, part)
            for is_minimum in (0, 1):
                small = builder.and_(_shift(builder, pairs, 4 * is_minimum), low)
                above = _shift(builder, tops, 4 * part + 2 * is_minimum - 4)
                small = builder.or_(small, builder.and_(above, high))
                place = ir.Constant(I32, num_parts * is_minimum + part)
                builder.store(small, builder.gep(smalls, [ir.Constant(I32, 0), place]))
        return builder.bitcast(smalls, _I8.as_pointer())

    return _smalls(blocks, types.intp), build


def _factor(single: str) -> Any:
    def implement(
        typing: Any, blocks: Any, record: Any, index: Any, smalls: Any
    ) -> tuple[Any, Codegen]:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            read = _Record(context, builder, signature.args[0], args[0], args[1])
            return read.factor(single, args[2], args[3])

        return f32x16(blocks, types.intp, types.intp, _smalls), build

    implement.__doc__ = (
        f"The {single} of group `index` of a record, f32; `smalls` of `load_smalls`."
    )
    return intrinsic(implement)


load_scale = _factor("scale")
load_minimum = _factor("minimum")


@intrinsic
def load_factors(
    typing: Any, blocks: Any, record: Any, step: Any, smalls: Any
) -> tuple[Any, Codegen]:
    """What the products of a step are multiplied by."""
    shape = _Shape.of(blocks.dtype)
    halved = shape.is_halved

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        read = _Record(context, builder, signature.args[0], args[0], args[1])
        if not halved:
            return read.factor("scale", args[2], args[3])
        both = [
            builder.add(builder.add(args[2], args[2]), ir.Constant(_I64, half)) for half in (0, 1)
        ]
        if shape.has_minis:
            made, parts = _TWO_SCALES, [read.factor("scale", index, args[3]) for index in both]
        else:
            smalls = [read.small(index, args[3]) for index in both]
            made, parts = _HALVES, [read.own_factor("scale"), *smalls]
        factors = ir.Constant(made, ir.Undefined)
        for i, part in enumerate(parts):
            factors = builder.insert_value(factors, part, i)
        return factors

    factors = Factors(is_halved=halved, is_float=shape.has_minis)
    return factors(blocks, types.intp, types.intp, _smalls), build


@intrinsic
def fetch_early(typing: Any, blocks: Any, record: Any, step: Any) -> tuple[Any, Codegen]:
    """Ask memory for what lies `AHEAD_BYTES` behind a step; beyond the array it does no harm."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0].dtype
        if not asks_ahead(of_bytes=_Shape.of(kind).is_signed):
            return context.get_dummy_value()
        num_lines = -(-kind.size // (_Shape.of(kind).num_steps * LINE_BYTES))
        first = address_of(context, builder, signature.args[0], args[0], args[1])
        first = builder.bitcast(first, _I8.as_pointer())
        at = builder.mul(args[2], ir.Constant(_I64, num_lines * LINE_BYTES))
        ask_for_lines(builder, builder.gep(first, [at]), AHEAD_BYTES, num_lines)
        return context.get_dummy_value()

    return types.void(blocks, types.intp, types.intp), build


@intrinsic
def load_codes(typing: Any, blocks: Any, record: Any, step: Any) -> tuple[Any, Codegen]:
    """32 columns of 16 rows: signed bytes, or what planes of bits add up to.

    The planes of a step lie one behind the other, the lowest bits first: one of 4 bits (vector i
    holds the columns 8 i .. 8 i + 3 in the low halves of its bytes and the next four in the high
    ones), of 2 (columns 16 i + 4 m .. + 3 at bit 2 m), of 1 (columns 4 j .. 4 j + 3 at bit j). Or
    codes of 6 bits: of 16 columns vectors 0, 1 and 2 hold four each in the low bits of their bytes,
    and above them two bits each of the last four columns, the lowest first. Codes of sizes become
    what they stand for, plus the largest.
    """
    shape = _Shape.of(blocks.dtype)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        read = _Record(context, builder, signature.args[0], args[0], args[1])
        first = builder.mul(args[2], ir.Constant(_I64, sum(shape.planes)))
        words: list[Any] = [None] * NUM_WORDS
        low = 0
        for bits in shape.planes:
            # A plane has as many vectors as bits.
            vectors = [read.vector(shape.codes, VEC_I32, first, low + i) for i in range(bits)]
            if shape.is_signed:
                words = vectors
            elif bits == 6:
                words = [*_of_six_bits(builder, *vectors[:3]), *_of_six_bits(builder, *vectors[3:])]
            else:
                _add_plane(builder, words, vectors, low)
            low += bits
        if shape.sizes:
            words = [_of_sizes(builder, word, shape.sizes, shape.sign) for word in words]
        made = ir.Constant(_CODES, ir.Undefined)
        for j, found in enumerate(words):
            made = builder.insert_value(made, found, j)
        return made

    codes = Codes(is_signed=shape.is_signed, zero=shape.zero)
    return codes(blocks, types.intp, types.intp), build


def _shift(builder: Any, value: Any, right: int) -> Any:
    """Shifted right, or left where that is negative."""
    if right >= 0:
        return builder.lshr(value, constant(right, VEC_I32)) if right else value
    return builder.shl(value, constant(-right, VEC_I32))


def _bits(builder: Any, value: Any, right: int, mask: int) -> Any:
    """Some bits of each byte, after a shift."""
    return builder.and_(_shift(builder, value, right), constant(mask * 0x01010101, VEC_I32))


def _of_sizes(builder: Any, codes: Any, sizes: Sequence[int], sign: int) -> Any:
    """Each byte, a number of `sizes` and a bit for a sign, as what it stands for plus the largest.

    What numbers beyond the last stand for nobody asks.
    """
    largest = sizes[-1]
    if "avx2" in cpu_features():
        filled = [*sizes, *[0] * (sign - len(sizes))]
        both = [largest + way * size for way in (1, -1) for size in filled]
        return _looked_up(builder, codes, both * (16 // len(both)))
    kind = ir.VectorType(_I8, 4 * LANES)

    def many(byte: int) -> Any:
        return ir.Constant(kind, [byte] * (4 * LANES))

    code = builder.bitcast(codes, kind)
    bits, size = builder.and_(code, many(sign - 1)), many(sizes[0])
    for number, (below, own) in enumerate(itertools.pairwise(sizes)):
        is_above = builder.icmp_unsigned(">", bits, many(number))
        size = builder.add(size, builder.select(is_above, many(own - below), many(0)))
    is_negative, zero = builder.icmp_unsigned(">", code, many(sign - 1)), many(largest)
    lifted = builder.select(is_negative, builder.sub(zero, size), builder.add(zero, size))
    return builder.bitcast(lifted, VEC_I32)


def _looked_up(builder: Any, codes: Any, bytes_: Sequence[int]) -> Any:
    """The same, of 32 bytes at a time, by the table of 16 that an instruction takes."""
    half = ir.VectorType(_I8, 2 * LANES)
    table, undefined = ir.Constant(half, 2 * list(bytes_)), ir.Constant(VEC_I32, ir.Undefined)
    parts = []
    for start in (0, LANES // 2):
        order = ir.Constant(ir.VectorType(I32, LANES // 2), list(range(start, start + LANES // 2)))
        some = builder.bitcast(builder.shuffle_vector(codes, undefined, order), half)
        found = call_llvm(builder, "llvm.x86.avx2.pshuf.b", table, some)
        parts.append(builder.bitcast(found, ir.VectorType(I32, LANES // 2)))
    return builder.shuffle_vector(*parts, ir.Constant(VEC_I32, list(range(LANES))))


def _of_six_bits(builder: Any, *vectors: Any) -> list[Any]:
    """Four words of three vectors."""
    last = None
    for i, vector in enumerate(vectors):
        part = _bits(builder, vector, 6 - 2 * i, 3 << 2 * i)
        last = part if last is None else builder.or_(last, part)
    return [*(_bits(builder, vector, 0, 0x3F) for vector in vectors), last]


def _add_plane(builder: Any, words: list[Any], vectors: Sequence[Any], low: int) -> None:
    """Put the bits of a plane into the words, at bit `low` of each byte."""
    bits = len(vectors)
    per_vector = NUM_WORDS // bits
    for j in range(NUM_WORDS):
        right = bits * (j % per_vector) - low
        moved = _bits(builder, vectors[j // per_vector], right, ((1 << bits) - 1) << low)
        words[j] = moved if words[j] is None else builder.or_(words[j], moved)
