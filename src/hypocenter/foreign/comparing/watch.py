"""Notes how tensors that the program compared differ: where torch says so, and at a failed assert.

`torch.equal`, `allclose` and `assert_close` are seen while both tensors are there. What else an
assertion hangs on is looked up at the end, by the names that its text has.
"""

from __future__ import annotations

import ast
import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from hypocenter.foreign.argument_facts import dtype_of
from hypocenter.foreign.caller import caller_of_now, is_own
from hypocenter.foreign.comparing.assertion_text import (
    Assertion,
    ComparedPair,
    assertion_at,
    base_of,
)
from hypocenter.record.compared import MAX_OTHERS, ComparedSide

if TYPE_CHECKING:
    from hypocenter.foreign.recorder import ForeignRecorder

#: Larger tensors are not compared once more.
MAX_ELEMENTS = 1 << 24
#: Comparisons that passed and are told of, and elements of a side of one.
MAX_PASSED, MAX_MEASURED = 64, 1 << 22
#: Of smaller ones all elements are kept, where contents are.
MAX_KEPT_BYTES = 1 << 16
#: What `torch.testing.assert_close` allows of a type (its documentation); of others nothing.
_TESTED = {
    "F16": (1e-3, 1e-5),
    "BF16": (1.6e-2, 1e-5),
    "F32": (1.3e-6, 1e-5),
    "F64": (1e-7, 1e-7),
}


@dataclass(frozen=True, slots=True)
class _Allowed:
    """What a comparison allows; `atol` is None where that is not known."""

    rtol: float = 0.0
    atol: float | None = 0.0
    equal_nan: bool = False


#: Who is told of two tensors, and of what their comparison allows.
_Note = Callable[[Any, Any, _Allowed], None]


@dataclass(frozen=True, slots=True)
class _Unequal:
    """Two tensors that were found unequal at `site`, without them: fields of a ComparedUnequal."""

    site: str
    fields: dict[str, Any]


class Comparisons:
    """What this program compared last and found unequal; told once an assertion has failed.

    `attempt` runs what may fail, and says so.
    """

    def __init__(
        self, opened: Callable[[], ForeignRecorder | None], attempt: Callable[..., None]
    ) -> None:
        self._opened, self._attempt = opened, attempt
        self._torch: Any = None
        self._last: _Unequal | None = None
        self._num_passed = 0

    def watch(self, torch: Any) -> None:
        """Have torch's own comparisons noted."""
        self._torch = torch
        for owner in (torch, torch.Tensor):
            for name, allowed in (("equal", _Allowed()), ("allclose", None)):
                setattr(owner, name, self._wrap(getattr(owner, name), allowed))
        testing = getattr(torch, "testing", None)
        if testing is not None:
            testing.assert_close = self._wrap_test(testing.assert_close)

    def _wrap(self, original: Any, allowed: _Allowed | None) -> Any:
        torch = self._torch

        @functools.wraps(original)
        def compare(*args: Any, **options: Any) -> Any:
            are_equal = original(*args, **options)
            if isinstance(are_equal, bool) and not torch.compiler.is_compiling():
                note = self._note_passed if are_equal else self._keep
                self._attempt(self._note, note, args, options, allowed)
            return are_equal

        return compare

    def _wrap_test(self, original: Any) -> Any:
        @functools.wraps(original)
        def test(*args: Any, **options: Any) -> Any:
            try:
                result = original(*args, **options)
            except AssertionError:
                self._attempt(self._note_test, self._keep, args, options)
                raise
            self._attempt(self._note_test, self._note_passed, args, options)
            return result

        return test

    def _note(
        self,
        note: _Note,
        args: tuple[Any, ...],
        options: dict[str, Any],
        allowed: _Allowed | None,
    ) -> None:
        """`equal` or `allclose` has compared two tensors."""
        given = dict(zip(("input", "other", "rtol", "atol", "equal_nan"), args, strict=False))
        given |= {"input" if n == "self" else n: value for n, value in options.items()}
        if allowed is None:
            rtol, atol = given.get("rtol", 1e-5), given.get("atol", 1e-8)
            allowed = _Allowed(rtol, atol, bool(given.get("equal_nan", False)))
        note(given.get("input"), given.get("other"), allowed)

    def _note_test(self, note: _Note, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """`assert_close` has compared two tensors."""
        given = dict(zip(("actual", "expected"), args, strict=False)) | options
        one: Any = given.get("actual")
        other: Any = given.get("expected")
        if not hasattr(one, "dtype") or not hasattr(other, "dtype"):
            return
        kinds = [_TESTED.get(dtype_of(side.dtype), (0.0, 0.0)) for side in (one, other)]
        rtol, atol = given.get("rtol"), given.get("atol")
        if rtol is None or atol is None:
            rtol, atol = (max(numbers) for numbers in zip(*kinds, strict=True))
        note(one, other, _Allowed(rtol, atol, bool(given.get("equal_nan", False))))

    def _note_passed(self, one: Any, other: Any, allowed: _Allowed) -> None:
        """Two tensors are equal: told of each that is a launch's."""
        recorder = self._opened() if self._num_passed < MAX_PASSED else None
        sides = [side for side in (one, other) if hasattr(side, "untyped_storage")]
        if recorder is None or len(sides) != 2:
            return
        numbers = [recorder.allocation_of(side) for side in sides]
        for at, number in enumerate(numbers):
            result, beside = sides[at], sides[1 - at]
            is_plain = not (result.is_complex() or beside.is_complex())
            if number and is_plain and 0 < result.numel() == beside.numel() <= MAX_MEASURED:
                self._num_passed += 1
                with self._torch.no_grad(), recorder.reads.quiet():
                    told = _closeness(beside.detach().cpu(), allowed)
                recorder.record_equal(
                    site=caller_of_now()[1],
                    allocation=number,
                    num_elements=result.numel(),
                    dtype=dtype_of(result.dtype),
                    other=numbers[1 - at],
                    origin=recorder.reads.origin_of(result, beside),
                    **told,
                )

    def _keep(self, one: Any, other: Any, allowed: _Allowed) -> None:
        fields = self._fields(one, other, allowed)
        if fields is not None:
            self._last = _Unequal(caller_of_now()[1], fields)

    # -- the end ----------------------------------------------------------------------------------

    def note_end(self, error: BaseException, trace: TracebackType | None) -> None:
        """An exception ends the program: tell what was compared, where it is a failed assertion."""
        recorder = self._opened()
        if not isinstance(error, AssertionError) or recorder is None or self._torch is None:
            return
        places = [(f, line) for f, line in traceback.walk_tb(trace) if is_own(f.f_code.co_filename)]
        if not places:
            return
        frame, line = places[-1]
        file = frame.f_code.co_filename
        found = assertion_at(file, line, functools.partial(_is_module, frame))
        if found is None:
            return
        last, site = self._last, f"{file}:{line}"
        told: _Unequal | None = None
        if last is not None and last.site in {f"{file}:{number}" for number in found.lines}:
            told = last
        else:
            pairs = (self._unequal(frame, file, pair) for pair in found.pairs)
            told = next(filter(None, pairs), None)
        if told is None:
            return
        sides = tuple(
            self._named_side(frame, found, side, expression, told.fields["index"])
            for side, expression in zip(
                told.fields["sides"], _expressions_of(found.pairs, told.site), strict=True
            )
        )
        if any(side.allocation for side in sides):  # else no launch was given any of them
            fields = told.fields | {"sides": sides}
            recorder.record_compared(site=site, compared_at=told.site, **fields)

    def _named_side(
        self,
        frame: FrameType,
        found: Assertion,
        side: ComparedSide,
        expression: ast.expr | None,
        index: tuple[int, ...],
    ) -> ComparedSide:
        """A side as the program spells it; of a copy, where the tensor lies that it was made of."""
        if expression is None:
            return side
        named = msgspec.structs.replace(side, name=ast.unparse(expression))
        numbers = (_number(frame, divisor) for divisor in found.divisors.get(named.name, ()))
        divisors = tuple(int(number) for number in numbers if number)
        named = msgspec.structs.replace(named, divisors=divisors)
        origin = found.origins.get(named.name)
        is_copy = origin is not None and not side.allocation
        tensor: Any = _tensor_of(frame, origin) if is_copy and origin is not None else None
        recorder = self._opened()
        if recorder is None or not hasattr(tensor, "untyped_storage"):
            return named
        with recorder.reads.quiet():
            if len(tensor.shape) != len(index) or any(map(int.__ge__, index, tensor.shape)):
                return named
            address, value = _element(tensor, tensor.detach().cpu(), index)
            allocation = recorder.allocation_of(tensor)
        if value != side.value or not allocation:  # it was changed since, or is no launch's
            return named
        lies_at = {"address": address, "allocation": allocation}
        return msgspec.structs.replace(named, **lies_at, others=(), data=b"")

    def _unequal(self, frame: FrameType, file: str, pair: ComparedPair) -> _Unequal | None:
        """How the tensors of a pair differ, where both names lead to one."""
        one, other = (_tensor_of(frame, base_of(side)) for side in (pair.one, pair.other))
        limits = [_number(frame, limit) for limit in (pair.rtol, pair.atol)]
        if one is None or other is None or limits[0] is None:
            return None
        fields = self._fields(one, other, _Allowed(limits[0], limits[1]))
        return _Unequal(f"{file}:{pair.line}", fields) if fields is not None else None

    # -- two tensors ------------------------------------------------------------------------------

    def _fields(self, one: Any, other: Any, allowed: _Allowed) -> dict[str, Any] | None:
        """Where two tensors differ; None where they do not, or are nothing to be compared."""
        torch, recorder = self._torch, self._opened()
        sides = [torch.as_tensor(side) for side in (one, other)]
        if recorder is None or any(side.is_complex() or side.is_sparse for side in sides):
            return None
        if all(side.numel() == 1 for side in sides):
            sides = [side.reshape(max((s.shape for s in sides), key=len)) for side in sides]
        shape, num = tuple(sides[0].shape), sides[0].numel()
        if sides[1].shape != shape or not 0 < num <= MAX_ELEMENTS:
            return None
        with torch.no_grad(), recorder.reads.quiet():
            held = [side.detach().cpu() for side in sides]
            different, is_first = _different(torch, held, allowed)
            if different is None:
                return None
            places = different.nonzero()
            indices: list[tuple[int, ...]] = [()]
            if shape:
                indices = [tuple(map(int, at)) for at in places[: 1 + MAX_OTHERS]]
            told = [
                _side(side, kept, indices, recorder) for side, kept in zip(sides, held, strict=True)
            ]
        count = int((different if is_first else held[0] != held[1]).sum())
        return {
            "sides": tuple(told),
            "shape": shape,
            "index": indices[0],
            "num_different": count,
            "num_elements": num,
            "is_first": is_first,
            "rtol": allowed.rtol if allowed.atol is not None else None,
            "atol": allowed.atol,
        }


def _different(torch: Any, held: list[Any], allowed: _Allowed) -> tuple[Any, bool]:
    """Which elements differ by more than is allowed, and True; where that is not known, the one of
    the largest difference, and False. None where none does."""
    are_floats = any(side.is_floating_point() for side in held)
    if are_floats:
        held = [side.double() for side in held]
    if allowed.atol is None:
        far = (held[0].double() - held[1].double()).abs()
        far = far.nan_to_num(nan=float("inf"), posinf=float("inf"))
        largest = far.max()
        mask = far == largest
        return (mask, False) if float(largest) > 0 else (None, False)
    if are_floats:
        rtol, atol = allowed.rtol, allowed.atol
        same = torch.isclose(*held, rtol=rtol, atol=atol, equal_nan=allowed.equal_nan)
        mask = ~same
    else:
        mask = held[0] != held[1]
    return (mask, True) if bool(mask.any()) else (None, True)


def _closeness(held: Any, allowed: _Allowed) -> dict[str, float]:
    """How much a comparison with these numbers has allowed, beside how much they differ."""
    numbers = held.double()
    finite = numbers[numbers.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    most = (allowed.atol or 0.0) + allowed.rtol * largest
    steps = [numbers.diff(dim=axis).abs() for axis in range(numbers.dim())]
    shares = [float((step > 2 * most).double().mean()) for step in steps if step.numel()]
    return {"allowed": most, "largest": largest, "share_unlike": max(shares, default=0.0)}


def _side(
    tensor: Any, held: Any, indices: list[tuple[int, ...]], recorder: ForeignRecorder
) -> ComparedSide:
    (address, value), *others = (_element(tensor, held, index) for index in indices)
    is_whole = isinstance(value, int)
    return ComparedSide(
        name="a tensor",
        dtype=dtype_of(tensor.dtype),
        value=value,
        address=address,
        allocation=recorder.allocation_of(tensor),
        others=tuple((at, int(number)) for at, number in others if is_whole),
        data=_bytes_of(held) if recorder.keeps_contents else b"",
    )


def _bytes_of(held: Any) -> bytes:
    num_bytes = held.numel() * held.element_size()
    is_kept = num_bytes <= MAX_KEPT_BYTES and dtype_of(held.dtype) in ("F16", "F32", "F64")
    return bytes(held.contiguous().numpy().tobytes()) if is_kept else b""


def _element(tensor: Any, held: Any, index: tuple[int, ...]) -> tuple[int, int | float]:
    """Where an element lies, and what it held."""
    steps = zip(index, tensor.stride(), strict=True)
    offset = sum(at * stride for at, stride in steps) * tensor.element_size()
    value = held[index].item() if index else held.item()
    return tensor.data_ptr() + offset, int(value) if isinstance(value, bool) else value


# -- what names stand for -------------------------------------------------------------------------


def _is_module(frame: FrameType, name: str) -> bool:
    return isinstance(_look_up(frame, name), ModuleType)


def _look_up(frame: FrameType, name: str) -> Any:
    return frame.f_locals.get(name, frame.f_globals.get(name))


def _number(frame: FrameType, limit: float | str | None) -> float | None:
    value = _look_up(frame, limit) if isinstance(limit, str) else limit
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value is not None else None


def _tensor_of(frame: FrameType, node: ast.expr) -> Any:
    """The tensor, array or number that an expression stands for; None for what would have to run.

    Attributes are read of an object's own dictionary, and parts by numbers that stand there.
    """
    if isinstance(node, ast.Name):
        found = _look_up(frame, node.id)
    elif isinstance(node, ast.Attribute):
        owner = _object_of(frame, node.value)
        found = getattr(owner, "__dict__", {}).get(node.attr)
    elif isinstance(node, ast.Subscript):
        owner = _object_of(frame, node.value)
        found = _part(owner, node.slice)
    else:
        return None
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return found if is_number or (hasattr(found, "dtype") and hasattr(found, "shape")) else None


def _object_of(frame: FrameType, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _look_up(frame, node.id)
    return _tensor_of(frame, node)


def _part(owner: Any, place: ast.expr) -> Any:
    """`owner[place]` of a list, a dictionary or a tensor, where the place is a literal."""
    if not (isinstance(owner, list | tuple | dict) or hasattr(owner, "untyped_storage")):
        return None
    try:
        return owner[ast.literal_eval(place)]
    except (ValueError, TypeError, SyntaxError, LookupError, RecursionError):
        return None


def _expressions_of(
    pairs: tuple[ComparedPair, ...], site: str
) -> tuple[ast.expr | None, ast.expr | None]:
    """How the program spells the two sides, where one comparison of its text is at that line."""
    line = int(site.rpartition(":")[2] or 0)
    here = [pair for pair in pairs if pair.line == line]
    if len(here) != 1:
        return None, None
    return base_of(here[0].one), base_of(here[0].other)
