"""Which elements of a result an element of an input can reach, for operations of known kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypocenter.foreign.nonfinite.ops import SeenOp

#: Along one axis everything reaches everything.
ALONG_AXIS = frozenset({"_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax"})
#: One number, or one of each row, comes of all.
REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var", "std", "logsumexp", "prod", "nansum"})
#: By name the two factors of a product of matrices.
PRODUCTS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}
#: What was in the tensor that they write is not read.
OVERWRITING = frozenset(
    {"copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential"}
    | {"_foreach_copy", "_foreach_zero"}
)


def reach_of(torch: Any, op: SeenOp, masks: Mapping[str, Sequence[Any]], result: Any) -> Any | None:
    """Which elements of a result the marked elements of inputs can have come to.

    `masks` are by parameter. None where that is not known of the operation: all of them may be.
    """
    name = op.facts.name
    marks = [mask for part in masks.values() for mask in part]
    if not marks:
        return torch.zeros(result.shape, dtype=torch.bool, device=result.device)
    try:
        if op.facts.is_pointwise or name.startswith("_foreach_"):
            return _any_of(torch, marks, result)
        if name in ALONG_AXIS:
            return _any_of(torch, [m.any(_axis(op), keepdim=True) for m in marks], result)
        if name in PRODUCTS:
            return _of_product(torch, op, masks, result)
        if name in REDUCTIONS:
            axes = op.inputs.get("dim")
            axes = list(range(marks[0].dim())) if axes in (None, []) else axes
            return _any_of(torch, [m.any(axes).reshape(result.shape) for m in marks], result)
    except (RuntimeError, IndexError, TypeError):  # shapes of a form that is not known here
        return None
    return None


def _axis(op: SeenOp) -> int:
    return int(op.inputs["dim"])


def _any_of(torch: Any, marks: Sequence[Any], result: Any) -> Any:
    found = torch.zeros(result.shape, dtype=torch.bool, device=result.device)
    for mark in marks:
        found |= mark.to(result.device).expand(result.shape)
    return found


def _of_product(torch: Any, op: SeenOp, masks: Mapping[str, Sequence[Any]], result: Any) -> Any:
    left, right = PRODUCTS[op.facts.name]
    marks = []
    for name, part in masks.items():
        for mark in part:
            if name == left:
                marks.append(mark.any(-1, keepdim=True))
            elif name == right:
                marks.append(mark.any(-2, keepdim=True))
            else:
                marks.append(mark)
    return _any_of(torch, marks, result)
