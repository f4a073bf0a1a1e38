"""Words of CPU kernels for blocks of Q8_0 and Q4_0 as GGUF has them, in arrays of their bytes.

A block has an f16 scale and 32 codes: of a byte each, or two to a byte, where the first 16 are the
lower halves. An array of int8 holds blocks of Q8_0, one of uint8 those of Q4_0. Words for reading
also take arrays of floats, which they read as they are, so one source serves all of them.

A value is code times scale, which f32 holds exactly.
"""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.lang import intrinsic, ir, literal, types
from hypocenter.device.cpu.vector_ir import (
    I16,
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
    float_to_half,
    half_to_float,
    load_floats,
    load_vector,
    pack,
)

#: Columns of a block, and the bytes of its scale.
BLOCK, SCALE_BYTES = 32, 2
_BLOCK_BYTES = {types.int8: 34, types.uint8: 18}
_FLOATS = (types.float32, types.uint16)
_I64, _VEC_I8 = ir.IntType(64), ir.VectorType(ir.IntType(8), LANES)


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


@intrinsic
def num_columns(typing: Any, array: Any, num_rows: Any) -> tuple[Any, Codegen]:
    """Columns that `num_rows` elements of an array hold: as many of floats, and those of blocks."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if array.dtype in _FLOATS:
            return args[1]
        num_blocks = builder.udiv(args[1], _number(_BLOCK_BYTES[array.dtype]))
        return builder.mul(num_blocks, _number(BLOCK))

    if array.dtype not in _FLOATS and array.dtype not in _BLOCK_BYTES:
        return None  # type: ignore[return-value]
    return types.intp(array, types.intp), build


@intrinsic
def block_bytes(typing: Any, array: Any) -> tuple[Any, Codegen]:
    """Bytes of a block of an array of them; a constant, so that code for others is left out."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _number(_BLOCK_BYTES[array.dtype])

    if array.dtype not in _BLOCK_BYTES:
        return None  # type: ignore[return-value]
    return types.intp(array), build


@intrinsic
def put_byte(typing: Any, array: Any, index: Any, value: Any) -> tuple[Any, Codegen]:
    """Write the lowest byte of an int32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        builder.store(builder.trunc(args[2], ir.IntType(8)), address)
        return context.get_dummy_value()

    if array.dtype not in _BLOCK_BYTES:
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, types.int32), build


@intrinsic
def half_bits(typing: Any, value: Any) -> tuple[Any, Codegen]:
    """The bits of one f32 as f16, rounded to nearest even, in an int32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = float_to_half(builder, all_lanes(builder, args[0], VEC_F32))
        return builder.zext(builder.extract_element(half, ir.Constant(I32, 0)), I32)

    return types.int32(types.float32), build


def _codes(builder: Any, address: Any, dtype: Any, is_upper: Any) -> Any:
    """16 codes as f32; of nibbles the lower ones of 16 bytes, or the upper (an i32 of 0 or 1)."""
    raw = load_vector(builder, address, _VEC_I8, 1)
    if dtype == types.int8:
        return builder.sitofp(builder.sext(raw, VEC_I32), VEC_F32)
    shift = all_lanes(builder, builder.shl(is_upper, ir.Constant(I32, 2)), VEC_I32)
    nibbles = builder.and_(builder.lshr(builder.zext(raw, VEC_I32), shift), constant(15, VEC_I32))
    return builder.sitofp(builder.sub(nibbles, constant(8, VEC_I32)), VEC_F32)


def _first_code(builder: Any, dtype: Any, column: Any) -> tuple[Any, Any]:
    """Of a column, behind the scale of its block: the byte of its code, and which half of it."""
    if dtype == types.int8:
        return builder.and_(column, _number(BLOCK - 1)), None
    upper = builder.and_(builder.lshr(column, _number(4)), _number(1))
    return builder.and_(column, _number(LANES - 1)), builder.trunc(upper, I32)


def _several(vectors: Any) -> Any:
    return types.UniTuple(f32x16, literal(vectors))


@intrinsic
def key_scales(
    typing: Any, array: Any, starts: Any, first: Any, column: Any, pitch: Any, count: Any
) -> tuple[Any, Codegen]:
    """Scales of the block that has `column`, of `count` times 16 keys; of floats nothing.

    The keys i begin at starts[first + i]. Row r of their blocks' bytes lies r * pitch behind that.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scales: list[Any] = [constant(1.0)] * literal(count)
        if array.dtype in _BLOCK_BYTES:
            block = builder.lshr(args[3], _number(5))
            row = builder.mul(block, _number(_BLOCK_BYTES[array.dtype]))
            offset = builder.mul(row, args[4])
            for index in range(len(scales)):
                place = builder.add(args[2], _number(index))
                start = builder.load(address_of(context, builder, starts, args[1], place))
                at = builder.add(start, offset)
                wide = []
                for _byte in range(SCALE_BYTES):
                    address = address_of(context, builder, array, args[0], at)
                    wide.append(builder.zext(load_vector(builder, address, _VEC_I8, 1), VEC_I16))
                    at = builder.add(at, args[4])
                upper = builder.shl(wide[1], ir.Constant(VEC_I16, [8] * LANES))
                scales[index] = half_to_float(builder, builder.or_(wide[0], upper))
        return pack(builder, scales)

    if not literal(count):
        return None  # type: ignore[return-value]
    args = array, starts, types.intp, types.intp, types.intp, count
    return _several(count)(*args), build


@intrinsic
def load_keys(
    typing: Any, array: Any, starts: Any, first: Any, column: Any, pitch: Any, scales: Any
) -> tuple[Any, Codegen]:
    """What the keys of `key_scales` have in `column`, which is of the block of these scales."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, upper = args[3], None
        if array.dtype in _BLOCK_BYTES:
            code, upper = _first_code(builder, array.dtype, column=args[3])
            block = builder.lshr(args[3], _number(5))
            row = builder.mul(block, _number(_BLOCK_BYTES[array.dtype]))
            row = builder.add(builder.add(row, code), _number(SCALE_BYTES))
        offset, loaded = builder.mul(row, args[4]), []
        for index in range(scales.count):
            place = builder.add(args[2], _number(index))
            start = builder.load(address_of(context, builder, starts, args[1], place))
            at = builder.add(start, offset)
            address = address_of(context, builder, array, args[0], at)
            if array.dtype in _FLOATS:
                loaded.append(load_floats(builder, address, array.dtype))
            else:
                codes = _codes(builder, address, array.dtype, upper)
                scale = builder.extract_value(args[5], index)
                loaded.append(builder.fmul(codes, scale))
        return pack(builder, loaded)

    return scales(array, starts, types.intp, types.intp, types.intp, scales), build


@intrinsic
def load_values(
    typing: Any, array: Any, starts: Any, first: Any, column: Any, width: Any, at: Any, count: Any
) -> tuple[Any, Codegen]:
    """`count` vectors of a row that begins at `at`: vector i of floats stands at starts[first + i].

    Those of blocks have columns from `column` on, which is whole blocks from the row's beginning,
    or half a block if there is one vector; behind the `width` columns of a row come the last again.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded: list[Any] = []
        for index in range(literal(count)):
            if array.dtype in _FLOATS:
                place = builder.add(args[2], _number(index))
                start = builder.load(address_of(context, builder, starts, args[1], place))
                address = address_of(context, builder, array, args[0], builder.add(start, args[5]))
                loaded.append(load_floats(builder, address, array.dtype))
            else:
                loaded.append(_of_block(context, builder, array, args, index, literal(count)))
        return pack(builder, loaded)

    if not literal(count):
        return None  # type: ignore[return-value]
    args = array, starts, types.intp, types.intp, types.intp, types.intp, count
    return _several(count)(*args), build


def _of_block(context: Any, builder: Any, array: Any, args: Any, index: int, count: int) -> Any:
    """Vector `index` of `load_values` where a row is blocks."""
    column = builder.add(args[3], _number(index * LANES))
    if count * LANES > BLOCK:
        last = builder.sub(args[4], _number(BLOCK - index * LANES % BLOCK))
        is_behind = builder.icmp_signed(">", column, last)
        column = builder.select(is_behind, last, column)
    block = builder.lshr(column, _number(5))
    start = builder.mul(block, _number(_BLOCK_BYTES[array.dtype]))
    start = builder.add(start, args[5])
    code, upper = _first_code(builder, array.dtype, column)
    if count > 1:  # whole blocks: it is known which half of one a vector is
        half = index % 2
        code = _number(half * LANES if array.dtype == types.int8 else 0)
        upper = ir.Constant(I32, half)
    address = address_of(context, builder, array, args[0], start)
    bits = builder.load(builder.bitcast(address, I16.as_pointer()))
    bits.align = 1
    scale = half_to_float(builder, all_lanes(builder, bits, VEC_I16))
    at = builder.add(builder.add(start, code), _number(SCALE_BYTES))
    address = address_of(context, builder, array, args[0], at)
    return builder.fmul(_codes(builder, address, array.dtype, upper), scale)
