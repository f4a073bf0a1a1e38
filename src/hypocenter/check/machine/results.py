"""Whether two runs of a launch left the same tensors, but for rounding.

The bound is meant for what a compiler breaks, not for rounding: sums in another order, exponentials
of other last bits stay far below it. A launch that computes whole numbers from floats is not judged
by these, since a last bit may turn one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hypocenter.base.dtypes import Array
from hypocenter.check.tuning import storage_bytes

#: Of the largest magnitude of a tensor: what two results may differ by.
_SHARE = 2.0**-8
_COARSE_SHARE = 2.0**-4
_COARSE_BITS = 10


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """The first element that differs, in bytes `first` to `end` of its storage, and how many do."""

    argument: str
    number: int
    first: int
    end: int
    interpreted: str
    machine: str
    count: int
    size: int


def first_difference(
    tensors: Mapping[str, torch.Tensor], machine: Mapping[str, Array]
) -> ResultDifference | None:
    """The first tensor that differs beyond rounding: the interpreter's, and the machine code's."""
    has_floats = any(tensor.dtype.is_floating_point for tensor in tensors.values())
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point and has_floats:
            continue
        found = _difference(name, tensor, storage_bytes(tensor), machine[name])
        if found is not None:
            return found
    return None


def _difference(
    name: str, tensor: torch.Tensor, one: Array, other: Array
) -> ResultDifference | None:
    size = tensor.element_size()
    whole = one.size // size * size
    mine, theirs = (torch.from_numpy(raw[:whole].copy()).view(tensor.dtype) for raw in (one, other))
    if tensor.dtype.is_floating_point:
        differs = _beyond_rounding(mine.double().numpy(), theirs.double().numpy(), tensor.dtype)
    else:
        differs = (mine != theirs).numpy()
    places = np.flatnonzero(differs)
    if not places.size:
        return None
    first = int(places[0])
    return ResultDifference(
        name,
        first,
        first * size,
        (first + 1) * size,
        f"{mine[first].item():g}",
        f"{theirs[first].item():g}",
        int(places.size),
        int(differs.size),
    )


def _beyond_rounding(mine: Array, theirs: Array, dtype: torch.dtype) -> Array:
    finite = np.isfinite(mine) & np.isfinite(theirs)
    scale = float(np.abs(mine[finite]).max(initial=0.0))
    is_coarse = torch.finfo(dtype).eps > 2.0**-_COARSE_BITS
    allowed = scale * (_COARSE_SHARE if is_coarse else _SHARE)
    with np.errstate(invalid="ignore"):
        apart = ~(np.abs(mine - theirs) <= allowed)
    same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
    differs: Array = apart & ~same
    return differs
