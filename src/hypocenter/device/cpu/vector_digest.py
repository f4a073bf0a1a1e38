"""Words of CPU kernels for digests (`device/digests.py`); the others are in `vector.py`."""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.lang import cgutils, intrinsic, ir, types
from hypocenter.device.cpu.vector_ir import (
    I32,
    LANES,
    VEC_F32,
    VEC_I32,
    Codegen,
    all_lanes,
    constant,
    f32x16,
)
from hypocenter.device.digests import FIRST, SECOND, SHIFTS

_I64 = ir.IntType(64)
_VEC_I64 = ir.VectorType(_I64, LANES)
_SIGN = 0x80000000


@intrinsic
def mix_places(typing: Any, first: Any) -> tuple[Any, Codegen]:
    """The mixes of 16 places from `first` on, as bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = all_lanes(builder, builder.trunc(args[0], I32), VEC_I32)
        mix = builder.add(start, ir.Constant(VEC_I32, list(range(LANES))))
        for shift, factor in zip(SHIFTS, (FIRST, SECOND, None), strict=True):
            mix = builder.xor(mix, builder.lshr(mix, constant(shift, VEC_I32)))
            if factor is not None:
                mix = builder.mul(mix, constant(factor, VEC_I32))
        return builder.bitcast(mix, VEC_F32)

    return f32x16(types.intp), build


@intrinsic
def signed_by(typing: Any, value: Any, mix: Any) -> tuple[Any, Codegen]:
    """Each lane, with its sign changed where the mix of its place says so."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, mix = (builder.bitcast(arg, VEC_I32) for arg in args)
        sign = builder.and_(mix, constant(_SIGN, VEC_I32))
        return builder.bitcast(builder.xor(value, sign), VEC_F32)

    return f32x16(f32x16, f32x16), build


@intrinsic
def digest_of_lanes(typing: Any, value: Any, mix: Any) -> tuple[Any, Codegen]:
    """What 16 elements add to a digest: the sum of their bits times (mix | 1)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, mix = (builder.bitcast(arg, VEC_I32) for arg in args)
        factor = builder.zext(builder.or_(mix, constant(1, VEC_I32)), _VEC_I64)
        products = builder.mul(builder.zext(bits, _VEC_I64), factor)
        kind = ir.FunctionType(_I64, [_VEC_I64])
        name = f"llvm.vector.reduce.add.v{LANES}i64"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [products])

    return types.int64(f32x16, f32x16), build


@intrinsic
def bits_of_number(typing: Any, value: Any) -> tuple[Any, Codegen]:
    """The bits of an f64 as an i64."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I64)

    return types.int64(types.float64), build


@intrinsic
def number_of_bits(typing: Any, bits: Any) -> tuple[Any, Codegen]:
    """The f64 that these bits are."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), build
