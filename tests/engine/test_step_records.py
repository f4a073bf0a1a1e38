"""What a run writes down of its requests, by which the doctor judges a step's inputs and blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import DEMO

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.base.errors import OutOfBlocks, UsageError
from hypocenter.kernels.sampling.draw import columns_of
from hypocenter.record import recorder, ring
from hypocenter.record.engine_events import (
    Answered,
    BlockChanged,
    BlocksNamed,
    Drawn,
    Entered,
)
from hypocenter.record.events import Called, Stepped
from hypocenter.record.prefixes import split_prefixes
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


def test_how_a_request_ended_is_recorded(
    run_of: Callable[[EngineConfig, Callable[[LLM], object]], Run],
) -> None:
    def use(llm: LLM) -> None:
        llm.generate([PREFIX], PARAMS)
        with pytest.raises(OutOfBlocks):
            llm.generate([PREFIX], SamplingParams(max_tokens=30, ignore_eos=True))

    run = run_of(EngineConfig(context_length=64, kv_tokens=32, num_threads=1), use)
    ends = [event for event in run.events if isinstance(event, Answered)]
    assert [(end.failed, end.num_tokens) for end in ends] == [("", 22), ("OutOfBlocks", 33)]
    assert all(end.digest and end.said for end in ends)


def test_launches_that_several_threads_share_have_their_text_and_names(
    run_of: Callable[[EngineConfig, Callable[[LLM], object]], Run],
) -> None:
    config = EngineConfig(context_length=256, max_batch_tokens=128, num_threads=2)
    prompt = list(range(40, 140))
    run = run_of(config, lambda llm: llm.generate([prompt], SamplingParams(max_tokens=1)))
    launches = [launch for plan in run.plans for launch in plan.launches]
    assert {launch.kernel for launch in launches} >= {"attention", "quantise"}
    assert all(launch.source for launch in launches)
    assert not [one.name for launch in launches for one in launch.arguments if "#" in one.name]


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


def test_blocks_are_recorded_with_the_tokens_that_they_stand_for(
    run_of: Callable[[EngineConfig, Callable[[LLM], object]], Run],
) -> None:
    def use(llm: LLM) -> None:
        llm.generate([PREFIX], PARAMS)
        llm.generate([[*PREFIX[:16], 99, 98]], PARAMS)
        llm.generate([PREFIX[::-1]], PARAMS)

    run = run_of(EngineConfig(context_length=64, num_threads=1), use)
    named = [event for event in run.events if isinstance(event, BlocksNamed)]
    assert [(event.request, event.first, len(event.blocks)) for event in named] == [
        (0, 0, 1), (1, 0, 1), (2, 0, 1),
    ]  # fmt: skip
    filled, adopted, other = (split_prefixes(event.prefixes) for event in named)
    assert filled == adopted != other
    assert named[0].blocks == named[1].blocks != named[2].blocks


def test_draws_are_recorded_with_their_positions_and_what_they_depend_on(
    run_of: Callable[[EngineConfig, Callable[[LLM], object]], Run],
) -> None:
    params = SamplingParams(
        max_tokens=2, ignore_eos=True, logit_bias={5: 1.0}, repeat_penalty=1.2,
        allowed_token_ids=(5, 6, 7),
    )  # fmt: skip
    config = EngineConfig(context_length=64, num_threads=1)
    run = run_of(config, lambda llm: [llm.generate([PREFIX], one) for one in (params, PARAMS)])
    drawn = [event for event in run.events if isinstance(event, Drawn)]
    assert [event.requests for event in drawn] == [(0,), (0,), (1,), (1,)]
    assert [event.positions for event in drawn] == [(20,), (21,), (20,), (21,)]
    told = [(*event.masks, *event.biases, *event.counts) for event in drawn]
    assert all(all(digests) for digests in told[:2])
    assert told[0][:2] == told[1][:2]
    assert told[0][2] != told[1][2]  # one token more
    assert told[2] == told[3] == ("", "", "")


def test_what_fails_before_a_step_is_recorded_with_its_statements(
    run_of: Callable[[EngineConfig, Callable[[LLM], object]], Run],
) -> None:
    def use(llm: LLM) -> None:
        def fail() -> list[object]:
            raise AssertionError("no chunks")

        llm.engine.scheduler.schedule = fail  # type: ignore[assignment]
        with pytest.raises(AssertionError, match="no chunks"):
            llm.generate([PREFIX], PARAMS)

    run = run_of(EngineConfig(context_length=64, num_threads=1), use)
    [called] = [event for event in run.events if isinstance(event, Called)]
    assert called.outcome == "AssertionError: no chunks"
    assert called.raised_in[0].function == "Engine._step"
    assert "self.scheduler.schedule()" in called.raised_in[0].text


def test_what_fails_in_the_making_of_a_request_is_recorded_too(
    run_of: Callable[[EngineConfig, Callable[[LLM], object]], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a form")

    def use(llm: LLM) -> None:
        monkeypatch.setattr("hypocenter.engine.admission.token_rules", fail)
        with pytest.raises(KeyError):
            llm.generate([PREFIX], PARAMS)

    config = EngineConfig(context_length=64, num_threads=1)
    [called] = [event for event in run_of(config, use).events if isinstance(event, Called)]
    assert called.raised_in[0].function == "Admission.request"


def test_a_wrong_call_is_no_defect_of_the_engine(
    run_of: Callable[[EngineConfig, Callable[[LLM], object]], Run],
) -> None:
    def use(llm: LLM) -> None:
        wrong: list[Any] = [[10**9], 7, list(range(1, 100))]
        for prompt in wrong:
            with pytest.raises(UsageError):
                llm.generate(prompt, PARAMS)

    config = EngineConfig(context_length=64, num_threads=1)
    assert not [event for event in run_of(config, use).events if isinstance(event, Called)]


def test_what_fails_while_a_model_is_loaded_is_recorded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a tensor")

    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.delenv("HYPO_RECORD", raising=False)
    recorder.close_recorder()
    opened = recorder.open_recorder()
    assert isinstance(opened, recorder.Recorder)
    monkeypatch.setattr("hypocenter.engine.llm.loaded_runner", fail)
    with pytest.raises(KeyError):
        LLM(DEMO)
    events = ring.read_run(opened.folder).events
    recorder.close_recorder()
    [called] = [event for event in events if isinstance(event, Called)]
    assert called.raised_in[0].function == "LLM.__init__"
