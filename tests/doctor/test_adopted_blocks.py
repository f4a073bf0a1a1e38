"""Blocks that a request adopts, held against the tokens behind which they were filled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from recorded.bundles import REQUEST, Run, decoder, inputs, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.engine_events import BlocksNamed, Entered
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.prefixes import (
    ROTATION,
    SALT,
    SETTINGS,
    BlockPrefixes,
    split_prefixes,
)

DIFFERS = FaultRecord(kind="differs", message="the text is not that of the good run")
NO_REPLAY = ("replay", "hang")
SIZE = 16
TEXT, OTHER = list(range(40)), [9, *range(1, 40)]
#: It reads the first block of request 7, and writes its own.
READER = msgspec.structs.replace(
    REQUEST, id=9, first_position=16, num_tokens=1, blocks=(2, 4), num_adopted=1
)


def prefixes(token_ids: list[int], first: int = 0, stop: int = 1) -> bytes:
    return BlockPrefixes().of_blocks(first, stop, SIZE, token_ids)


def reads(run: Run, plan: int, token_ids: list[int]) -> None:
    """Request 9 adopts block 2 for its first tokens, and runs one more."""
    runs_on(run, plan, prefixes=prefixes(token_ids))


def runs_on(run: Run, plan: int, **named: Any) -> None:
    """It says of block 2 what is `named`."""
    run.emit(BlocksNamed, request=9, blocks=(2,), **named)
    given = inputs(positions=[16], slots=[64], sequence_rows=[0], counts=[1, 1])
    given["block_tables"][0, 1] = 4
    run.run(plan, given, (READER,))


def filled_by_7() -> tuple[Run, int]:
    """Request 7 fills block 2 with the first tokens of TEXT, and leaves it to others."""
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    run.emit(Entered, request=7, num_prompt_tokens=40, settings=(), seed=0)
    run.run(plan, inputs(), (REQUEST,))
    run.emit(BlocksNamed, request=7, blocks=(2,), prefixes=prefixes(TEXT))
    return run, plan


def found_in(run: Run) -> Diagnosis:
    found = diagnose(run.bundle(DIFFERS), without=NO_REPLAY)
    assert all(not rung.left_out or rung.name in NO_REPLAY for rung in found.rungs), found.rungs
    return found


def test_a_block_that_was_filled_behind_other_tokens_is_named() -> None:
    run, plan = filled_by_7()
    reads(run, plan, OTHER)
    root = found_in(run).roots[0]
    assert (root.cause, root.argument) == (Cause.FOREIGN_BLOCK, "block_tables")
    assert "block 2 was filled by request 7 behind other tokens" in root.sentence
    assert "of request 9, which reads it as its block 0" in root.sentence


def test_a_block_that_was_filled_behind_the_same_tokens_is_no_finding() -> None:
    run, plan = filled_by_7()
    reads(run, plan, TEXT)
    found = found_in(run)
    assert not found.roots
    texts = [text for row in found.hypotheses for text in row.evidence]
    assert "1 block that requests adopted had been filled behind just their tokens" in texts
    rows = {row.cause: row.verdict for row in found.hypotheses}
    assert rows[Cause.FOREIGN_BLOCK] is Verdict.REFUTED


def reads_with(there: dict[str, str], here: dict[str, str]) -> Run:
    """Request 9 adopts a block of its own first tokens; each says what its keys were made with."""
    run, plan = filled_by_7()
    filled = run.events.pop()
    run.events.append(msgspec.structs.replace(filled, made_with=there))
    runs_on(run, plan, prefixes=prefixes(TEXT), made_with=here)
    return run


@pytest.mark.parametrize(
    ("there", "here", "named"),
    [
        ({ROTATION: "of short texts"}, {ROTATION: "of long texts"}, ROTATION),
        ({SALT: "aa", SETTINGS: "1"}, {SALT: "bb", SETTINGS: "1"}, SALT),
        ({SALT: "aa", SETTINGS: "1"}, {SALT: "aa", SETTINGS: "1"}, ""),
        ({}, {SALT: "aa"}, ""),
    ],
)
def test_a_block_that_was_made_with_another_setting_is_named(
    there: dict[str, str], here: dict[str, str], named: str
) -> None:
    roots = found_in(reads_with(there, here)).roots
    assert [root.cause for root in roots] == [Cause.FOREIGN_BLOCK] * bool(named)
    for root in roots:
        assert f"block 2 was filled by request 7 with another {named}, and" in root.sentence
        assert f"{named}: {there[named]} when request 7 filled block 2" in root.proof.red


@pytest.mark.parametrize(("settings", "is_wrong"), [("1", False), ("2", True)])
def test_a_block_of_a_process_before_is_held_against_its_settings(
    settings: str, is_wrong: bool
) -> None:
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    run.emit(Entered, request=9, num_prompt_tokens=40, settings=(), seed=0)
    run.emit(BlocksNamed, request=-1, blocks=(2,), prefixes=b"", made_with={SETTINGS: settings})
    runs_on(run, plan, prefixes=prefixes(TEXT), made_with={SETTINGS: "1"})
    roots = found_in(run).roots
    assert bool(roots) == is_wrong
    assert not is_wrong or "a process before with another settings" in roots[0].sentence


def test_a_block_that_was_taken_anew_or_read_back_is_what_its_next_reader_says() -> None:
    run, plan = filled_by_7()
    owner = msgspec.structs.replace(REQUEST, id=8)
    run.run(plan, inputs(), (owner,))
    reads(run, plan, OTHER)
    assert not found_in(run).roots
    run, plan = filled_by_7()
    run.emit(BlocksNamed, request=-1, blocks=(2,), prefixes=b"")
    reads(run, plan, OTHER)
    assert not found_in(run).roots


def test_numbers_of_another_engine_begin_anew() -> None:
    run, plan = filled_by_7()
    run.emit(Entered, request=7, num_prompt_tokens=40, settings=(), seed=0)
    reads(run, plan, OTHER)
    assert not found_in(run).roots


def test_a_prefix_covers_all_tokens_up_to_the_end_of_its_block() -> None:
    both = split_prefixes(prefixes(TEXT, 0, 2))
    other = split_prefixes(prefixes(OTHER, 0, 2))
    assert len(both) == len({*both}) == 2
    assert all(one != two for one, two in zip(both, other, strict=True))
    grown = BlockPrefixes()
    assert grown.of_blocks(0, 1, SIZE, TEXT[:16]) == both[0]
    assert grown.of_blocks(1, 2, SIZE, TEXT) == both[1]
