"""Follows lanes that have no value: those that a masked load without `other` leaves out.

For Triton they are undefined. Where one reaches an access or a branch, the watch is told of it; all
else is computed as ever. A builder turns into `Following` with the first such lane of a program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.interpret.builder import Builder
from hypocenter.device.triton_lang import interpreter, tl

_interp: Any = interpreter()
_Handle: Any = _interp.TensorHandle

#: What a handle's lanes have no value from: the load (as the watch named it) and the lanes of each.
Undefined = dict[Any, Array]


class Watch(Protocol):
    """Who is told of lanes that meet, and of lanes without a value."""

    def meet(self) -> None:
        """All lanes of the program have come as far as this."""

    def left_out(self, pointers: Array, lanes: Array) -> Any:
        """The load that is being made leaves `lanes` out; gives what stands for it from here on."""

    def tell_reached(self, load: Any, what: str) -> None:
        """A lane that `load` left out reaches `what` of the instruction that is being run."""


def undefined_of(handle: Any) -> Undefined:
    known: Undefined = getattr(handle, "undefined", _NONE)
    return known


_NONE: Undefined = {}


def mark(handle: Any, undefined: Undefined) -> None:
    """From now on `undefined` is what has no value of `handle`, as far as any lane has none."""
    shape = handle.data.shape
    found = {load: np.broadcast_to(lanes, shape) for load, lanes in undefined.items()}
    found = {load: lanes for load, lanes in found.items() if lanes.any()}
    if found:
        handle.undefined = found


def _any(undefined: Undefined) -> Any:
    """The lanes that have no value, from whichever load."""
    known: Any = False
    for lanes in undefined.values():
        known = known | lanes
    return known


def _unite(parts: Iterable[Undefined]) -> Undefined:
    total: Undefined = {}
    for part in parts:
        for load, lanes in part.items():
            total[load] = total[load] | lanes if load in total else lanes
    return total


class Following(Builder):
    """A Builder of a program in which some lanes have no value."""

    def create_masked_load(
        self, pointers: Any, mask: Any, other: Any, *rest: Any, **options: Any
    ) -> Any:
        self._look_at_address(pointers, mask)
        result = super().create_masked_load(pointers, mask, other, *rest, **options)
        if other is not None and (given := undefined_of(other)):
            mark(result, {load: lanes & ~mask.data for load, lanes in given.items()})
        return result

    def create_masked_store(self, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._look_at_address(pointers, mask)
        self._look_at(value, mask.data, "the value")
        return super().create_masked_store(pointers, value, mask, *rest)

    def create_atomic_cas(self, pointers: Any, compare: Any, value: Any, *rest: Any) -> Any:
        for part, what in ((pointers, "the address"), (compare, "the value"), (value, "the value")):
            self._look_at(part, True, what)
        return super().create_atomic_cas(pointers, compare, value, *rest)

    def create_atomic_rmw(
        self, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        self._look_at_address(pointers, mask)
        self._look_at(value, mask.data, "the value")
        return super().create_atomic_rmw(operation, pointers, value, mask, *rest)

    def _look_at_address(self, pointers: Any, mask: Any) -> None:
        self._look_at(mask, True, "the mask")
        self._look_at(pointers, mask.data, "the address")

    def _look_at(self, handle: Any, active: Array | bool, what: str) -> None:
        for load, lanes in undefined_of(handle).items():
            if (lanes & active).any():
                self.watch.tell_reached(load, what)

    def branches_on(self, handle: Any) -> None:
        self._look_at(handle, True, "the condition")

    def create_dot(self, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        result = super().create_dot(a, b, acc, *rest)
        left, right = undefined_of(a), undefined_of(b)
        if left or right or undefined_of(acc):
            # A product with a zero that is defined counts as nothing.
            zero_a, zero_b = _is(a, 0), _is(b, 0)
            parts = [undefined_of(acc)]
            parts.append({load: _meets(lanes, ~zero_b) for load, lanes in left.items()})
            parts.append({load: _meets(~zero_a, lanes) for load, lanes in right.items()})
            mark(result, _unite(parts))
        return result


def _meets(left: Array, right: Array) -> Array:
    """For each element of a matrix product whether a true meets a true on the way."""
    met: Array = np.matmul(left.astype(np.float32), right.astype(np.float32)) > 0
    return met


def _is(handle: Any, number: int) -> Array:
    """Where a handle holds `number`, and that is defined."""
    held: Array = (handle.data == number) & ~np.asarray(_any(undefined_of(handle)))
    return held


#: Operations in which a number of the one operand makes the other one's not matter.
_ABSORBING = {"create_and": 0, "create_mul": 0, "create_fmul": 0, "create_or": -1}


def _absorb(number: int, left: Any, right: Any) -> Undefined:
    parts = []
    for one, other in ((left, right), (right, left)):
        wanted = 1 if number == -1 and other.data.dtype == np.bool_ else number
        matters = ~_is(other, wanted)
        parts.append({load: lanes & matters for load, lanes in undefined_of(one).items()})
    return _unite(parts)


def _select(condition: Any, yes: Any, no: Any) -> Undefined:
    parts = [undefined_of(condition)]
    parts.append({load: lanes & condition.data for load, lanes in undefined_of(yes).items()})
    parts.append({load: lanes & ~condition.data for load, lanes in undefined_of(no).items()})
    return _unite(parts)


def _rule_of(name: str) -> Callable[..., Undefined]:
    if name in _ABSORBING:
        return functools.partial(_absorb, _ABSORBING[name])
    if name == "create_select":
        return _select
    return lambda *operands: _unite(map(undefined_of, operands))


def _by_lanes(name: str) -> Callable[..., Any]:
    """An operation on each lane by itself."""
    plain, rule = getattr(Builder, name), _rule_of(name)

    def operation(self: Following, *args: Any) -> Any:
        result = plain(self, *args)
        operands = [arg for arg in args if isinstance(arg, _Handle)]
        if any(hasattr(operand, "undefined") for operand in operands):
            mark(result, rule(*operands))
        return result

    return operation


def _moving(name: str) -> Callable[..., Any]:
    """An operation that moves lanes, and does with their flags what it does with the lanes."""
    plain = getattr(Builder, name)

    def operation(self: Following, *args: Any) -> Any:
        result = plain(self, *args)
        operands = [arg for arg in args if isinstance(arg, _Handle)]
        for load in _unite(map(undefined_of, operands)):
            moved = plain(self, *(_flags(arg, load) for arg in args))
            results = result if isinstance(result, tuple) else (result,)
            flags = moved if isinstance(moved, tuple) else (moved,)
            for part, flag in zip(results, flags, strict=True):
                mark(part, _unite([undefined_of(part), {load: flag.data}]))
        return result

    return operation


def _flags(arg: Any, load: Any) -> Any:
    if not isinstance(arg, _Handle):
        return arg
    return _Handle(undefined_of(arg).get(load, np.zeros(arg.data.shape, bool)), tl.int1)


def _gather(self: Following, source: Any, indices: Any, axis: Any) -> Any:
    result = Builder.create_gather(self, source, indices, axis)
    moved = {
        load: np.take_along_axis(lanes, indices.data, axis=axis)
        for load, lanes in undefined_of(source).items()
    }
    mark(result, _unite([moved, undefined_of(indices)]))
    return result


_MOVING = ("broadcast", "cat", "expand_dims", "join", "reshape", "split", "trans", "unsplat")
#: Those that are handled on their own, or give nothing.
_OTHERS = (
    *("assert", "assume", "atomic", "barrier", "descriptor", "dot", "extern", "gather", "get_"),
    *("histogram", "inline", "load", "make", "masked", "print", "splat", "store"),
)
for _name in [name for name in dir(Builder) if name.startswith("create_")]:
    _word = _name.removeprefix("create_")
    if _word in _MOVING:
        setattr(Following, _name, _moving(_name))
    elif not _word.startswith(_OTHERS):
        setattr(Following, _name, _by_lanes(_name))
Following.create_gather = _gather


def _create_splat(self: Following, kind: Any, arg: Any) -> Any:
    result = Builder.create_splat(self, kind, arg)
    mark(result, {load: lanes.reshape(-1)[:1] for load, lanes in undefined_of(arg).items()})
    return result


Following.create_splat = _create_splat


def transpose_defined(plain: Any) -> Any:
    """tl.tensor.T."""

    def get(self: Any) -> Any:
        result = plain.fget(self)
        undefined = undefined_of(self.handle)
        mark(result.handle, {load: np.transpose(lanes) for load, lanes in undefined.items()})
        return result

    return property(get)


def carry(operands: Sequence[Any], result: Any) -> None:
    """`result` has no value where one of the handles `operands` has none."""
    mark(result, _unite(map(undefined_of, operands)))


def reducing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """tl.reduce: a result has no value where a lane that goes into it has none."""

    def reduce(
        input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **options: Any
    ) -> Any:
        _interp.interpreter_semantic.builder.meet()
        result = plain(input, axis, combine_fn, keep_dims=keep_dims, **options)
        _interp.interpreter_semantic.builder.see_reduced(input, result)
        if undefined := _of_all(input):
            along = axis.value if isinstance(axis, tl.constexpr) else axis
            lanes = {load: part.any(axis=along) for load, part in undefined.items()}
            _mark_all(result, lanes)
        return result

    return reduce


def scanning(plain: Callable[..., Any]) -> Callable[..., Any]:
    """tl.associative_scan: a result has no value from the first lane on that has none."""

    def scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **options: Any) -> Any:
        _interp.interpreter_semantic.builder.meet()
        result = plain(input, axis, combine_fn, reverse=reverse, **options)
        if undefined := _of_all(input):
            along = axis.value if isinstance(axis, tl.constexpr) else axis
            way = -1 if reverse else 1
            lanes = {}
            for load, part in undefined.items():
                flipped = np.flip(part, along) if way < 0 else part
                spread = np.logical_or.accumulate(flipped, axis=along)
                lanes[load] = np.flip(spread, along) if way < 0 else spread
            _mark_all(result, lanes)
        return result

    return scan


def _of_all(tensors: Any) -> Undefined:
    parts = tensors if isinstance(tensors, Sequence | tl.tuple) else (tensors,)
    return _unite(undefined_of(part.handle) for part in parts if isinstance(part, tl.tensor))


def _mark_all(tensors: Any, lanes: Undefined) -> None:
    parts = tensors if isinstance(tensors, Sequence | tl.tuple) else (tensors,)
    for part in parts:
        shape = part.handle.data.shape
        mark(part.handle, {load: flags.reshape(shape) for load, flags in lanes.items()})
