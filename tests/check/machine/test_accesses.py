"""Races of a block and of two, from logs of accesses that are written here by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hypocenter.base.dtypes import Array
from hypocenter.check.machine.accesses import AccessWatch
from hypocenter.check.machine.memory import ArgumentMemory
from hypocenter.device.amd import instruction_rows as r
from hypocenter.replay.findings import FindingKind

LOAD, STORE, ATOMIC = r.LOAD, r.STORE, r.ATOMIC
LOCAL = -1


def log_of(*accesses: tuple[int, int, int, int], space: int = LOCAL, address: int = 64) -> Array:
    """Accesses of four bytes to one place: wave, action, barriers before it, what it leaves."""
    rows = [
        (wave, 0, number, address, 4, action, space, epoch, left, 0)
        for number, (wave, action, epoch, left) in enumerate(accesses)
    ]
    return np.array(rows, np.int64)


@pytest.mark.parametrize(("accesses", "is_race"), [
    ([(0, STORE, 0, 5), (1, STORE, 0, 6)], True),
    ([(0, STORE, 0, 5), (1, STORE, 0, 5)], False),  # both leave the same
    ([(0, STORE, 0, 5), (1, STORE, 1, 6)], False),  # a barrier stands between
    ([(0, STORE, 0, 5), (0, STORE, 0, 6)], False),  # one wave is in order
    # The last of each wave counts.
    ([(0, STORE, 0, 1), (0, STORE, 0, 5), (1, STORE, 0, 5)], False),
    # A counter is set to zero by one wave while others count already; and after a barrier.
    ([(0, STORE, 0, 0), (0, ATOMIC, 0, 1), (1, ATOMIC, 0, 2)], True),
    ([(0, STORE, 0, 0), (0, ATOMIC, 1, 1), (1, ATOMIC, 1, 2)], False),
    # Who has taken a lock by an atomic operation may give it back by a plain store.
    ([(0, ATOMIC, 0, 1), (0, STORE, 0, 0), (1, ATOMIC, 0, 1), (1, STORE, 0, 0)], False),
])  # fmt: skip
def test_two_waves_that_write_one_element(
    accesses: list[tuple[int, int, int, int]], is_race: bool
) -> None:
    watch = AccessWatch((), 1024)
    # Two atomic operations on what nobody wrote are told as well, where there is no race.
    found = [
        oddity
        for oddity in watch.note_block(0, log_of(*accesses))
        if oddity.kind is FindingKind.RACE
    ]
    assert len(found) == is_race
    for oddity in found:
        assert (oddity.is_write, {oddity.wave, oddity.other_wave}) == (True, {0, 1})
        assert oddity.at == 64


@pytest.mark.parametrize(("first", "is_race"), [
    # A loop of compare and swap loads first what it then changes.
    ([(0, LOAD, 0, 0), (0, ATOMIC, 0, 1), (1, LOAD, 0, 0), (1, ATOMIC, 0, 2)], False),
    # One that only looks is not ordered with it, nor is one beside a plain write.
    ([(0, ATOMIC, 0, 1), (1, LOAD, 0, 0)], True),
    ([(0, LOAD, 0, 0), (0, STORE, 0, 1), (1, LOAD, 0, 0), (1, ATOMIC, 0, 2)], True),
])  # fmt: skip
def test_a_wave_that_reads_what_another_changes_by_an_atomic_operation(
    first: list[tuple[int, int, int, int]], is_race: bool
) -> None:
    found = list(AccessWatch((), 1024).note_block(0, log_of((2, STORE, 5, 0), *first)))
    assert any(oddity.kind is FindingKind.RACE for oddity in found) == is_race


@pytest.mark.parametrize(("second", "is_race"), [(6, True), (5, False)])
def test_two_blocks_that_write_one_element(second: int, is_race: bool) -> None:
    out = np.zeros(8, np.int32)
    memory = ArgumentMemory({"out": out})
    watch, address = AccessWatch(memory.held, 0), memory.held[0].address
    found = []
    for block, left in enumerate((5, second)):
        out[2] = left
        log = log_of((0, STORE, 0, left), space=r.GLOBAL, address=address + 8)
        found += list(watch.note_block(block, log))
    assert [(oddity.kind, oddity.other_block) for oddity in found] == [
        (FindingKind.RACE, 0)
    ] * is_race


@pytest.mark.parametrize(("accesses", "is_told"), [
    ([(0, ATOMIC, 0, 1)], True),
    ([(0, STORE, 0, 0), (0, ATOMIC, 1, 1)], False),
    ([(0, LOAD, 0, 0), (0, STORE, 0, 1)], True),
])  # fmt: skip
def test_a_read_of_what_nobody_wrote_an_atomic_one_among_them(
    accesses: list[tuple[int, int, int, int]], is_told: bool
) -> None:
    watch = AccessWatch((), 1024)
    found = list(watch.note_block(0, log_of(*accesses)))
    assert [oddity.kind for oddity in found] == [FindingKind.UNINITIALISED_READ] * is_told
    bytes_read = [np.flatnonzero(read).tolist() for read in watch.unwritten.values()]
    assert bytes_read == [[64, 65, 66, 67]] * is_told


def test_bytes_of_wide_stores_are_held_against_each_other() -> None:
    """Of 16 bytes the last four differ, which another wave writes by itself."""
    wide = (0, 0, 0, 64, 16, STORE, LOCAL, 0, 0, 7 << 32)
    for left, is_race in ((7, False), (9, True)):
        log = np.array([wide, (1, 0, 1, 76, 4, STORE, LOCAL, 0, left, 0)], np.int64)
        assert bool(list(AccessWatch((), 1024).note_block(0, log))) == is_race
