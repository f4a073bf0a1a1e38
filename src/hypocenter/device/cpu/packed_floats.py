"""Words of CPU kernels that read a weight of floats: by columns, or of bf16 by pairs of them.

A weight is an array of 16 rows side by side, as float32; as uint16, bits of f16; or as int32, words
of two bf16, an even column low and the odd one behind it high. It is multiplied by activations of
float32 exactly, or, if of bf16, by activations that are bits of bf16 too (int16).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.dtypes import LEAST
from hypocenter.device.cpu.lang import intrinsic, ir, types
from hypocenter.device.cpu.sums import each_row
from hypocenter.device.cpu.target import instruction_set
from hypocenter.device.cpu.vector_ir import (
    I32,
    VEC_F32,
    VEC_I16,
    VEC_I32,
    Codegen,
    address_of,
    all_lanes,
    call_llvm,
    constant,
    f32x16,
    fused_multiply_add,
    load_floats,
    load_vector,
)

_I64 = ir.IntType(64)
_HIGH = 0xFFFF0000
_LEAST_BITS = int(np.float32(LEAST).view(np.uint32))


@intrinsic
def columns_of(typing: Any, weights: Any) -> tuple[Any, Codegen]:
    """Columns of a step of a weight, a constant: 1, or 2 of bf16."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.intp, 2 if weights.dtype == types.int32 else 1)

    return types.intp(weights), build


@intrinsic
def load_column(typing: Any, weights: Any, index: Any, column: Any) -> tuple[Any, Codegen]:
    """16 elements of column `column` of a weight as f32, where those of its step lie at `index`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        if weights.dtype != types.int32:
            return load_floats(builder, address, weights.dtype)
        is_odd = builder.trunc(builder.and_(args[2], ir.Constant(_I64, 1)), I32)
        down = all_lanes(builder, builder.shl(is_odd, ir.Constant(I32, 4)), VEC_I32)
        words = builder.lshr(load_vector(builder, address, VEC_I32, 4), down)
        return builder.bitcast(builder.shl(words, constant(16, VEC_I32)), VEC_F32)

    return f32x16(weights, types.intp, types.intp), build


@intrinsic
def add_step(
    typing: Any, totals: Any, weights: Any, index: Any, x: Any, x_index: Any, pitch: Any
) -> tuple[Any, Codegen]:
    """totals[i] + the products of the columns of a step with x[x_index + i * pitch ...].

    Exact products take one fused step a column, the even one first. Two of bf16 do as `vdpbf16ps`
    does by Intel's manual: the odd column first, each sum rounded to nearest even. Below 2**128
    such products are exact in f32, so there is one rounding with a fused step and without.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, weights, index, x, x_index, pitch = args
        address = address_of(context, builder, signature.args[1], weights, index)

        def place(row: int, column: int = 0) -> Any:
            at = builder.add(x_index, builder.mul(pitch, ir.Constant(_I64, row)))
            at = builder.add(at, ir.Constant(_I64, column))
            return address_of(context, builder, signature.args[3], x, at)

        def exact(columns: list[Any]) -> Any:
            def change(row: int, total: Any) -> Any:
                for at, column in enumerate(columns):
                    factor = all_lanes(builder, builder.load(place(row, at)), VEC_F32)
                    total = fused_multiply_add(builder, column, factor, total)
                return total

            return each_row(builder, totals, change)

        if signature.args[1].dtype != types.int32:
            return exact([load_floats(builder, address, signature.args[1].dtype)])
        words = load_vector(builder, address, VEC_I32, 4)
        if signature.args[3].dtype == types.float32:
            return exact([_even(builder, words), _odd(builder, words)])

        def change(row: int, total: Any) -> Any:
            pair = builder.load(builder.bitcast(place(row), I32.as_pointer()))
            pair.align = 2
            return _add_pairs(builder, total, words, all_lanes(builder, pair, VEC_I32))

        return each_row(builder, totals, change)

    if (x.dtype, weights.dtype) not in _PRODUCTS:
        return None  # type: ignore[return-value]
    return totals(totals, weights, types.intp, x, types.intp, types.intp), build


_PRODUCTS = (
    (types.float32, types.float32),
    (types.float32, types.uint16),
    (types.float32, types.int32),
    (types.int16, types.int32),
)


def _even(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.shl(words, constant(16, VEC_I32)), VEC_F32)


def _odd(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.and_(words, constant(_HIGH, VEC_I32)), VEC_F32)


def _add_pairs(builder: Any, total: Any, weights: Any, x: Any) -> Any:
    if instruction_set() == "avx512-bf16":
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call_llvm(builder, name, total, weights, x)
    for half in (_odd, _even):
        total = fused_multiply_add(builder, half(builder, weights), half(builder, x), total)
    return total


@intrinsic
def store_rounded(typing: Any, array: Any, index: Any, value: Any) -> tuple[Any, Codegen]:
    """Write 16 lanes to an int16 array as bits of bf16, as `bf16.factors_of_products` does."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[2], VEC_I32)
        size = builder.and_(bits, constant(0x7FFFFFFF, VEC_I32))
        odd = builder.and_(builder.lshr(bits, constant(16, VEC_I32)), constant(1, VEC_I32))
        rounded = builder.add(builder.add(bits, odd), constant(0x7FFF, VEC_I32))
        is_nan = builder.icmp_unsigned(">", size, constant(0x7F800000, VEC_I32))
        quiet = builder.or_(bits, constant(0x400000, VEC_I32))
        rounded = builder.select(is_nan, quiet, rounded)
        is_tiny = builder.icmp_unsigned("<", size, constant(_LEAST_BITS, VEC_I32))
        rounded = builder.select(is_tiny, constant(0, VEC_I32), rounded)
        high = builder.trunc(builder.lshr(rounded, constant(16, VEC_I32)), VEC_I16)
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        builder.store(high, builder.bitcast(address, VEC_I16.as_pointer())).align = 2
        return context.get_dummy_value()

    if array.dtype != types.int16:
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, f32x16), build
