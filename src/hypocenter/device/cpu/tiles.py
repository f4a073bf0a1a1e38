"""Products of codes by tiles (AMX): 16 rows of activations with 16 outputs, over 32 columns.

A tile product takes eight words of four columns from each row of activations, as they lie in
memory, and the same words of weights, one vector for each. What it leaves is a vector of 16 outputs
for each row: sums of integers, so the same as on any other path. Words of tiles name registers by
number; the numbers and sizes here are the only ones.

Source: Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypocenter.device.cpu.instructions import NEEDED, TILES
from hypocenter.device.cpu.lang import cgutils, intrinsic, ir, types
from hypocenter.device.cpu.target import cpu_features, instruction_set
from hypocenter.device.cpu.vector_ir import LANES, VEC_I32, Codegen, all_lanes, constant

#: Rows of activations of a tile.
ROWS = 16
_WORDS = 8
_I8, _I64 = ir.IntType(8), ir.IntType(64)
_SUMS, _X, _WEIGHTS = (ir.Constant(_I8, number) for number in range(3))
_ROW_BYTES, _VECTOR_BYTES = 4 * _WORDS, 4 * LANES
#: Of each register that is used: bytes of a row, and rows.
_SIZES = ((_VECTOR_BYTES, ROWS), (_ROW_BYTES, ROWS), (_VECTOR_BYTES, _WORDS))
_HAVE = set(NEEDED[TILES]) <= cpu_features()


def are_used(num_rows: int) -> bool:
    """Whether so many rows of activations are multiplied by tiles."""
    return num_rows == ROWS and instruction_set() == TILES


def products(
    builder: Any, weights: Sequence[Any], x: Any, *, is_signed: bool, have: bool = _HAVE
) -> list[Any]:
    """Of each row the sums of `weights`, eight vectors of codes, times the codes at the address
    `x`, which are signed: i8 [16, 32]. The same by other instructions where there are no tiles.
    """
    room = cgutils.alloca_once(builder, ir.ArrayType(VEC_I32, _WORDS))
    sums = cgutils.alloca_once(builder, ir.ArrayType(VEC_I32, ROWS))
    for kept in (room, sums):
        kept.align = _VECTOR_BYTES
    for at, vector in enumerate(weights):
        builder.store(vector, _vector(builder, room, at)).align = _VECTOR_BYTES
    if have:
        pitch = (ir.Constant(_I64, size) for size in (_ROW_BYTES, _VECTOR_BYTES, _VECTOR_BYTES))
        _call(builder, "tilezero", _SUMS)
        _call(builder, "tileloadd64", _X, _bytes(builder, x), next(pitch))
        _call(builder, "tileloadd64", _WEIGHTS, _bytes(builder, room), next(pitch))
        _call(builder, "tdpbssd" if is_signed else "tdpbsud", _SUMS, _X, _WEIGHTS)
        _call(builder, "tilestored64", _SUMS, _bytes(builder, sums), next(pitch))
    else:
        _store_products(builder, room, x, sums, is_signed)
    found = [builder.load(_vector(builder, sums, row)) for row in range(ROWS)]
    for vector in found:
        vector.align = _VECTOR_BYTES
    return found


@intrinsic
def begin_tiles(typing: Any, kept: Any) -> tuple[Any, Codegen]:
    """Say what sizes tiles have, where totals of as many rows as are in `kept` are made by them."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if are_used(kept.num_rows) and _HAVE:
            place = cgutils.global_constant(builder, "tile_sizes", _sizes())
            _call(builder, "ldtilecfg", _bytes(builder, place))
        return context.get_dummy_value()

    return types.void(kept), build


@intrinsic
def end_tiles(typing: Any, kept: Any) -> tuple[Any, Codegen]:
    """Leave them; a thread that has some takes longer to be exchanged."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if are_used(kept.num_rows) and _HAVE:
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(kept), build


def _sizes() -> Any:
    """The 64 bytes of a configuration: palette 1; bytes of rows from 16 on, rows from 48 on."""
    data = bytearray(64)
    data[0] = 1
    for number, (row_bytes, num_rows) in enumerate(_SIZES):
        data[16 + 2 * number] = row_bytes
        data[48 + number] = num_rows
    return ir.Constant(ir.ArrayType(_I8, 64), data)


def _store_products(builder: Any, room: Any, x: Any, sums: Any, is_signed: bool) -> None:
    """What the tiles do, read from the same memory and left there."""
    words = builder.bitcast(x, ir.IntType(32).as_pointer())
    extend = builder.ashr if is_signed else builder.lshr
    down = constant(24, VEC_I32)
    for row in range(ROWS):
        total = constant(0, VEC_I32)
        for word in range(_WORDS):
            weight = builder.load(_vector(builder, room, word))
            at = ir.Constant(_I64, row * _ROW_BYTES // 4 + word)
            codes = all_lanes(builder, builder.load(builder.gep(words, [at])), VEC_I32)
            for byte in range(4):
                left = constant(24 - 8 * byte, VEC_I32)
                pair = (
                    extend(builder.shl(weight, left), down),
                    builder.ashr(builder.shl(codes, left), down),
                )
                total = builder.add(total, builder.mul(*pair))
        builder.store(total, _vector(builder, sums, row))


def _vector(builder: Any, room: Any, at: int) -> Any:
    return builder.gep(room, [ir.Constant(_I64, 0), ir.Constant(_I64, at)])


def _bytes(builder: Any, place: Any) -> Any:
    return builder.bitcast(place, _I8.as_pointer())


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in args])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, args)
