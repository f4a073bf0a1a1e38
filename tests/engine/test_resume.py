"""An answer that was begun elsewhere goes on here: same tokens, same text, nothing sent twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pretended.fake_runner import expected_output, fake_engine

from hypocenter import LLM, SamplingParams
from hypocenter.base.errors import ContextOverflow, UsageError
from hypocenter.base.results import Delta
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request

PROMPT = "def count_words(text):\n"
EACH_WAY = {
    "greedy": SamplingParams(max_tokens=24),
    "sampled": SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=24, temperature=0.7, seed=6, repeat_penalty=1.3, frequency_penalty=0.4
    ),
    "held back": SamplingParams(
        max_tokens=24, temperature=1.3, seed=1, stop=("te~", "ar~", "\n    ~")
    ),
    "characters": SamplingParams(max_tokens=100, temperature=50.0, seed=3, ignore_eos=True),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(context_length=256, kv_tokens=1024) as llm:
        yield llm


def run(engine: Engine, request: Request) -> list[Delta]:
    engine.complete([request])
    return list(request.deltas)


@pytest.mark.parametrize("way", EACH_WAY)
def test_what_follows_is_what_would_have_followed(llm: LLM, way: str) -> None:
    params, prompt_ids = EACH_WAY[way], llm.encode(PROMPT)
    whole = run(llm.engine, llm.engine.request(prompt_ids, params))
    assert len(whole) > 3
    for cut in range(len(whole)):
        before = [token_id for delta in whole[:cut] for token_id in delta.token_ids]
        request = llm.engine.request(prompt_ids, params, RequestTerms(output_ids=before))
        after = run(llm.engine, request)
        assert [i for delta in after for i in delta.token_ids] == [
            i for delta in whole[cut:] for i in delta.token_ids
        ]
        assert "".join(d.text for d in after) == "".join(d.text for d in whole[cut:])
        assert after[-1].finish_reason == whole[-1].finish_reason
        done = llm.engine.result(request)
        assert done.text == "".join(delta.text for delta in whole)


def test_some_of_these_cuts_are_within_a_character_or_a_stop_string(llm: LLM) -> None:
    several = {
        way: run(llm.engine, llm.engine.request(llm.encode(PROMPT), params))
        for way, params in EACH_WAY.items()
    }
    assert any(len(delta.token_ids) > 1 for delta in several["held back"])
    assert any(len(delta.token_ids) > 1 for delta in several["characters"])


def test_logprobs_are_those_of_the_tokens_that_are_sent_here(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1)
    prompt_ids = llm.encode(PROMPT)
    [whole] = llm.engine.complete([first := llm.engine.request(prompt_ids, params)])
    sent = [i for delta in list(first.deltas)[:5] for i in delta.token_ids]
    request = llm.engine.request(prompt_ids, params, RequestTerms(output_ids=sent))
    [resumed] = llm.engine.complete([request])
    assert whole.logprobs is not None
    assert resumed.logprobs == whole.logprobs[len(sent) :]
    assert resumed.prompt_logprobs == whole.prompt_logprobs
    assert [d.logprobs for d in request.deltas] == [d.logprobs for d in list(first.deltas)[5:]]


def test_an_answer_that_was_whole_ends_at_once() -> None:
    engine = fake_engine()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    ids = expected_output([4, 5], params, 128, end=False)
    request = engine.request([4, 5], params, RequestTerms(output_ids=ids))
    assert [(d.token_ids, d.finish_reason) for d in run(engine, request)] == [((), "length")]


def test_ids_of_an_answer_are_checked_as_those_of_a_prompt() -> None:
    engine = fake_engine()
    with pytest.raises(UsageError, match="output token 1 is 61, but the vocabulary has 61"):
        engine.request([1], SamplingParams(), RequestTerms(output_ids=[2, 61]))
    with pytest.raises(ContextOverflow, match="128 tokens"):
        engine.request([1] * 100, SamplingParams(), RequestTerms(output_ids=[2] * 29))


def test_the_cache_holds_as_many_tokens_as_it_was_asked_for(llm: LLM) -> None:
    assert llm.engine.cache.num_blocks == 1024 // 16
    assert llm.context_length == 256
    full = llm.engine.request(llm.encode(PROMPT), SamplingParams(max_tokens=None, ignore_eos=True))
    [completion] = llm.engine.complete([full])
    assert len(completion.token_ids) + len(completion.prompt_token_ids) == 256
    with LLM(context_length=256, kv_tokens=64) as small:
        assert small.engine.cache.num_blocks == 4
        assert small.generate(PROMPT, max_tokens=8).token_ids == completion.token_ids[:8]
