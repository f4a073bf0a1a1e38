"""The words that CPU kernels are written in: 16 lanes of f32, unchecked array access, functions of
one number lane by lane.

Each word is a few LLVM instructions on `<16 x float>`; LLVM fits them to the machine's registers,
so one source serves AVX-512, AVX2, NEON and plain code. Indices are flat element offsets and are
not checked: the op that launches a kernel has checked the extents. Every word rounds each lane by
itself, so a lane's result never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cgutils, inline, intrinsic, ir, types
from hypocenter.device.cpu.vector_ir import (
    I32,
    LANES,
    VEC_F32,
    VEC_I32,
    Codegen,
    address_of,
    all_lanes,
    constant,
    f32x16,
    first_lanes,
    float_to_half,
    fused_multiply_add,
    load_floats,
)

# Adding it rounds to an integer, whatever instruction the machine lacks; the low bits of the sum
# are then that integer with the bias of an exponent.
_ROUND = np.float32(1.5 * 2**23 + 127)
_EXP_LOW, _EXP_HIGH, _EXP2_LOW = np.float32(-87.33654), np.float32(88.0), np.float32(-126)
LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_ONE, _ZERO = np.float32(1), np.float32(0)
# Minimax coefficients for f32, the highest power's first: of exp on [-ln2/2, ln2/2], all but the
# last two, which are 1 (Cephes, expf); of 2**r on [-1/2, 1/2], all but the last, 1 (Cephes, exp2f).
_OF_EXP = tuple(
    map(
        np.float32,
        (
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ),
    )
)
_OF_EXP2 = tuple(
    map(
        np.float32,
        (
            1.535336188319500e-4,
            1.339887440266574e-3,
            9.618437357674640e-3,
            5.550332471162809e-2,
            2.402264791363012e-1,
            6.931472028550421e-1,
        ),
    )
)


@intrinsic
def load(typing: Any, array: Any, index: Any) -> tuple[Any, Codegen]:
    """16 elements as f32: from float32, or from uint16, read as f16 bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        return load_floats(builder, address, array.dtype)

    if array.dtype not in (types.float32, types.uint16):
        return None  # type: ignore[return-value]
    return f32x16(array, types.intp), build


@intrinsic
def load_first(typing: Any, array: Any, index: Any, num_lanes: Any) -> tuple[Any, Codegen]:
    """The first `num_lanes` of 16 float32 elements, zeros in the rest; touches only those."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        pointer = builder.bitcast(address, VEC_F32.as_pointer())
        mask = first_lanes(builder, args[2])
        kind = ir.FunctionType(VEC_F32, [pointer.type, I32, mask.type, VEC_F32])
        name = "llvm.masked.load.v16f32.p0"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [pointer, ir.Constant(I32, 4), mask, constant(0.0)])

    if array.dtype != types.float32:
        return None  # type: ignore[return-value]
    return f32x16(array, types.intp, types.intp), build


@intrinsic
def store_first(
    typing: Any, array: Any, index: Any, value: Any, num_lanes: Any
) -> tuple[Any, Codegen]:
    """Write the first `num_lanes` lanes to a float32 array; touches only those."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        pointer = builder.bitcast(address, VEC_F32.as_pointer())
        mask = first_lanes(builder, args[3])
        kind = ir.FunctionType(ir.VoidType(), [VEC_F32, pointer.type, I32, mask.type])
        name = "llvm.masked.store.v16f32.p0"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [args[2], pointer, ir.Constant(I32, 4), mask])
        return context.get_dummy_value()

    if array.dtype != types.float32:
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, f32x16, types.intp), build


@intrinsic
def pick(typing: Any, value: Any, lane: Any) -> tuple[Any, Codegen]:
    """One lane of a vector."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], builder.trunc(args[1], I32))

    return types.float32(f32x16, types.intp), build


@intrinsic
def store_low_bytes(typing: Any, words: Any, index: Any, value: Any) -> tuple[Any, Codegen]:
    """Write the lowest byte of each lane's bits to four words of an int32 array."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        low = ir.VectorType(ir.IntType(8), LANES)
        bytes_ = builder.trunc(builder.bitcast(args[2], VEC_I32), low)
        builder.store(bytes_, builder.bitcast(address, low.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(words, types.intp, f32x16), build


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> tuple[Any, Codegen]:
    """Write 16 lanes to a float32 array, or to a uint16 array as f16 bits (nearest even)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, signature.args[0], args[0], args[1])
        value = args[2]
        if array.dtype == types.uint16:
            value = float_to_half(builder, value)
        written = builder.store(value, builder.bitcast(address, value.type.as_pointer()))
        written.align = array.dtype.bitwidth // 8
        return context.get_dummy_value()

    if array.dtype not in (types.float32, types.uint16):
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, f32x16), build


@intrinsic
def spread(typing: Any, array: Any, index: Any) -> tuple[Any, Codegen]:
    """One element of a float32 array in all 16 lanes."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scalar = builder.load(address_of(context, builder, signature.args[0], args[0], args[1]))
        return all_lanes(builder, scalar, VEC_F32)

    if array.dtype != types.float32:
        return None  # type: ignore[return-value]
    return f32x16(array, types.intp), build


@intrinsic
def get(typing: Any, array: Any, index: Any) -> tuple[Any, Codegen]:
    """One element, unchecked and without the negative-index rule that stops vectorisation."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(address_of(context, builder, signature.args[0], args[0], args[1]))

    return array.dtype(array, types.intp), build


@intrinsic
def put(typing: Any, array: Any, index: Any, value: Any) -> tuple[Any, Codegen]:
    """Write one element, unchecked."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], address_of(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), build


@intrinsic
def put_half(typing: Any, array: Any, index: Any, value: Any) -> tuple[Any, Codegen]:
    """Write one f32 to a float32 array, or to a uint16 array as f16 bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[2]
        if array.dtype == types.uint16:
            half = float_to_half(builder, all_lanes(builder, value, VEC_F32))
            value = builder.extract_element(half, ir.Constant(I32, 0))
        builder.store(value, address_of(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    if array.dtype not in (types.float32, types.uint16):
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, types.float32), build


@intrinsic
def splat(typing: Any, value: Any) -> tuple[Any, Codegen]:
    """One f32 in all 16 lanes."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return all_lanes(builder, args[0], VEC_F32)

    return f32x16(types.float32), build


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> tuple[Any, Codegen]:
    """a * b + c: rounded once where the machine has a fused instruction, else twice."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fused_multiply_add(builder, *args)

    return f32x16(f32x16, f32x16, f32x16), build


def _binary(emit: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    def implement(typing: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, args[0], args[1])

        return f32x16(f32x16, f32x16), build

    implement.__doc__ = doc
    return intrinsic(implement)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


add = _binary(lambda builder, a, b: builder.fadd(a, b), "a + b.")
sub = _binary(lambda builder, a, b: builder.fsub(a, b), "a - b.")
mul = _binary(lambda builder, a, b: builder.fmul(a, b), "a * b.")
div = _binary(lambda builder, a, b: builder.fdiv(a, b), "a / b.")
larger = _binary(_larger, "The larger of a and b; b where either is NaN.")
smaller = _binary(_smaller, "The smaller of a and b; b where either is NaN.")


@intrinsic
def absolute(typing: Any, value: Any) -> tuple[Any, Codegen]:
    """|value|."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], VEC_I32)
        return builder.bitcast(builder.and_(bits, constant(0x7FFFFFFF, VEC_I32)), VEC_F32)

    return f32x16(f32x16), build


@intrinsic
def finite_or(typing: Any, value: Any, other: Any) -> tuple[Any, Codegen]:
    """Lanes that hold a number; `other` where they are infinite or NaN."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.and_(builder.bitcast(args[0], VEC_I32), constant(0x7FFFFFFF, VEC_I32))
        is_finite = builder.icmp_unsigned("<", bits, constant(0x7F800000, VEC_I32))
        return builder.select(is_finite, args[0], all_lanes(builder, args[1], VEC_F32))

    return f32x16(f32x16, types.float32), build


@intrinsic
def keep(typing: Any, value: Any, low: Any, high: Any, other: Any) -> tuple[Any, Codegen]:
    """Lanes low <= lane < high of `value`; `other` in the rest."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(VEC_I32, list(range(LANES)))
        low, high = (all_lanes(builder, builder.trunc(bound, I32), VEC_I32) for bound in args[1:3])
        inside = builder.and_(
            builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high)
        )
        return builder.select(inside, args[0], all_lanes(builder, args[3], VEC_F32))

    return f32x16(f32x16, types.intp, types.intp, types.float32), build


def _fold(emit: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    """Reduce the lanes by halves, always in the same tree."""

    def implement(typing: Any, value: Any) -> tuple[Any, Codegen]:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            folded = args[0]
            for step in (8, 4, 2, 1):
                order = [(lane + step) % LANES for lane in range(LANES)]
                turned = builder.shuffle_vector(folded, folded, ir.Constant(VEC_I32, order))
                folded = emit(builder, folded, turned)
            return builder.extract_element(folded, ir.Constant(I32, 0))

        return types.float32(f32x16), build

    implement.__doc__ = doc
    return intrinsic(implement)


sum_lanes = _fold(lambda builder, a, b: builder.fadd(a, b), "Sum of the lanes, in a fixed tree.")
max_lanes = _fold(_larger, "Largest lane.")


@inline
def _polynomial(r: Any, coefficients: Any) -> Any:
    """Of degree 5 in r."""
    p = fma(splat(coefficients[0]), r, splat(coefficients[1]))
    p = fma(p, r, splat(coefficients[2]))
    p = fma(p, r, splat(coefficients[3]))
    p = fma(p, r, splat(coefficients[4]))
    return fma(p, r, splat(coefficients[5]))


@intrinsic
def _power_of_two(typing: Any, shifted: Any) -> tuple[Any, Codegen]:
    """2**n for a lane that holds n + `_ROUND`: its low bits, moved to the exponent."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], VEC_I32)
        return builder.bitcast(builder.shl(bits, constant(23, VEC_I32)), VEC_F32)

    return f32x16(f32x16), build


@inline
def exp(x: Any) -> Any:
    """e**x per lane, within 2 ulp for -87.3 <= x <= 88; below that 1.2e-38, above it e**88.

    Range reduction by ln 2 in two parts, then Cephes' polynomial for expf.
    """
    x = larger(splat(_EXP_LOW), sub(splat(_ZERO), larger(splat(-_EXP_HIGH), sub(splat(_ZERO), x))))
    shifted = add(mul(x, splat(LOG2_E)), splat(_ROUND))
    n = sub(shifted, splat(_ROUND))
    r = fma(n, splat(_LN2_LOW), fma(n, splat(_LN2_HIGH), x))
    p = _polynomial(r, _OF_EXP)
    p = fma(mul(p, r), r, add(r, splat(_ONE)))
    return mul(p, _power_of_two(shifted))


@inline
def exp2(x: Any) -> Any:
    """2**x per lane, within 2 ulp for -126 <= x <= 126; below that 1.2e-38.

    Cephes' polynomial for exp2f: fewer steps than `exp`, whose range takes two of reduction.
    """
    x = larger(splat(_EXP2_LOW), x)
    shifted = add(x, splat(_ROUND))
    r = sub(x, sub(shifted, splat(_ROUND)))
    p = _polynomial(r, _OF_EXP2)
    return mul(fma(p, r, splat(_ONE)), _power_of_two(shifted))


@inline
def sigmoid(x: Any) -> Any:
    """1 / (1 + e**-x) per lane."""
    return div(splat(_ONE), add(splat(_ONE), exp(sub(splat(_ZERO), x))))


@inline
def tanh(x: Any) -> Any:
    """Hyperbolic tangent per lane as 2 * sigmoid(2x) - 1: absolute error below 2e-7."""
    return sub(mul(splat(np.float32(2)), sigmoid(add(x, x))), splat(_ONE))
