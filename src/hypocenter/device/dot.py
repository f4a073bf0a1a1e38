"""Sums of products of 8-bit codes in LLVM's words: one way for each path of instructions.

All give the same integers; `lang.instruction_set` says which one this machine has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypocenter.device.lang import cgutils, instruction_set, ir
from hypocenter.device.vector_ir import I16, I32, LANES, VEC_I32, call_llvm, constant

_I8 = ir.IntType(8)
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
            self._weights, self.lift = [builder.xor(one, flip) for one in weights], 128

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
            return _joined(builder, parts)
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
            size, signed = (builder.bitcast(one, half) for one in some)
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
        return _joined(builder, parts)

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
    return [[builder.shuffle_vector(one, undefined, order) for one in vectors] for order in orders]


def _joined(builder: Any, parts: Sequence[Any]) -> Any:
    return builder.shuffle_vector(parts[0], parts[1], ir.Constant(VEC_I32, list(range(LANES))))
