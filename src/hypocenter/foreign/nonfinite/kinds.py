"""Why an operation gave NaN or infinity: by its name and the values that it read there.

What is found is tried: the operation is made again as it was, and with one fact changed
(`trial.py`).
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypocenter.foreign.nonfinite.ops import SeenOp
from hypocenter.foreign.nonfinite.spread import ALONG_AXIS, PRODUCTS
from hypocenter.foreign.nonfinite.trial import Trial
from hypocenter.record.nonfinite import ChangedFact, NumberKind, Operand

#: Of a line of the program's.
MAX_CHARS = 200
#: Functions by their names and the range in which their results are real.
_DOMAINS: dict[str, Callable[[float], bool]] = {
    "acos": lambda x: -1 <= x <= 1,
    "asin": lambda x: -1 <= x <= 1,
    "atanh": lambda x: -1 < x < 1,
    "acosh": lambda x: x >= 1,
    "logit": lambda x: 0 < x < 1,
}
_LOGS = {"log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0}
_DIVISIONS = frozenset({"div", "true_divide", "floor_divide", "remainder", "fmod", "reciprocal"})
_SUMS = frozenset({"add", "sub", "rsub", "sum", "mean", "cumsum", "addcmul", "logsumexp"})
_ATTENTION = "_scaled_dot_product"


@dataclass(slots=True)
class Found:
    """What is recorded of such an operation, as `record/nonfinite.py:NonFinite`."""

    op: SeenOp
    kind: NumberKind
    result: Operand
    operands: tuple[Operand, ...] = ()
    exact: float | None = None
    limit: float | None = None
    wide: str = ""
    is_reproduced: bool = False
    change: ChangedFact = ChangedFact.NONE
    changed: float | None = None
    id: int = 0
    comes_from: tuple[int, ...] = ()
    is_sure: bool = True
    made_at: str = ""
    num_nan: int = 0
    num_inf: int = 0
    num_elements: int = 0

    def fields(self) -> dict[str, Any]:
        """Those of the event."""
        op = self.op
        own = {name: getattr(self, name) for name in self.__slots__ if name != "op"}
        return {
            **own,
            "number": op.number,
            "operation": op.facts.name,
            "site": op.site,
            "statement": _statement_at(op.site),
            "node": op.node,
            "forward_site": op.forward_site,
            "launched": op.made.seq if op.made is not None else 0,
        }


def _statement_at(site: str) -> str:
    """The text of a line, as far as it can be read."""
    file, _, line = site.rpartition(":")
    return linecache.getline(file, int(line)).strip()[:MAX_CHARS] if line.isdigit() else ""


def where(torch: Any, mask: Any) -> int:
    """The first marked element, counted row by row."""
    return int(mask.reshape(-1).to(torch.uint8).argmax())


def operand_at(name: str, tensor: Any, at: int, value: float | None = None) -> Operand:
    """The element `at` of a tensor, counted row by row; a number where `tensor` is None."""
    if tensor is None:
        return Operand(name=name, dtype="", shape=(), index=(), value=float(value or 0.0))
    index, left = [], at
    for size in reversed(tensor.shape):
        index.append(left % size)
        left //= size
    found = float(tensor.reshape(-1)[at]) if value is None else value
    return Operand(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        index=tuple(reversed(index)),
        value=found,
    )


def explain(
    torch: Any, op: SeenOp, number: int, after: Any, at: int, pairs: Sequence[tuple[str, Any]]
) -> Found:
    """Why element `at` of result `number` (`after`) is NaN or infinite; `pairs`: what it read."""
    result = operand_at("result", after, at)
    if op.is_launch:
        wanted = op.results[number]
        name = next(name for name, value in op.inputs.items() if value is wanted)
        return Found(op, NumberKind.IN_KERNEL, operand_at(name, after, at))
    is_elementwise = op.facts.is_pointwise or op.facts.name.startswith("_foreach_")
    operands = _operands(op, after, at, pairs) if is_elementwise else ()
    values = {operand.name: operand.value for operand in operands}
    trial = Trial(torch, op, number, at, float(result.value), pairs)
    found = Found(op, NumberKind.UNKNOWN, result, operands)
    kind = _kind_of_values(op.facts.name.removeprefix("_foreach_"), values)
    if kind in (NumberKind.INF_MINUS_INF, NumberKind.UNKNOWN):
        kind = _kind_of_rows(torch, op, after, at, pairs, values, kind)
    found.kind = kind
    found.is_reproduced = trial.gives_the_same()
    _try_change(torch, found, trial)
    return found


def _operands(
    op: SeenOp, after: Any, at: int, pairs: Sequence[tuple[str, Any]]
) -> tuple[Operand, ...]:
    """What an elementwise operation read for one element: of tensors, then numbers."""
    found = []
    for name, tensor in pairs:
        try:
            index = _index_of(after.shape, at)
            found.append(_element(name, tensor, index))
        except IndexError:
            return ()
    for name, value in op.inputs.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found.append(operand_at(name, None, 0, float(value)))
    return tuple(found)


def _index_of(shape: Sequence[int], at: int) -> list[int]:
    index = []
    for size in reversed(shape):
        index.append(at % size)
        at //= size
    return index[::-1]


def _element(name: str, tensor: Any, index: list[int]) -> Operand:
    """The element of a tensor that is spread over a result at `index`."""
    own = index[len(index) - tensor.dim() :] if tensor.dim() else []
    place = 0
    for size, number in zip(tensor.shape, own, strict=True):
        place = place * size + (number if size > 1 else 0)
    return operand_at(name, tensor, place)


def _kind_of_values(name: str, values: Mapping[str, float]) -> NumberKind:
    """By what one element was made of."""
    first = values.get("self", math.nan)
    other = values.get("other", math.nan)
    if name in _DIVISIONS or name == "addcdiv":
        return _of_division(name, values)
    if name in _LOGS and first == first:
        if first == _LOGS[name]:
            return NumberKind.LOG_OF_ZERO
        return NumberKind.LOG_OF_NEGATIVE if first < _LOGS[name] else NumberKind.UNKNOWN
    if name in ("sqrt", "rsqrt"):
        if first < 0:
            return NumberKind.ROOT_OF_NEGATIVE
        return NumberKind.OVER_ZERO if name == "rsqrt" and first == 0 else NumberKind.UNKNOWN
    if name == "pow":
        power = values.get("exponent", math.nan)
        if first == 0 and power < 0:
            return NumberKind.OVER_ZERO
        is_real = first >= 0 or power == round(power) if math.isfinite(power) else True
        return NumberKind.UNKNOWN if is_real else NumberKind.POWER_OF_NEGATIVE
    if name in _DOMAINS:
        inside = first != first or _DOMAINS[name](first)
        return NumberKind.UNKNOWN if inside else NumberKind.OUTSIDE_DOMAIN
    if name == "mul" and 0.0 in (first, other) and (math.isinf(first) or math.isinf(other)):
        return NumberKind.ZERO_TIMES_INF
    if name in ("add", "sub", "rsub") and math.isinf(first) and math.isinf(other):
        return NumberKind.INF_MINUS_INF
    return NumberKind.UNKNOWN


def _of_division(name: str, values: Mapping[str, float]) -> NumberKind:
    over, under = values.get("self", math.nan), values.get("other", math.nan)
    if name == "reciprocal":
        over, under = 1.0, over
    elif name == "addcdiv":
        over, under = values.get("tensor1", math.nan), values.get("tensor2", math.nan)
    if under == 0:
        return NumberKind.ZERO_OVER_ZERO if over == 0 else NumberKind.OVER_ZERO
    both = math.isinf(over) and math.isinf(under)
    return NumberKind.INF_OVER_INF if both else NumberKind.UNKNOWN


def _kind_of_rows(
    torch: Any,
    op: SeenOp,
    after: Any,
    at: int,
    pairs: Sequence[tuple[str, Any]],
    values: Mapping[str, float],
    otherwise: NumberKind,
) -> NumberKind:
    """By the row or the whole that one element was made of."""
    name, tensors = op.facts.name, dict(pairs)
    own = tensors.get("self")
    if name in ALONG_AXIS and own is not None:
        row = own.movedim(int(op.inputs["dim"]), -1)
        rest = _index_of(after.shape, at)
        del rest[int(op.inputs["dim"])]
        line = row[tuple(rest)] if own.dim() else own.reshape(1)
        if bool((line == -math.inf).all()):
            return NumberKind.MASKED_ROW
        return NumberKind.INF_MINUS_INF if bool((line == math.inf).any()) else otherwise
    if name in ("sub", "_foreach_sub") and otherwise is NumberKind.INF_MINUS_INF:
        return _of_difference(torch, op, after, at, tensors, otherwise)
    if name.startswith(_ATTENTION):
        return _of_attention(tensors, after, at, otherwise)
    return _of_whole(op, own, tensors, after, at, otherwise)


def _of_difference(
    torch: Any,
    op: SeenOp,
    after: Any,
    at: int,
    tensors: Mapping[str, Any],
    otherwise: NumberKind,
) -> NumberKind:
    """A row of nothing but -infinity, less its own maximum, is a softmax of a masked row."""
    own, other = tensors.get("self"), tensors.get("other")
    if own is None or other is None or own.shape != after.shape or own.dim() != other.dim():
        return otherwise
    axes = [n for n in range(own.dim()) if other.shape[n] == 1 and own.shape[n] > 1]
    if len(axes) != 1:
        return otherwise
    index: list[Any] = list(_index_of(after.shape, at))
    index[axes[0]] = slice(None)
    is_whole = bool((own[tuple(index)] == -math.inf).all())
    return NumberKind.MASKED_ROW if is_whole else otherwise


def _of_attention(
    tensors: Mapping[str, Any], after: Any, at: int, otherwise: NumberKind
) -> NumberKind:
    mask = tensors.get("attn_mask", tensors.get("attn_bias"))
    if mask is None or after.dim() != 4:
        return otherwise
    index = _index_of(after.shape, at)[:3]
    own = index[3 - (mask.dim() - 1) :]
    row = mask[tuple(n if size > 1 else 0 for n, size in zip(own, mask.shape, strict=False))]
    return NumberKind.MASKED_ROW if bool((row == -math.inf).all()) else otherwise


def _of_whole(
    op: SeenOp, own: Any, tensors: Mapping[str, Any], after: Any, at: int, otherwise: NumberKind
) -> NumberKind:
    name = op.facts.name
    if name == "mean" and _num_from(op) == 0:
        return NumberKind.NO_ELEMENTS
    if name in ("var", "std", "var_mean", "std_mean"):
        correction = op.inputs.get("correction")
        correction = 1 if correction is None else correction
        num = _num_reduced(op)
        return NumberKind.TOO_FEW if num - correction <= 0 else otherwise
    if name.startswith("nll_loss") and op.inputs.get("target") is not None:
        target, ignored = op.inputs["target"], op.inputs.get("ignore_index", -100)
        if not op.node and bool((target == ignored).all()):
            return NumberKind.ALL_IGNORED
    if name in _SUMS and own is not None and bool((own == math.inf).any()):
        return NumberKind.INF_MINUS_INF if bool((own == -math.inf).any()) else otherwise
    if name in PRODUCTS and after.dim() >= 2:
        return _of_product(op, tensors, after, at, otherwise)
    return otherwise


def _num_from(op: SeenOp) -> int:
    return int(op.inputs["self"].numel())


def _num_reduced(op: SeenOp) -> int:
    own = op.inputs["self"]
    axes = op.inputs.get("dim")
    if axes in (None, []):
        return int(own.numel())
    return math.prod(int(own.shape[axis]) for axis in axes)


def _of_product(
    op: SeenOp, tensors: Mapping[str, Any], after: Any, at: int, otherwise: NumberKind
) -> NumberKind:
    left, right = (tensors.get(name) for name in PRODUCTS[op.facts.name])
    if left is None or right is None:
        return otherwise
    *batch, i, j = _index_of(after.shape, at)
    terms = left[(*batch, i)].double() * right[(*batch, slice(None), j)].double()
    if bool(terms.isnan().any()):
        return NumberKind.ZERO_TIMES_INF
    both = bool((terms == math.inf).any()) and bool((terms == -math.inf).any())
    return NumberKind.INF_MINUS_INF if both else otherwise


# -- what is changed ------------------------------------------------------------------------------

_TINY = 1e-6


def _try_change(torch: Any, found: Found, trial: Trial) -> None:
    """Make the operation again with the one fact changed that its kind names."""
    if found.kind is NumberKind.UNKNOWN:
        _try_wider(torch, found, trial)
        return
    change = _CHANGES.get(found.kind)
    if change is None:
        return
    found.change = change
    name = found.op.facts.name.removeprefix("_foreach_")
    if change is ChangedFact.DENOMINATOR:
        of = {"addcdiv": "tensor2", "reciprocal": "self", "rsqrt": "self", "pow": "self"}
        wanted = of.get(name, "other")
        found.changed = trial.value(
            lambda n, t: t.masked_fill(t == 0, 1.0) if n == wanted else t,
            lambda n, x: 1.0 if n == wanted and x == 0 else x,
        )
    elif change is ChangedFact.CLAMPED:
        low = _LOGS.get(name, 0.0) + _TINY
        found.changed = trial.value(
            lambda n, t: _inside(t, name) if name in _DOMAINS else t.clamp(min=low)
        )
    elif change is ChangedFact.UNMASKED:
        found.changed = trial.value(lambda n, t: t.masked_fill(t == -math.inf, 0.0))
    else:
        found.changed = trial.value(
            lambda n, t: t.nan_to_num(0.0, 1.0, -1.0),
            lambda n, x: math.copysign(1.0, x) if math.isinf(x) else x,
        )


def _inside(tensor: Any, name: str) -> Any:
    if name == "acosh":
        return tensor.clamp(min=1.0)
    return tensor.clamp(*((_TINY, 1 - _TINY) if name == "logit" else (_TINY - 1, 1 - _TINY)))


_CHANGES = {
    NumberKind.ZERO_OVER_ZERO: ChangedFact.DENOMINATOR,
    NumberKind.OVER_ZERO: ChangedFact.DENOMINATOR,
    NumberKind.LOG_OF_ZERO: ChangedFact.CLAMPED,
    NumberKind.LOG_OF_NEGATIVE: ChangedFact.CLAMPED,
    NumberKind.ROOT_OF_NEGATIVE: ChangedFact.CLAMPED,
    NumberKind.POWER_OF_NEGATIVE: ChangedFact.CLAMPED,
    NumberKind.OUTSIDE_DOMAIN: ChangedFact.CLAMPED,
    NumberKind.MASKED_ROW: ChangedFact.UNMASKED,
    NumberKind.INF_MINUS_INF: ChangedFact.FINITE_INPUTS,
    NumberKind.ZERO_TIMES_INF: ChangedFact.FINITE_INPUTS,
    NumberKind.INF_OVER_INF: ChangedFact.FINITE_INPUTS,
}


def _try_wider(torch: Any, found: Found, trial: Trial) -> None:
    """A finite result in a wider type is an overflow of the type that it had."""
    wide, exact = trial.wider()
    if exact is None:
        if _is_growing(found):
            found.kind = NumberKind.OVERFLOW
            found.limit = float(torch.finfo(getattr(torch, found.result.dtype)).max)
        return
    if not math.isfinite(exact):
        return
    found.kind, found.change, found.wide = NumberKind.OVERFLOW, ChangedFact.WIDER_TYPE, wide
    found.exact = found.changed = exact
    found.limit = float(torch.finfo(getattr(torch, trial.result_dtype)).max)


#: Functions that leave every type of floats for finite arguments.
_GROWING = frozenset({"exp", "exp2", "expm1", "sinh", "cosh", "pow", "mul"})


def _is_growing(found: Found) -> bool:
    name = found.op.facts.name.removeprefix("_foreach_")
    values = [operand.value for operand in found.operands]
    finite = bool(values) and all(map(math.isfinite, values))
    return name in _GROWING and finite and math.isinf(found.result.value)
