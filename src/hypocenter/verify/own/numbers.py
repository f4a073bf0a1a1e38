"""How far what a user's kernel wrote may be from its reference, by types and lengths of sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hypocenter.contracts.demands import evaluate
from hypocenter.verify.bounds import of_chain
from hypocenter.verify.own.reference import Reference

#: Half the distance from 1 to the next number of a type.
_HALF_STEP = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
_NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}


@dataclass(frozen=True, slots=True)
class Held:
    """How far one tensor is off, as a share of its bound, and where that is worst."""

    name: str
    share: float
    place: tuple[int, ...]
    got: float
    exact: float
    bound: float


class BadReference(Exception):
    """A reference that does not say what it must; the text says why."""


def as_float64(arguments: Mapping[str, Any], *, sizes: bool = False) -> dict[str, Any]:
    """Arguments as a reference gets them: floats as float64, or their sizes."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            wide = value.to(torch.float64)
            found[name] = wide.abs() if sizes else wide
        else:
            found[name] = value
    return found


def hold(
    reference: Reference, before: Mapping[str, Any], after: Mapping[str, torch.Tensor]
) -> list[Held]:
    """Hold what a launch left in its tensors against its reference.

    The size that roundings are a share of is what the reference makes of the sizes of all numbers,
    or the result itself where that is more. Raises BadReference.
    """
    exact = _results(reference, as_float64(before))
    sizes = _results(reference, as_float64(before, sizes=True))
    length = _length(reference, before)
    between = _HALF_STEP[_NAMES[reference.rounds_to]]
    found = []
    for name, right in exact.items():
        if name not in after:
            raise BadReference(f"it returns {name!r}, which is no tensor of the launch")
        got = after[name]
        right = torch.as_tensor(right, dtype=torch.float64)
        if right.shape != got.shape:
            raise BadReference(f"{name} is {list(right.shape)} in it, and {list(got.shape)} here")
        size = torch.maximum(torch.as_tensor(sizes[name], dtype=torch.float64).abs(), right.abs())
        size = torch.nan_to_num(size, nan=0.0, posinf=0.0)
        share = of_chain(length) + (0.0 if between < 2.0**-20 else 2 * between * math.sqrt(length))
        own = _HALF_STEP.get(got.dtype, 0.0)
        bound = share * torch.maximum(size, right.abs()) + own * right.abs()
        bound = bound + _SMALLEST.get(got.dtype, 0.0)
        found.append(_worst(name, got, right, bound))
    return found


def _results(reference: Reference, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    found = reference.function(**arguments)
    if not isinstance(found, Mapping):
        raise BadReference("it must return what tensors hold, by name")
    return found


def _length(reference: Reference, arguments: Mapping[str, Any]) -> int:
    if isinstance(reference.sums, int):
        return max(reference.sums, 1)
    numbers = {name: value for name, value in arguments.items() if isinstance(value, int)}
    length = evaluate(reference.sums, numbers)
    if length is None:
        raise BadReference(f"sums is {reference.sums!r}, which names no number of the launch")
    return max(length, 1)


def _worst(name: str, got: Any, right: Any, bound: Any) -> Held:
    wide = got.to(torch.float64)
    same = (wide == right) | (wide.isnan() & right.isnan())
    share = torch.where(same, 0.0, (wide - right).abs() / bound)
    share = torch.where(share.isnan(), math.inf, share)
    if not share.numel():
        return Held(name, 0.0, (), 0.0, 0.0, 0.0)
    flat = int(share.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), share.shape))
    values = (float(item.reshape(-1)[flat]) for item in (share, wide, right, bound))
    share_there, got_there, right_there, bound_there = values
    return Held(name, share_there, place, got_there, right_there, bound_there)
