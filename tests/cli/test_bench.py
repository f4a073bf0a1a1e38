"""`hypo bench` on a device that works while the host goes on: no figure that the device denies."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from repository import DEMO

from hypocenter import LLM
from hypocenter.base.results import Completion, Route
from hypocenter.cli import machine, measured_drafts
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.tool_options import BenchOptions
from hypocenter.cli.verbs import bench
from hypocenter.cli.verbs.bench import Measurement, ModelSize, bandwidth_share, remarks, table
from hypocenter.engine.batch import Batch
from hypocenter.engine.drafting.drafter import Drafter
from hypocenter.engine.drafting.model_drafter import DraftRecord
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.settings.config import EngineConfig

MODEL = ModelSize("llama Q8_0", 1000, 500, bytes_per_token=1000)
STEP_SECONDS = 0.004


class LateRunner:
    """A device that is told in no time, and needs STEP_SECONDS for each step."""

    vocab_size, context_length, block_size, max_batch_tokens = 100, 256, 16, 32
    config = EngineConfig()
    num_state_slots = num_checkpoints = 0
    adapters = None

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self._num_due = 0

    def run(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._num_due += 1

    def wait(self) -> None:
        time.sleep(self._num_due * STEP_SECONDS)
        self._num_due = 0


def measured(**options: Any) -> tuple[LateRunner, list[Measurement]]:
    runner = LateRunner()
    with ProgressDisplay(quiet=True) as progress:
        asked = BenchOptions(repetitions=1, **options)
        return runner, list(bench._measure(cast(Any, runner), asked, progress))


def test_the_clock_stops_when_the_device_has_done_the_work() -> None:
    _, (prompt, decode) = measured(num_prompt=(64,), num_generate=5)
    assert prompt.mean <= 64 / (2 * STEP_SECONDS)
    assert decode.mean <= 1 / STEP_SECONDS


def test_sequences_lie_apart_in_the_cache() -> None:
    runner, found = measured(num_prompt=(0,), num_generate=3, num_sequences=(1, 4), depth=(18,))
    assert [one.name for one in found] == ["tg3 @ d18", "tg3 x4 @ d18"]
    assert found[1].mean <= 4 / STEP_SECONDS
    last = runner.batches[-1]
    assert last.positions.tolist() == [20] * 4
    assert last.slots.tolist() == [20, 52, 84, 116], "32 positions each: two whole blocks"
    assert last.block_tables.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert last.sequence_rows.tolist() == last.logit_rows.tolist() == [0, 1, 2, 3]
    # What lies before them was fed into the very blocks that they read.
    fed = [batch for batch in runner.batches if len(batch.token_ids) == 18]
    assert [batch.slots[0] for batch in fed[-4:]] == [0, 32, 64, 96]
    for batch in fed:
        at = batch.block_tables[0, batch.positions // 16] * 16 + batch.positions % 16
        assert np.array_equal(at, batch.slots)


def test_drafts_are_measured_in_answers_that_are_known_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens with drafts and without; a file's edit has right ones, and a trap none."""
    said: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    complete = Engine.complete

    def listen(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
        found = complete(engine, requests)
        said.setdefault(found[0].prompt_token_ids, []).append(found[0].token_ids)
        return found

    monkeypatch.setattr(Engine, "complete", listen)
    with LLM(device="cpu", num_threads=1, spec="ngram") as llm:
        pairs = {pair.name: pair for pair in measured_drafts.measure(llm, 80, 2, lambda *a: None)}
        texts = list(measured_drafts._texts(llm, 80))
    for text in texts:
        assert text.answer is not None
        assert said[tuple(text.prompt)] == [tuple(text.answer)] * 6
    assert [len(pair.without) for pair in pairs.values()] == [2, 2, 2]
    assert pairs["edit"].num_accepted > 30
    assert (pairs["random"].num_accepted, pairs["trap"].num_accepted) == (0, 0)
    assert pairs["edit"].as_object()["num_drafted"] >= pairs["edit"].num_accepted
    assert f"of {pairs['edit'].num_drafted} drafts right" in pairs["edit"].text


def test_where_nothing_was_drafted_there_is_no_ratio() -> None:
    """What the two runs differ by is then no gain of drafts."""
    none = measured_drafts.Pairs("own", 8, (10.0,), (87.0,), 0, 0)
    assert none.text == "own8: nothing was drafted, so there is no ratio"
    assert none.as_object()["ratio"] is None
    some = measured_drafts.Pairs("own", 8, (10.0,), (20.0,), 4, 0)
    assert "2.00 x" in some.text
    assert some.as_object()["ratio"] == 2.0


def test_a_draft_model_is_measured_by_how_often_it_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held to the text in three places of four: so many drafts are right, and the answer the same,
    as it is where none is right and where nothing is held."""
    monkeypatch.setattr(DraftRecord, "cost", 0.05)
    monkeypatch.setattr(Drafter, "_left", lambda self, num_output, gains=True: math.inf)
    with LLM(device="cpu", num_threads=1, draft_model=str(DEMO)) as llm:
        pairs = {pair.name: pair for pair in measured_drafts.measure(llm, 80, 1, lambda *a: None)}
    known, wrong, own = pairs.values()
    # Behind the first wrong one of a step none counts.
    assert 0.4 < known.num_accepted / known.num_drafted < 0.9
    assert wrong.num_accepted == 0 < wrong.num_drafted
    assert own.num_accepted > 0


def test_which_places_are_right_is_the_same_in_each_run() -> None:
    right = measured_drafts.are_right(4000, 0.75)
    assert right == measured_drafts.are_right(4000, 0.75)
    assert sum(right) / 4000 == pytest.approx(0.75, abs=0.03)
    assert not any(measured_drafts.are_right(100, 0.0))


def test_no_share_is_above_one() -> None:
    def decode(speed: float, num: int = 1) -> Measurement:
        return Measurement("tg8", 8 * num, 0, num, (speed,))

    assert bandwidth_share(MODEL, decode(50.0), 1e5) == pytest.approx(0.5)
    assert bandwidth_share(MODEL, decode(200.0, num=4), 1e5) == pytest.approx(0.5)
    assert bandwidth_share(MODEL, decode(101.0), 1e5) is None
    assert bandwidth_share(MODEL, decode(50.0), None) is None
    assert bandwidth_share(MODEL, Measurement("pp8", 8, 0, 1, (9.0,)), 1e5) is None
    assert "%" not in table(MODEL, [decode(992.0)], 1e5, "cuda:0", 1)
    lines = remarks(MODEL, [decode(992.0)], 1e5, _route("cuda:0"), 2.5)
    assert any("from caches" in line for line in lines)
    assert any("copied on the device" in line for line in lines)


def test_a_simulated_gpu_has_no_bandwidth() -> None:
    lines = remarks(MODEL, [], None, _route("sim:h200"), 2.5)
    assert lines[1] == "sim:h200 is simulated: its speed says nothing of a GPU"


def _route(device: str) -> Route:
    return Route(
        device=device, instruction_set=device, weight_dtype="Q8_0", activation_dtype="I8",
        kv_dtype="f16", num_threads=1, kernels=(), num_graphs=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("level_3", "wanted"),
    [(["32768K"], 256 << 20), (["98304K"] * 12, 2 << 30), ([], 2 << 30)],
)
def test_what_is_read_is_too_much_for_caches(
    level_3: list[str], wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores share each; of a machine that says nothing much is read."""
    for core in range(2 * len(level_3)):
        shared = f"{core // 2 * 2}-{core // 2 * 2 + 1}"
        for index, (level, size) in enumerate((("2", "1024K"), ("3", level_3[core // 2]))):
            cache = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            cache.mkdir(parents=True)
            (cache / "level").write_text(f"{level}\n")
            (cache / "size").write_text(f"{size}\n")
            (cache / "shared_cpu_list").write_text(f"{core if level == '2' else shared}\n")
    found = machine.cache_bytes(tmp_path)
    assert found == (sum(int(size[:-1]) << 10 for size in level_3) or None)
    monkeypatch.setattr(machine, "cache_bytes", lambda: found)
    monkeypatch.setattr(machine, "memory", lambda: {"available_bytes": 64 << 30})
    assert bench.read_bytes() == wanted
    monkeypatch.setattr(machine, "memory", lambda: {"available_bytes": 100 << 20})
    assert bench.read_bytes() == 50 << 20
