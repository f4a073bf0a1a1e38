"""More words for CPU kernels: several vectors at once, kept in registers as a tuple.

How many there are is a number that the kernel's source states, so loops over them are unrolled.
"""

from __future__ import annotations

from typing import Any

from hypocenter.device.lang import cgutils, cpu_name, ir, literal_word, types, word
from hypocenter.device.vector_ir import (
    I32,
    LANES,
    VEC_F32,
    VEC_I16,
    Codegen,
    address_of,
    all_lanes,
    f32x16,
    fused,
    half_to_float,
    load_vector,
)

LINE_BYTES = 64
#: How far ahead memory is asked for: what one thread reads in the time that memory takes to answer.
AHEAD_BYTES = 4096
#: Processors, as LLVM spells them, that see for themselves what is read next, and lose by being
#: asked; and those that do where codes are whole bytes, which are read with so few instructions.
_FORESIGHTED = ("znver4",)
_FORESIGHTED_OF_BYTES = ("znver4", "znver5")


#: Processors on which a multiply-add had better read a number from memory and spread it itself, for
#: every other row: a Zen 4 then does 16 of them and two conversions in 16 cycles, and else in 18.5.
_SPREAD_BY_FMA = ("znver4",)


def asks_ahead(*, of_bytes: bool = False) -> bool:
    """Whether kernels ask for the weights that they are about to read; `docs/cpu.md` has what that
    gives on which processor."""
    return cpu_name() not in (_FORESIGHTED_OF_BYTES if of_bytes else _FORESIGHTED)


def ask_for_lines(
    builder: Any, address: Any, start: int, num_lines: int, *, nearest: bool = True
) -> None:
    """Ask memory for cache lines from `start` bytes behind an address on, to lie in the cache that
    is nearest, or in the second."""
    first = builder.bitcast(address, ir.IntType(8).as_pointer())
    function = ir.FunctionType(ir.VoidType(), [first.type, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
    # To be read, how near, as data.
    how = [ir.Constant(I32, value) for value in (0, 3 if nearest else 2, 1)]
    for line in range(num_lines):
        at = ir.Constant(ir.IntType(64), start + line * LINE_BYTES)
        builder.call(fetch, [builder.gep(first, [at]), *how])


def load_lines(builder: Any, address: Any, num_lines: int) -> None:
    """Load a byte of each of so many cache lines from an address on."""
    first = builder.bitcast(address, ir.IntType(8).as_pointer())
    for line in range(num_lines):
        at = builder.gep(first, [ir.Constant(ir.IntType(64), line * LINE_BYTES)])
        # Atomic, or it would be left out because nobody looks at what is loaded.
        builder.load_atomic(at, "monotonic", 1)


def _literal(count: Any) -> int:
    """A count that the kernel's source states; 0 sends numba to ask again with its value."""
    return getattr(count, "literal_value", 0)


def _unpack(builder: Any, values: Any) -> list[Any]:
    return [builder.extract_value(values, index) for index in range(values.type.count)]


def _pack(builder: Any, values: list[Any]) -> Any:
    packed = ir.Constant(ir.ArrayType(VEC_F32, len(values)), ir.Undefined)
    for index, value in enumerate(values):
        packed = builder.insert_value(packed, value, index)
    return packed


@word
def splat_each(typing: Any, value: Any, count: Any) -> tuple[Any, Codegen]:
    """A tuple of `count` vectors with one f32 in all lanes."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _pack(builder, [all_lanes(builder, args[0], VEC_F32)] * _literal(count))

    if not _literal(count):
        return None  # type: ignore[return-value]
    return types.UniTuple(f32x16, _literal(count))(types.float32, count), build


@word
def load_each(
    typing: Any, array: Any, starts: Any, first: Any, offset: Any, count: Any
) -> tuple[Any, Codegen]:
    """A tuple of `count` vectors as of `load`: vector i stands at starts[first + i] + offset."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = []
        for index in range(_literal(count)):
            place = builder.add(args[2], context.get_constant(types.intp, index))
            start = builder.load(address_of(context, builder, signature.args[1], args[1], place))
            address = address_of(context, builder, array, args[0], builder.add(start, args[3]))
            if array.dtype == types.float32:
                loaded.append(load_vector(builder, address, VEC_F32, 4))
            else:
                loaded.append(half_to_float(builder, load_vector(builder, address, VEC_I16, 2)))
        return _pack(builder, loaded)

    if not _literal(count) or array.dtype not in (types.float32, types.uint16):
        return None  # type: ignore[return-value]
    several = types.UniTuple(f32x16, _literal(count))
    return several(array, starts, types.intp, types.intp, count), build


@word
def fma_outer(
    typing: Any, vectors: Any, array: Any, index: Any, pitch: Any, sums: Any
) -> tuple[Any, Codegen]:
    """Row i of `sums`, as long as `vectors`, plus vectors * array[index + i * pitch].

    Each sum is one `fma`, so it does not depend on how many rows or vectors there are.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        factors, added = _unpack(builder, args[0]), _unpack(builder, args[4])
        base = address_of(context, builder, array, args[1], args[2])
        by_fma = cpu_name() in _SPREAD_BY_FMA
        starts = base, _renamed(builder, base) if by_fma else base
        for row in range(len(added) // len(factors)):
            place = builder.mul(args[3], context.get_constant(types.intp, row))
            for column, factor in enumerate(factors):
                which = row * len(factors) + column
                if column == 0 or (row % 2 and by_fma):
                    scalar = builder.load(builder.gep(starts[column % 2], [place]))
                    value = all_lanes(builder, scalar, VEC_F32)
                added[which] = fused(builder, factor, value, added[which])
        return _pack(builder, added)

    if array.dtype != types.float32:
        return None  # type: ignore[return-value]
    return sums(vectors, array, types.intp, types.intp, sums), build


def _renamed(builder: Any, address: Any) -> Any:
    """The same address, which the compiler takes for another: what is read there is read anew."""
    kind = ir.FunctionType(address.type, [address.type])
    return builder.asm(kind, "", "=r,0", [address], False)


@word
def store_outer(
    typing: Any, array: Any, index: Any, pitch: Any, sums: Any, count: Any
) -> tuple[Any, Codegen]:
    """Write rows of `count` vectors each to a float32 array, row i from index + i * pitch on."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for which, value in enumerate(_unpack(builder, args[3])):
            row, column = divmod(which, _literal(count))
            step = builder.mul(args[2], context.get_constant(types.intp, row))
            place = builder.add(args[1], step)
            place = builder.add(place, context.get_constant(types.intp, LANES * column))
            address = address_of(context, builder, array, args[0], place)
            builder.store(value, builder.bitcast(address, value.type.as_pointer())).align = 4
        return context.get_dummy_value()

    if not _literal(count) or array.dtype != types.float32:
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, types.intp, sums, count), build


@literal_word
def prefetch(typing: Any, array: Any, index: Any, count: Any) -> tuple[Any, Codegen]:
    """Ask for `count` elements, to lie in the second cache; harmless wherever they are."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, array, args[0], args[1])
        num_bytes = _literal(count) * array.dtype.bitwidth // 8
        ask_for_lines(builder, address, 0, -(-num_bytes // LINE_BYTES), nearest=False)
        return context.get_dummy_value()

    if not _literal(count):
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, count), build


@literal_word
def fetch(typing: Any, array: Any, index: Any, count: Any) -> tuple[Any, Codegen]:
    """Load a little of each line of `count` elements, which brings them into the caches: a core
    drops none of what it loads, as it does of what it is asked for."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, array, args[0], args[1])
        num_bytes = _literal(count) * array.dtype.bitwidth // 8
        load_lines(builder, address, -(-num_bytes // LINE_BYTES))
        return context.get_dummy_value()

    if not _literal(count):
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, count), build


@literal_word
def fetch_ahead(typing: Any, array: Any, index: Any, count: Any) -> tuple[Any, Codegen]:
    """Ask for what lies `AHEAD_BYTES` behind `count` elements; beyond the array it does no harm."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not asks_ahead():
            return context.get_dummy_value()
        address = address_of(context, builder, array, args[0], args[1])
        num_bytes = _literal(count) * array.dtype.bitwidth // 8
        ask_for_lines(builder, address, AHEAD_BYTES, -(-num_bytes // LINE_BYTES))
        return context.get_dummy_value()

    if not _literal(count):
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, count), build
