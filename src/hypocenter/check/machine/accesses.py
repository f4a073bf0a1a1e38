"""Races and reads of what nobody wrote, from the accesses that a block of machine code made.

Between two barriers nothing orders the waves of a block; nothing orders the blocks of a launch,
but for atomic operations, which are taken to order the blocks that both make them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.check.machine.memory import ArrayRegion
from hypocenter.device.amd import instruction_rows as r
from hypocenter.replay.findings import FindingKind

#: Columns of the executor's log.
_WAVE, _LANE, _ROW, _ADDRESS, _BYTES, _ACTION, _SPACE, _EPOCH, _LEFT = range(9)
_LOCAL = -1
_ATOMICS = (r.ATOMIC, r.SWAP, r.COMPARE_SWAP)
_WRITES = (r.STORE, *_ATOMICS)


@dataclass(frozen=True, slots=True)
class Oddity:
    """One example of what is wrong: the row of code, the lane, and the other side where two are.

    `at` is the byte within the array, or within LDS where `region` is None.
    """

    kind: FindingKind
    region: ArrayRegion | None
    at: int
    num_bytes: int
    row: int
    wave: int
    lane: int
    is_write: bool
    other_row: int | None = None
    other_wave: int | None = None
    other_block: int | None = None


#: Of rows of code that read what nobody had written: the array's name, or None for LDS, and the
#: row; bool[bytes] of what was read so.
UnwrittenBytes = dict[tuple[str | None, int], Array]


class AccessWatch:
    """Follows the blocks of one launch, in the order in which they are run."""

    def __init__(self, regions: Sequence[ArrayRegion], local_bytes: int) -> None:
        self._regions, self._local_bytes = regions, local_bytes
        self._atomic_blocks: set[int] = set()
        self.unwritten: UnwrittenBytes = {}

    def note_block(self, number: int, log: Array) -> Iterator[Oddity]:
        """What is wrong with the accesses of the block of that number; each place of code once."""
        if np.isin(log[:, _ACTION], _ATOMICS).any():
            self._atomic_blocks.add(number)
        inside = log[:, _ADDRESS] + log[:, _BYTES] <= self._local_bytes
        # A load straight to LDS fills words that no entry of the log tells of.
        is_filled = bool((log[:, _ACTION] == r.TO_LOCAL).any())
        yield from self._of_local(log[(log[:, _SPACE] == _LOCAL) & inside], is_filled=is_filled)
        outer = log[(log[:, _SPACE] != _LOCAL) & (log[:, _SPACE] != r.SCRATCH)]
        for region in self._regions:
            held = (outer[:, _ADDRESS] >= region.address) & (outer[:, _ADDRESS] < region.end)
            if held.any():
                yield from self._of_region(region, number, outer[held])

    def _of_region(self, region: ArrayRegion, number: int, log: Array) -> Iterator[Oddity]:
        at, entry = _bytes_of(log, region.address)
        writes = np.isin(log[entry, _ACTION], _WRITES)
        yield from self._of_unwritten(region, log, at, entry, region.is_known)
        yield from _races_of_waves(region, log, at, entry)
        yield from _two_writers(region, log, at, entry)
        is_atomic = np.isin(log[entry, _ACTION], _ATOMICS)
        yield from self._races_of_blocks(region, number, log, at, entry, writes, is_atomic)
        region.is_known[at[writes]] = True

    def _races_of_blocks(
        self,
        region: ArrayRegion,
        number: int,
        log: Array,
        at: Array,
        entry: Array,
        writes: Array,
        is_atomic: Array,
    ) -> Iterator[Oddity]:
        plain_reads, plain_writes = ~writes, writes & ~is_atomic
        writer = region.writer[at]
        # A read of what another block wrote, and a write of what another block read.
        after_write = plain_reads & (writer >= 0) & (writer != number)
        lowest, highest = region.first_reader[at], region.last_reader[at]
        is_read_elsewhere = (lowest >= 0) & ((lowest != number) | (highest != number))
        after_read = plain_writes & is_read_elsewhere
        # Two writes count where they leave different bytes.
        twice = plain_writes & (writer >= 0) & (writer != number)
        twice &= region.data[at] != region.shadow[at]
        for wrong, other in ((after_write, writer), (after_read, lowest), (twice, writer)):
            for place in _one_a_row(log, entry, wrong):
                block = int(other[place])
                if block == number:
                    block = int(highest[place])
                if {block, number} <= self._atomic_blocks:
                    continue
                kind = FindingKind.RACE
                yield _oddity(kind, region, log[entry[place]], int(at[place]), other_block=block)
        written, read = at[plain_writes], at[plain_reads]
        region.writer[written] = number
        region.shadow[written] = region.data[written]
        unread = region.first_reader[read] < 0
        region.first_reader[read[unread]] = number
        region.last_reader[read] = number

    def _of_local(self, log: Array, *, is_filled: bool) -> Iterator[Oddity]:
        if not len(log):
            return
        at, entry = _bytes_of(log, 0)
        raced = [*_races_of_waves(None, log, at, entry), *_two_writers(None, log, at, entry)]
        yield from raced
        # What a wave reads too early may be written later: that is the race.
        if not raced and not is_filled:
            yield from self._of_unwritten(None, log, at, entry, np.zeros(self._local_bytes, bool))

    def _of_unwritten(
        self, region: ArrayRegion | None, log: Array, at: Array, entry: Array, known: Array
    ) -> Iterator[Oddity]:
        """Reads of bytes that were not known and that no earlier access of this block wrote.

        An atomic operation reads what it then writes.
        """
        writes, is_atomic = (np.isin(log[entry, _ACTION], these) for these in (_WRITES, _ATOMICS))
        unknown = (~writes | is_atomic) & ~known[at]
        if not unknown.any():
            return
        first_write = np.full(len(known), len(log), np.int64)
        np.minimum.at(first_write, at[writes], entry[writes])
        wrong = unknown & (first_write[at] >= entry)
        for place in _one_a_row(log, entry, wrong):
            row, name = int(log[entry[place], _ROW]), None if region is None else region.name
            read = self.unwritten.setdefault((name, row), np.zeros(len(known), bool))
            read[at[wrong & (log[entry, _ROW] == row)]] = True
            yield _oddity(FindingKind.UNINITIALISED_READ, region, log[entry[place]], int(at[place]))


def _bytes_of(log: Array, first: int) -> tuple[Array, Array]:
    """Each byte of each access: where it lies, and the number of the access."""
    sizes = log[:, _BYTES]
    entry = np.repeat(np.arange(len(log)), sizes)
    inner = np.arange(len(entry)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return log[entry, _ADDRESS] - first + inner, entry


def _races_of_waves(
    region: ArrayRegion | None, log: Array, at: Array, entry: Array
) -> Iterator[Oddity]:
    """Bytes that a wave writes and another one reads with no barrier between.

    A wave that reads what it then changes by an atomic operation, as a loop of compare and swap
    begins, is ordered with others that change it so.
    """
    action, wave, epoch = (log[entry, column] for column in (_ACTION, _WAVE, _EPOCH))
    if wave.min() == wave.max():
        return
    writes = np.isin(action, _WRITES)
    key = at * (int(epoch.max()) + 1) + epoch
    keys, number = np.unique(key, return_inverse=True)
    lowest = np.full(len(keys), 1 << 30)
    highest = np.full(len(keys), -1)
    np.minimum.at(lowest, number[writes], wave[writes])
    np.maximum.at(highest, number[writes], wave[writes])
    writer = np.where(lowest[number] != wave, lowest[number], highest[number])
    wrong = ~writes & (highest[number] >= 0) & (writer != wave)
    if not wrong.any():
        return
    is_atomic = np.isin(action, _ATOMICS)
    is_plainly_written = np.zeros(len(keys), bool)
    is_plainly_written[number[writes & ~is_atomic]] = True
    own = number * (int(wave.max()) + 1) + wave
    wrong &= is_plainly_written[number] | ~np.isin(own, own[is_atomic])
    for place in _one_a_row(log, entry, wrong):
        same = np.flatnonzero((number == number[place]) & writes & (wave == writer[place]))
        other = log[entry[same[0]]]
        yield _oddity(
            FindingKind.RACE,
            region,
            log[entry[place]],
            int(at[place]),
            other_row=int(other[_ROW]),
            other_wave=int(other[_WAVE]),
        )


def _two_writers(
    region: ArrayRegion | None, log: Array, at: Array, entry: Array
) -> Iterator[Oddity]:
    """Bytes that two waves leave otherwise with no barrier between; which stays, time decides.

    Atomic operations are no such writes among each other. What a wave writes before its first
    one, beside those of another wave, is: a counter that is set to zero too late.
    """
    is_plain = log[:, _ACTION] == r.STORE
    writes = np.flatnonzero(np.isin(log[entry, _ACTION], _WRITES))
    if not is_plain.any() or log[:, _WAVE].min() == log[:, _WAVE].max():
        return
    of = entry[writes]
    inner = at[writes] - (log[of, _ADDRESS] - (log[entry[0], _ADDRESS] - at[0]))
    held = log[of, _LEFT + inner // 8] >> (8 * (inner % 8)) & 255
    place = at[writes] * (int(log[:, _EPOCH].max()) + 1) + log[of, _EPOCH]
    num_waves = int(log[:, _WAVE].max()) + 1
    key = place * num_waves + log[of, _WAVE]
    # Of each wave its first and its last write of a byte.
    keys, first = np.unique(key, return_index=True)
    last = len(key) - 1 - np.unique(key[::-1], return_index=True)[1]
    starts_plain, ends_plain = is_plain[of[first]], is_plain[of[last]]
    same = keys[1:] // num_waves == keys[:-1] // num_waves
    both_plain = ends_plain[1:] & ends_plain[:-1]
    differ = both_plain & (held[last[1:]] != held[last[:-1]])
    # Only who wrote plainly before all else meets the atomic operation of another wave unordered.
    mixed = starts_plain[1:] != starts_plain[:-1]
    pairs = np.flatnonzero(same & (differ | mixed))
    if not pairs.size:
        return
    chosen = np.where(mixed, np.where(starts_plain[1:], first[1:], first[:-1]), last[1:])[pairs]
    others = np.where(mixed, np.where(starts_plain[1:], first[:-1], first[1:]), last[:-1])[pairs]
    for number in _one_a_row(log, of[chosen], np.full(len(chosen), True)):
        other = log[of[others[number]]]
        yield _oddity(
            FindingKind.RACE,
            region,
            log[of[chosen[number]]],
            int(at[writes[chosen[number]]]),
            other_row=int(other[_ROW]),
            other_wave=int(other[_WAVE]),
        )


def _one_a_row(log: Array, entry: Array, wrong: Array) -> Iterator[int]:
    """Of the bytes that are wrong the first of each row of code."""
    places = np.flatnonzero(wrong)
    if places.size:
        _, first = np.unique(log[entry[places], _ROW], return_index=True)
        yield from (int(places[number]) for number in np.sort(first))


def _oddity(
    kind: FindingKind,
    region: ArrayRegion | None,
    entry: Array,
    at: int,
    *,
    other_row: int | None = None,
    other_wave: int | None = None,
    other_block: int | None = None,
) -> Oddity:
    return Oddity(
        kind,
        region,
        at,
        int(entry[_BYTES]),
        int(entry[_ROW]),
        int(entry[_WAVE]),
        int(entry[_LANE]),
        int(entry[_ACTION]) in _WRITES,
        other_row,
        other_wave,
        other_block,
    )
