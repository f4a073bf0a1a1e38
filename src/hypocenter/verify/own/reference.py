"""`hypocenter.reference`: says beside a Triton kernel what it computes, for `hypo verify FILE.py`.

Imports neither torch nor Triton, and compares nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Mapping[str, Any]])

#: By the Python function that a kernel was made of.
_known: dict[Any, Reference] = {}


@dataclass(frozen=True, slots=True)
class Reference:
    """What a kernel computes.

    `function` gets the launch's arguments by their names, tensors of floats as float64, and returns
    what tensors must hold afterwards, by name. `sums`: how many numbers an element of the result
    adds up, a number or an expression over the arguments, such as "K". `rounds_to`: the narrowest
    type that something between is rounded to ("fp16", "bf16" or "fp32"). `draw` and `grid` say how
    launches are made: numbers as choices, tensors as (type, *shape), the shape in expressions.
    """

    function: Callable[..., Mapping[str, Any]]
    kernel: Any
    sums: int | str
    rounds_to: str
    draw: Mapping[str, Sequence[Any]] | None
    grid: Callable[..., tuple[int, ...]] | None


def reference(
    kernel: Any,
    *,
    sums: int | str = 1,
    rounds_to: str = "fp32",
    draw: Mapping[str, Sequence[Any]] | None = None,
    grid: Callable[..., tuple[int, ...]] | None = None,
) -> Callable[[_Function], _Function]:
    """Mark a function as what `kernel` computes; arguments as in `Reference`.

    Raises ValueError where a schema has no grid, or `rounds_to` is none of the types.
    """
    if (draw is None) != (grid is None):
        raise ValueError("draw and grid belong together: give both, or neither")
    if rounds_to not in ("fp16", "bf16", "fp32"):
        raise ValueError(f"rounds_to is {rounds_to!r}, but must be fp16, bf16 or fp32")

    def keep(function: _Function) -> _Function:
        _known[python_function(kernel)] = Reference(function, kernel, sums, rounds_to, draw, grid)
        return function

    return keep


def python_function(kernel: Any) -> Any:
    """What is below an autotuner, heuristics and Triton's own function."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def reference_of(kernel: Any) -> Reference | None:
    """The reference of a kernel, if there is one."""
    return _known.get(python_function(kernel))


def references() -> tuple[Reference, ...]:
    """All that are known in this process."""
    return tuple(_known.values())
