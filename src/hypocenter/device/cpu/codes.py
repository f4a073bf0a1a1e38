"""Words of CPU kernels for codes of weights: their products with codes of activations, and values.

Products of codes are sums of integers: the same on every path of instructions, of which
`target.instruction_set` names the one that this machine has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypocenter.device.cpu.lang import cgutils, intrinsic, ir, literal_intrinsic, types
from hypocenter.device.cpu.packed_codes import NUM_WORDS, Codes
from hypocenter.device.cpu.target import instruction_set
from hypocenter.device.cpu.vector_ir import (
    F32,
    I16,
    I32,
    LANES,
    VEC_F32,
    VEC_I32,
    Codegen,
    address_of,
    all_lanes,
    call_llvm,
    constant,
    f32x16,
    fused_multiply_add,
    load_scalar,
)

#: Rows whose sums of products grow side by side where rows are many: a sum waits for its last step,
#: and the next row's comes too late to fill the gap. Few rows, or short sums, do better one by one.
_ROWS_IN_TURN = 8
_HALVES = (range(NUM_WORDS // 2), range(NUM_WORDS // 2, NUM_WORDS))
_ALL = range(NUM_WORDS)
_NONE = constant(0, VEC_I32)

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_WITH_VNNI = ("avx512-bf16", "avx512-vnni")


class Dot:
    """Sums of four products of weight and activation codes a lane, on one path of instructions.

    `lift` is what the path adds to each signed weight code.
    """

    def __init__(self, builder: Any, weights: Sequence[Any], *, is_signed: bool) -> None:
        self._builder, self._is_signed, path = builder, is_signed, instruction_set()
        self._path, self._weights = path, list(weights)
        self.lift = 0
        if is_signed and path in (*_WITH_VNNI, "avx-vnni"):
            flip = constant(0x80808080, VEC_I32)
            self._weights, self.lift = [builder.xor(weight, flip) for weight in weights], 128

    def add(self, sums: Any, index: int, x: Any) -> Any:
        """sums + the products of weight vector `index` with the bytes of x, which are signed."""
        builder, weights = self._builder, self._weights[index]
        if self._path in _WITH_VNNI:
            return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", sums, weights, x)
        if self._path == "avx-vnni":
            name = "llvm.x86.avx512.vpdpbusd.256"
            parts = [
                call_llvm(builder, name, *some) for some in _in_halves(builder, sums, weights, x)
            ]
            return _join(builder, parts)
        if self._path in ("avx2", "avx512"):
            return builder.add(sums, self._by_pairs(weights, x))
        return builder.add(sums, self._by_bytes(weights, x))

    def _by_pairs(self, weights: Any, x: Any) -> Any:
        """By the 16-bit sums of AVX2, which saturate: weights of up to 127, or sizes of up to 128
        times numbers of up to 127, do not reach that."""
        builder, parts = self._builder, []
        half, pair = ir.VectorType(_I8, 32), ir.VectorType(I16, 16)
        ones = ir.Constant(pair, [1] * 16)
        for some in _in_halves(builder, weights, x):
            size, signed = (builder.bitcast(value, half) for value in some)
            if self._is_signed:
                signed = call_llvm(builder, "llvm.x86.avx2.psign.b", signed, size)
                size = _absolute(builder, size)
            kind = ir.FunctionType(pair, [half, half])
            sums = builder.call(
                _function(builder, kind, "llvm.x86.avx2.pmadd.ub.sw"), [size, signed]
            )
            kind = ir.FunctionType(ir.VectorType(I32, 8), [pair, pair])
            parts.append(
                builder.call(_function(builder, kind, "llvm.x86.avx2.pmadd.wd"), [sums, ones])
            )
        return _join(builder, parts)

    def _by_bytes(self, weights: Any, x: Any) -> Any:
        builder, total = self._builder, None
        for byte in range(4):
            left, down = constant(24 - 8 * byte, VEC_I32), constant(24, VEC_I32)
            shift = builder.ashr if self._is_signed else builder.lshr
            product = builder.mul(
                shift(builder.shl(weights, left), down), builder.ashr(builder.shl(x, left), down)
            )
            total = product if total is None else builder.add(total, product)
        return total


def _function(builder: Any, kind: Any, name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _absolute(builder: Any, bytes_: Any) -> Any:
    zero = ir.Constant(bytes_.type, None)
    return builder.select(builder.icmp_signed("<", bytes_, zero), builder.sub(zero, bytes_), bytes_)


def _in_halves(builder: Any, *vectors: Any) -> list[list[Any]]:
    """The lower eight lanes of each vector, and the upper ones."""
    undefined = ir.Constant(VEC_I32, ir.Undefined)
    pick = ir.VectorType(I32, LANES // 2)
    orders = [ir.Constant(pick, list(range(start, start + 8))) for start in (0, 8)]
    return [
        [builder.shuffle_vector(vector, undefined, order) for vector in vectors] for order in orders
    ]


def _join(builder: Any, parts: Sequence[Any]) -> Any:
    return builder.shuffle_vector(parts[0], parts[1], ir.Constant(VEC_I32, list(range(LANES))))


def _at(builder: Any, index: Any, step: int) -> Any:
    return builder.add(index, ir.Constant(_I64, step))


class _Activations:
    """Codes of activations: x_codes i32 [.., group, tile rows, 8], x_scales f32 [.., group, tile],
    x_sums i32 [.., group, 3, tile] (of the first 16 columns, of the last, of all)."""

    def __init__(
        self, context: Any, builder: Any, kinds: Any, arrays: Any, tile: Any, group: Any, row: Any
    ) -> None:
        self._context, self._builder = context, builder
        self._kinds, self._arrays = kinds, arrays
        before = builder.mul(group, tile)
        self._tile, self._rows = tile, builder.add(before, row)
        self._words = builder.mul(self._rows, ir.Constant(_I64, NUM_WORDS))
        self._sums = builder.add(builder.mul(before, ir.Constant(_I64, 3)), row)

    def _scalar(self, which: int, at: Any) -> Any:
        return load_scalar(
            self._context, self._builder, self._kinds[which], self._arrays[which], at
        )

    def intrinsic(self, row: int, index: int) -> Any:
        at = _at(self._builder, self._words, NUM_WORDS * row + index)
        return all_lanes(self._builder, self._scalar(0, at), VEC_I32)

    def scale(self, row: int) -> Any:
        at = _at(self._builder, self._rows, row)
        return all_lanes(self._builder, self._scalar(1, at), VEC_F32)

    def sum(self, row: int, which: int) -> Any:
        at = self._builder.mul(self._tile, ir.Constant(_I64, which))
        return self._scalar(2, _at(self._builder, self._builder.add(self._sums, at), row))


class _Products:
    """Sums of (code - zero) * x_code over columns of 16 weight rows, for rows of activations."""

    def __init__(self, builder: Any, codes: Any, kind: Codes, x: _Activations) -> None:
        self._builder, self._x = builder, x
        weights = [builder.extract_value(codes, j) for j in _ALL]
        self._dot = Dot(builder, weights, is_signed=kind.is_signed)
        self._offset = -kind.zero - self._dot.lift

    def _begin(self, row: int, which: int) -> Any:
        if self._offset == 0:
            return _NONE
        start = self._builder.mul(self._x.sum(row, which), ir.Constant(I32, self._offset))
        return all_lanes(self._builder, start, VEC_I32)

    def _add(self, sums: Any, words: Iterable[int], row: int) -> Any:
        for j in words:
            sums = self._dot.add(sums, j, self._x.intrinsic(row, j))
        return sums

    def of_halves(self, row: int, smalls: Sequence[Any]) -> Any:
        """Over 32 columns, each half of them times its small integer."""
        sums = zip(self.of_each_half(row), smalls, strict=True)
        return self._builder.add(*(self._builder.mul(*pair) for pair in sums))

    def of_each_half(self, row: int) -> list[Any]:
        """Over the first 16 columns, and over the last."""
        return [self._add(self._begin(row, half), _HALVES[half], row) for half in (0, 1)]

    def of_one(self, row: int) -> Any:
        """Over 32 columns, as two sums: one would wait for each of its steps."""
        first = self._add(self._begin(row, 2), _HALVES[0], row)
        return self._builder.add(first, self._add(_NONE, _HALVES[1], row))

    def of_several(self, rows: Iterable[int]) -> dict[int, Any]:
        """Over 32 columns, side by side."""
        sums = {row: self._begin(row, 2) for row in rows}
        for j in _ALL:
            for row in sums:
                sums[row] = self._add(sums[row], [j], row)
        return sums


@intrinsic
def add_products(
    typing: Any, totals: Any, codes: Any, factors: Any, x_codes: Any, x_scales: Any, x_sums: Any,
    tile: Any, group: Any, row: Any,
) -> tuple[Any, Codegen]:  # fmt: skip
    """totals[i] + factor * x_scale * the sum of (code - zero) * x_code, for rows row + i of a tile.

    `group` counts the steps of x. The sum is one of integers, over 32 columns; where the halves of
    these have factors of their own, small integers, it is the sum of both halves times theirs. That
    is below 2**24 for every type (2 * 16 * 32 * 127 * 128 for Q6_K), so as f32 it is exact. Then
    come two products and one fused step; or those for one half after the other, where their factors
    are no integers.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, codes, factors, *arrays = args[:6]
        x = _Activations(context, builder, signature.args[3:6], arrays, *args[6:])
        products = _Products(builder, codes, signature.args[1], x)

        def finish(made: Any, row: int, factor: Any, sums: Any) -> Any:
            factor, sums = builder.fmul(factor, x.scale(row)), builder.sitofp(sums, VEC_F32)
            total = fused_multiply_add(builder, sums, factor, builder.extract_value(made, row))
            return builder.insert_value(made, total, row)

        made, num_rows = totals, totals.type.count
        if signature.args[2].is_float:
            for row in range(num_rows):
                for half, sums in enumerate(products.of_each_half(row)):
                    made = finish(made, row, builder.extract_value(factors, half), sums)
            return made
        if signature.args[2].is_halved:
            factor, *smalls = (builder.extract_value(factors, i) for i in range(3))
            for row in range(num_rows):
                made = finish(made, row, factor, products.of_halves(row, smalls))
            return made
        if num_rows == 1:
            return finish(made, 0, factors, products.of_one(0))
        at_once = _ROWS_IN_TURN if num_rows > _ROWS_IN_TURN else 1
        for first in range(0, num_rows, at_once):
            for row, sums in products.of_several(range(first, first + at_once)).items():
                made = finish(made, row, factors, sums)
        return made

    kinds = (totals, codes, factors, x_codes, x_scales, x_sums)
    return totals(*kinds, types.intp, types.intp, types.intp), build


@literal_intrinsic
def store_values(
    typing: Any, array: Any, index: Any, codes: Any, part: Any, scale: Any, low: Any, lane: Any
) -> tuple[Any, Codegen]:
    """array[index ..] = (code - zero) * scale + low in 16 columns (half `part`) of row `lane`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, codes, _, scale, low, lane = args
        lane, zero = builder.trunc(lane, I32), ir.Constant(I32, signature.args[2].zero)
        scale, low = (builder.extract_element(value, lane) for value in (scale, low))
        extend = builder.sext if signature.args[2].is_signed else builder.zext
        for place, j in enumerate(_HALVES[signature.args[3].literal_value]):
            bits = builder.extract_element(builder.extract_value(codes, j), lane)
            for byte in range(4):
                code = builder.trunc(builder.lshr(bits, ir.Constant(I32, 8 * byte)), _I8)
                value = builder.sitofp(builder.sub(extend(code, I32), zero), F32)
                value = fused_multiply_add(builder, value, scale, low)
                at = _at(builder, index, 4 * place + byte)
                builder.store(value, address_of(context, builder, signature.args[0], array, at))
        return context.get_dummy_value()

    kinds = (array, types.intp, codes, part, f32x16, f32x16, types.intp)
    return types.void(*kinds), build
