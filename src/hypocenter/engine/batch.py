"""A batch: what of which requests one step runs, as arrays, and what must hold of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hypocenter.base.dtypes import Float32s, Int32s
from hypocenter.base.errors import LaunchRejected
from hypocenter.base.refusals import (
    BatchSize,
    EntryOutOfRange,
    EntryRepeated,
    TableTooShort,
    WrongCount,
)
from hypocenter.engine.drafting.ahead import DraftsAhead
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.request import Request
from hypocenter.engine.state_ledger import BatchStates
from hypocenter.engine.state_slots import StateSlots
from hypocenter.record.events import RequestRecord
from hypocenter.record.recorder import current

#: Up to so many numbers Python itself is done before numpy gets going.
_FEW_NUMBERS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tokens of one step, of any number of sequences; every array is i32.

    `slots` says where each token's key and value go, `sequence_rows` which row of `block_tables`
    it belongs to, `logit_rows` of which tokens the logits are wanted: those that a token is drawn
    from, and then those that are kept. Entries of `block_tables` beyond a sequence's blocks are -1.
    """

    token_ids: Int32s  # [num_tokens]
    positions: Int32s  # [num_tokens]
    slots: Int32s  # [num_tokens]
    sequence_rows: Int32s  # [num_tokens]
    block_tables: Int32s  # [num_sequences, max_blocks_per_sequence]
    logit_rows: Int32s  # [num_logit_rows]
    #: What a recorder writes down of the requests; empty where nothing is recorded.
    requests: tuple[RequestRecord, ...] = ()
    #: The device has the token ids: it chose them in a step that may still run.
    ids_on_device: bool = False
    #: Puts drafts that the device has among the token ids, once all others are there.
    put_drafts: Callable[[], None] | None = None
    #: Of each row of block_tables, where layers carry a state.
    states: BatchStates | None = None
    #: Whether its texts are rotated as texts beyond the original context are; all of them or none.
    is_long: bool = False
    #: Of each token, which of its request's two texts it is of, 0 or 1, where vectors are made.
    text_kinds: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    #: Of each token, the row of `HiddenStates` that stands for the token before it, where the model
    #: is a head that drafts.
    hidden_rows: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    #: Of each row of block_tables, what each adapter counts, f32; None where no request has any.
    adapter_scales: Float32s | None = None

    @property
    def last_seen(self) -> Int32s:
        """The position of the last token of each token's text, all of which the batch has."""
        last = np.zeros(len(self.block_tables), np.int32)
        np.maximum.at(last, self.sequence_rows, self.positions)
        seen: Int32s = last[self.sequence_rows]
        return seen


@dataclass(frozen=True, slots=True)
class Chunk:
    """The positions [start, stop) of a request, to run in one step.

    `samples`: a token is chosen after it. Settled here, because the request grows by it.
    `ids_on_device`: its one token is chosen by the step before, which may still run. A copy of its
    state is left in `checkpoint_slot`, as it is before the position `checkpoint_at` (0: nowhere).

    Its last tokens are `drafts`, which are tried: a token is chosen before each, and after the
    last one. `masks` say which may be, where a form or a rule does; there are none without drafts.
    With `ahead` the device has the drafts, and each counts as 0 until they are read. Its first
    `num_again` tokens were computed before, but states go on from before them.
    """

    request: Request
    start: int
    stop: int
    samples: bool
    ids_on_device: bool = False
    checkpoint_slot: int = 0
    checkpoint_at: int = 0
    drafts: tuple[int, ...] = ()
    masks: tuple[Int32s | None, ...] = ()
    ahead: DraftsAhead | None = None
    num_again: int = 0

    @classmethod
    def next_of(cls, request: Request, num_tokens: int) -> Chunk:
        """The next `num_tokens` pending tokens of a request, behind those that run again."""
        samples = num_tokens == request.num_pending and not request.is_full
        start, num_again = request.num_computed, request.num_again
        stop = start + num_tokens
        return cls(request, start - num_again, stop, samples, num_again=num_again)

    def leaving(self, checkpoint: tuple[int, int] | None) -> Chunk:
        """The same, leaving its state in a slot, and before which position; None: as it is."""
        if checkpoint is None:
            return self
        slot, position = checkpoint
        return replace(self, checkpoint_slot=slot, checkpoint_at=position)

    def trying(
        self,
        drafts: Sequence[int],
        masks: Sequence[Int32s | None],
        ahead: DraftsAhead | None = None,
    ) -> Chunk:
        """The same, with drafts behind its last token."""
        stop, masks = self.stop + len(drafts), tuple(masks)
        return replace(self, stop=stop, drafts=tuple(drafts), masks=masks, ahead=ahead)

    def knowing_drafts(self) -> Chunk:
        """The same once its drafts are read."""
        if self.ahead is None:
            return self
        drafts = self.ahead.ids_of(self.request.id)[: len(self.drafts)]
        return replace(self, drafts=tuple(drafts), ahead=None)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_new(self) -> int:
        """How many of its tokens are the request's, and run for the first time."""
        return self.num_tokens - self.num_again - len(self.drafts)

    @property
    def num_drawn(self) -> int:
        """How many tokens are chosen."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def is_answer(self) -> bool:
        """Whether it is the last token of an answer, and perhaps drafts."""
        return self.num_new == 1

    @property
    def num_kept(self) -> int:
        """So many of its tokens have logits that the request keeps, from `first_kept` on."""
        return max(min(self.stop, self.request.num_kept) - self.first_kept, 0)

    @property
    def first_kept(self) -> int:
        """The position of the first of these."""
        return max(self.start, self.request.first_kept)

    @property
    def token_ids(self) -> list[int]:
        """Its tokens; 0 for one that only the device knows."""
        if self.ids_on_device:
            return [0]
        return [*self.request.token_ids[self.start : self.stop], *self.drafts]

    @property
    def text_kinds(self) -> list[int]:
        """The text, the first or the second one, that each of its tokens is of."""
        num_first = max(min(self.stop, self.request.num_first) - self.start, 0)
        return [0] * num_first + [1] * (self.num_tokens - num_first)

    def record(self, row: int, cache: KVCache) -> RequestRecord:
        """What is written down of it, which has row `row` of the block table."""
        states = cache.states
        begin = states.source_of(self.request.id) if states else None
        return RequestRecord(
            id=self.request.id,
            row=row,
            first_position=self.start,
            num_tokens=self.num_tokens,
            blocks=cache.blocks(self.request.id),
            num_adopted=cache.num_adopted(self.request.id),
            state_slot=states.slot_of(self.request.id) if states else None,
            state_source=begin.checkpoint.slot if begin else None,
            left_by=begin.checkpoint.owner if begin else None,
            samples=self.samples,
            num_drafts=len(self.drafts),
            num_kept=self.num_kept,
            first_kept=self.first_kept - self.start if self.num_kept else 0,
            digest="" if self.ids_on_device else self.request.digest(),
        )


def make_batch(chunks: list[Chunk], cache: KVCache) -> Batch:
    """Lay the chunks out as one batch.

    Rows of the logits are in the order of the chunks: of each chunk that samples its last token,
    or that and its drafts, and then all that are kept.
    """
    # Lists, for most chunks are of one token, which Python adds sooner than numpy gets going.
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sequence_rows: list[int] = []
    drawn_rows: list[int] = []
    kept_rows: list[int] = []
    text_kinds: list[int] = []
    targets: list[int] = []
    sources: list[int] = []
    tables, requests = [], []
    is_recorded = current().is_on
    for row, chunk in enumerate(chunks):
        placement = cache.retrieve(chunk.request.id, chunk.start, chunk.stop)
        first_kept = len(token_ids) + chunk.first_kept - chunk.start
        kept_rows += range(first_kept, first_kept + chunk.num_kept)
        if chunk.request.pooling is not None:
            text_kinds += chunk.text_kinds
        token_ids += chunk.token_ids
        if chunk.ahead is not None:
            targets += range(len(token_ids) - len(chunk.drafts), len(token_ids))
            sources += chunk.ahead.sources(chunk.request.id, len(chunk.drafts))
        positions += range(chunk.start, chunk.stop)
        slots += placement.slots
        sequence_rows += [row] * chunk.num_tokens
        tables.append(placement.block_table)
        drawn_rows += range(len(token_ids) - chunk.num_drawn, len(token_ids))
        if is_recorded:
            requests.append(chunk.record(row, cache))
    if len(tables) == 1:
        block_tables = tables[0][None].copy()
    else:
        block_tables = np.full((len(tables), max(map(len, tables))), -1, np.int32)
        for row, table in enumerate(tables):
            block_tables[row, : len(table)] = table
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        sequence_rows=np.array(sequence_rows, np.int32),
        block_tables=block_tables,
        logit_rows=np.array(drawn_rows + kept_rows, np.int32),
        requests=tuple(requests),
        ids_on_device=any(chunk.ids_on_device for chunk in chunks),
        put_drafts=_putting(chunks, targets, sources),
        states=_states_of(chunks, cache.states) if cache.states else None,
        is_long=chunks[0].request.uses_long_factors,
        text_kinds=np.array(text_kinds, np.int32),
        adapter_scales=adapter_scales_of([chunk.request for chunk in chunks]),
    )


def _putting(
    chunks: list[Chunk], targets: list[int], sources: list[int]
) -> Callable[[], None] | None:
    """What puts the drafts that the device has into a step; None where it has none."""
    ahead = next((chunk.ahead for chunk in chunks if chunk.ahead is not None), None)
    if ahead is None:
        return None
    places = np.array(targets, np.int32), np.array(sources, np.int32)
    return functools.partial(ahead.place, *places)


def adapter_scales_of(requests: Sequence[Request]) -> Float32s | None:
    """f32 [num_requests, num_adapters]: what each adapter counts for each request; None where all
    have none."""
    each = [request.adapter_scales for request in requests]
    if not any(each):
        return None
    scales = np.zeros((len(each), max(map(len, each))), np.float32)
    for row, given in enumerate(each):
        scales[row, : len(given)] = given
    return scales


def _states_of(chunks: list[Chunk], states: StateSlots) -> BatchStates:
    """Where the chunks' states are; what they begin with is theirs from now on."""
    found = []
    first = 0
    for chunk in chunks:
        slot = states.slot_of(chunk.request.id)
        begin = states.pop_source(chunk.request.id)
        source, digest = (begin.checkpoint.slot, begin.digest) if begin else (slot, b"")
        stop = first + chunk.checkpoint_at - chunk.start if chunk.checkpoint_at else 0
        found.append((chunk.request.id, slot, source, chunk.checkpoint_slot, stop, digest))
        first += chunk.num_tokens
    owners, slots, sources, checkpoints, stops, digests = zip(*found, strict=True)
    is_spare = tuple(bool(chunk.drafts) for chunk in chunks)
    return BatchStates(
        owners=owners,
        slots=np.array(slots, np.int32),
        sources=np.array(sources, np.int32),
        checkpoint_slots=np.array(checkpoints, np.int32),
        checkpoint_stops=np.array(stops, np.int32),
        digests=digests,
        named=states.pop_news(),
        is_spare=is_spare,
    )


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What the numbers of a batch must stay below: sizes of model, context and cache."""

    max_batch_tokens: int
    vocab_size: int
    context_length: int
    num_blocks: int
    block_size: int
    #: Those of checkpoints, too; 0 where no layer carries a state.
    num_state_slots: int = 0
    #: Of `HiddenStates`; 0 where the model is no head that drafts.
    num_hidden_rows: int = 0


def check_batch(batch: Batch, limits: BatchLimits) -> None:
    """Raises LaunchRejected for the first index of a batch that lies outside what it indexes."""
    num_tokens = len(batch.token_ids)
    if not 1 <= num_tokens <= limits.max_batch_tokens:
        size = BatchSize(num_tokens=num_tokens, max_tokens=limits.max_batch_tokens)
        raise LaunchRejected("step", size)
    scales = batch.adapter_scales
    if scales is not None and len(scales) != len(batch.block_tables):
        wanted = len(batch.block_tables)
        count = WrongCount(
            argument="adapter_scales", num=len(scales), wanted=wanted, of="sequences"
        )
        raise LaunchRejected("step", count)
    each_token = ["positions", "slots", "sequence_rows"]
    each_token += ["hidden_rows"] if limits.num_hidden_rows else []
    for name in each_token:
        num_entries = len(getattr(batch, name))
        if num_entries != num_tokens:
            count = WrongCount(argument=name, num=num_entries, wanted=num_tokens, of="tokens")
            raise LaunchRejected("step", count)
    if num_tokens > 1 and len(np.unique(batch.slots)) != num_tokens:
        raise LaunchRejected("step", _first_repeated("slots", batch.slots))
    _check_range("token_ids", batch.token_ids, limits.vocab_size, "the vocabulary")
    _check_range("positions", batch.positions, limits.context_length, "the context")
    _check_range("slots", batch.slots, limits.num_blocks * limits.block_size, "the cache")
    _check_range("sequence_rows", batch.sequence_rows, len(batch.block_tables), "block_tables")
    _check_range("logit_rows", batch.logit_rows, num_tokens, "the batch")
    if limits.num_hidden_rows:
        _check_range("hidden_rows", batch.hidden_rows, limits.num_hidden_rows, "what is left")
    if limits.num_state_slots:
        _check_states(batch.states, len(batch.block_tables), num_tokens, limits.num_state_slots)
    # Entries of a table behind its sequence's last block are unused and may hold anything.
    for row, position in _last_positions(batch.sequence_rows, batch.positions).items():
        num_used = position // limits.block_size + 1
        if num_used > batch.block_tables.shape[1]:
            short = TableTooShort(
                argument="block_tables",
                row=row,
                num_entries=batch.block_tables.shape[1],
                num_needed=num_used,
            )
            raise LaunchRejected("step", short)
        used = batch.block_tables[row, :num_used]
        _check_range("block_tables", used, limits.num_blocks, "the cache's blocks", row=row)


def _check_states(
    states: BatchStates | None, num_sequences: int, num_tokens: int, num_slots: int
) -> None:
    if states is None:
        wanted = num_sequences
        count = WrongCount(argument="state_slots", num=0, wanted=wanted, of="sequences")
        raise LaunchRejected("step", count)
    arrays = {
        "state_slots": states.slots,
        "state_sources": states.sources,
        "checkpoint_slots": states.checkpoint_slots,
        "checkpoint_stops": states.checkpoint_stops,
    }
    for name, values in arrays.items():
        if len(values) != num_sequences:
            count = WrongCount(argument=name, num=len(values), wanted=num_sequences, of="sequences")
            raise LaunchRejected("step", count)
        if name == "checkpoint_stops":
            _check_range(name, values, num_tokens + 1, "the step")
        else:
            _check_range(name, values, num_slots, "the states")
    left = states.checkpoint_slots[states.checkpoint_stops > 0]
    for name, values in (("state_slots", states.slots), ("checkpoint_slots", left)):
        if len(np.unique(values)) != len(values):
            raise LaunchRejected("step", _first_repeated(name, values))


def _last_positions(rows: Int32s, positions: Int32s) -> dict[int, int]:
    """The last position of each row."""
    if len(rows) == 1:
        return {rows.item(): positions.item()}
    if len(rows) <= _FEW_NUMBERS:
        last: dict[int, int] = {}
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            last[row] = max(last.get(row, 0), position)
        return last
    known, places = np.unique(rows, return_inverse=True)
    highest = np.zeros(len(known), positions.dtype)
    np.maximum.at(highest, places, positions)
    return dict(zip(known.tolist(), highest.tolist(), strict=True))


def _first_repeated(name: str, values: Int32s) -> EntryRepeated:
    """The first entry that one before has too."""
    seen: set[int] = set()
    for at, value in enumerate(values.tolist()):
        if value in seen:
            return EntryRepeated(argument=name, entry=(at,), value=value)
        seen.add(value)
    raise AssertionError(f"no two {name} are equal")


def _check_range(name: str, values: Int32s, bound: int, of: str, *, row: int | None = None) -> None:
    """Raises LaunchRejected for an entry outside 0 .. bound - 1; `row` is that of a table."""
    if values.size <= _FEW_NUMBERS:
        known = values.tolist()
        is_within = not known or (min(known) >= 0 and max(known) < bound)
    else:
        is_within = bool(values.min() >= 0 and values.max() < bound)
    if not is_within:
        first = int(np.flatnonzero((values < 0) | (values >= bound))[0])
        entry = (first,) if row is None else (row, first)
        value = int(values[first])
        outside = EntryOutOfRange(argument=name, entry=entry, value=value, of=of, bound=bound)
        raise LaunchRejected("step", outside)
