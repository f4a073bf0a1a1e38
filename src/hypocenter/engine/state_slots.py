"""Which request has which slot of the states, and which states are kept for others: checkpoints.

A layer without attention carries a state from token to token of a sequence. Blocks of the KV cache
can be read by others from any of them on; a state is of use only where tokens go on behind the last
one that went into it. So at the end of some blocks a copy is left in a slot of its own, under the
digest of that block; whoever begins with the same tokens goes on from there.

    take       gives a request its slot, and the checkpoint that it begins with
    reserve    a slot for the state that a step will leave behind so many tokens
    settle     that step has run: its checkpoints are found under their digests from now on
    drop       the block of a digest is gone, and a state is of no use without it
    go_back    drafts were wrong: the request goes on from the state before them

With drafts a request has a second slot, a spare one. A step leaves in it the state before the
drafts, and in the first one that behind them.

Steps run in the order in which they were made. So a slot may be given to the next checkpoint as
soon as every step that reads it is made. What a slot really holds, `ledger.py` knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hypocenter.base.errors import IntegrityError


@dataclass(slots=True)
class Checkpoint:
    """The state behind the first `num_tokens` of `owner`; one that does not `last` goes when the
    same request leaves the next."""

    slot: int
    owner: int
    num_tokens: int
    lasts: bool


class StateSource(NamedTuple):
    """What a request begins with, and the digest of the block before it."""

    checkpoint: Checkpoint
    digest: bytes


class StateSlots:
    """Slots 0 .. num_running - 1 for requests with tokens in the cache, and `num_checkpoints`
    behind them. Not thread-safe."""

    def __init__(
        self, num_running: int, num_checkpoints: int = 0, *, has_spares: bool = False
    ) -> None:
        """`has_spares`: each request has two of the `num_running` slots."""
        assert num_running > 0, num_running
        self.num_running, self.num_checkpoints = num_running, num_checkpoints
        # Taken from the end: low slots first, and those given back last are used again first.
        self._free = list(range(num_running - 1, -1, -1))
        self._of_request: dict[int, int] = {}
        self._has_spares = has_spares
        self._spares: dict[int, int] = {}
        self._blank = list(range(num_running + num_checkpoints - 1, num_running - 1, -1))
        #: Of steps that have not settled, by request.
        self._pending: dict[int, list[Checkpoint]] = {}
        #: By digest; the one to go first comes first. A dict for its order.
        self._kept: dict[bytes, Checkpoint] = {}
        #: Of requests whose first step is not made: what it will read.
        self._sources: dict[int, StateSource] = {}
        #: Digests that the ledger has not been told of, by slot.
        self._news: dict[int, bytes] = {}

    @property
    def num_kept(self) -> int:
        """Checkpoints that a request may find."""
        return len(self._kept)

    def has(self, digest: bytes) -> bool:
        """Whether there is a checkpoint behind the block of that digest."""
        return digest in self._kept

    def take(self, request_id: int, digest: bytes | None = None) -> None:
        """Give the request a slot. There is one, for as many requests as there are slots run.

        With a digest it goes on from that checkpoint, which stays until its first step is made.
        """
        assert request_id not in self._of_request, request_id
        assert self._free, (request_id, self.num_running)
        self._of_request[request_id] = self._free.pop()
        if self._has_spares:
            self._spares[request_id] = self._free.pop()
        if digest is not None:
            checkpoint = self._kept[digest] = self._kept.pop(digest)
            checkpoint.lasts = True  # it has been of use to somebody
            self._sources[request_id] = StateSource(checkpoint, digest)

    def give_back(self, request_id: int, *, forget: bool = False) -> None:
        """Gives a request's slot back. With `forget` nobody finds any checkpoint that it has
        left."""
        if self._has_spares:
            self._free.append(self._spares.pop(request_id))
        self._free.append(self._of_request.pop(request_id))
        self.pop_source(request_id)
        for checkpoint in self._pending.pop(request_id, ()):
            self._blank.append(checkpoint.slot)
        if forget:
            for digest in [d for d, kept in self._kept.items() if kept.owner == request_id]:
                self.drop(digest)

    def slot_of(self, request_id: int) -> int:
        return self._of_request[request_id]

    def spare_of(self, request_id: int) -> int:
        """Where a step leaves the state before the drafts of a request."""
        return self._spares[request_id]

    def go_back(self, request_id: int) -> None:
        """Have the request go on from what the last step left in its spare slot."""
        own, spares = self._of_request, self._spares
        own[request_id], spares[request_id] = spares[request_id], own[request_id]

    def source_of(self, request_id: int) -> StateSource | None:
        """What `pop_source` will give."""
        return self._sources.get(request_id)

    def pop_source(self, request_id: int) -> StateSource | None:
        """What the step that is being made reads for the request, if not its own slot."""
        source = self._sources.pop(request_id, None)
        if source is not None and source.digest not in self._kept:
            self._free_checkpoint(source.checkpoint)
        return source

    def reserve(self, request_id: int, num_tokens: int, *, lasts: bool) -> int | None:
        """A slot in which a step that is being made leaves the state behind `num_tokens`.

        None where no slot can be had: all are waited for by steps, or last and this one does not.
        """
        slot = self._blank_slot(request_id, lasts)
        if slot is not None:
            checkpoint = Checkpoint(slot, request_id, num_tokens, lasts)
            self._pending.setdefault(request_id, []).append(checkpoint)
        return slot

    def _blank_slot(self, request_id: int, lasts: bool) -> int | None:
        if not self._blank:
            wanted = {source.digest for source in self._sources.values()}
            unread = [digest for digest in self._kept if digest not in wanted]
            passing = [digest for digest in unread if not self._kept[digest].lasts]
            # One that passes never takes the place of one that lasts: or those of many running
            # answers would push out what all their prompts began with.
            goes = self._passing_of(request_id) or next(iter(passing or unread * lasts), None)
            if goes is not None:
                self.drop(goes)
        return self._blank.pop() if self._blank else None

    def _passing_of(self, request_id: int) -> bytes | None:
        """The checkpoint that the request's next one takes the place of."""
        return next(
            (d for d, kept in self._kept.items() if kept.owner == request_id and not kept.lasts),
            None,
        )

    def settle(self, request_id: int, digests: Sequence[bytes], block_size: int) -> None:
        """The request's leading blocks have these digests, and are kept."""
        left = []
        for checkpoint in self._pending.pop(request_id, ()):
            number = checkpoint.num_tokens // block_size
            if number > len(digests):
                left.append(checkpoint)
            elif (digest := digests[number - 1]) in self._kept:
                self._kept[digest].lasts |= checkpoint.lasts
                self._blank.append(checkpoint.slot)
            else:
                if (passing := self._passing_of(request_id)) is not None:
                    self.drop(passing)
                self._kept[digest] = checkpoint
                self._news[checkpoint.slot] = digest
        if left:
            self._pending[request_id] = left

    def drop(self, digest: bytes) -> None:
        """Nobody finds that checkpoint any more; nothing happens where there is none."""
        if (checkpoint := self._kept.pop(digest, None)) is not None:
            self._free_checkpoint(checkpoint)

    def _free_checkpoint(self, checkpoint: Checkpoint) -> None:
        """One that is not kept any more, once nobody begins with it."""
        if all(source.checkpoint is not checkpoint for source in self._sources.values()):
            self._news.pop(checkpoint.slot, None)
            self._blank.append(checkpoint.slot)

    def pop_news(self) -> tuple[tuple[int, bytes], ...]:
        """Slots of checkpoints and their digests that have settled since this was asked last."""
        news = tuple(self._news.items())
        self._news.clear()
        return news

    def check_integrity(self, owners: set[int], kept_blocks: Mapping[bytes, int]) -> None:
        """Each slot is free or one request's, which are `owners`; each checkpoint is free, waited
        for, or behind one of the blocks that are kept. Raises IntegrityError."""
        if (having := set(self._of_request)) != owners:
            raise IntegrityError(
                f"states: requests {sorted(having)} have slots, but {sorted(owners)} have blocks"
            )
        if self._has_spares and set(self._spares) != owners:
            raise IntegrityError(
                f"states: requests {sorted(self._spares)} have a spare slot, but {sorted(owners)} "
                "have blocks"
            )
        running = [*self._free, *self._of_request.values(), *self._spares.values()]
        self._check_slots(running, 0, self.num_running)
        pending = [checkpoint for several in self._pending.values() for checkpoint in several]
        read = [source.checkpoint for source in self._sources.values()]
        checkpoints = {
            id(checkpoint): checkpoint for checkpoint in (*pending, *self._kept.values(), *read)
        }
        taken = [checkpoint.slot for checkpoint in checkpoints.values()]
        self._check_slots([*self._blank, *taken], self.num_running, self.num_checkpoints)
        for digest, checkpoint in self._kept.items():
            if digest not in kept_blocks:
                raise IntegrityError(
                    f"states: checkpoint {checkpoint.slot} is found under digest "
                    f"{digest.hex()[:8]}, under which no block is kept"
                )
        if lost := {checkpoint.owner for checkpoint in pending} - owners:
            raise IntegrityError(f"states: checkpoints are waited for by requests {sorted(lost)}")
        if lost := set(self._sources) - owners:
            raise IntegrityError(f"states: requests {sorted(lost)} begin with checkpoints unasked")

    @staticmethod
    def _check_slots(found: list[int], first: int, number: int) -> None:
        if (seen := sorted(found)) != list(range(first, first + number)):
            raise IntegrityError(
                f"states: slots {seen} are free or taken, but there are {number} from {first} on, "
                "each once"
            )
