"""What Triton makes one machine code of: a kernel, the kinds of its arguments, and its constants.

A form is found without Triton, so that launches of a plan that are alike are asked about once, and
a simulated GPU can count those that it meets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from hypocenter.base.tensor import Tensor

#: Triton tells AMD's compiler of tensors that are smaller.
_LARGE_BYTES = 1 << 31
#: Pointers and numbers are told apart by whether they are multiples of it.
_ALIGNMENT = 16


class Compilable(Protocol):
    """What is compiled for a launch: `jit` is Triton's function, None where there is none."""

    kernel: str
    jit: Any
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    extents: Mapping[str, int]


AnyLaunch = TypeVar("AnyLaunch", bound=Compilable)


def form_of(jit: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Hashable:
    """The form of a launch of `jit`: two that have the same one need the same machine code.

    Of `options` all count but the grid.
    """
    at_run = (parameter for parameter in jit.params if parameter.name not in options)
    kinds = tuple(
        _kind(value, is_free=parameter.do_not_specialize)
        for parameter, value in zip(at_run, args, strict=False)
    )
    named = sorted((name, value) for name, value in options.items() if name != "grid")
    return id(jit), kinds, tuple(named)


def distinct(launches: Iterable[AnyLaunch]) -> list[AnyLaunch]:
    """The first launch of each form; calls of libraries have none."""
    found: dict[Hashable, AnyLaunch] = {}
    for launch in launches:
        if launch.jit is not None:
            large = tuple(n for n, size in launch.extents.items() if size >= _LARGE_BYTES)
            found.setdefault((form_of(launch.jit, launch.args, launch.options), large), launch)
    return list(found.values())


def likeness(value: Any) -> Hashable:
    """What is the same of two layers, say, that are launched in the same forms: of tensors type,
    shape, strides and alignment, of whatever holds these all that it holds."""
    if isinstance(value, Tensor):
        parts = tuple(map(_kind, getattr(value.data, "parts", (value.data,))))
        return value.dtype.name, value.shape, value.strides, parts
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return tuple(likeness(getattr(value, field.name)) for field in fields)
    if isinstance(value, tuple | list):
        return tuple(map(likeness, value))
    return value if isinstance(value, Hashable) else id(value)


def _kind(value: Any, *, is_free: bool = False) -> Hashable:
    """As Triton specialises it; `is_free`: by its type alone."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        width = 32 if -(1 << 31) <= value < 1 << 31 else 64
        if is_free or value == 1:
            return "free" if is_free else "one", width
        return width, value % _ALIGNMENT == 0
    if isinstance(value, np.generic):
        return value.dtype.name
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.ndim, value.ctypes.data % _ALIGNMENT == 0
    if isinstance(value, float) or value is None:
        return type(value).__name__
    address = value.data_ptr() if hasattr(value, "data_ptr") else value.address
    return str(value.dtype), address % _ALIGNMENT == 0
