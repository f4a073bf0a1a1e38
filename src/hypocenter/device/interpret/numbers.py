"""A builder that tells of each operation on floats whose result holds NaN or infinity.

For whoever looks for the first such operation of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array, bf16_to_f32, f32_to_bf16
from hypocenter.device.interpret.builder import Builder
from hypocenter.device.triton_lang import tl

#: Told of an operation, its operands and its result; what it returns stands in the result's place.
OnNumbers = Callable[[str, tuple[Array, ...], Array], Array | None]


class NumberBuilder(Builder):
    """Triton's builder for one memory, which tells `on_numbers`."""

    def __init__(self, memory: Any, on_step: Callable[[], None], on_numbers: OnNumbers) -> None:
        super().__init__(memory, on_step)
        self._on_numbers = on_numbers

    def _see(self, operation: str, operands: tuple[Any, ...], result: Any) -> Any:
        """Tell of the result where it is not finite."""
        if not hasattr(result, "data") or not result.dtype.scalar.is_floating():
            return result
        values = _floats(result)
        if np.isfinite(values).all():
            return result
        known = tuple(_floats(operand) for operand in operands if hasattr(operand, "data"))
        instead = self._on_numbers(operation, known, values)
        if instead is not None:
            is_short = result.dtype.scalar == tl.bfloat16 and result.data.dtype == np.uint16
            result.data = f32_to_bf16(instead) if is_short else instead.astype(result.data.dtype)
        return result

    def binary_op(self, lhs: Any, rhs: Any, operator: Any) -> Any:
        return self._see(_name(operator), (lhs, rhs), super().binary_op(lhs, rhs, operator))

    def unary_op(self, operand: Any, operator: Any) -> Any:
        return self._see(_name(operator), (operand,), super().unary_op(operand, operator))

    def ternary_op(self, first: Any, second: Any, third: Any, operator: Any) -> Any:
        result = super().ternary_op(first, second, third, operator)
        return self._see(_name(operator), (first, second, third), result)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        return self._see("fma", (x, y, z), super().create_fma(x, y, z))

    def create_dot(self, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        return self._see("dot", (a, b, acc), super().create_dot(a, b, acc, *rest))

    def cast_impl(self, source: Any, target: Any) -> Any:
        return self._see("cast", (source,), super().cast_impl(source, target))

    def see_reduced(self, source: Any, result: Any) -> None:
        """Tell of a reduction of one tensor: a sum may leave its type."""
        if isinstance(source, tl.tensor) and isinstance(result, tl.tensor):
            self._see("reduce", (source.handle,), result.handle)

    def create_masked_load(self, pointers: Any, *rest: Any, **options: Any) -> Any:
        result = super().create_masked_load(pointers, *rest, **options)
        return self._see("load", (), result)


def _name(operator: Any) -> str:
    return str(getattr(operator, "__name__", operator))


def _floats(handle: Any) -> Array:
    data: Array = handle.data
    if handle.dtype.scalar == tl.bfloat16 and data.dtype == np.uint16:
        return bf16_to_f32(data)
    return data
