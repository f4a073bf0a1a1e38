"""The smallest part of what two sides differ in that explains what they compute: by halves, then
one by one. Who runs them is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


class NoTimeLeft(Exception):
    """Raised by a run that may not begin any more."""


def narrow(
    pieces: Sequence[_T], explains: Callable[[Sequence[_T]], bool]
) -> tuple[tuple[_T, ...], bool]:
    """Pieces that explain all, none of which can be left out, and whether that was shown.

    `explains(some)` says whether exchanging only these makes both sides equal; it is asked once of
    each. No pieces: not even all of them explain it. False with pieces: time ended before.
    """
    left = tuple(pieces)
    known: dict[tuple[_T, ...], bool] = {}

    def is_enough(some: tuple[_T, ...]) -> bool:
        if some not in known:
            known[some] = explains(some)
        return known[some]

    try:
        if not is_enough(left):
            return (), False
        while len(left) > 1:
            half = len(left) // 2
            part = next((part for part in (left[:half], left[half:]) if is_enough(part)), None)
            if part is None:
                break
            left = part
        for piece in left if len(left) > 1 else ():
            others = tuple(each for each in left if each != piece)
            if is_enough(others):
                left = others
    except NoTimeLeft:
        return left, False
    return left, True
