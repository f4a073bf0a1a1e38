"""States are kept where others may go on from them: the same tokens to the bit, and less work."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from models.families import FamilyModel, make_family
from pretended.fake_runner import FAULT_ID, batches_of, expected_output, fake_engine, finish
from pretended.fake_runner import run as run_alone

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.base.errors import BadSetting, IntegrityError, LaunchRejected
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.engine.scheduler import NUM_OPENING
from hypocenter.engine.state_ledger import BatchStates, StateLedger, spans_of
from hypocenter.engine.state_slots import StateSlots

TEN = SamplingParams(max_tokens=10, ignore_eos=True)
#: Blocks of the engines here have four tokens.
PROMPT = [5 + number % 20 for number in range(30)]


def run(engine: Engine, prompt: list[int], params: SamplingParams = TEN, **more: Any) -> Request:
    return run_alone(engine, prompt, params, **more)


def engine_of(num_checkpoints: int = 6, **sizes: Any) -> Engine:
    return fake_engine(num_checkpoints=num_checkpoints, **sizes)


def test_the_same_prompt_goes_on_from_its_last_state() -> None:
    engine = engine_of()
    first, second = run(engine, PROMPT), run(engine, PROMPT)
    assert (first.num_cached, second.num_cached) == (0, (len(PROMPT) - NUM_OPENING) // 4 * 4)
    assert first.output_ids == second.output_ids == expected_output(PROMPT, TEN, 128, end=False)


def test_a_conversation_goes_on_from_its_own_answer() -> None:
    engine = engine_of()
    first = run(engine, PROMPT)
    longer = [*PROMPT, *first.output_ids, 3, 4]
    second = run(engine, longer)
    assert second.num_cached == (len(PROMPT) + 9) // 4 * 4  # its last token was never computed
    assert second.output_ids == expected_output(longer, TEN, 128, end=False)
    # Another turn that leaves the answer out goes on from the prompt.
    other = run(engine, [*PROMPT[:24], 50, 51])
    assert other.num_cached == 20


def test_where_two_part_a_state_is_left_for_a_third() -> None:
    engine = engine_of()
    stem = PROMPT[:13]
    rests = [[40 + number] * 16 for number in range(3)]
    found = [run(engine, stem + rest) for rest in rests]
    assert [request.num_cached for request in found] == [0, 0, 12]
    for request, rest in zip(found, rests, strict=True):
        assert request.output_ids == expected_output(stem + rest, TEN, 128, end=False)


def test_where_two_part_a_long_prompt_still_leaves_its_end() -> None:
    """Both lie in one chunk, which is cut between them."""
    engine = engine_of(max_batch_tokens=64)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = [[*PROMPT[:13], *[40 + number] * 16] for number in range(3)]
    cached = [run(engine, prompts[at], one).num_cached for at in (0, 1, 1, 2)]
    assert cached == [0, 0, 20, 12]


def test_of_an_answer_the_last_state_alone_is_kept() -> None:
    engine = engine_of()
    run(engine, PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    assert engine.cache.states is not None
    assert engine.cache.states.num_kept == 2


def test_the_one_that_was_used_last_longest_ago_goes() -> None:
    engine = engine_of(2)
    prompts = [[first, *PROMPT] for first in (30, 31, 32)]
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        run(engine, prompt, one)
    cached = [run(engine, prompts[at], one).num_cached for at in (0, 2)]
    assert cached == [28, 20]  # the third time it knows where the others went on
    assert run(engine, prompts[1], one).num_cached == 0


def test_a_preempted_request_goes_on_from_its_last_state() -> None:
    engine = engine_of(num_blocks=14)
    first = engine.request(PROMPT[:18], replace(TEN, max_tokens=12))
    second = engine.request([33, *PROMPT[:16]], replace(TEN, max_tokens=20))
    num_tokens = finish(engine, first, second)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert second.output_ids == expected_output(second.prompt_ids, second.params, 128, end=False)
    assert second.num_cached == 0  # it computed that itself
    assert num_tokens == 18 + 11 + 17 + 19 + 2  # of its 26 the last two anew


@pytest.mark.parametrize("has_room", [False, True])
def test_without_checkpoints_nothing_is_adopted(has_room: bool) -> None:
    engine = engine_of(0) if not has_room else fake_engine(num_checkpoints=4, prefix_cache=False)
    assert [run(engine, PROMPT).num_cached for _ in range(2)] == [0, 0]


def test_a_block_that_goes_takes_its_state_along() -> None:
    engine = engine_of(num_blocks=12)
    run(engine, PROMPT)
    run(engine, [40] * 40, SamplingParams(max_tokens=2, ignore_eos=True))
    assert run(engine, PROMPT).num_cached == 0


def test_what_a_failed_request_left_is_forgotten() -> None:
    engine = engine_of()
    prompt = [FAULT_ID, *PROMPT]
    for _ in range(2):
        request = engine.request(prompt, TEN)
        finish(engine, request)
        assert request.error is not None
        assert request.num_cached == 0
    assert engine.cache.states is not None
    assert engine.cache.states.num_kept == 0


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_checkpoints", [1, 2, 5])
def test_many_requests(runs_ahead: bool, num_checkpoints: int) -> None:
    """The runner itself compares each state with the tokens it must stand for."""
    rng = random.Random(num_checkpoints)
    engine = engine_of(
        num_checkpoints, num_blocks=24, max_batch_requests=4, max_batch_tokens=13,
        runs_ahead=runs_ahead,
    )  # fmt: skip
    stems = [[rng.randrange(1, 50) for _ in range(rng.randrange(4, 40))] for _ in range(3)]
    requests: list[Request] = []
    for _ in range(24):
        prompt = [*rng.choice(stems)[: rng.randrange(1, 40)], rng.randrange(1, 50)]
        if requests and rng.random() < 0.4:
            before = rng.choice(requests)
            prompt = list(before.token_ids)[:50]
        params = SamplingParams(max_tokens=rng.randrange(1, 40), seed=1, ignore_eos=True)
        request = engine.request(prompt, params)
        requests.append(request)
        engine.submit(request)
        for _ in range(rng.randrange(6)):
            engine.step()
            engine.check_integrity()
        if rng.random() < 0.2:
            engine.cancel(rng.choice(requests))
    finish(engine)
    for request in requests:
        assert request.error is None
        wanted = expected_output(request.prompt_ids, request.params, 128, end=False)
        assert request.output_ids == wanted[: len(request.output_ids)]
        assert len(request.output_ids) == len(wanted) or request.finish_reason == "cancelled"
    assert num_checkpoints == 1 or sum(request.num_cached for request in requests) > 0
    assert any(request.num_preemptions for request in requests)
    assert batches_of(engine)[0].states is not None


# -- what the ledger refuses ----------------------------------------------------------------------


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def of_one(owner: int, **fields: Any) -> BatchStates:
    """A sequence in slot 1; slots 0 to 2 are for requests, 3 and 4 for checkpoints."""
    return replace(BatchStates.own((owner,), ids(1)), **fields)


@pytest.fixture
def ledger() -> StateLedger:
    """Request 7 has left its first four tokens in slot 3."""
    ledger = StateLedger(3, 2)
    left = of_one(7, checkpoint_slots=ids(3), checkpoint_stops=ids(4))
    ledger.note(spans_of(left, ids(0, 6), np.arange(6, dtype=np.int32)), is_whole=True)
    return ledger


def goes_on(ledger: StateLedger, start: int, states: BatchStates) -> None:
    ledger.check(states, ids(0), ids(start))


def test_a_hand_over_that_fits(ledger: StateLedger) -> None:
    ledger.name(((3, b"\1" * 32),))
    goes_on(ledger, 4, of_one(8, sources=ids(3), digests=(b"\1" * 32,)))
    goes_on(ledger, 6, of_one(7))


def test_a_hand_over_that_does_not_fit(ledger: StateLedger) -> None:
    ours, other = b"\1" * 32, b"\2" * 32

    def refused(text: str, start: int = 4, **fields: Any) -> None:
        with pytest.raises(LaunchRejected, match=text):
            goes_on(ledger, start, of_one(8, **{"sources": ids(3), "digests": (ours,), **fields}))

    refused(r"state_sources\[0\] is 3, which request 7 left behind tokens that have not settled")
    ledger.name(((3, ours),))
    refused(
        r"is 3, which request 7 left behind tokens 01010101, but the tokens of request 8 begin "
        "with 02020202",
        digests=(other,),
    )
    refused("whose state stands for 4 tokens, but its sequence goes on from position 5", start=5)
    refused("is 4, which has nobody's state", sources=ids(4))
    refused("is 0, which is kept for requests that run", sources=ids(0))
    refused("is 4, which is kept for checkpoints", slots=ids(4))
    kept: Any = {"checkpoint_stops": ids(1)}
    refused("is 3, which a sequence of the step uses", checkpoint_slots=ids(3), **kept)
    spare: Any = {**kept, "is_spare": (True,)}
    refused("is 1, which a sequence of the step uses", checkpoint_slots=ids(1), **spare)
    refused("is 4, which is kept for checkpoints", checkpoint_slots=ids(4), **spare)
    refused("is 2, which is kept for requests that run", checkpoint_slots=ids(2), **kept)
    spoiled = of_one(9, checkpoint_slots=ids(3), checkpoint_stops=ids(1))
    ledger.note(spans_of(spoiled, ids(0, 1), ids(0)), is_whole=False)
    refused("is 3, which has nobody's state")


def test_stops_are_of_tokens_that_the_step_takes() -> None:
    ledger, positions = StateLedger(3, 2), np.arange(2, dtype=np.int32)
    states = BatchStates.own((1, 2), ids(0, 1))
    states = replace(states, checkpoint_slots=ids(3, 4), checkpoint_stops=ids(1, 1))
    rows = ids(0, 0, 1, 1)
    with pytest.raises(LaunchRejected, match=r"checkpoint_stops\[1\] is 4, for a state of -1 "):
        ledger.check(states, rows, np.concatenate([positions, positions]))


def test_slots_of_checkpoints_are_counted() -> None:
    slots = StateSlots(1, 2)
    slots.take(5)
    assert slots.reserve(5, 4, lasts=True) == 1
    slots.settle(5, [b"a"], 4)
    slots.check_integrity({5}, {b"a": 0})
    with pytest.raises(IntegrityError, match="found under digest 61"):
        slots.check_integrity({5}, {})
    slots._blank.append(1)
    with pytest.raises(IntegrityError, match=r"there are 2 from 1 on"):
        slots.check_integrity({5}, {b"a": 0})


def test_answers_that_run_leave_what_all_of_them_began_with() -> None:
    engine = engine_of(3, num_blocks=64, max_batch_requests=8, max_batch_tokens=64)
    stem = PROMPT[:20]
    run(engine, [*stem, *[40] * 9])
    run(engine, [*stem, *[41] * 9])
    many = [
        engine.request([*stem, 42 + n, *[43] * 8], replace(TEN, max_tokens=30)) for n in range(6)
    ]
    finish(engine, *many)
    assert run(engine, [*stem, *[49] * 9]).num_cached == 20


def test_a_checkpoint_that_was_used_goes_after_one_that_was_not() -> None:
    slots = StateSlots(2, 2)
    slots.take(5)
    for digests in ([b"a"], [b"a", b"b"]):
        slots.reserve(5, 4 * len(digests), lasts=True)
        slots.settle(5, digests, 4)
    slots.take(6, b"a")
    slots.give_back(6)
    slots.reserve(5, 12, lasts=True)
    assert (slots.has(b"a"), slots.has(b"b")) == (True, False)


def test_what_is_begun_with_outlives_its_block() -> None:
    """Whoever was given it has not read it yet, when a failed request takes it away."""
    slots = StateSlots(2, 1)
    slots.take(5)
    slots.reserve(5, 4, lasts=True)
    slots.settle(5, [b"a"], 4)
    slots.take(6, b"a")
    slots.give_back(5, forget=True)
    slots.check_integrity({6}, {})
    assert slots.reserve(6, 8, lasts=True) is None
    source = slots.pop_source(6)
    assert source is not None
    assert (source.checkpoint.slot, slots.pop_news()) == (2, ())
    assert slots.reserve(6, 8, lasts=True) == 2


# -- a real model ---------------------------------------------------------------------------------

SMALL = EngineConfig(
    context_length=96, num_threads=2, kv_dtype="f32", max_batch_requests=3, max_batch_tokens=16
)


@pytest.fixture(scope="module", params=["qwen35", "lfm2-tied", "falcon-h1", "mamba2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return make_family(request.param, tmp_path_factory.mktemp("checkpoints"))


def test_logits_with_a_hit_are_those_without(model: FamilyModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=20)
    stem, others = model.token_ids[:44], model.token_ids[60:90]
    prompts = [stem, stem, stem[:39] + others[:12], stem[:39] + others[5:9]]
    with LLM(model.path, replace(SMALL, prefix_cache=False)) as llm:
        expected = [llm.engine.request(prompt, params) for prompt in prompts]
        finish(llm.engine, *expected)
    with LLM(model.path, SMALL) as llm:
        for at, (prompt, one) in enumerate(zip(prompts, expected, strict=True)):
            found = llm.engine.request(prompt, params)
            finish(llm.engine, found)
            assert (found.output_ids, found.logprobs) == (one.output_ids, one.logprobs)
            assert found.num_cached == (32 if at else 0)
            assert found.timings().num_cached_tokens == found.num_cached


def test_settings_of_checkpoints() -> None:
    with pytest.raises(BadSetting, match="state_checkpoints"):
        EngineConfig(state_checkpoints=-1)
