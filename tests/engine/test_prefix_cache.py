"""Prompts that begin alike are computed once: same tokens, same logits to the bit, less work."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ops.kernel_launch import bits
from pretended.fake_runner import (
    FAULT_ID,
    POISON_ID,
    batches_of,
    expected_output,
    fake_engine,
    finish,
)
from pretended.fake_runner import run as run_alone

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.base.errors import BadLogits, BadSetting, UsageError
from hypocenter.engine.batch import Batch
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request

TEN = SamplingParams(max_tokens=10, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
CODE = "def read_lines(path):\n    with open(path) as file:\n        return file.read"


def run(engine: Engine, prompt: list[int], params: SamplingParams = TEN, **more: Any) -> Request:
    return run_alone(engine, prompt, params, **more)


def test_the_same_prompt_is_computed_once_but_for_its_last_block() -> None:
    engine = fake_engine()
    first = run(engine, PROMPT)
    num_before = len(batches_of(engine))
    second = run(engine, PROMPT)
    assert (first.num_cached, second.num_cached) == (0, 8)
    assert len(batches_of(engine)[num_before].token_ids) == 1
    assert first.output_ids == second.output_ids == expected_output(PROMPT, TEN, 128, end=False)
    assert (second.timings().num_prompt_tokens, second.timings().num_cached_tokens) == (1, 8)


def test_of_a_prompt_of_whole_blocks_the_last_is_computed_for_its_logits() -> None:
    engine = fake_engine()
    run(engine, PROMPT[:8])
    assert run(engine, PROMPT[:8]).num_cached == 4


def test_a_conversation_goes_on_from_its_own_answer() -> None:
    engine = fake_engine()
    first = run(engine, PROMPT)
    longer = [*PROMPT, *first.output_ids, 3, 4]
    second = run(engine, longer)
    assert second.num_cached == (len(PROMPT) + 9) // 4 * 4  # its last token was never computed
    assert second.output_ids == expected_output(longer, TEN, 128, end=False)


def test_only_what_is_alike_is_taken() -> None:
    engine = fake_engine()
    run(engine, PROMPT)
    changed = [*PROMPT[:5], 50, *PROMPT[6:]]
    other = run(engine, changed)
    assert other.num_cached == 4
    assert other.output_ids == expected_output(changed, TEN, 128, end=False)
    assert run(engine, [50, *PROMPT[1:]]).num_cached == 0


def test_a_running_request_is_read_from_and_outlived() -> None:
    engine = fake_engine()
    first = engine.request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.submit(first)
    engine.step()
    second = engine.request([*PROMPT, 20], TEN)
    engine.submit(second)
    engine.step()
    assert second.num_cached == 8
    assert set(engine.cache.blocks(first.id)) & set(engine.cache.blocks(second.id))
    finish(engine)
    assert second.output_ids == expected_output([*PROMPT, 20], TEN, 128, end=False)


def test_what_comes_together_and_begins_alike_is_computed_once() -> None:
    engine = fake_engine()  # steps of 16 tokens, blocks of 4
    stem = [token % 50 + 1 for token in range(40)]
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    requests = [engine.request([*stem, 50 + number, 3], one) for number in range(4)]
    num_tokens = finish(engine, *requests)
    assert num_tokens < 42 + 3 * 10
    for request in requests:
        assert request.output_ids == expected_output(request.prompt_ids, one, 128, end=False)
        timings = request.timings()
        assert timings.num_prompt_tokens + timings.num_cached_tokens == 42
    assert [request.num_cached >= 32 for request in requests] == [False, True, True, True]


def test_a_prefix_that_somebody_reads_outlives_the_one_that_left_it_first() -> None:
    """Both compute it in one step; the one whose copy is found ends, and another needs room."""
    engine = fake_engine(num_blocks=14)
    short = engine.request(PROMPT[:5], SamplingParams(max_tokens=1, ignore_eos=True))
    long = engine.request(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True))
    engine.submit(short)
    engine.submit(long)
    engine.step()
    assert short.done
    other = engine.request([40] * 26, SamplingParams(max_tokens=8, ignore_eos=True))
    finish(engine, other)
    assert (long.done, long.num_preemptions + other.num_preemptions) == (True, 0)
    assert run(engine, [*PROMPT, *long.output_ids, 3]).num_cached == 20


def test_salts_keep_requests_apart() -> None:
    engine = fake_engine()
    run(engine, PROMPT, cache_salt="a")
    assert run(engine, PROMPT, cache_salt="b").num_cached == 0
    assert run(engine, PROMPT).num_cached == 0
    assert run(engine, PROMPT, cache_salt="a").num_cached == 8


def test_whoever_wants_all_logits_of_the_prompt_computes_them() -> None:
    engine = fake_engine()
    run(engine, PROMPT)
    with_logprobs = SamplingParams(max_tokens=1, prompt_logprobs=0)
    assert run(engine, PROMPT, with_logprobs).num_cached == 0
    request = run(engine, PROMPT, keeps_logits=True)
    assert request.num_cached == 0
    assert sum(map(len, request.logits)) == len(PROMPT)


def test_it_can_be_switched_off() -> None:
    engine = fake_engine(prefix_cache=False)
    run(engine, PROMPT)
    assert run(engine, PROMPT).num_cached == 0
    assert engine.cache.num_kept_blocks == 0


def test_nobody_reads_what_a_failed_request_left() -> None:
    engine = fake_engine()
    poisoned = [POISON_ID, *PROMPT]
    with pytest.raises(BadLogits):
        engine.result(run(engine, poisoned))
    assert engine.cache.num_kept_blocks == 0
    engine.submit(good := engine.request(PROMPT, TEN))
    engine.step()
    assert engine.cache.num_kept_blocks == 2
    finish(engine, engine.request([FAULT_ID], TEN))  # which fails the step of both
    assert isinstance(good.error, RuntimeError)
    assert engine.cache.num_kept_blocks == 0
    assert run(engine, PROMPT).num_cached == 0


def test_a_request_that_fails_alone_leaves_the_others_of_its_step() -> None:
    engine = fake_engine()
    bad, good = engine.request([POISON_ID, *PROMPT[:5]], TEN), engine.request(PROMPT, TEN)
    finish(engine, bad, good)
    assert isinstance(bad.error, BadLogits)
    assert good.output_ids == expected_output(PROMPT, TEN, 128, end=False)
    assert run(engine, PROMPT).num_cached == 8


def test_a_cancelled_request_leaves_what_it_has_computed() -> None:
    engine = fake_engine()
    request = engine.request(PROMPT * 4, TEN)  # in three chunks
    engine.submit(request)
    engine.step()
    engine.cancel(request)
    engine.check_integrity()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    assert run(engine, PROMPT * 4).num_cached == 16


def test_who_gave_way_reads_what_is_left_of_its_own() -> None:
    engine = fake_engine(num_blocks=8)
    first = engine.request([1] * 9, SamplingParams(max_tokens=16, ignore_eos=True))
    second = engine.request([2] * 9, SamplingParams(max_tokens=10, ignore_eos=True))
    num_tokens = finish(engine, first, second)
    assert second.num_preemptions == 1
    assert second.num_cached == 0  # when it came
    for request in (first, second):
        assert request.output_ids == expected_output(
            request.prompt_ids, request.params, 128, end=False
        )
    num_twice = num_tokens - (9 + 15) - (9 + 9)
    assert 0 < num_twice < 9


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_requests_gets_the_tokens_of_each_alone(seed: int, runs_ahead: bool) -> None:
    rng = random.Random(seed)
    engine = fake_engine(
        runs_ahead=runs_ahead, num_blocks=14, max_batch_tokens=11, max_batch_requests=5
    )
    stems = [[rng.randrange(1, 50) for _ in range(30)] for _ in range(3)]
    requests: list[Request] = []
    for _ in range(300):
        if rng.random() < 0.3:
            prompt = rng.choice(stems)[: rng.randrange(1, 30)]
            prompt = prompt + [rng.randrange(1, 50) for _ in range(rng.randrange(4))]
            params = SamplingParams(max_tokens=rng.randrange(1, 20), ignore_eos=True)
            requests.append(engine.request(prompt, params))
            engine.submit(requests[-1])
        engine.step()
        engine.check_integrity()
        if requests and rng.random() < 0.05:
            rng.choice(requests).cancel_requested = True
    finish(engine)
    for request in requests:
        expected = expected_output(request.prompt_ids, request.params, 128, end=False)
        assert request.finish_reason in ("length", "cancelled")
        if request.finish_reason == "cancelled":
            expected = expected[: len(request.output_ids)]
        assert request.output_ids == expected
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    assert sum(request.num_cached for request in requests) > 0
    assert sum(request.num_preemptions for request in requests) > 0
    assert runs_ahead == any(batch.ids_on_device for batch in batches_of(engine))


# -- the bundled model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(config=EngineConfig(context_length=512, max_batch_tokens=64)) as llm:
        yield llm


def drawn_from(llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The completion of a prompt, and the bits of all logits that its tokens were drawn from."""
    seen: list[np.ndarray] = []
    runner = llm.engine.runner
    run_batch = runner.run

    def run_and_look(batch: Batch) -> Any:
        logits = run_batch(batch)
        if len(batch.logit_rows):
            seen.append(bits(np.array(logits.data[:1, : runner.vocab_size])))
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(runner, "run", run_and_look)
        return llm.generate(prompt, max_tokens=24, ignore_eos=True), np.concatenate(seen)


def test_logits_after_a_hit_are_those_without_to_the_bit(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = llm.tokenizer.encode(CODE * 6)
    plain, plain_bits = drawn_from(llm, prompt, monkeypatch)
    hit, hit_bits = drawn_from(llm, prompt, monkeypatch)
    assert plain.timings.num_cached_tokens == 0
    assert hit.timings.num_cached_tokens == (len(prompt) - 1) // 16 * 16 > 64
    assert plain.token_ids == hit.token_ids
    assert (plain_bits == hit_bits).all()
    # A turn later: over what was generated, too.
    longer = [*prompt, *plain.token_ids, *prompt[:5]]
    hit, hit_bits = drawn_from(llm, longer, monkeypatch)
    assert hit.timings.num_cached_tokens > len(prompt)
    with LLM(context_length=512, max_batch_tokens=64, prefix_cache=False) as other:
        plain, plain_bits = drawn_from(other, longer, monkeypatch)
        assert plain.timings.num_cached_tokens == 0
    assert plain.token_ids == hit.token_ids
    assert (plain_bits == hit_bits).all()


def test_the_setting_is_checked_and_found_under_other_names() -> None:
    with pytest.raises(BadSetting, match="prefix_cache"):
        EngineConfig(prefix_cache="yes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="prefix_cache"):
        EngineConfig(enable_prefix_caching=True)  # type: ignore[call-arg]
