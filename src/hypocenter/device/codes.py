"""Words of CPU kernels for codes of weights: their products with codes of activations, and values.

Products of codes are sums of integers, so they are the same whichever instructions the machine has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypocenter.device.dot import Dot
from hypocenter.device.lang import ir, literal_word, types, word
from hypocenter.device.records import NUM_WORDS, Codes
from hypocenter.device.vector_ir import (
    F32,
    I32,
    VEC_F32,
    VEC_I32,
    Codegen,
    address_of,
    all_lanes,
    constant,
    f32x16,
    fused,
    load_scalar,
)

#: Rows whose sums of products grow side by side where rows are many: a sum waits for its last step,
#: and the next row's comes too late to fill the gap. Few rows, or short sums, do better one by one.
_ROWS_IN_TURN = 8
_HALVES = (range(NUM_WORDS // 2), range(NUM_WORDS // 2, NUM_WORDS))
_ALL = range(NUM_WORDS)
_NONE = constant(0, VEC_I32)

_I8, _I64 = ir.IntType(8), ir.IntType(64)


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

    def word(self, row: int, index: int) -> Any:
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

    def _begun(self, row: int, which: int) -> Any:
        if self._offset == 0:
            return _NONE
        start = self._builder.mul(self._x.sum(row, which), ir.Constant(I32, self._offset))
        return all_lanes(self._builder, start, VEC_I32)

    def _added(self, sums: Any, words: Iterable[int], row: int) -> Any:
        for j in words:
            sums = self._dot.add(sums, j, self._x.word(row, j))
        return sums

    def of_halves(self, row: int, smalls: Sequence[Any]) -> Any:
        """Over 32 columns, each half of them times its small integer."""
        parts = [
            self._builder.mul(self._added(self._begun(row, half), _HALVES[half], row), small)
            for half, small in enumerate(smalls)
        ]
        return self._builder.add(*parts)

    def of_one(self, row: int) -> Any:
        """Over 32 columns, as two sums: one would wait for each of its steps."""
        first = self._added(self._begun(row, 2), _HALVES[0], row)
        return self._builder.add(first, self._added(_NONE, _HALVES[1], row))

    def of_several(self, rows: Iterable[int]) -> dict[int, Any]:
        """Over 32 columns, side by side."""
        sums = {row: self._begun(row, 2) for row in rows}
        for j in _ALL:
            for row in sums:
                sums[row] = self._added(sums[row], [j], row)
        return sums


@word
def add_products(
    typing: Any, totals: Any, codes: Any, factors: Any, x_codes: Any, x_scales: Any, x_sums: Any,
    tile: Any, group: Any, row: Any,
) -> tuple[Any, Codegen]:  # fmt: skip
    """totals[i] + factor * x_scale * the sum of (code - zero) * x_code, for rows row + i of a tile.

    `group` counts the steps of x. The sum is one of integers, over 32 columns; where the halves of
    these have factors of their own, small integers, it is the sum of both halves times theirs. That
    is below 2**24 for every type (2 * 16 * 32 * 127 * 128 for Q6_K), so as f32 it is exact. Then
    come two products and one fused step.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, codes, factors, *arrays = args[:6]
        x = _Activations(context, builder, signature.args[3:6], arrays, *args[6:])
        products = _Products(builder, codes, signature.args[1], x)

        def ended(made: Any, row: int, factor: Any, sums: Any) -> Any:
            factor, sums = builder.fmul(factor, x.scale(row)), builder.sitofp(sums, VEC_F32)
            total = fused(builder, sums, factor, builder.extract_value(totals, row))
            return builder.insert_value(made, total, row)

        made, num_rows = totals, totals.type.count
        if signature.args[2].is_halved:
            factor, *smalls = (builder.extract_value(factors, i) for i in range(3))
            for row in range(num_rows):
                made = ended(made, row, factor, products.of_halves(row, smalls))
            return made
        if num_rows == 1:
            return ended(made, 0, factors, products.of_one(0))
        at_once = _ROWS_IN_TURN if num_rows > _ROWS_IN_TURN else 1
        for first in range(0, num_rows, at_once):
            for row, sums in products.of_several(range(first, first + at_once)).items():
                made = ended(made, row, factors, sums)
        return made

    kinds = (totals, codes, factors, x_codes, x_scales, x_sums)
    return totals(*kinds, types.intp, types.intp, types.intp), build


@literal_word
def store_values(
    typing: Any, array: Any, index: Any, codes: Any, part: Any, scale: Any, low: Any, lane: Any
) -> tuple[Any, Codegen]:
    """array[index ..] = (code - zero) * scale + low in 16 columns (half `part`) of row `lane`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, codes, _, scale, low, lane = args
        lane, zero = builder.trunc(lane, I32), ir.Constant(I32, signature.args[2].zero)
        scale, low = (builder.extract_element(one, lane) for one in (scale, low))
        extend = builder.sext if signature.args[2].is_signed else builder.zext
        for place, j in enumerate(_HALVES[signature.args[3].literal_value]):
            bits = builder.extract_element(builder.extract_value(codes, j), lane)
            for byte in range(4):
                code = builder.trunc(builder.lshr(bits, ir.Constant(I32, 8 * byte)), _I8)
                value = builder.sitofp(builder.sub(extend(code, I32), zero), F32)
                value = fused(builder, value, scale, low)
                at = _at(builder, index, 4 * place + byte)
                builder.store(value, address_of(context, builder, signature.args[0], array, at))
        return context.get_dummy_value()

    kinds = (array, types.intp, codes, part, f32x16, f32x16, types.intp)
    return types.void(*kinds), build
