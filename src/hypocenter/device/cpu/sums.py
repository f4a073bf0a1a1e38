"""Words of CPU kernels that hold a vector of f32 sums for each of several activation rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypocenter.device.cpu.lang import (
    cgutils,
    intrinsic,
    ir,
    literal_intrinsic,
    models,
    register_model,
    types,
)
from hypocenter.device.cpu.vector_ir import (
    VEC_F32,
    Codegen,
    address_of,
    all_lanes,
    f32x16,
    fused_multiply_add,
    load_scalar,
    load_vector,
)

_I64 = ir.IntType(64)


class _Totals(types.Type):  # type: ignore[misc]
    """A vector of f32 for each of several rows of activations."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(name=f"f32x16 x {num_rows}")
        self.num_rows = num_rows


class _Kept(types.Type):  # type: ignore[misc]
    """Where several totals of `num_rows` rows are kept meanwhile."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(name=f"kept f32x16 x {num_rows}")
        self.num_rows = num_rows


@register_model(_Totals)
class _TotalsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, totals: _Totals) -> None:
        super().__init__(manager, totals, ir.ArrayType(VEC_F32, totals.num_rows))


@register_model(_Kept)
class _KeptModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kept: _Kept) -> None:
        super().__init__(manager, kept, ir.ArrayType(VEC_F32, kept.num_rows).as_pointer())


@literal_intrinsic
def zero_totals(typing: Any, num_rows: Any) -> tuple[Any, Codegen]:
    """Zeros for `num_rows` rows, a number that is written out."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.ArrayType(VEC_F32, num_rows.literal_value), None)

    return _Totals(num_rows.literal_value)(num_rows), build


@literal_intrinsic
def keep_zeros(typing: Any, count: Any, num_rows: Any) -> tuple[Any, Codegen]:
    """Room of the kernel's own for `count` totals of `num_rows` rows, which are zero at first."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type = ir.ArrayType(VEC_F32, num_rows.literal_value)
        kept = cgutils.alloca_once(builder, array_type, ir.Constant(_I64, count.literal_value))
        for index in range(count.literal_value):
            place = builder.gep(kept, [ir.Constant(_I64, index)])
            builder.store(ir.Constant(array_type, None), place)
        return kept

    return _Kept(num_rows.literal_value)(count, num_rows), build


@intrinsic
def kept_totals(typing: Any, kept: Any, index: Any) -> tuple[Any, Codegen]:
    """Totals that are kept."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(args[0], [args[1]]))

    return _Totals(kept.num_rows)(kept, types.intp), build


@intrinsic
def kept_row(typing: Any, kept: Any, index: Any, row: Any) -> tuple[Any, Codegen]:
    """The vector of one row of totals that are kept."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(args[0], [args[1], args[2]]))

    return f32x16(kept, types.intp, types.intp), build


@intrinsic
def keep_totals(typing: Any, kept: Any, index: Any, totals: Any) -> tuple[Any, Codegen]:
    """Keep totals in place of those that were."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(kept, types.intp, totals), build


def each_row(builder: Any, totals: Any, change: Callable[[int, Any], Any]) -> Any:
    """The totals with each row's vector changed."""
    made = ir.Constant(totals.type, ir.Undefined)
    for row in range(totals.type.count):
        made = builder.insert_value(made, change(row, builder.extract_value(totals, row)), row)
    return made


@intrinsic
def add_scaled(
    typing: Any, totals: Any, vector: Any, array: Any, index: Any, pitch: Any
) -> tuple[Any, Codegen]:
    """totals[i] + vector * array[index + i * pitch], each sum one fused step."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, vector, array, index, pitch = args

        def change(row: int, total: Any) -> Any:
            at = builder.add(index, builder.mul(pitch, ir.Constant(_I64, row)))
            scalar = load_scalar(context, builder, signature.args[2], array, at)
            return fused_multiply_add(builder, vector, all_lanes(builder, scalar, VEC_F32), total)

        return each_row(builder, totals, change)

    return totals(totals, f32x16, array, types.intp, types.intp), build


@intrinsic
def add_to_each(typing: Any, totals: Any, vector: Any) -> tuple[Any, Codegen]:
    """totals[i] + vector."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return each_row(builder, args[0], lambda row, total: builder.fadd(total, args[1]))

    return totals(totals, f32x16), build


@intrinsic
def add_stored(typing: Any, totals: Any, array: Any, index: Any, pitch: Any) -> tuple[Any, Codegen]:
    """array[index + i * pitch ...] + totals[i], 16 elements each."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, array, index, pitch = args

        def change(row: int, total: Any) -> Any:
            at = builder.add(index, builder.mul(pitch, ir.Constant(_I64, row)))
            address = address_of(context, builder, signature.args[1], array, at)
            return builder.fadd(load_vector(builder, address, VEC_F32, 4), total)

        return each_row(builder, totals, change)

    return totals(totals, array, types.intp, types.intp), build


@intrinsic
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
