"""What the state in each slot stands for, by the batches that ran; who gets which is elsewhere.

`state_slots.py` says which slot a request should have. The ledger knows what was done: a batch that
would go on from a state of another request, of other tokens, or of fewer of them, does not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hypocenter.base.dtypes import Int32s
from hypocenter.base.errors import LaunchRejected
from hypocenter.base.refusals import (
    Refused,
    StateElsewhere,
    StateInUse,
    StateOfAnother,
    StateOfOtherTokens,
)


@dataclass(frozen=True, slots=True, eq=False)
class BatchStates:
    """The states of a batch: the owner of each sequence, and where its state is read and left.

    slots, sources, checkpoint_slots, checkpoint_stops i32 [num_sequences], as
    `kernels/recurrent/sequences.py` has them. `digests` are of the tokens before a checkpoint that
    is read; empty where a sequence goes on from its own slot. `named`: digests of the tokens that
    earlier batches left in slots of checkpoints. `is_spare`: the checkpoint of a sequence is left
    in the second slot that its request has; empty where none is.
    """

    owners: tuple[int, ...]
    slots: Int32s
    sources: Int32s
    checkpoint_slots: Int32s
    checkpoint_stops: Int32s
    digests: tuple[bytes, ...]
    named: tuple[tuple[int, bytes], ...] = ()
    is_spare: tuple[bool, ...] = ()

    @classmethod
    def own(cls, owners: tuple[int, ...], slots: Int32s) -> BatchStates:
        """Each goes on from its own slot, and none leaves a checkpoint."""
        none = np.zeros_like(slots)
        return cls(owners, slots, slots, none, none, (b"",) * len(slots))


class _Standing(NamedTuple):
    """Whose state it is, of how many tokens, and of which; no digest: they have not settled."""

    owner: int
    num_tokens: int
    digest: bytes = b""


class Span(NamedTuple):
    """A sequence of a batch: whose, in which slot, and its positions."""

    owner: int
    slot: int
    start: int
    stop: int
    source: int
    digest: bytes
    #: A checkpoint's slot, and how many tokens of the sequence it is of; 0: there is none.
    checkpoint: int
    num_saved: int
    is_spare: bool


class StateLedger:
    """The owners of slots 0 .. num_running - 1, and of `num_checkpoints` behind them."""

    def __init__(self, num_running: int, num_checkpoints: int = 0) -> None:
        self._num_running = num_running
        self._standing: list[_Standing | None] = [None] * (num_running + num_checkpoints)

    def check(self, states: BatchStates, rows: Int32s, positions: Int32s) -> None:
        """Whether a batch may run; rows and positions are of each token.

        Raises LaunchRejected where tokens of a sequence do not follow one another, a slot is none,
        another's or of the other kind, or a state stands at another position or behind other tokens
        than its sequence goes on from.
        """
        steps, num_sequences = np.diff(rows), len(states.slots)
        is_in_order = rows[0] == 0 and rows[-1] + 1 == num_sequences == len(states.owners)
        if not is_in_order or ((steps < 0) | (steps > 1)).any():
            what = f"must be 0 to {num_sequences - 1} in order, for so many states and owners"
            raise LaunchRejected("step", Refused(argument="sequence_rows", what=what))
        if (np.diff(positions)[steps == 0] != 1).any():
            what = "must count up by one within a sequence"
            raise LaunchRejected("step", Refused(argument="positions", what=what))
        starts = sequence_starts(rows, num_sequences)
        spans = spans_of(states, starts, positions)
        used = {slot for span in spans for slot in (span.source, span.slot)}
        for row, span in enumerate(spans):
            self._require_kinds(row, span, used)
            self._require_fit(row, span)

    def _require_kinds(self, row: int, span: Span, used: set[int]) -> None:
        """A state is left in a slot for requests, and copied into one that nobody uses."""

        def refuse(argument: str, slot: int, what: str) -> None:
            refusal = StateInUse(argument=argument, row=row, slot=slot, what=what)
            raise LaunchRejected("step", refusal)

        if span.slot >= self._num_running:
            refuse("state_slots", span.slot, "which is kept for checkpoints")
        if span.source != span.slot and span.source < self._num_running:
            refuse("state_sources", span.source, "which is kept for requests that run")
        if not span.num_saved:
            return
        if not span.start < span.num_saved <= span.stop:
            what = f"{span.num_saved} tokens, of which this step takes {span.start} to {span.stop}"
            refuse("checkpoint_stops", span.checkpoint, f"for a state of {what}")
        if span.is_spare and span.checkpoint >= self._num_running:
            refuse("checkpoint_slots", span.checkpoint, "which is kept for checkpoints")
        if not span.is_spare and span.checkpoint < self._num_running:
            refuse("checkpoint_slots", span.checkpoint, "which is kept for requests that run")
        if span.checkpoint in used:
            refuse("checkpoint_slots", span.checkpoint, "which a sequence of the step uses")

    def _require_fit(self, row: int, span: Span) -> None:
        """The kernels read nothing of a state at position 0, so anything may be there."""
        if span.start == 0:
            return
        is_own = span.source == span.slot
        argument = "state_slots" if is_own else "state_sources"
        standing = self._standing[span.source]
        if standing is None or (is_own and standing.owner != span.owner):
            held_by = None if standing is None else standing.owner
            another = StateOfAnother(
                argument=argument, row=row, slot=span.source, owner=held_by, wanted=span.owner
            )
            raise LaunchRejected("step", another)
        if not is_own and (not span.digest or standing.digest != span.digest):
            other = StateOfOtherTokens(
                argument=argument,
                row=row,
                slot=span.source,
                owner=standing.owner,
                digest=standing.digest.hex()[:8],
                wanted=span.owner,
                wanted_digest=span.digest.hex()[:8],
            )
            raise LaunchRejected("step", other)
        if standing.num_tokens != span.start:
            elsewhere = StateElsewhere(
                argument=argument,
                row=row,
                slot=span.source,
                num_tokens=standing.num_tokens,
                position=span.start,
            )
            raise LaunchRejected("step", elsewhere)

    def name(self, named: tuple[tuple[int, bytes], ...]) -> None:
        """The tokens behind which slots of checkpoints stand are known by now."""
        for slot, digest in named:
            if (standing := self._standing[slot]) is not None:
                self._standing[slot] = standing._replace(digest=digest)

    def note(self, spans: list[Span], *, is_whole: bool) -> None:
        """A batch was launched; with `is_whole` false nobody knows what its states are now."""
        for span in spans:
            self._standing[span.slot] = _Standing(span.owner, span.stop) if is_whole else None
            if span.num_saved:
                saved = _Standing(span.owner, span.num_saved)
                self._standing[span.checkpoint] = saved if is_whole else None


def spans_of(states: BatchStates, starts: Int32s, positions: Int32s) -> list[Span]:
    """The sequences of a batch, in order; starts as of `sequence_starts`."""
    num = len(states.slots)
    firsts, lengths = positions[starts[:num]], starts[1 : num + 1] - starts[:num]
    saved = firsts + states.checkpoint_stops - starts[:num]
    saved[states.checkpoint_stops == 0] = 0
    columns = (
        states.owners,
        states.slots.tolist(),
        firsts.tolist(),
        (firsts + lengths).tolist(),
        states.sources.tolist(),
        states.digests,
        states.checkpoint_slots.tolist(),
        saved.tolist(),
        states.is_spare or (False,) * num,
    )
    return [Span(*values) for values in zip(*columns, strict=True)]


def sequence_starts(rows: Int32s, max_sequences: int) -> Int32s:
    """Where the tokens of each sequence begin, i32 [max_sequences + 1]; behind the last sequence
    how many tokens there are."""
    found = np.searchsorted(rows, np.arange(max_sequences + 1))
    return found.astype(np.int32)
