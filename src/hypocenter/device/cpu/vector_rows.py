"""More words for CPU kernels: several vectors at once, kept in registers as a tuple.

How many there are is a number that the kernel's source states, so loops over them are unrolled.
"""

from __future__ import annotations

from typing import Any

from hypocenter.device.cpu.lang import intrinsic, ir, literal, types
from hypocenter.device.cpu.target import cpu_name
from hypocenter.device.cpu.vector_ir import (
    LANES,
    VEC_F32,
    Codegen,
    address_of,
    all_lanes,
    f32x16,
    fused_multiply_add,
    pack,
    unpack,
)

#: Processors on which a multiply-add had better read a number from memory and spread it itself, for
#: every other row: a Zen 4 then does 16 of them and two conversions in 16 cycles, and else in 18.5.
_SPREAD_BY_FMA = ("znver4",)


@intrinsic
def splat_each(typing: Any, value: Any, count: Any) -> tuple[Any, Codegen]:
    """A tuple of `count` vectors with one f32 in all lanes."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return pack(builder, [all_lanes(builder, args[0], VEC_F32)] * literal(count))

    if not literal(count):
        return None  # type: ignore[return-value]
    return types.UniTuple(f32x16, literal(count))(types.float32, count), build


@intrinsic
def fma_outer(
    typing: Any, vectors: Any, array: Any, index: Any, pitch: Any, sums: Any
) -> tuple[Any, Codegen]:
    """Row i of `sums`, as long as `vectors`, plus vectors * array[index + i * pitch].

    Each sum is one `fma`, so it does not depend on how many rows or vectors there are.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        factors, added = unpack(builder, args[0]), unpack(builder, args[4])
        base = address_of(context, builder, array, args[1], args[2])
        by_fma = cpu_name() in _SPREAD_BY_FMA
        starts = base, _rename_address(builder, base) if by_fma else base
        for row in range(len(added) // len(factors)):
            place = builder.mul(args[3], context.get_constant(types.intp, row))
            for column, factor in enumerate(factors):
                which = row * len(factors) + column
                if column == 0 or (row % 2 and by_fma):
                    scalar = builder.load(builder.gep(starts[column % 2], [place]))
                    value = all_lanes(builder, scalar, VEC_F32)
                added[which] = fused_multiply_add(builder, factor, value, added[which])
        return pack(builder, added)

    if array.dtype != types.float32:
        return None  # type: ignore[return-value]
    return sums(vectors, array, types.intp, types.intp, sums), build


def _rename_address(builder: Any, address: Any) -> Any:
    """The same address, which the compiler takes for another: what is read there is read anew."""
    kind = ir.FunctionType(address.type, [address.type])
    return builder.asm(kind, "", "=r,0", [address], False)


@intrinsic
def store_outer(
    typing: Any, array: Any, index: Any, pitch: Any, sums: Any, count: Any
) -> tuple[Any, Codegen]:
    """Write rows of `count` vectors each to a float32 array, row i from index + i * pitch on."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for which, value in enumerate(unpack(builder, args[3])):
            row, column = divmod(which, literal(count))
            step = builder.mul(args[2], context.get_constant(types.intp, row))
            place = builder.add(args[1], step)
            place = builder.add(place, context.get_constant(types.intp, LANES * column))
            address = address_of(context, builder, array, args[0], place)
            builder.store(value, builder.bitcast(address, value.type.as_pointer())).align = 4
        return context.get_dummy_value()

    if not literal(count) or array.dtype != types.float32:
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, types.intp, sums, count), build
