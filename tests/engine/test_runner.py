"""The runner refuses a batch whose indices would lead a kernel astray, and copies nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from repository import DEMO

from hypocenter.base.errors import LaunchRejected
from hypocenter.device import copies
from hypocenter.engine.batch import Batch, BatchLimits, check_batch
from hypocenter.engine.runner import Runner, load_runner
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.config import EngineConfig


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with open_gguf(DEMO) as file:
        yield load_runner(file, EngineConfig(context_length=64, kv_tokens=64))


def _batch(**changes: Any) -> Batch:
    """Two tokens at positions 16 and 17 of a sequence that lies in pages 3 and 1."""
    arrays = {
        "token_ids": [5, 6],
        "positions": [16, 17],
        "slots": [16, 17],
        "sequence_rows": [0, 0],
        "block_tables": [[3, 1]],
        "logit_rows": [1],
    } | changes
    given: dict[str, Any] = {name: np.array(v, np.int32) for name, v in arrays.items()}
    return Batch(**given)


#: A decode step of that sequence.
ONE = {"token_ids": [5], "positions": [16], "slots": [16], "sequence_rows": [0], "logit_rows": [0]}


def test_a_right_batch_runs(runner: Runner) -> None:
    assert runner.run(_batch()).shape == runner.run(_batch(**ONE)).shape == (1, 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [5, 4096]}, r"token_ids\[1\] = 4096, but the vocabulary has 4096"),
        ({"token_ids": [-1, 6]}, r"token_ids\[0\] = -1"),
        ({**ONE, "token_ids": [-1]}, r"token_ids\[0\] = -1"),
        ({**ONE, "slots": [64]}, r"slots\[0\] = 64, but the cache has 64"),
        ({"positions": [15, 16], "block_tables": [[3]]}, "reaches into block 2"),
        ({"positions": [16, 15], "block_tables": [[3]]}, "reaches into block 2"),
        ({"token_ids": []}, "0 tokens, but 1 to 512"),
        ({"positions": [16, 64]}, r"positions\[1\] = 64, but the context has 64"),
        ({"positions": [16]}, "1 positions for 2 tokens"),
        ({"slots": [16]}, "1 slots for 2 tokens"),
        ({"slots": [16, 64]}, r"slots\[1\] = 64, but the cache has 64"),
        ({"slots": [16, 16]}, r"slots\[1\] = 16, but an entry before has the same value"),
        ({"sequence_rows": [0]}, "1 sequence_rows for 2 tokens"),
        ({"sequence_rows": [0, 1]}, r"sequence_rows\[1\] = 1, but block_tables has 1"),
        ({"block_tables": [[3]]}, r"block_tables\[0\] has 1 entries, but its sequence reaches"),
        ({"block_tables": [[3, 4]]}, r"block_tables\[0, 1\] = 4, but the cache's blocks has 4"),
        ({"block_tables": [[3, -1]]}, r"block_tables\[0, 1\] = -1"),
        ({"logit_rows": [2]}, r"logit_rows\[0\] = 2, but the batch has 2"),
    ],
)
def test_a_wrong_batch_is_refused(runner: Runner, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchRejected, match=message):
        runner.run(_batch(**changes))


def test_what_lies_behind_the_last_block_of_a_sequence_may_be_anything(runner: Runner) -> None:
    clean = copies.to_host(runner.run(_batch()))
    logits = copies.to_host(runner.run(_batch(block_tables=[[3, 1, 1_000_000_000, -7]])))
    assert np.array_equal(logits, clean)


def test_all_plans_share_their_logits(runner: Runner) -> None:
    """Each bucket of tokens makes a plan; a buffer for each would hold memory for good."""
    before = {id(plan.result.allocation) for plan in runner._plans.values()}
    runner.run(_batch())
    runner.run(_batch(token_ids=[5], positions=[16], slots=[16], sequence_rows=[0], logit_rows=[0]))
    after = {id(plan.result.allocation) for plan in runner._plans.values()}
    assert len(before) == len(after) == 1


@pytest.mark.parametrize("num_tokens", [40, 400])
def test_the_last_block_of_each_sequence_is_found_among_few_tokens_and_many(
    num_tokens: int,
) -> None:
    """Two sequences whose tokens take turns, the second one from its end on."""
    rows = np.arange(num_tokens, dtype=np.int32) % 2
    positions = np.where(rows == 0, np.arange(num_tokens), num_tokens - np.arange(num_tokens))
    limits = BatchLimits(512, 100, 1024, 1024, 16)

    def check(num_blocks: int) -> None:
        tables = np.zeros((2, num_blocks), np.int32)
        batch = _batch(
            token_ids=rows,
            positions=positions,
            slots=np.arange(num_tokens),
            sequence_rows=rows,
            block_tables=tables,
        )
        check_batch(batch, limits)

    last = num_tokens - 1
    check(last // 16 + 1)
    assert positions.max() == last
    with pytest.raises(LaunchRejected, match=rf"reaches into block {last // 16 + 1}"):
        check(last // 16)
