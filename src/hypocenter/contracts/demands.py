"""What a contract is made of: tensors, numbers, and relations between them; and its expressions.

Checks nothing by itself: `contract.py` does, by functions that `contract_source.py` writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType

Symbols = Mapping[str, Any]

#: An axis that is one symbol.
SYMBOL = re.compile(r"[a-z_][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Index:
    """The values of an index tensor: each lies in 0 .. `bound` - 1, or is the `sentinel`.

    `bound` is an expression over the contract's symbols, `of` says what is indexed, for the
    message. `live` marks the entries that the kernel will read (all when None): a function of the
    values of every tensor and scalar, giving a mask that broadcasts to the tensor's shape.
    """

    bound: str
    of: str
    sentinel: int | None = None
    live: Callable[[Symbols], Array] | None = None
    unique: bool = False
    monotone: bool = False


@dataclass(frozen=True, slots=True)
class Reach:
    """Which elements a kernel writes, where that is not all of the live rows; the rest stays.

    `of` says it, for the declaration. `mask` is a function of the values of every index tensor, of
    scalars and sizes, giving a mask that broadcasts to the live rows.
    """

    of: str
    mask: Callable[[Symbols], Array]


@dataclass(frozen=True, slots=True)
class Arg:
    """One tensor argument.

    `shape` is a comma-separated list of symbols (one name = one value within a call), numbers, and
    expressions over symbols bound before; `>= expression` asks for at least that much. `layout` is
    `contiguous`, `rows` (the last axis has stride 1), `pages` (so have the last two together) or
    `any`. `access` is read, write or both.
    `fills` says how far the last axis is written where that is not to its end, `reach` what is
    written where values decide it; `hides` that -infinity is among it, for what must not count.
    """

    name: str
    dtypes: tuple[DType, ...]
    shape: str
    access: str = "read"
    layout: str = "contiguous"
    alignment_bytes: int = 4
    optional: bool = False
    index: Index | None = None
    fills: str = ""
    reach: Reach | None = None
    hides: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis.strip() for axis in self.shape.split(","))


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number: `condition` is an expression over symbols that holds for right values."""

    name: str
    condition: str = "True"
    limit: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A relation between symbols, with the sentence that says it."""

    condition: str
    limit: str


@dataclass(frozen=True, slots=True)
class Apart:
    """Two tensors that must not overlap: the one is written while the other is still read."""

    written: str
    read: str


def live_counts(rows: str, count: int | None = None) -> Arg:
    """The tensor that says how many tokens [0] and how many logit rows [1] of a step are live.

    The kernel reads entry `count`, or the one that its scalar `count` names; it must not exceed
    `rows`, the symbol of the axis that it bounds.
    """

    def live_entries(values: Symbols) -> Array:
        entry: int = values["count"] if count is None else count
        return np.array([entry == 0, entry == 1])

    index = Index(f"{rows} + 1", "a step of that size", live=live_entries)
    return Arg("counts", (DType.I32,), "2", index=index)


#: Which entry of `counts` a kernel reads.
COUNT = Scalar("count", "count in (0, 1)", "must be 0 or 1")


def live_rows(name: str, count: int = 0) -> Callable[[Symbols], Array]:
    """The mask of the first counts[count] entries of the index tensor `name`."""
    return lambda values: np.arange(len(values[name])) < values["counts"][count]


def evaluate(expression: str, values: Symbols) -> int | None:
    """An expression of a contract; None where it names what is not among `values`."""
    try:
        return int(eval(expression.strip(), {}, dict(values)))
    except (NameError, TypeError, ZeroDivisionError):
        return None


def holds(condition: str, values: Symbols) -> bool:
    """Whether a condition of a contract holds; one over values that are not there does."""
    return not is_broken(lambda: not eval(condition, {}, dict(values)))


def names_in(expression: str) -> tuple[str, ...]:
    """The names in an expression of a contract, in order."""
    parts = ast.walk(ast.parse(expression, mode="eval"))
    found = [(part.col_offset, part.id) for part in parts if isinstance(part, ast.Name)]
    return tuple(dict.fromkeys(name for _, name in sorted(found)))


def is_broken(test: Callable[[], bool]) -> bool:
    """Whether a demand is broken; one over what is not known is not."""
    try:
        return test()
    except (NameError, TypeError):
        return False
    except ZeroDivisionError:
        return True
