"""What a run writes down of its requests, by which the doctor judges a step's inputs and blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from repository import DEMO

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.kernels.sampling.draw import columns_of
from hypocenter.record import recorder, ring
from hypocenter.record.engine.engine_events import BlockChanged, Entered
from hypocenter.record.events import (
    Stepped,
)
from hypocenter.record.ring import Run

PREFIX = list(range(40, 60))
PARAMS = SamplingParams(temperature=0.5, top_k=7, seed=9, max_tokens=2, ignore_eos=True)


@pytest.fixture
def run_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[EngineConfig, Callable[[LLM], object]], Run]:
    """What is recorded of what is done with the bundled model."""
    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.delenv("HYPO_RECORD", raising=False)
    recorder.close_recorder()

    def run(config: EngineConfig, use: Callable[[LLM], object]) -> Run:
        with LLM(DEMO, config) as llm:
            use(llm)
        opened = recorder.current()
        assert isinstance(opened, recorder.Recorder)
        found = ring.read_run(opened.folder)
        recorder.close_recorder()
        return found

    return run


def test_a_request_is_recorded_with_what_it_draws_by_and_when(
    run_of: Callable[[EngineConfig, Callable[[LLM], object]], Run],
) -> None:
    config = EngineConfig(context_length=64, max_batch_tokens=8, num_threads=1)
    run = run_of(config, lambda llm: llm.generate([PREFIX], PARAMS))
    [entered] = [event for event in run.events if isinstance(event, Entered)]
    assert entered.settings == tuple(map(float, columns_of(PARAMS)))
    assert (entered.seed, entered.num_prompt_tokens) == (9, len(PREFIX))
    steps = [event.requests[0] for event in run.events if isinstance(event, Stepped)]
    assert [step.num_tokens for step in steps] == [8, 8, 4, 1]
    assert [step.samples for step in steps] == [False, False, True, True]
    assert {step.num_kept for step in steps} == {0}


def test_a_traced_run_tells_of_a_kept_block_that_was_written(
    run_of: Callable[[EngineConfig, Callable[[LLM], object]], Run],
) -> None:
    def use(llm: LLM, *, writes: bool) -> None:
        llm.generate([PREFIX], PARAMS)
        watch = llm.engine.runner.page_watch
        assert watch is not None
        if writes:
            watch._pages[1].data[0] += 1
        llm.generate([PREFIX], PARAMS)

    config = EngineConfig(context_length=64, launch_mode="traced", num_threads=1)
    quiet = run_of(config, lambda llm: use(llm, writes=False))
    assert not [event for event in quiet.events if isinstance(event, BlockChanged)]
    run = run_of(config, lambda llm: use(llm, writes=True))
    [changed] = [event for event in run.events if isinstance(event, BlockChanged)]
    tensors = {tensor.id: tensor.name for tensor in run.tensors}
    assert (tensors[changed.tensor], changed.block) == ("k_cache.1", 0)
    assert changed.kept_in < changed.step
