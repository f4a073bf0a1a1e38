"""Which request has which slot of the states, and what the state in each slot stands for.

A layer without attention carries a state from token to token of a sequence. Blocks of the KV cache
can be read by others from any of them on; a state is of use to its own request alone, and only
where that goes on behind the last token that went into it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hypocenter.dtypes import Int32s
from hypocenter.errors import IntegrityError, LaunchRejected
from hypocenter.refusals import Refused, StateElsewhere, StateOfAnother


class StateSlots:
    """A slot for each request that has tokens in the cache. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0, num_slots
        self.num_slots = num_slots
        # Taken from the end: low slots first, and those given back last are used again first.
        self._free = list(range(num_slots - 1, -1, -1))
        self._of_request: dict[int, int] = {}

    def take(self, request_id: int) -> None:
        """Give the request a slot. There is one, for as many requests as there are slots run."""
        assert request_id not in self._of_request, request_id
        assert self._free, (request_id, self.num_slots)
        self._of_request[request_id] = self._free.pop()

    def give_back(self, request_id: int) -> None:
        self._free.append(self._of_request.pop(request_id))

    def slot_of(self, request_id: int) -> int:
        return self._of_request[request_id]

    def check_integrity(self, owners: set[int]) -> None:
        """Each slot is free or one request's, which are `owners`; raises IntegrityError."""
        if (having := set(self._of_request)) != owners:
            raise IntegrityError(
                f"states: requests {sorted(having)} have slots, but {sorted(owners)} have blocks"
            )
        seen = sorted([*self._free, *self._of_request.values()])
        if seen != list(range(self.num_slots)):
            raise IntegrityError(
                f"states: slots {seen} are free or taken, but there are {self.num_slots}, each once"
            )


class _Standing(NamedTuple):
    """Whose state it is, and of how many tokens."""

    owner: int
    num_tokens: int


class Span(NamedTuple):
    """A sequence of a batch: whose, in which slot, and its positions."""

    owner: int
    slot: int
    start: int
    stop: int


class StateLedger:
    """What the state in each slot stands for, by the batches that ran."""

    def __init__(self, num_slots: int) -> None:
        self._standing: list[_Standing | None] = [None] * num_slots

    def check(
        self, owners: tuple[int, ...], slots: Int32s, rows: Int32s, positions: Int32s
    ) -> None:
        """Whether a batch may run; owners and slots are of each row of the block tables, rows and
        positions of each token.

        Raises LaunchRejected where tokens of a sequence do not follow one another, a slot is none
        or another's, or a state stands at another position than its sequence goes on from.
        """
        steps = np.diff(rows)
        is_in_order = rows[0] == 0 and rows[-1] + 1 == len(slots) == len(owners)
        if not is_in_order or ((steps < 0) | (steps > 1)).any():
            what = f"must be 0 to {len(slots) - 1} in order, for so many states and owners"
            raise LaunchRejected("step", Refused(argument="sequence_rows", what=what))
        if (np.diff(positions)[steps == 0] != 1).any():
            what = "must count up by one within a sequence"
            raise LaunchRejected("step", Refused(argument="positions", what=what))
        starts = sequence_starts(rows, len(slots))
        for row, span in enumerate(spans_of(owners, slots, starts, positions)):
            self._require_fit(row, span)

    def _require_fit(self, row: int, span: Span) -> None:
        """The kernels read nothing of a state at position 0, so anything may be there."""
        standing = self._standing[span.slot]
        if span.start == 0:
            return
        if standing is None or standing.owner != span.owner:
            held_by = None if standing is None else standing.owner
            another = StateOfAnother(
                argument="state_slots", row=row, slot=span.slot, owner=held_by, wanted=span.owner
            )
            raise LaunchRejected("step", another)
        if standing.num_tokens != span.start:
            elsewhere = StateElsewhere(
                argument="state_slots",
                row=row,
                slot=span.slot,
                num_tokens=standing.num_tokens,
                position=span.start,
            )
            raise LaunchRejected("step", elsewhere)

    def note(self, spans: list[Span], *, is_whole: bool) -> None:
        """A batch was launched; with `is_whole` false nobody knows what its states are now."""
        for span in spans:
            self._standing[span.slot] = _Standing(span.owner, span.stop) if is_whole else None


def spans_of(
    owners: tuple[int, ...], slots: Int32s, starts: Int32s, positions: Int32s
) -> list[Span]:
    """The sequences of a batch, in order; starts as of `sequence_starts`."""
    begins, ends = starts[: len(slots)], starts[1 : len(slots) + 1]
    firsts, lengths = positions[begins].tolist(), (ends - begins).tolist()
    return [
        Span(owner, slot, first, first + length)
        for owner, slot, first, length in zip(owners, slots.tolist(), firsts, lengths, strict=True)
    ]


def sequence_starts(rows: Int32s, max_sequences: int) -> Int32s:
    """Where the tokens of each sequence begin, i32 [max_sequences + 1]; behind the last sequence
    how many tokens there are."""
    found = np.searchsorted(rows, np.arange(max_sequences + 1))
    return found.astype(np.int32)
