"""Which elements of an operation's result hang on elements that nobody has written.

A mask is a tensor of booleans with the shape of what it belongs to. Of an operation that is not
known here nothing is said. What an operation masks, cuts off or chooses away is gone from its
result, as padding is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

#: By the number of a tensor's Python object its mask; a tensor without one was written whole.
Masks = Mapping[int, Any]

#: Operations that read of their first tensor what their other arguments choose.
CHOOSING = frozenset(
    {"embedding", "gather", "index", "index_select", "masked_select", "take"}
    | {"nll_loss_forward", "nll_loss2d_forward", "nll_loss"}
)
_MOVING = frozenset(
    {"cat", "stack", "roll", "flip", "constant_pad_nd", "tril", "triu", "repeat", "_unsafe_view"}
)
_COPYING = frozenset({"clone", "_to_copy", "copy_", "contiguous", "lift_fresh_copy"})
_REDUCING = frozenset(
    {"sum", "mean", "prod", "amax", "amin", "max", "min", "var", "std", "all", "any", "argmax"}
    | {"argmin", "logsumexp", "norm", "linalg_vector_norm", "nansum", "median"}
)
_ALONG = frozenset({"_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort"})


def result_mask(
    operation: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any, masks: Masks
) -> Any:
    """The mask of the result, or of the first of several results; None where it is not known."""
    name = name_of(operation)
    if name in CHOOSING:
        return _choose(name, args, masks)
    if name == "where":
        return _where(args, masks)
    if name in ("masked_fill", "masked_fill_"):
        return _of(args[0], masks) & ~args[1] | _of(args[1], masks)
    if name in _COPYING:
        source = args[1] if name == "copy_" else args[0]
        return _of(source, masks).expand(args[0].shape)
    if name in _MOVING:
        return _move(operation, args, masks)
    if name in _REDUCING or name in _ALONG:
        return _reduce(operation, name, args, keywords, masks)
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        left, right = (_of(tensor, masks) for tensor in args[-2:])
        product = left.any(-1, keepdim=True) | right.any(-2, keepdim=True)
        return product | _of(args[0], masks) if name.endswith("addmm") or len(args) > 2 else product
    if is_pointwise(operation):
        return _pointwise(name.removesuffix("_"), args, keywords, result, masks)
    return None


def name_of(operation: Any) -> str:
    """As `sub`, without where it comes from."""
    return str(operation._schema.name).removeprefix("aten::")


def is_pointwise(operation: Any) -> bool:
    """Whether each element of the result comes of one element of each argument, as torch says.

    Of some that work in place it says so of the form that does not.
    """
    forms, name = [operation], name_of(operation)
    if name.endswith("_"):
        packet = getattr(sys.modules["torch"].ops.aten, name[:-1], None)
        forms.append(getattr(packet, operation._overloadname, None))
    tags = (tag for form in forms for tag in getattr(form, "tags", ()))
    return any(str(tag).endswith("pointwise") for tag in tags)


def _of(value: Any, masks: Masks) -> Any:
    """The mask of a tensor, all False where it was written whole."""
    found = masks.get(id(value))
    return found if found is not None else value.new_zeros(value.shape, dtype=_bool(value))


def _bool(tensor: Any) -> Any:
    return (tensor == tensor).dtype


def _choose(name: str, args: tuple[Any, ...], masks: Masks) -> Any:
    if name.startswith("nll_loss"):
        return None  # what it chooses by has a value that stands for none
    mask = _of(args[0], masks)
    if name == "embedding":
        return mask[args[1]]
    if name == "index":
        places = tuple(slice(None) if at is None else at for at in args[1])
        return mask[places]
    return getattr(mask, name)(*args[1:])


def _where(args: tuple[Any, ...], masks: Masks) -> Any:
    if len(args) != 3:
        return None
    condition, yes, no = args
    first, second = (_of(v, masks) if hasattr(v, "shape") else False for v in (yes, no))
    chosen = (condition & first) | (~condition & second)
    return chosen | _of(condition, masks)


def _move(operation: Any, args: tuple[Any, ...], masks: Masks) -> Any:
    def as_mask(value: Any) -> Any:
        if isinstance(value, list | tuple) and value and hasattr(value[0], "shape"):
            return [_of(part, masks) for part in value]
        return _of(value, masks) if hasattr(value, "shape") else value

    return operation(*map(as_mask, args))


def _reduce(
    operation: Any, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any], masks: Masks
) -> Any:
    given = {
        argument.name: args[at] if at < len(args) else keywords.get(argument.name)
        for at, argument in enumerate(operation._schema.arguments)
    }
    mask, along = _of(args[0], masks), given.get("dim")
    if name in _ALONG:
        is_from_here_on = name.startswith("cum") or name.startswith("logcum")
        if is_from_here_on:
            return mask.cumsum(along) > 0
        return mask.any(along, keepdim=True).expand(mask.shape)
    axes = [along] if isinstance(along, int) else list(along or range(mask.dim()))
    axes = sorted((axis % max(mask.dim(), 1) for axis in axes), reverse=True)
    for axis in axes if mask.dim() else ():
        mask = mask.any(axis, keepdim=bool(given.get("keepdim")))
    return mask


# -- one element of each --------------------------------------------------------------------------

#: Values of one operand with which the result is the same whatever the other one is.
_DECIDING: Mapping[str, Callable[[Any], Any]] = {
    "mul": lambda value: value == 0,
    "bitwise_and": lambda value: value == 0,
    "logical_and": lambda value: value == 0,
    "__and__": lambda value: value == 0,
    "bitwise_or": lambda value: value == 1,
    "logical_or": lambda value: value != 0,
    "__or__": lambda value: value == 1,
    "add": lambda value: abs(value) == math.inf,
    "sub": lambda value: abs(value) == math.inf,
    "maximum": lambda value: value == math.inf,
    "minimum": lambda value: value == -math.inf,
}


def _pointwise(
    name: str,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    result: Any,
    masks: Masks,
) -> Any:
    first = result[0] if isinstance(result, list | tuple) else result
    decides = _DECIDING.get(name)
    values = [value for value in (*args, *keywords.values()) if hasattr(value, "untyped_storage")]
    found = first.new_zeros(first.shape, dtype=_bool(first))
    for value in values:
        mask = masks.get(id(value))
        if mask is None:
            continue
        others = [other for other in args[:2] if other is not value]
        if decides is not None and len(others) == 1 and _is_value(others[0]):
            mask = mask & ~_decide(decides, others[0], masks, mask)
        found = found | mask
    return found


def _is_value(value: Any) -> bool:
    return hasattr(value, "untyped_storage") or isinstance(value, int | float)


def _decide(decides: Callable[[Any], Any], other: Any, masks: Masks, mask: Any) -> Any:
    """Where the other operand alone decides, and was written."""
    if not hasattr(other, "untyped_storage"):
        return mask.new_full((), bool(decides(other)))
    return decides(other) & ~_of(other, masks)
