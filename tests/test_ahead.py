"""Steps that are launched before those before them are settled: same answers, same record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runner import END_ID, POISON_ID, batches_of, expected_output, fake_engine
from tiny_gguf import write_tiny

from hypocenter import LLM, ring
from hypocenter.bundle import Bundle
from hypocenter.config import EngineConfig, SamplingParams
from hypocenter.device import memory, recorder
from hypocenter.device.sim import open_sim
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.errors import BadLogits
from hypocenter.forensics.bundle_index import BundleIndex
from hypocenter.forensics.case import Case
from hypocenter.recording import FaultRecord, Place, RequestRecord, Stepped

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


def num_drawn(engine: Engine) -> int:
    return sum(batch.is_drawn for batch in batches_of(engine))


def test_each_step_but_the_first_is_launched_before_its_token_is_known() -> None:
    engine = ahead()
    request = submit(engine, [3, 1, 4])
    assert engine.step() == 3
    assert len(batches_of(engine)) == 2
    assert len(request.output_ids) == 1
    finish(engine)
    assert request.output_ids == expected_output([3, 1, 4], TEN, 128)
    assert (len(batches_of(engine)), num_drawn(engine)) == (10, 9)  # and none too many
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_a_runner_that_does_not_runs_nothing_ahead() -> None:
    engine = fake_engine()
    submit(engine, [3, 1, 4])
    finish(engine)
    assert (len(batches_of(engine)), num_drawn(engine)) == (10, 0)


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
    assert num_drawn(engine) == 0
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


def test_who_interrupts_finds_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ahead()
    request = submit(engine, [3, 1, 4])
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_settle", interrupting)
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


def recorded(path: Path, params: SamplingParams, runs_ahead: bool) -> tuple[Any, ring.Run]:
    """Two answers of a small model on a simulated GPU, and what was recorded of them."""
    recorder.close_recorder()
    memory.use_backend(open_sim(SIM, graphs=True))
    config = EngineConfig(device=SIM, context_length=64, max_batch_tokens=8)
    with LLM(path, config) as llm:
        assert llm.engine.runner.runs_ahead
        llm.engine.runner.runs_ahead = runs_ahead
        requests = [llm.engine.request(ids, params) for ids in ([1, 2, 3], [4, 5])]
        outputs = [one.token_ids for one in llm.engine.complete(requests)]
    opened = recorder.current()
    assert opened is not None
    run = ring.read_run(opened.folder)
    assert run.missing == ()
    return outputs, run


def steps_of(run: ring.Run) -> list[tuple[dict[str, Any], tuple[RequestRecord, ...]]]:
    """What the record says of each step of the decoder: inputs by name, requests."""
    names = {tensor.id: tensor.name for tensor in run.tensors}
    return [
        ({names[v.tensor]: (v.dtype, v.shape, v.data) for v in event.inputs}, event.requests)
        for event in run.events
        if isinstance(event, Stepped) and event.requests
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_and_record_are_those_of_steps_one_by_one(
    runs: None, tmp_path: Path, temperature: float
) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", num_layers=2, tokens=list("abcdefg"))
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=temperature, seed=3)
    outputs, run = recorded(path, params, runs_ahead=True)
    alone, plain = recorded(path, params, runs_ahead=False)
    assert outputs == alone
    assert steps_of(run) == steps_of(plain)
    assert len(steps_of(run)) == 5
    events = [event for event in run.events if isinstance(event, Stepped)]
    assert not any(event.drawn for event in events)


def test_what_nobody_has_seen_is_not_taken_for_what_was_there_before(
    runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder.Recorder, "drawn", lambda *given: None)  # the run ended before
    path = write_tiny(tmp_path / "tiny.gguf", tokens=list("abcdefg"))
    _, run = recorded(path, SamplingParams(max_tokens=3, ignore_eos=True), runs_ahead=True)
    first, *others = [e for e in run.events if isinstance(e, Stepped) and e.requests]
    (ids,) = [one.id for one in run.tensors if (one.name, one.shape) == ("token_ids", (8,))]
    assert (first.drawn, [event.drawn for event in others]) == (0, [ids, ids])
    assert [request.digest for event in others for request in event.requests] == [""] * 4
    bundle = Bundle(
        kind="suspect", device=SIM, fault=FaultRecord(kind="none", message=""), plans=run.plans,
        tensors=run.tensors, events=run.events,
    )  # fmt: skip
    case, index = Case(bundle), BundleIndex(bundle)
    for event, is_known in ((first, True), (others[0], False)):
        assert (case.values(ids, event.seq) is not None) == is_known
        assert (ids in index.values(Place(event.step, event.plan, 0))) == is_known
