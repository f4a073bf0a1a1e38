"""The builder behind an interpreted kernel: Triton's own, with its traps mended.

It computes bfloat16 as numbers, and it knows of each integer what it would be without a limit to
its bits, so that a memory can tell an address that wrapped. It runs no program.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array, bf16_to_f32, f32_to_bf16
from hypocenter.base.package import is_below
from hypocenter.device.interpret.eight_bits import is_rounded_here, to_eight_bits
from hypocenter.device.triton_lang import interpreter, tl

_interp: Any = interpreter()
_Handle: Any = _interp.TensorHandle

#: Steps after which is asked whether a program goes on, as a rule and where it is watched closely.
STEPS_BETWEEN, STEPS_BETWEEN_CLOSE = 4096, 1
#: Operations that make less of a number.
_DIVIDING = frozenset({"create_ashr", "create_sdiv", "create_udiv"})
_LEAVING = frozenset({"create_srem", "create_urem"})
#: Odd factors from here on are those of hashes.
_MIXING = 1 << 19
_NARROW = {np.dtype(kind): np.iinfo(kind) for kind in ("i1", "u1", "i2", "u2", "i4", "u4")}


@dataclass(frozen=True, slots=True)
class Wrap:
    """Where an integer first left its type: the instruction, and whether it is one of a hash."""

    code: CodeType
    instruction: int
    type_name: str
    is_mixing: bool = False


class Reduced(enum.Enum):
    """What has made less of a number that had wrapped: a division or a shift, one that takes the
    upper bits of a hash, or a remainder."""

    NOT = enum.auto()
    QUOTIENT = enum.auto()
    UPPER_BITS = enum.auto()
    REMAINDER = enum.auto()


@dataclass(frozen=True, slots=True)
class Exact:
    """What an integer, or an address, would be if none of its parts had wrapped.

    `reduced` is what has made less of the number since, as a hash does, which wraps on purpose.
    """

    values: Array  # int64 (addresses: uint64), broadcastable to the shape of the data
    wrap: Wrap
    reduced: Reduced = Reduced.NOT


class Builder(_interp.InterpreterBuilder):  # type: ignore[misc]
    """Triton's InterpreterBuilder for one memory; `steps` counts integer operations and accesses.

    Before each access `memory.exact` is set to the Exact of its pointers, or None. `on_step` is
    called now and then (each `steps_between` steps, a power of two) and may raise to end a program
    that never would.
    """

    def __init__(self, memory: Any, on_step: Callable[[], None]) -> None:
        super().__init__()
        # Triton's own check of int32 arithmetic: slow, and silent without a debug build.
        plain: Any = _interp.InterpreterOptions()
        self.options = dataclasses.replace(plain, sanitize_overflow=False)
        self.memory = memory
        self.steps, self.steps_between = 0, STEPS_BETWEEN
        self._on_step = on_step
        #: Who is told of lanes that meet and of those without a value, and the class of a builder
        #: that follows these.
        self.watch: Any = None
        self.following: type[Builder] | None = None
        #: Who makes of the operands of a product, and its precision, those that are multiplied.
        self.operands: Callable[[Array, Array, str], tuple[Array, Array]] | None = None
        #: Whether the load that is being made names an `other`; a scalar 0 gets lost in Triton.
        self.gives_other = False

    def step(self) -> None:
        self.steps += 1
        if not self.steps & (self.steps_between - 1):
            self._on_step()

    # -- integers, and what they would be -------------------------------------------------------

    def _track(self, result: Any, operator: Any, *operands: Any) -> Any:
        """Attach to `result` its exact value where it, or an operand, has left its type."""
        self.step()
        data = result.data
        limits = _NARROW.get(data.dtype)
        if limits is None and not any(hasattr(operand, "exact") for operand in operands):
            return result
        known = [o.exact.values if hasattr(o, "exact") else o.data for o in operands]
        try:
            exact = operator(*known, dtype=np.int64)
        except TypeError:  # uint64 among them
            exact = operator(*(part.astype(np.int64) for part in known))
        if (exact != data.astype(np.int64, copy=False)).any():
            wrap = _first_wrap(operands) or _here(result)
            result.exact = Exact(exact, wrap, _reduction_of(operands))
        return result

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, dest = src.dtype.scalar, dst_type.scalar
        if rounding_mode != _interp._ir.ROUNDING_MODE.RTNE or not is_rounded_here(source, dest):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return _interp.TensorHandle(to_eight_bits(src.data, source, dest), dest)

    def create_add(self, lhs: Any, rhs: Any) -> Any:
        return self._track(super().create_add(lhs, rhs), np.add, lhs, rhs)

    def create_sub(self, lhs: Any, rhs: Any) -> Any:
        return self._track(super().create_sub(lhs, rhs), np.subtract, lhs, rhs)

    def create_mul(self, lhs: Any, rhs: Any) -> Any:
        result = self._track(super().create_mul(lhs, rhs), np.multiply, lhs, rhs)
        has_wrapped = hasattr(result, "exact") and _first_wrap((lhs, rhs)) is None
        if has_wrapped and (_is_of_hash(lhs.data) or _is_of_hash(rhs.data)):
            wrap = dataclasses.replace(result.exact.wrap, is_mixing=True)
            result.exact = dataclasses.replace(result.exact, wrap=wrap)
        return result

    def create_shl(self, lhs: Any, rhs: Any) -> Any:
        return self._track(super().create_shl(lhs, rhs), np.left_shift, lhs, rhs)

    def create_addptr(self, pointer: Any, offset: Any) -> Any:
        self.step()
        result = super().create_addptr(pointer, offset)
        wrap = _first_wrap((pointer, offset))
        if wrap is not None:
            width = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
            start = pointer.exact.values if hasattr(pointer, "exact") else pointer.data
            steps = offset.exact.values if hasattr(offset, "exact") else offset.data
            values = start + steps.astype(np.uint64) * np.uint64(width)
            result.exact = Exact(values, wrap, _reduction_of((pointer, offset)))
        return result

    # -- numbers --------------------------------------------------------------------------------

    def get_bf16(self, value: float) -> Any:  # Triton 3.6 has none
        return _Handle(f32_to_bf16(np.array([value], np.float32)), tl.bfloat16)

    def cast_impl(self, source: Any, target: Any) -> Any:
        target, data = target.scalar, source.data
        if source.dtype.scalar == tl.bfloat16 and data.dtype == np.uint16:
            if target == tl.bfloat16:
                return source
            data = bf16_to_f32(data)
        if target == tl.bfloat16:
            # The interpreter itself truncates here; a GPU does not.
            return _Handle(f32_to_bf16(data.astype(np.float32)), target)
        result = _Handle(data.astype(_interp._get_np_dtype(target)), target)
        if data.dtype.kind in "iu" and target.is_int():
            return self._track(result, _identity, source)
        return result

    def binary_op(self, lhs: Any, rhs: Any, operator: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16 or lhs.data.dtype != np.uint16:
            return super().binary_op(lhs, rhs, operator)
        output = operator(bf16_to_f32(lhs.data), bf16_to_f32(rhs.data))
        if output.dtype == bool:
            return _Handle(output, tl.int1)
        return _Handle(f32_to_bf16(output), tl.bfloat16)

    def unary_op(self, operand: Any, operator: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return super().unary_op(operand, operator)
        return _Handle(f32_to_bf16(operator(bf16_to_f32(operand.data))), tl.bfloat16)

    def ternary_op(self, first: Any, second: Any, third: Any, operator: Any) -> Any:
        if third.dtype.scalar != tl.bfloat16 or operator is np.where:
            return super().ternary_op(first, second, third, operator)
        parts = (bf16_to_f32(part.data) for part in (first, second, third))
        return _Handle(f32_to_bf16(operator(*parts)), tl.bfloat16)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar != tl.bfloat16:
            return super().create_fma(x, y, z)
        product = bf16_to_f32(x.data).astype(np.float64) * bf16_to_f32(y.data)
        total = (product + bf16_to_f32(z.data)).astype(np.float32)
        return _Handle(f32_to_bf16(total), tl.bfloat16)

    def create_dot(self, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        """Operands of at most 32 bits as float64, so that no sum hangs on the shape of a tile."""
        floats = (tl.float16, tl.bfloat16, tl.float32)
        if a.dtype.scalar not in floats or b.dtype.scalar not in floats:
            return super().create_dot(a, b, acc, *rest)
        self.meet()
        self.step()
        left, right = (
            bf16_to_f32(part.data) if part.dtype.scalar == tl.bfloat16 else part.data
            for part in (a, b)
        )
        if self.operands is not None:
            left, right = self.operands(left, right, rest[0].name)
        product = np.matmul(left.astype(np.float64), right.astype(np.float64))
        kind = acc.dtype.scalar
        if kind == tl.bfloat16:
            return _Handle(f32_to_bf16((product + bf16_to_f32(acc.data)).astype(np.float32)), kind)
        return _Handle((product + acc.data).astype(acc.data.dtype), kind)

    def see_reduced(self, source: Any, result: Any) -> None:
        """A reduction has been made, of a tensor or of several."""

    # -- lanes that meet ------------------------------------------------------------------------

    def meet(self) -> None:
        """All lanes of the program have come as far as this."""
        if self.watch is not None:
            self.watch.meet()

    def create_barrier(self, *args: Any) -> None:
        self.meet()

    # -- accesses -------------------------------------------------------------------------------

    def _note_access(self, pointers: Any) -> None:
        self.step()
        self.memory.exact = getattr(pointers, "exact", None)

    def create_masked_load(
        self, pointers: Any, mask: Any, other: Any, *rest: Any, **options: Any
    ) -> Any:
        self._note_access(pointers)
        result = super().create_masked_load(pointers, mask, other, *rest, **options)
        following = None if self.gives_other or other is not None else self.following
        if following is not None and not mask.data.all():
            left_out = np.broadcast_to(~mask.data, result.data.shape)
            result.undefined = {self.watch.left_out(pointers.data, left_out): left_out}
            self.__class__ = following
        return result

    def branches_on(self, handle: Any) -> None:
        """A program goes one way or another by this number."""

    def create_masked_store(self, pointers: Any, *rest: Any, **options: Any) -> Any:
        self._note_access(pointers)
        return super().create_masked_store(pointers, *rest, **options)

    def create_atomic_cas(self, pointers: Any, *rest: Any) -> Any:
        self._note_access(pointers)
        return super().create_atomic_cas(pointers, *rest)

    def create_atomic_rmw(self, operation: Any, pointers: Any, *rest: Any) -> Any:
        self._note_access(pointers)
        return super().create_atomic_rmw(operation, pointers, *rest)


def scalar(value: Any, numpy_type: Any, kind: Any) -> Any:
    """One number, or address, as a scalar of Triton of the type `kind`."""
    return tl.tensor(_Handle(np.array([value], dtype=numpy_type), kind), kind)


def _carrying(name: str) -> Callable[..., Any]:
    """The builder's operation `name`, applied to the exact values of its operands too."""
    plain = getattr(_interp.InterpreterBuilder, name)

    def operation(self: Builder, *args: Any) -> Any:
        result = plain(self, *args)
        operands = [arg for arg in args if isinstance(arg, _Handle)]
        wrap = _first_wrap(operands)
        if wrap is not None:
            exact = plain(self, *(_as_exact(arg) for arg in args))
            for part, known in zip(_tuple(result), _tuple(exact), strict=True):
                if (known.data != part.data.astype(known.data.dtype)).any():
                    part.exact = Exact(known.data, wrap, _reduction_of(operands, name))
        return result

    return operation


def _as_exact(operand: Any) -> Any:
    if not isinstance(operand, _Handle) or operand.data.dtype.kind not in "iu":
        return operand
    if not hasattr(operand, "exact"):
        is_address = operand.data.dtype == np.uint64
        return operand if is_address else _Handle(operand.data.astype(np.int64), tl.int64)
    values = operand.exact.values
    return _Handle(np.broadcast_to(values, operand.data.shape), tl.int64)


def _meeting(name: str) -> Callable[..., Any]:
    """The builder's operation `name`, for which lanes have to meet."""
    plain = getattr(Builder, name)

    def operation(self: Builder, *args: Any) -> Any:
        self.meet()
        return plain(self, *args)

    return operation


for _name in (
    "create_ashr",
    "create_broadcast",
    "create_expand_dims",
    "create_join",
    "create_maxsi",
    "create_maxui",
    "create_minsi",
    "create_minui",
    "create_reshape",
    "create_sdiv",
    "create_select",
    "create_split",
    "create_srem",
    "create_trans",
    "create_udiv",
    "create_urem",
):
    setattr(Builder, _name, _carrying(_name))


for _name in ("create_gather", "create_histogram", "create_reshape", "create_trans"):
    setattr(Builder, _name, _meeting(_name))


def _create_splat(self: Builder, *args: Any) -> Any:
    result = _interp.InterpreterBuilder.create_splat(self, *args)
    for arg in args:
        if hasattr(arg, "exact"):
            value = np.broadcast_to(arg.exact.values.reshape(-1)[:1], result.data.shape)
            result.exact = dataclasses.replace(arg.exact, values=value)
    return result


Builder.create_splat = _create_splat


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _identity(values: Array, dtype: Any) -> Array:
    return values.astype(dtype)


def _first_wrap(operands: Any) -> Wrap | None:
    return next((o.exact.wrap for o in operands if hasattr(o, "exact")), None)


def _reduction_of(operands: Any, name: str = "") -> Reduced:
    """How the result of an operation is reduced: a row and a column, which are quotient and
    remainder of one number, are as a quotient together."""
    known = {o.exact.reduced for o in operands if hasattr(o, "exact")} or {Reduced.NOT}
    if name in _LEAVING or known == {Reduced.REMAINDER}:
        return Reduced.REMAINDER
    if Reduced.NOT not in known:
        return Reduced.UPPER_BITS if known == {Reduced.UPPER_BITS} else Reduced.QUOTIENT
    if name not in _DIVIDING:
        return Reduced.NOT
    wrap = _first_wrap(operands)
    return Reduced.UPPER_BITS if wrap is not None and wrap.is_mixing else Reduced.QUOTIENT


def _is_of_hash(factor: Array) -> bool:
    """Whether a factor is one number, odd and large: an even one loses bits, so no hash has it."""
    number = abs(int(factor.flat[0])) if factor.size else 0
    return number >= _MIXING and number % 2 == 1 and bool((factor == factor.flat[0]).all())


def _here(result: Any) -> Wrap:
    """The instruction of the kernel that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return Wrap(frame.f_code, frame.f_lasti, str(result.dtype.scalar))


_TRITON = str(_interp.__file__).rsplit("runtime", 1)[0]


def is_machinery(filename: str) -> bool:
    """Whether frames of a file are never the kernel's: Triton's, or the interpreter's here."""
    return filename.startswith(_TRITON) or is_below(filename, "device/interpret")
