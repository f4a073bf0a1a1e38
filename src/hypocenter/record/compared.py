"""Comparisons of a program's own: one that came out unequal and ended it, and those that passed."""

from __future__ import annotations

from typing import Literal

import msgspec

from hypocenter.record.engine_events import Event

#: Elements that are kept beside the first.
MAX_OTHERS = 16


class ComparedSide(msgspec.Struct, frozen=True, kw_only=True):
    """One of two tensors that were compared: how the program spells it, and what it held.

    `value` is that of the element at which they differ, which lies at `address`. `allocation` is
    the memory, where a launch was given it, else 0. Of whole numbers `others` are address and value
    of some more elements that differ, the same ones on both sides. Of float numbers `data` are the
    bytes of all elements, row by row; empty where they are many, or contents are not kept.
    `divisors` are numbers by which the program takes the tensor apart again, or what it makes of
    it: it computes both the quotient and the remainder.
    """

    name: str
    dtype: str
    value: int | float
    address: int = 0
    allocation: int = 0
    others: tuple[tuple[int, int], ...] = ()
    data: bytes = b""
    divisors: tuple[int, ...] = ()


class ComparedUnequal(Event, frozen=True, kw_only=True, tag=True):
    """The assertion at `site` failed, which compared two tensors of `shape` at `compared_at`.

    `num_different` of `num_elements` differ by more than the comparison allows. `index` is the
    first of them; where it is not known what is allowed, that of the largest difference, and not
    `is_first`. `rtol` (of the second side) and `atol` are what is allowed, None where that is not
    known. What the sides held is from the end of the program, or from the comparison itself.
    """

    site: str
    compared_at: str
    sides: tuple[ComparedSide, ComparedSide]
    shape: tuple[int, ...]
    index: tuple[int, ...]
    num_different: int
    num_elements: int
    is_first: bool = True
    rtol: float | None = None
    atol: float | None = None


#: Of the other side of a comparison: whether it came of the result, or of the same kernel.
SideOrigin = Literal["apart", "derived", "unknown"]


class ComparedEqual(Event, frozen=True, kw_only=True, tag=True):
    """The program compared a tensor that a launch was given with another, and found them equal.

    `allocation` is the memory of the first one, of which `num_elements` of type `dtype` were
    compared at `site`; `other` that of the other side, 0 where no launch was given it. `origin`
    says where that came from. `allowed` is the most that an element might differ by, `largest` the
    largest number of the other side, and `share_unlike` what share of its elements differ by more
    than twice that from the one before, along the axis where most do: with them in another order
    the comparison would fail.
    """

    site: str
    allocation: int
    num_elements: int
    dtype: str = ""
    other: int = 0
    origin: SideOrigin = "unknown"
    allowed: float = 0.0
    largest: float = 0.0
    share_unlike: float = 0.0
