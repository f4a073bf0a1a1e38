"""What the words for CPU kernels are made of: types and steps of LLVM on 16 lanes of f32.

Nothing here is called by a kernel: `vector.py` and its neighbours make words of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypocenter.device.cpu.lang import cgutils, ir, models, register_model, types
from hypocenter.device.cpu.target import cpu_features

LANES = 16

F32, I16, I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
VEC_F32 = ir.VectorType(F32, LANES)
VEC_I32 = ir.VectorType(I32, LANES)
VEC_I16 = ir.VectorType(I16, LANES)
_VEC_F16 = ir.VectorType(ir.HalfType(), LANES)
_HAS_FMA = bool({"fma", "avx512f", "neon"} & cpu_features())
_HAS_F16 = bool({"f16c", "avx512f", "fullfp16", "neon"} & cpu_features())

Codegen = Callable[[Any, Any, Any, Any], Any]


class _Lanes(types.Type):  # type: ignore[misc]
    """numba's name for a vector held in registers."""


f32x16 = _Lanes(name="f32x16")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, lanes: _Lanes) -> None:
        super().__init__(manager, lanes, VEC_F32)


def constant(value: float, kind: Any = VEC_F32) -> Any:
    return ir.Constant(kind, [value] * LANES)


def address_of(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def load_scalar(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.load(address_of(context, builder, array_type, array, index))


def load_vector(builder: Any, address: Any, kind: Any, align: int) -> Any:
    loaded = builder.load(builder.bitcast(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def all_lanes(builder: Any, scalar: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, constant(0, VEC_I32))


def load_floats(builder: Any, address: Any, dtype: Any) -> Any:
    """16 elements as f32: of float32, or of uint16, read as f16 bits."""
    if dtype == types.float32:
        return load_vector(builder, address, VEC_F32, 4)
    return half_to_float(builder, load_vector(builder, address, VEC_I16, 2))


def unpack(builder: Any, values: Any) -> list[Any]:
    """The vectors of a tuple of them."""
    return [builder.extract_value(values, index) for index in range(values.type.count)]


def pack(builder: Any, values: Sequence[Any]) -> Any:
    """A tuple of vectors."""
    packed = ir.Constant(ir.ArrayType(VEC_F32, len(values)), ir.Undefined)
    for index, value in enumerate(values):
        packed = builder.insert_value(packed, value, index)
    return packed


def call_llvm(builder: Any, name: str, *args: Any) -> Any:
    """A call of what gives a value of its first argument's type."""
    kind = ir.FunctionType(args[0].type, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fused_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c: rounded once where the machine has a fused instruction, else twice."""
    if not _HAS_FMA:
        return builder.fadd(builder.fmul(a, b), c)
    lanes = f"v{a.type.count}" if isinstance(a.type, ir.VectorType) else ""
    return call_llvm(builder, f"llvm.fma.{lanes}f32", a, b, c)


def first_lanes(builder: Any, num_lanes: Any) -> Any:
    lanes = ir.Constant(VEC_I32, list(range(LANES)))
    bound = all_lanes(builder, builder.trunc(num_lanes, I32), VEC_I32)
    return builder.icmp_signed("<", lanes, bound)


def half_to_float(builder: Any, bits: Any) -> Any:
    """f16 bits to f32, exact. Without hardware: shift into f32's fields, then rebias by 2**112."""
    if _HAS_F16:
        return builder.fpext(builder.bitcast(bits, _VEC_F16), VEC_F32)
    wide = builder.zext(bits, VEC_I32)
    sign = builder.shl(builder.and_(wide, constant(0x8000, VEC_I32)), constant(16, VEC_I32))
    rest = builder.shl(builder.and_(wide, constant(0x7FFF, VEC_I32)), constant(13, VEC_I32))
    scaled = builder.fmul(builder.bitcast(rest, VEC_F32), constant(2.0**112))
    # Exponent 31 means Inf or NaN: widen it to f32's own.
    special = builder.icmp_unsigned(">=", rest, constant(31 << 23, VEC_I32))
    widened = builder.or_(rest, constant(0x7F800000, VEC_I32))
    finite = builder.bitcast(scaled, VEC_I32)
    return builder.bitcast(builder.or_(sign, builder.select(special, widened, finite)), VEC_F32)


def float_to_half(builder: Any, value: Any) -> Any:
    """f32 to f16 bits, rounded to nearest even; NaN stays NaN. Without hardware: by integers."""
    if _HAS_F16:
        return builder.bitcast(builder.fptrunc(value, _VEC_F16), VEC_I16)
    bits = builder.bitcast(value, VEC_I32)
    sign = builder.lshr(builder.and_(bits, constant(0x80000000, VEC_I32)), constant(16, VEC_I32))
    size = builder.and_(bits, constant(0x7FFFFFFF, VEC_I32))
    # Normal results: rebias the exponent and round the 13 dropped bits to even.
    odd = builder.and_(builder.lshr(size, constant(13, VEC_I32)), constant(1, VEC_I32))
    rebias = constant(((15 - 127) << 23) + 0xFFF, VEC_I32)
    normal = builder.lshr(builder.add(builder.add(size, rebias), odd), constant(13, VEC_I32))
    # Subnormal results: adding 0.5 leaves them, rounded to even, in the low bits of the sum.
    shifted = builder.fadd(builder.bitcast(size, VEC_F32), constant(0.5))
    small = builder.sub(builder.bitcast(shifted, VEC_I32), constant(0x3F000000, VEC_I32))
    is_small = builder.icmp_unsigned("<", size, constant(113 << 23, VEC_I32))
    half = builder.select(is_small, small, normal)
    too_large = builder.icmp_unsigned(">=", size, constant(0x47800000, VEC_I32))
    half = builder.select(too_large, constant(0x7C00, VEC_I32), half)
    is_nan = builder.icmp_unsigned(">", size, constant(0x7F800000, VEC_I32))
    half = builder.select(is_nan, constant(0x7E00, VEC_I32), half)
    return builder.trunc(builder.or_(sign, half), VEC_I16)
