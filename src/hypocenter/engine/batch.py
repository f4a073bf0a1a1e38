"""A batch: what of which requests one step runs, as arrays, and what must hold of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hypocenter.dtypes import Int32s
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.request import Request
from hypocenter.engine.state_slots import StateSlots
from hypocenter.errors import LaunchRejected
from hypocenter.record.events import RequestRecord
from hypocenter.record.recorder import current
from hypocenter.refusals import (
    BatchSize,
    EntryOutOfRange,
    EntryRepeated,
    TableTooShort,
    WrongCount,
)

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
    #: Of each row of block_tables, where layers carry a state: whose it is, and in which slot.
    owners: tuple[int, ...] = ()
    state_slots: Int32s | None = None  # [num_sequences]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The positions [start, stop) of a request, to run in one step.

    `samples`: a token is chosen after it. Settled here, because the request grows by it.
    `ids_on_device`: its one token is chosen by the step before, which may still run.
    """

    request: Request
    start: int
    stop: int
    samples: bool
    ids_on_device: bool = False

    @classmethod
    def next_of(cls, request: Request, num_tokens: int) -> Chunk:
        """The next `num_tokens` pending tokens of a request."""
        reaches_end = num_tokens == request.num_pending
        start = request.num_computed
        return cls(request, start, start + num_tokens, reaches_end and not request.is_full)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_kept(self) -> int:
        """Its first so many tokens have logits that the request keeps."""
        return max(min(self.stop, self.request.num_kept) - self.start, 0)

    @property
    def token_ids(self) -> list[int]:
        """Its tokens; 0 for one that only the device knows."""
        return [0] if self.ids_on_device else self.request.token_ids[self.start : self.stop]

    def record(self, row: int, cache: KVCache) -> RequestRecord:
        """What is written down of it, which has row `row` of the block table."""
        return RequestRecord(
            id=self.request.id,
            row=row,
            first_position=self.start,
            num_tokens=self.num_tokens,
            blocks=cache.blocks(self.request.id),
            num_adopted=cache.num_adopted(self.request.id),
            samples=self.samples,
            num_kept=self.num_kept,
            digest="" if self.ids_on_device else self.request.digest(),
        )


def make_batch(chunks: list[Chunk], cache: KVCache) -> Batch:
    """Lay the chunks out as one batch.

    Rows of the logits are in the order of the chunks: one of each chunk that samples, and then all
    that are kept.
    """
    # Lists, for most chunks are of one token, which Python adds sooner than numpy gets going.
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sequence_rows: list[int] = []
    drawn_rows: list[int] = []
    kept_rows: list[int] = []
    tables, requests = [], []
    is_recorded = current().is_on
    for row, chunk in enumerate(chunks):
        placement = cache.retrieve(chunk.request.id, chunk.start, chunk.stop)
        kept_rows += range(len(token_ids), len(token_ids) + chunk.num_kept)
        token_ids += chunk.token_ids
        positions += range(chunk.start, chunk.stop)
        slots += placement.slots
        sequence_rows += [row] * chunk.num_tokens
        tables.append(placement.block_table)
        if chunk.samples:
            drawn_rows.append(len(token_ids) - 1)
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
        owners=tuple(chunk.request.id for chunk in chunks) if cache.states else (),
        state_slots=_state_slots(chunks, cache.states) if cache.states else None,
    )


def _state_slots(chunks: list[Chunk], states: StateSlots) -> Int32s:
    return np.array([states.slot_of(chunk.request.id) for chunk in chunks], np.int32)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What the numbers of a batch must stay below: sizes of model, context and cache."""

    max_batch_tokens: int
    vocab_size: int
    context_length: int
    num_blocks: int
    block_size: int
    #: 0 where no layer carries a state.
    num_state_slots: int = 0


def check_batch(batch: Batch, limits: BatchLimits) -> None:
    """Raises LaunchRejected for the first index of a batch that lies outside what it indexes."""
    num_tokens = len(batch.token_ids)
    if not 1 <= num_tokens <= limits.max_batch_tokens:
        size = BatchSize(num_tokens=num_tokens, max_tokens=limits.max_batch_tokens)
        raise LaunchRejected("step", size)
    for name in ("positions", "slots", "sequence_rows"):
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
    if limits.num_state_slots:
        _check_state_slots(batch, limits.num_state_slots)
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


def _check_state_slots(batch: Batch, num_slots: int) -> None:
    slots, num_sequences = batch.state_slots, len(batch.block_tables)
    num_entries = 0 if slots is None else len(slots)
    if slots is None or num_entries != num_sequences:
        count = WrongCount(
            argument="state_slots", num=num_entries, wanted=num_sequences, of="sequences"
        )
        raise LaunchRejected("step", count)
    _check_range("state_slots", slots, num_slots, "the states")
    if len(np.unique(slots)) != num_entries:
        raise LaunchRejected("step", _first_repeated("state_slots", slots))


def _last_positions(rows: Int32s, positions: Int32s) -> dict[int, int]:
    """The last position of each row."""
    if len(rows) == 1:
        return {rows.item(): positions.item()}
    last: dict[int, int] = {}
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        last[row] = max(last.get(row, 0), position)
    return last


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
