"""Steps that are launched before those before them are settled: same answers, same record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from models.tiny_gguf import WIDTH, write_tiny
from pretended.fake_runner import END_ID, POISON_ID, batches_of, expected_output, fake_engine

from hypocenter import LLM
from hypocenter.base.errors import BadLogits
from hypocenter.device import devices
from hypocenter.device.sim.sim import open_sim
from hypocenter.doctor.case import Case
from hypocenter.doctor.diff import rundiff
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.engine.step import Steps
from hypocenter.record import recorder, ring
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Place, Reached, RequestRecord, Stepped, Waited
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.recorder import never_breaks
from hypocenter.settings.config import EngineConfig, SamplingParams

SIM = "sim:h200"
TEN = SamplingParams(max_tokens=10, ignore_eos=True)
LONG = SamplingParams(max_tokens=110, ignore_eos=True)


def ahead(**sizes: Any) -> Engine:
    return fake_engine(runs_ahead=True, **sizes)


def submit(engine: Engine, prompt: list[int], params: SamplingParams = TEN) -> Request:
    request = engine.request(prompt, params)
    engine.submit(request)
    return request


def finish(engine: Engine) -> None:
    while engine.step():
        engine.check_integrity()


def num_sampled_ahead(engine: Engine) -> int:
    return sum(batch.ids_on_device for batch in batches_of(engine))


def test_each_step_but_the_first_is_launched_before_its_token_is_known() -> None:
    engine = ahead()
    request = submit(engine, [3, 1, 4])
    assert engine.step() == 3
    assert len(batches_of(engine)) == 2
    assert len(request.output_ids) == 1
    finish(engine)
    assert request.output_ids == expected_output([3, 1, 4], TEN, 128)
    assert (len(batches_of(engine)), num_sampled_ahead(engine)) == (10, 9)  # and none too many
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_a_runner_that_does_not_runs_nothing_ahead() -> None:
    engine = fake_engine()
    submit(engine, [3, 1, 4])
    finish(engine)
    assert (len(batches_of(engine)), num_sampled_ahead(engine)) == (10, 0)


def test_the_step_after_an_end_token_is_thrown_away() -> None:
    prompt, params = ending_prompt()
    engine = ahead()
    request = submit(engine, prompt, params)
    finish(engine)
    expected = expected_output(prompt, params, 128)
    assert expected[-1] == END_ID
    assert (request.output_ids, request.finish_reason) == (expected, "stop")
    assert len(batches_of(engine)) == len(expected) + 1
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_what_nobody_wants_is_not_waited_for() -> None:
    prompt, params = ending_prompt()
    engine = ahead()
    request = submit(engine, prompt, params)
    while not request.done:
        engine.step()
    submit(engine, [3, 1, 4])
    assert engine.step() == 3


def test_nothing_is_launched_beyond_the_context() -> None:
    engine = ahead(context_length=12)
    request = submit(engine, [3, 1, 4], LONG)
    finish(engine)
    assert len(request.output_ids) == 12 - 3
    assert len(batches_of(engine)) == 12 - 3


def test_requests_that_outgrow_the_cache_take_turns() -> None:
    engine = ahead(num_blocks=6, block_size=4, context_length=24)
    requests = [submit(engine, prompt, LONG) for prompt in ([3, 1, 4], [1, 5, 9])]
    finish(engine)
    assert sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        assert request.error is None
        expected = expected_output(request.prompt_ids, LONG, 24, end=False)
        assert request.output_ids == expected


def test_who_ends_gets_nothing_more_while_another_goes_on() -> None:
    prompt, params = ending_prompt()
    engine = ahead()
    ending, other = submit(engine, prompt, params), submit(engine, [3, 1, 4], LONG)
    finish(engine)
    assert ending.output_ids == expected_output(prompt, params, 128)
    assert ending.deltas[-1].finish_reason == "stop"
    assert other.output_ids == expected_output([3, 1, 4], LONG, 128, end=False)


def ending_prompt() -> tuple[list[int], SamplingParams]:
    """One whose greedy answer ends by itself, after a few tokens."""
    params = SamplingParams(max_tokens=100)
    for first in range(1, POISON_ID):
        found = expected_output([first], params, 128)
        if found[-1] == END_ID and 3 < len(found) < 100:
            return [first], params
    raise AssertionError("no such prompt")


def test_who_comes_in_between_is_let_in_by_the_next_step_but_one() -> None:
    engine = ahead()
    first = submit(engine, [3, 1, 4])
    engine.step()
    second = submit(engine, [1, 5, 9])
    engine.step()  # settles what was launched, and launches nothing further
    assert (len(first.output_ids), second.output_ids) == (2, [])
    engine.step()
    assert (len(first.output_ids), len(second.output_ids)) == (3, 1)
    finish(engine)
    assert first.output_ids == expected_output([3, 1, 4], TEN, 128)
    assert second.output_ids == expected_output([1, 5, 9], TEN, 128)


@pytest.mark.parametrize(
    "changed", [{"repeat_penalty": 1.3}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}]
)
def test_penalties_need_the_token_first(changed: dict[str, float]) -> None:
    engine = ahead()
    params = SamplingParams(max_tokens=10, ignore_eos=True, **changed)  # type: ignore[arg-type]
    request = submit(engine, [3, 1, 4], params)
    finish(engine)
    assert num_sampled_ahead(engine) == 0
    assert request.output_ids == expected_output([3, 1, 4], params, 128)


def test_a_request_may_be_cancelled_in_between() -> None:
    engine = ahead()
    first, second = submit(engine, [3, 1, 4]), submit(engine, [1, 5, 9])
    engine.step()
    engine.cancel(first)
    assert (first.finish_reason, len(first.output_ids)) == ("cancelled", 1)
    finish(engine)
    assert len(first.output_ids) == 1
    assert second.output_ids == expected_output([1, 5, 9], TEN, 128)
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_bad_logits_fail_their_request_alone() -> None:
    engine = ahead()
    bad, good = submit(engine, [POISON_ID, 2]), submit(engine, [1, 5, 9])
    finish(engine)
    assert isinstance(bad.error, BadLogits)
    assert good.output_ids == expected_output([1, 5, 9], TEN, 128)


def test_a_fault_in_between_fails_those_that_run_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ahead()
    request = submit(engine, [3, 1, 4])
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "run", failing)
        engine.step()
    assert isinstance(request.error, RuntimeError)
    later = submit(engine, [1, 5, 9])
    finish(engine)
    assert later.output_ids == expected_output([1, 5, 9], TEN, 128)


def failing(batch: Any) -> Any:
    raise RuntimeError("the device is on fire")


def test_who_ends_with_a_step_is_not_hurt_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, params = ending_prompt()
    expected = expected_output(prompt, params, 128)
    engine = ahead()
    request, other = submit(engine, prompt, params), submit(engine, [3, 1, 4], LONG)
    while len(request.output_ids) < len(expected) - 1:
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "run", failing)
        engine.step()
    assert (request.output_ids, request.finish_reason, request.error) == (expected, "stop", None)
    assert isinstance(other.error, RuntimeError)
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_closing_waits_for_what_is_launched() -> None:
    engine = ahead()
    submit(engine, [3, 1, 4])
    engine.step()
    waited: list[int] = []

    def outcomes() -> list[Any]:
        waited.append(1)
        return []

    assert engine._steps.ahead is not None
    engine._steps.ahead = dataclasses.replace(engine._steps.ahead, wait=outcomes)
    engine.close()
    assert waited == [1]


def test_who_interrupts_finds_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead()
    request = submit(engine, [3, 1, 4])
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine._steps, "settle", interrupting)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check_integrity()
    finish(engine)
    assert request.num_preemptions == 1
    assert request.output_ids == expected_output([3, 1, 4], TEN, 128)


def interrupting(*given: Any) -> None:
    raise KeyboardInterrupt


# -- on a device, with its kernels and its record --------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    recorder.close_recorder()
    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path / "runs"))
    yield
    recorder.close_recorder()


def tiny(folder: Path) -> Path:
    """A model that says after each token the one that follows it in the vocabulary."""
    each = np.eye(7, WIDTH, dtype=np.float32)
    tensors = {"token_embd.weight": 50 * each, "output.weight": 3 * np.roll(each, 1, axis=0)}
    return write_tiny(folder / "tiny.gguf", tokens=list("abcdefg"), tensors=tensors)


def recorded(
    path: Path, params: SamplingParams, runs_ahead: bool, *, one_by_one: bool = False,
    is_whole: bool = True,
) -> tuple[Any, ring.Run]:  # fmt: skip
    """Answers of a small model on a simulated GPU, and what was recorded of them."""
    recorder.close_recorder()
    devices.use_backend(open_sim(SIM, graphs=True))
    config = EngineConfig(device=SIM, context_length=64, max_batch_tokens=8)
    with LLM(path, config) as llm:
        assert llm.engine.runner.runs_ahead
        llm.engine.runner.runs_ahead = runs_ahead
        requests = [llm.engine.request(ids, params) for ids in ([1, 2, 3], [4, 5])]
        turns = [[one] for one in requests] if one_by_one else [requests]
        outputs = [one.token_ids for turn in turns for one in llm.engine.complete(turn)]
    opened = recorder.current()
    assert isinstance(opened, recorder.Recorder)
    run = ring.read_run(opened.folder)
    assert (run.missing == ()) == is_whole
    return outputs, run


def steps_of(run: ring.Run) -> list[tuple[dict[str, Any], tuple[RequestRecord, ...]]]:
    """What the record says of each step of the decoder: inputs by name, requests."""
    names = {tensor.id: tensor.name for tensor in run.tensors}
    return [
        ({names[v.tensor]: (v.dtype, v.shape, v.data) for v in event.inputs}, event.requests)
        for event in run.events
        if isinstance(event, Stepped) and event.requests
    ]


def bundle_of(run: ring.Run) -> Bundle:
    return Bundle(
        kind="suspect", device=SIM, fault=FaultRecord(kind="none", message=""), plans=run.plans,
        tensors=run.tensors, events=run.events, progress=Reached(run.progress.submitted),
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.tier("sim", fast=lambda case: case.temperature > 0)
def test_answers_and_record_are_those_of_steps_one_by_one(
    runs: None, tmp_path: Path, temperature: float
) -> None:
    path = tiny(tmp_path)
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=temperature, seed=3)
    outputs, run = recorded(path, params, runs_ahead=True)
    assert len({token for one in outputs for token in one}) > 3  # it matters what ran
    alone, plain = recorded(path, params, runs_ahead=False)
    assert outputs == alone
    assert steps_of(run) == steps_of(plain)
    assert len(steps_of(run)) == 5
    filled = [bool(e.filled_by_device) for e in run.events if isinstance(e, Stepped) and e.requests]
    assert filled == [False, True, True, True, True]
    assert rundiff(bundle_of(run), bundle_of(plain)).differences == ()


@pytest.mark.parametrize("biases", [{}, {3: 2.0, 6: 100.0}])
@pytest.mark.tier("sim")
def test_masks_and_biases_of_a_step_are_its_own_when_it_is_launched_ahead(
    runs: None, tmp_path: Path, biases: dict[int, float]
) -> None:
    # From the fourth token on 2 may come, which ends the answer: each step has another mask.
    params = SamplingParams(
        max_tokens=7, ignore_eos=True, logit_bias={5: False, **biases}, min_tokens=3,
        stop_token_ids=[2, 6],
    )  # fmt: skip
    path = tiny(tmp_path)
    outputs, run = recorded(path, params, runs_ahead=True)
    assert all(len(output) >= 4 and 5 not in output for output in outputs)
    assert any(output[-1] in (2, 6) for output in outputs)
    assert not any(token in (2, 6) for output in outputs for token in output[:3])
    filled = [bool(e.filled_by_device) for e in run.events if isinstance(e, Stepped) and e.requests]
    assert any(filled)
    config = EngineConfig(context_length=64, max_batch_tokens=8)
    with LLM(path, config) as llm:
        requests = [llm.engine.request(ids, params) for ids in ([1, 2, 3], [4, 5])]
        assert [one.token_ids for one in llm.engine.complete(requests)] == outputs


def test_a_step_that_was_launched_ahead_is_watched_while_somebody_waits(
    runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    settle = Steps.settle

    def settled(steps: Steps, *given: Any) -> None:
        opened = recorder.current()
        assert isinstance(opened, recorder.Recorder)
        seen.append((opened.header[ring.CELL_STEP_STARTED] > 0, opened.current_step))
        settle(steps, *given)

    monkeypatch.setattr(Steps, "settle", settled)
    recorded(tiny(tmp_path), SamplingParams(max_tokens=3, ignore_eos=True), runs_ahead=True)
    # While the second is awaited the third is there already, and nothing comes after the third.
    assert seen == [(True, 2), (True, 3), (True, 3)]
    opened = recorder.current()
    assert isinstance(opened, recorder.Recorder)
    assert opened.header[ring.CELL_STEP_STARTED] == 0


def test_a_step_that_is_thrown_away_is_watched_too(
    runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    opened = recorder.open_recorder()
    assert isinstance(opened, recorder.Recorder)

    def outcomes() -> list[Any]:
        seen.append(opened.header[ring.CELL_STEP_STARTED] > 0)
        return []

    engine = ahead()
    submit(engine, [3, 1, 4])
    engine.step()
    assert engine._steps.ahead is not None
    engine._steps.ahead = dataclasses.replace(engine._steps.ahead, wait=outcomes)
    engine.close()
    assert seen == [True]
    assert opened.header[ring.CELL_STEP_STARTED] == 0


@pytest.mark.tier("sim")
def test_what_nobody_has_seen_is_not_taken_for_what_was_there_before(
    runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        recorder.Recorder, "record_ids", lambda *given: None
    )  # the run ended before
    _, run = recorded(
        tiny(tmp_path), SamplingParams(max_tokens=3, ignore_eos=True), runs_ahead=True
    )
    first, *others = [e for e in run.events if isinstance(e, Stepped) and e.requests]
    (ids,) = [one.id for one in run.tensors if (one.name, one.shape) == ("token_ids", (8,))]
    assert (first.filled_by_device, [event.filled_by_device for event in others]) == (0, [ids, ids])
    assert [request.digest for event in others for request in event.requests] == [""] * 4
    case, index = Case(bundle_of(run)), BundleIndex(bundle_of(run))
    for event, is_known in ((first, True), (others[0], False)):
        assert (case.index.values_of(ids, event.seq) is not None) == is_known
        assert (ids in index.values(Place(event.step, event.plan, 0))) == is_known
    _, other = recorded(tiny(tmp_path), SamplingParams(max_tokens=3, ignore_eos=True), False)
    found = rundiff(bundle_of(other), bundle_of(run))
    assert found.differences == ()
    assert any("a run did not live to learn it" in gap.reason for gap in found.unseen)


@pytest.mark.tier("sim")
def test_steps_that_were_thrown_away_are_no_difference(runs: None, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True, stop=("g",))
    outputs, run = recorded(tiny(tmp_path), params, True, one_by_one=True)
    alone, plain = recorded(tiny(tmp_path), params, False, one_by_one=True)
    assert outputs == alone
    assert len(steps_of(run)) > len(steps_of(plain))
    for good, bad in ((run, plain), (plain, run)):
        assert rundiff(bundle_of(good), bundle_of(bad)).differences == ()


def test_what_the_host_has_not_waited_for_may_be_at_fault(
    runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    _, run = recorded(tiny(tmp_path), params, runs_ahead=True)
    steps = [event.step for event in run.events if isinstance(event, Stepped) and event.requests]
    assert {place.step for place in BundleIndex(bundle_of(run)).under_way} == {steps[-1]}
    waits = [event for event in run.events if isinstance(event, Waited)]
    assert [wait.copied_in for wait in waits] == steps
    # It ended while it waited for the last step but one.
    events = tuple(event for event in run.events if event not in waits[-2:])
    index = BundleIndex(msgspec.structs.replace(bundle_of(run), events=events))
    assert {place.step for place in index.under_way} == set(steps[-2:])


@pytest.mark.tier("sim")
def test_what_was_learned_is_put_on_no_other_step(
    runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = recorder.Recorder.record_step.__wrapped__  # type: ignore[attr-defined]

    @never_breaks
    def failing(self: recorder.Recorder, plan: Any, *given: Any, **keywords: Any) -> None:
        if keywords.get("filled_by_device") is not None and len(lost) == 1:
            plan = None  # which nothing can be recorded of
        lost.extend([1] * (keywords.get("filled_by_device") is not None))
        step(self, plan, *given, **keywords)

    lost: list[int] = []
    monkeypatch.setattr(recorder.Recorder, "record_step", failing)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    _, run = recorded(tiny(tmp_path), params, True, is_whole=False)
    monkeypatch.undo()
    digests = [event.requests[0].digest for event in run.events
               if isinstance(event, Stepped) and event.requests]  # fmt: skip
    _, plain = recorded(tiny(tmp_path), params, runs_ahead=False)
    right = [requests[0].digest for _, requests in steps_of(plain)]
    assert digests == [right[0], right[1], right[3]]
