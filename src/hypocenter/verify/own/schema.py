"""Launches that are made from a reference's schema: every choice of numbers, tensors drawn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hypocenter.contracts.demands import evaluate
from hypocenter.verify.own.numbers import BadReference
from hypocenter.verify.own.reference import Reference, python_function

_TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i32": torch.int32,
    "i64": torch.int64,
}
MAX_LAUNCHES = 64


def numbers_of(reference: Reference) -> Iterator[dict[str, int]]:
    """Every choice of numbers of a schema, up to MAX_LAUNCHES evenly among them."""
    assert reference.draw is not None
    choices = {name: tuple(given) for name, given in reference.draw.items() if _is_number(given)}
    every = list(itertools.product(*choices.values()))
    step = -(-len(every) // MAX_LAUNCHES)
    for chosen in every[::step]:
        yield dict(zip(choices, chosen, strict=True))


def constants_of(reference: Reference) -> dict[str, tuple[int, ...]]:
    """The numbers that are constants of the kernel: only choices of these may be taken."""
    assert reference.draw is not None
    jit = reference.kernel
    while hasattr(jit, "fn") and not hasattr(jit, "params"):
        jit = jit.fn
    constants = {param.name for param in jit.params if param.is_constexpr}
    return {
        name: tuple(given)
        for name, given in reference.draw.items()
        if _is_number(given) and name in constants
    }


def launch(reference: Reference, numbers: Mapping[str, int], seed: int = 0) -> None:
    """Launch the kernel with these numbers, and tensors that are drawn; raises BadReference."""
    assert reference.draw is not None
    assert reference.grid is not None
    arguments: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(seed)
    for name, given in reference.draw.items():
        arguments[name] = (
            numbers[name] if _is_number(given) else _tensor(name, given, numbers, generator)
        )
    grid = reference.grid(**numbers)
    reference.kernel[grid](**arguments)


def _is_number(given: Any) -> bool:
    return not isinstance(given[0], str)


def _tensor(name: str, given: Any, numbers: Mapping[str, int], generator: Any) -> Any:
    kind, *axes = given
    if kind not in _TYPES:
        raise BadReference(f"{name} is of {kind!r}, but types are {', '.join(_TYPES)}")
    shape = []
    for axis in axes:
        size = axis if isinstance(axis, int) else evaluate(axis, numbers)
        if size is None:
            raise BadReference(f"{name} has the axis {axis!r}, which names no number of the schema")
        shape.append(size)
    dtype = _TYPES[kind]
    if dtype.is_floating_point:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
        return drawn.to(dtype).to(device="cuda")
    return torch.randint(0, 1 << 15, shape, generator=generator, dtype=dtype).to(device="cuda")


def name_of(reference: Reference) -> str:
    """The kernel's name."""
    return str(python_function(reference.kernel).__name__)
