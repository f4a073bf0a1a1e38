"""An operation made again with what it read: as it was, with a fact changed, in a wider type."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypocenter.foreign.nonfinite.ops import SeenOp, is_looked_at

TensorChange = Callable[[str, Any], Any]
Number = Callable[[str, float], float]
#: Inputs of more bytes are not computed with again.
MAX_BYTES = 1 << 30


class Trial:
    """One operation, and element `at` of its result `number`, which was `value`.

    `pairs` are the floats that it read, by parameter, in the order of its arguments.
    """

    def __init__(
        self,
        torch: Any,
        op: SeenOp,
        number: int,
        at: int,
        value: float,
        pairs: Sequence[tuple[str, Any]],
    ) -> None:
        self._torch, self._op, self._number, self._at = torch, op, number, at
        self._value, self._pairs = value, pairs
        self._number_of: Number = lambda name, value: value
        self._is_list = op.facts.name.startswith("_foreach_")
        result = op.results[number]
        self.result_dtype = str(result.dtype).removeprefix("torch.")
        num_bytes = sum(content.nbytes for _, content in pairs)
        self._can_run = op.func is not None and not op.facts.is_random and num_bytes <= MAX_BYTES

    def gives_the_same(self) -> bool:
        """Whether the operation, made again as it was, leaves the same there."""
        again = self.value(lambda name, tensor: tensor)
        if again is None:
            return False
        return again == self._value or (math.isnan(again) and math.isnan(self._value))

    def value(
        self, change: TensorChange, number: Number = lambda name, value: value
    ) -> float | None:
        """What it leaves there with changed inputs, tensors and numbers; None where it cannot be
        made."""
        if not self._can_run:
            return None
        self._number_of = number
        try:
            return self._run(change, None)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None

    def wider(self) -> tuple[str, float | None]:
        """A wider type, and what it leaves there in that; None where no such can be made."""
        torch = self._torch
        for dtype in (torch.float64, torch.float32):
            if not self._can_run or str(dtype)[6:] == self.result_dtype:
                continue
            self._number_of = lambda name, value: value
            try:
                return str(dtype)[6:], self._run(functools.partial(_cast, dtype), dtype)
            except (RuntimeError, TypeError, ValueError, IndexError):
                continue
        return "", None

    def _run(self, change: TensorChange, dtype: Any) -> float:
        op, left = self._op, list(self._pairs)
        written: list[Any] = []
        names = op.facts.names
        args = tuple(
            self._argument(names[place] if place < len(names) else "", value, change, left, written)
            for place, value in enumerate(op.args)
        )
        kwargs = {
            name: self._argument(name, value, change, left, written)
            for name, value in op.kwargs.items()
        }
        if dtype is not None:
            kwargs |= {"dtype": dtype} if kwargs.get("dtype") is not None else {}
            if op.facts.name == "copy":  # the copy itself is what narrows
                return float(kwargs.get("src", args[1]).reshape(-1)[self._at])
        result = op.func(*args, **kwargs)
        results = [*written, *self._new(result)]
        wanted = 0 if self._is_list and len(results) == 1 else self._number
        return float(results[wanted].reshape(-1)[self._at])

    def _argument(
        self,
        name: str,
        value: Any,
        change: TensorChange,
        left: list[tuple[str, Any]],
        written: list[Any],
    ) -> Any:
        """An argument with what was read in place of each tensor of floats."""
        is_written = any(name == own for _, own in self._op.facts.written)
        is_list = isinstance(value, list | tuple) and self._is_list
        if is_list and len(value) == len(self._op.results):
            value = list(value)[self._number : self._number + 1]
        if isinstance(value, list | tuple):
            return [self._argument(name, part, change, left, written) for part in value]
        if isinstance(value, float | int) and not isinstance(value, bool):
            return self._number_of(name, value)
        if not is_looked_at(self._torch, value):
            return value.clone() if is_written and hasattr(value, "clone") else value
        if left and left[0][0] == name:
            made = change(name, left.pop(0)[1].to(value.dtype))
        else:  # it is written and not read
            made = change(name, self._torch.zeros_like(value))
        if is_written:
            made = made.clone()
            written.append(made)
        return made

    def _new(self, result: Any) -> Iterator[Any]:
        parts = result if isinstance(result, tuple) else (result,)
        for part, is_new in zip(parts, self._op.facts.new, strict=False):
            if is_new:
                found = part if isinstance(part, list | tuple) else (part,)
                yield from (t for t in found if is_looked_at(self._torch, t))


def _cast(dtype: Any, name: str, tensor: Any) -> Any:
    return tensor.to(dtype)
