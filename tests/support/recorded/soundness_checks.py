"""The checks that keep the doctor's corrections from saying what is not so, each to be taken away.

`witness` is a launch of `common_mistakes.py` of which something false is said without the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from hypocenter.doctor.rungs import replays
from hypocenter.doctor.rungs.replaying import (
    index_causes,
    race_causes,
    stride_causes,
    trials,
)
from hypocenter.replay import census


@dataclass(frozen=True)
class Check:
    owner: Any
    name: str
    without: Any
    witness: str

    @contextmanager
    def taken_away(self) -> Iterator[None]:
        with patch.object(self.owner, self.name, self.without):
            yield


def _uncounted(*fields: str) -> Callable[..., census.CensusChange]:
    """The comparison of two replays without some of its counts."""
    change_of = census.change_of

    def change(before: census.Census, after: census.Census) -> census.CensusChange:
        empty = census.CensusChange()
        return replace(change_of(before, after), **{name: getattr(empty, name) for name in fields})

    return change


def _first(found: list[trials.Fitting]) -> list[trials.Fitting]:
    return found[:1]


def _alone(bench: Any, finding: Any, found: Any, fits_of: Any) -> Any:
    return found


def _told(meeting: Any, cause: Any, bench: Any, finding: Any) -> Iterator[Any]:
    yield cause


CHECKS = {
    "accesses inside that are lost": Check(
        census, "change_of", _uncounted("num_lost", "num_unread"), "a sum that ends at none of them"
    ),
    "elements that are written no more": Check(
        census, "change_of", _uncounted("num_unwritten"),
        "a store that ends at none of the numbers that are passed",
    ),
    "accesses that go elsewhere": Check(
        census, "change_of", _uncounted("moved", "num_moved"), "a stride of two tensors"
    ),
    "fixes that fit equally are alternatives": Check(
        trials, "_best", _first, "two numbers that are equal"
    ),
    "fixes are joined until nothing is left": Check(
        replays, "join_fixes", _alone, "the tail of the depth"
    ),
    "an index stays in the axis of its stride": Check(
        stride_causes, "_stays", lambda *a: True, "a stride that the text makes"
    ),
    "an entry moves along an axis": Check(
        index_causes, "is_divided_in", lambda *a: True,
        "rows taken by another stride, with entries that are right",
    ),
    "an entry ends where its own axis does": Check(
        index_causes._Indexed, "has_index_before", lambda *a: False,
        "a slot behind the page that it is in",
    ),
    "programs meet by indices inside their axes": Check(
        race_causes, "_if_inside", _told,
        "a stride of the text, where elements are added to"
    ),
    "programs meet by no table": Check(
        race_causes._Meeting, "tables", [], "ranges of a table that overlap"
    ),
    "those who meet leave nothing unwritten": Check(
        race_causes, "leaves_gaps", lambda *a: False,
        "programs that meet, and elements that nobody writes",
    ),
}  # fmt: skip
