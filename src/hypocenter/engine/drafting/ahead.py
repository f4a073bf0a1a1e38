"""Drafts that a device still writes: how many of which request, and how they get into a step.

Launches nothing by itself: `chain.py` does. The host reads them together with the step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hypocenter.base.dtypes import Int32s

#: Puts drafts into a step's token ids: into which of these, and which drafts, counted row by row.
PutDrafts = Callable[[Int32s, Int32s], None]


@dataclass(frozen=True, slots=True)
class ChainRow:
    """Drafts of a request: `num` behind its `num_tokens` tokens, which lie in `blocks`."""

    request_id: int
    num_tokens: int
    num: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """Up to `num` drafts of a request, in column `row`; `ids` has them once they are read."""

    row: int
    num: int
    ids: list[int] = field(default_factory=list)


class DraftsAhead:
    """What `wait` gives, i32 [max_drafts, max_rows], once the device is there, by request.

    `work` is what the draft model's steps did for that, in steps of a single row; None where it
    read a prompt, too. A draft that is none of `num_ids` tokens counts as token 0, as in `place`.
    """

    def __init__(
        self,
        rows: Mapping[int, WrittenRow],
        wait: Callable[[], Int32s],
        place: PutDrafts,
        *,
        max_rows: int,
        num_ids: int,
        work: float | None = None,
    ) -> None:
        self._rows, self._wait, self.place = rows, wait, place
        self._max_rows, self._num_ids, self.work = max_rows, num_ids, work

    def num_of(self, request_id: int) -> int:
        """How many drafts there are of a request."""
        return self._rows[request_id].num if request_id in self._rows else 0

    def sources(self, request_id: int, num: int) -> list[int]:
        """Where the first `num` drafts of a request are, counted row by row."""
        row = self._rows[request_id].row
        return [number * self._max_rows + row for number in range(num)]

    def read(self) -> None:
        """Wait for the drafts; `ids_of` has them then."""
        drafts = self._wait()
        for written in self._rows.values():
            column = drafts[: written.num, written.row].tolist()
            written.ids[:] = [draft if 0 <= draft < self._num_ids else 0 for draft in column]

    def ids_of(self, request_id: int) -> list[int]:
        """The drafts of a request, that were read."""
        return self._rows[request_id].ids


@dataclass(frozen=True, slots=True)
class WrittenDrafts:
    """Drafts of requests by their ids, and those that a device still writes."""

    ids: dict[int, list[int]]
    ahead: DraftsAhead | None = None


NOTHING = WrittenDrafts({})
