"""Texts that outgrow a model's original context are turned by other factors (longrope)."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from models.families import FamilyModel, engine_logits, hf_logits, make_family
from pretended.fake_runner import batches_of, expected_output, fake_engine, finish, run

from hypocenter import LLM
from hypocenter.engine.batch import Batch
from hypocenter.engine.kv_cache import BlockDigests
from hypocenter.settings.config import SamplingParams

LONG_FROM = 12
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


def kinds(batches: list[Batch]) -> list[bool]:
    """Of each batch whether its texts were long, after asserting that it is as it must be."""
    for batch in batches:
        if len(batch.logit_rows) == 1 and len(set(batch.sequence_rows)) == 1:
            length = int(batch.positions[batch.logit_rows[0]]) + 1
            assert batch.is_long == (length > LONG_FROM), length
    return [batch.is_long for batch in batches]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_text_that_outgrows_it_is_computed_anew(runs_ahead: bool) -> None:
    engine = fake_engine(longrope_threshold=LONG_FROM, runs_ahead=runs_ahead)
    request = run(engine, list(range(1, 8)), GREEDY)
    assert request.output_ids == expected_output(request.prompt_ids, GREEDY, 128, end=False)
    batches = batches_of(engine)
    assert kinds(batches) == sorted(kinds(batches))  # once long, it stays so
    first = next(batch for batch in batches if batch.is_long)
    assert list(first.positions) == list(range(LONG_FROM + 1))
    assert sum(len(batch.positions) for batch in batches) == 36 + LONG_FROM


def test_a_long_prompt_is_long_from_its_first_token() -> None:
    engine = fake_engine(longrope_threshold=LONG_FROM, max_batch_tokens=4)
    run(engine, list(range(1, 20)), dataclasses.replace(GREEDY, max_tokens=2))
    assert all(batch.is_long for batch in batches_of(engine))
    engine = fake_engine(longrope_threshold=LONG_FROM)
    run(engine, list(range(1, LONG_FROM + 1)), dataclasses.replace(GREEDY, max_tokens=1))
    assert not any(batch.is_long for batch in batches_of(engine))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_both_kinds_run_beside_each_other_in_turns(runs_ahead: bool) -> None:
    engine = fake_engine(longrope_threshold=LONG_FROM, runs_ahead=runs_ahead, num_blocks=40)
    prompts = [list(range(1, 5)), list(range(5, 30)), list(range(2, 10)), list(range(30, 50))]
    requests = [engine.request(prompt, GREEDY) for prompt in prompts]
    finish(engine, *requests)
    for request in requests:
        assert request.output_ids == expected_output(request.prompt_ids, GREEDY, 128, end=False)
    of_batches = kinds(batches_of(engine))
    mixed = of_batches[: of_batches.index(False) + 8]
    assert all(a != b for a, b in itertools.pairwise(mixed[1:])), mixed


def test_it_goes_on_where_there_is_room_for_one_kind_alone() -> None:
    engine = fake_engine(longrope_threshold=LONG_FROM, num_blocks=10, max_batch_tokens=8)
    prompts = [list(range(1, 12)), list(range(5, 30)), list(range(2, 11))]
    requests = [
        engine.request(prompt, dataclasses.replace(GREEDY, max_tokens=9)) for prompt in prompts
    ]
    finish(engine, *requests)
    assert all(len(request.output_ids) == 9 for request in requests)


def test_what_was_computed_of_a_short_text_is_not_read_for_a_long_one() -> None:
    """The fake cache knows how each token was turned, and would say so."""
    engine = fake_engine(longrope_threshold=LONG_FROM)
    few = dataclasses.replace(GREEDY, max_tokens=1)
    start = list(range(1, 10))
    run(engine, start, few)
    long = run(engine, [*start, *range(20, 40)], few)
    assert long.num_cached == 0
    assert run(engine, [*start, *range(20, 41)], few).num_cached == 28
    assert run(engine, start, few).num_cached == 8


def test_digests_of_long_texts_are_others() -> None:
    digests = BlockDigests(4, "salt")
    ids = list(range(8))
    others = digests.of_long_texts()
    assert not set(digests.first(2, ids)) & set(others.first(2, ids))
    assert others.first(2, ids) == BlockDigests(4, "salt").of_long_texts().first(2, ids)
    assert others.first(2, ids) != BlockDigests(4, "other").of_long_texts().first(2, ids)


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    """Its original context has 32 tokens, and it is opened with many more."""
    return make_family("phi3-longrope-long", tmp_path_factory.mktemp("phi3"))


@pytest.mark.parametrize("num_tokens", [20, 32, 33, 60])
def test_factors_are_those_of_the_length_of_the_text(phi3: FamilyModel, num_tokens: int) -> None:
    ids = phi3.token_ids[:num_tokens]
    theirs = hf_logits(phi3.hf_model, ids)
    ours = engine_logits(phi3.path, ids, phi3.context_length)
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 3e-5


def test_an_answer_that_outgrows_it_goes_on_as_a_long_text(phi3: FamilyModel) -> None:
    with LLM(phi3.path, kv_dtype="f32", context_length=phi3.context_length) as llm:
        made = llm.generate(phi3.token_ids[:28], max_tokens=12, ignore_eos=True).token_ids
        for number, token in enumerate(made):
            text = [*phi3.token_ids[:28], *made[:number]]
            assert int(np.array(llm.logits(text))[-1].argmax()) == token
            assert int(hf_logits(phi3.hf_model, text)[-1].argmax()) == token
