"""Settings that name single tokens: alone, in a batch with others, ahead, with forms, resumed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pretended.fake_runner import END_ID, VOCAB_SIZE, batches_of, fake_engine, hashed_logits

from hypocenter import LLM, SamplingParams
from hypocenter.base.errors import BadSetting, NoTokenLeft, UsageError
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.engine import Engine
from hypocenter.engine.logprobs import token_logprob
from hypocenter.engine.request import Request
from hypocenter.engine.token_rules import token_rules
from hypocenter.kernels.sampling.draw import TokenChoice, mask_of
from hypocenter.kernels.sampling.sampling import sample_reference

PROMPT = [3, 1, 4]
WARM = SamplingParams(max_tokens=24, temperature=1.5, seed=11)
GREEDY = SamplingParams(max_tokens=24)


def letters(*ids: int) -> str:
    return "".join(chr(96 + token_id) for token_id in ids)


def with_words(engine: Engine) -> Engine:
    """The fake tokenizer spells "a" as token 1 and so on; a blank it drops."""
    tokenizer: Any = engine.tokenizer
    tokenizer.encode = lambda text, **_: [ord(char) - 96 for char in text if char != " "]
    return engine


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    """What a request must yield, from the definition of its settings and without any engine."""
    tokens = list(prompt)
    biases = dict(params.logit_bias)
    ends = ({END_ID} - ({END_ID} if params.ignore_eos else set())) | {*params.stop_token_ids}
    while len(tokens) - len(prompt) < (params.max_tokens or 0):
        output = tokens[len(prompt) :]
        allowed = set(params.allowed_token_ids or range(VOCAB_SIZE))
        allowed -= {token for token, bias in biases.items() if bias == -np.inf}
        for word in params.bad_words:
            *before, last = [ord(char) - 96 for char in word]
            if output[len(output) - len(before) :] == before:
                allowed.discard(last)
        if len(output) < params.min_tokens:
            allowed = allowed - ends or allowed
        some = {token: bias for token, bias in biases.items() if bias > -np.inf}
        ids = np.array(sorted(set(tokens)), np.int32)
        draw = TokenChoice(
            params,
            len(tokens),
            ids,
            np.array([output.count(token) for token in ids], np.int32),
            mask_of(np.array([token in allowed for token in range(VOCAB_SIZE)])),
            np.array(list(some), np.int32),
            np.array(list(some.values()), np.float64),
        )
        [token] = sample_reference(hashed_logits(tokens)[None], [draw])
        assert isinstance(token, int)
        tokens.append(token)
        if token in ends:
            break
    return tokens[len(prompt) :]


def submit(engine: Engine, params: SamplingParams, output_ids: list[int] | None = None) -> Request:
    request = engine.request(PROMPT, params, RequestTerms(output_ids=output_ids or ()))
    engine.submit(request)
    return request


def finish(engine: Engine) -> None:
    while engine.step():
        engine.check_integrity()


#: Under each name settings that change what `WARM` and `GREEDY` yield, alone or together.
RULES: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {5: 3.0, 6: 2.5, 7: -100}},
    "never": {"logit_bias": dict.fromkeys(range(50), False), "min_tokens": 3},
    "allowed": {"allowed_token_ids": [2, 3, 5, 7, 11, 13]},
    "stop": {"stop_token_ids": list(range(30, 42))},
    "min": {"min_tokens": 9, "stop_token_ids": list(range(10, 50))},
    "words": {"bad_words": [letters(2), letters(3, 5), letters(5, 5), letters(5, 3, 2)],
              "allowed_token_ids": [2, 3, 5, 40]},
    "all": {"logit_bias": {5: 2.0, 9: False}, "allowed_token_ids": [3, 5, 9, 30, 31],
            "min_tokens": 4, "stop_token_ids": [30], "repeat_penalty": 1.4,
            "bad_words": [letters(3, 3), letters(5, 5)]},
}  # fmt: skip
each_rule = pytest.mark.parametrize("name", RULES)
each_way = pytest.mark.parametrize("base", [GREEDY, WARM], ids=["greedy", "seeded"])


@each_rule
@each_way
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_each_setting_does_what_it_says(name: str, base: SamplingParams, runs_ahead: bool) -> None:
    engine = with_words(fake_engine(runs_ahead=runs_ahead))
    params = replace(base, **RULES[name])
    request = submit(engine, params)
    finish(engine)
    assert request.error is None
    assert request.output_ids == expected(PROMPT, params)
    assert request.output_ids != expected(PROMPT, base)
    ends = ends_of(params)
    assert (request.finish_reason == "stop") == (request.output_ids[-1] in ends)
    is_ahead = any(batch.ids_on_device for batch in batches_of(engine))
    # What hangs on the tokens before needs them first; the rest hangs on their number alone.
    assert is_ahead == (runs_ahead and name not in ("words", "all"))


def ends_of(params: SamplingParams) -> set[int]:
    return {END_ID, *params.stop_token_ids}


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_in_one_batch_each_request_gets_what_it_gets_alone(runs_ahead: bool) -> None:
    engine = with_words(fake_engine(runs_ahead=runs_ahead, max_batch_requests=16, num_blocks=256))
    all_params = [
        replace(base, **fields) for fields in ({}, *RULES.values()) for base in (GREEDY, WARM)
    ]
    requests = [submit(engine, params) for params in all_params]
    finish(engine)
    for request, params in zip(requests, all_params, strict=True):
        assert request.output_ids == expected(PROMPT, params)
        assert request.rules is not None or not (
            params.logit_bias or params.allowed_token_ids or params.min_tokens or params.bad_words
        )
    assert max(len(batch.block_tables) for batch in batches_of(engine)) > len(requests) - 3


@each_rule
@each_way
def test_an_answer_that_was_begun_elsewhere_goes_on_alike(name: str, base: SamplingParams) -> None:
    params = replace(base, **RULES[name])
    whole = expected(PROMPT, params)
    for cut in range(1, len(whole), 4):
        engine = with_words(fake_engine())
        request = submit(engine, params, whole[:cut])
        finish(engine)
        assert request.output_ids == whole


def test_without_such_settings_there_are_no_rules() -> None:
    engine = fake_engine()
    for params in (SamplingParams(), SamplingParams(stop_token_ids=[5], temperature=1.0)):
        assert token_rules(params, engine.tokenizer, VOCAB_SIZE) is None


def test_a_stop_token_ends_an_answer_whose_text_does_not_show_it() -> None:
    engine = fake_engine()
    free = submit(engine, replace(GREEDY, ignore_eos=True))
    finish(engine)
    fifth = free.output_ids[4]
    num_before = free.output_ids.index(fifth)
    stopped = submit(engine, replace(GREEDY, ignore_eos=True, stop_token_ids=[fifth]))
    finish(engine)
    assert stopped.output_ids == free.output_ids[: num_before + 1]
    assert engine.result(stopped).text == letters(*free.output_ids[:num_before])
    assert stopped.finish_reason == "stop"


def test_min_tokens_hold_off_stop_strings_too() -> None:
    engine = fake_engine()
    free = submit(engine, replace(GREEDY, ignore_eos=True, logit_bias={5: 60.0}))
    finish(engine)
    assert set(free.output_ids) == {5}
    # A string is complete with the third token; with `min_tokens` one that ends behind them counts.
    for stop, min_tokens, num_tokens in (
        ("eee", 0, 3), ("eee", 2, 3), ("eee", 3, 4), ("eee", 7, 8), ("e", 7, 8), ("eeez", 7, 24),
    ):  # fmt: skip
        params = replace(
            free.params, stop=stop, min_tokens=min_tokens, logit_bias={5: 60.0}, ignore_eos=True
        )
        request = submit(engine, params)
        finish(engine)
        assert len(request.output_ids) == num_tokens, (stop, min_tokens)
        if num_tokens < 24:
            assert engine.result(request).text == "e" * (num_tokens - len(stop))
        for cut in range(num_tokens):
            again = submit(engine, params, request.output_ids[:cut])
            finish(engine)
            assert again.output_ids == request.output_ids
            assert engine.result(again).text == engine.result(request).text


def test_where_only_an_end_is_left_it_comes_before_min_tokens() -> None:
    engine = fake_engine()
    request = submit(engine, replace(GREEDY, min_tokens=5, allowed_token_ids=[END_ID]))
    finish(engine)
    assert (request.output_ids, request.finish_reason) == ([END_ID], "stop")


def test_logprobs_are_of_the_raw_logits_whatever_the_settings_changed() -> None:
    engine = fake_engine()
    params = replace(WARM, logit_bias={5: 4.0}, allowed_token_ids=[5, 6, 7], logprobs=3)
    request = submit(engine, params)
    finish(engine)
    output = request.output_ids
    assert output == expected(PROMPT, params)
    raw = [
        token_logprob(
            hashed_logits(PROMPT + output[:place]), token, 3, engine.tokenizer.shown_piece
        )
        for place, token in enumerate(output)
    ]
    assert request.logprobs == raw
    assert any(top.token_id not in (5, 6, 7) for one in raw for top in one.top)


def test_a_request_that_has_no_token_left_ends_alone() -> None:
    engine = with_words(fake_engine())
    stuck = submit(
        engine, replace(GREEDY, allowed_token_ids=[5, 6], bad_words=[letters(5, 6), letters(6, 6),
                        letters(6, 5), letters(5, 5)])
    )  # fmt: skip
    other = submit(engine, WARM)
    finish(engine)
    assert isinstance(stuck.error, NoTokenLeft)
    told = "no token may come next by allowed_token_ids and bad_words; allow more"
    assert str(stuck.error) == told
    assert other.output_ids == expected(PROMPT, WARM)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"logit_bias": {61: 1}}, "logit_bias is 61, but the vocabulary has 61 tokens, from 0 on"),
        ({"allowed_token_ids": [1, 99]}, "allowed_token_ids is 99, but the vocabulary has 61"),
        ({"stop_token_ids": [61]}, "stop_token_ids is 61, but the vocabulary has 61 tokens"),
        (
            {"allowed_token_ids": [4], "logit_bias": {4: False}},
            "no token may come next by allowed_token_ids and logit_bias; allow more",
        ),
        (
            {"bad_words": ["d"], "allowed_token_ids": [4]},
            "no token may come next by allowed_token_ids and bad_words",
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused_when_it_is_asked(
    fields: dict[str, Any], told: str
) -> None:
    engine = with_words(fake_engine())
    with pytest.raises(UsageError, match=re.escape(told)):
        engine.request(PROMPT, SamplingParams(**fields))


MANY = range(1 << 16)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"logit_bias": {5: 100.5}}, "logit_bias is 100.5 for token 5, but must be from -100 to"),
        ({"logit_bias": {5: True}}, "logit_bias is True for token 5, but must be from -100 to"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias is nan for token 5, but must be from"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias is inf for token 5, but must be from"),
        ({"logit_bias": {"5": 1}}, "logit_bias is '5', but must name tokens by their ids"),
        ({"logit_bias": {-1: 1}}, "logit_bias is -1, but a token id is from 0 to 2147483647"),
        ({"logit_bias": [(5, 1), (5, 2)]}, "token 5 stands there twice"),
        ({"logit_bias": dict.fromkeys(MANY, 1)}, "logit_bias is a list of 65536, but at most 1024"),
        ({"stop_token_ids": MANY}, "stop_token_ids is a list of 65536, but at most 128 are"),
        ({"stop_token_ids": [True]}, "stop_token_ids is True, but must name tokens by their ids"),
        ({"allowed_token_ids": MANY}, "allowed_token_ids is a list of 65536, but at most 32768"),
        ({"allowed_token_ids": []}, "one token at least must be allowed, or None: all are"),
        ({"min_tokens": -1}, "min_tokens is -1, but must be from 0 to"),
        ({"min_tokens": 129}, "min_tokens is 129, but max_tokens is 128; take at most that"),
        ({"bad_words": ["a", ""]}, "bad_words is '', but an empty text is no word; leave it out"),
        ({"bad_words": ["a"] * 129}, "bad_words is a list of 129, but at most 128 are allowed"),
        ({"bad_words": ["a" * 257]}, "but a word has at most 256 characters"),
    ],
)
def test_settings_are_bounded_and_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadSetting, match=re.escape(told)) as caught:
        SamplingParams(**fields)
    assert caught.value.field == next(iter(fields))


def test_settings_are_kept_as_what_nobody_can_change() -> None:
    ids: list[Any] = [4, np.int64(4), 2]
    biases: dict[Any, Any] = {9: 1, 2: False, np.int64(5): -float("inf")}
    params = SamplingParams(logit_bias=biases, stop_token_ids=ids, bad_words="no")
    assert params.logit_bias == ((2, -np.inf), (5, -np.inf), (9, 1.0))
    assert params.stop_token_ids == (4, 2)
    assert params.bad_words == ("no",)
    assert replace(params) == params
    assert hash(replace(params)) == hash(params)
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


# -- with a model ----------------------------------------------------------------------------------

TEXT = "def count_words(text):\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(context_length=256) as llm:
        yield llm


def test_a_word_that_must_not_come_does_not(llm: LLM) -> None:
    for params in (GREEDY, replace(WARM, temperature=0.9)):
        free = llm.generate(TEXT, params, max_tokens=40).text
        words = [word for word in re.findall(r"\w+", free) if len(word) > 3][:4]
        assert len(words) > 2
        held = llm.generate(TEXT, params, max_tokens=40, bad_words=words)
        spelled = {
            tuple(llm.tokenizer.encode(blank + word, add_special=False, at_start=False))
            for word in words
            for blank in ("", " ")
        }
        ids = held.token_ids
        for sequence in spelled:
            places = range(len(ids) - len(sequence) + 1)
            assert all(ids[n : n + len(sequence)] != sequence for n in places), sequence
        assert held.text != free


def test_a_form_and_rules_hold_together(llm: LLM) -> None:
    (end_id,) = llm.tokenizer.end_ids
    params = SamplingParams(
        max_tokens=40, temperature=1.0, seed=2, grammar="start: /[a-z]{1,200}/",
        logit_bias={end_id: 100},
    )  # fmt: skip
    short = llm.generate(TEXT, params)
    assert (len(short.token_ids), short.token_ids[-1]) == (2, end_id)  # as soon as the form lets it
    longer = llm.generate(TEXT, params, min_tokens=12)
    assert (len(longer.token_ids), longer.token_ids[-1]) == (13, end_id)
    assert re.fullmatch("[a-z]+", longer.text)
    first = short.token_ids[0]
    other = llm.generate(TEXT, params, logit_bias={end_id: 100, first: False})
    assert first not in other.token_ids
    assert re.fullmatch("[a-z]+", other.text)


def test_a_form_that_is_whole_ends_its_answer_and_one_without_a_token_fails(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, grammar='start: "yes"')
    whole = llm.generate(TEXT, params, min_tokens=30)
    assert (whole.text, whole.finish_reason) == ("yes", "stop")
    with pytest.raises(NoTokenLeft, match="by allowed_token_ids and grammar; allow more"):
        llm.generate(TEXT, params, allowed_token_ids=llm.encode("0"))


@pytest.mark.parametrize("where", [1, 7, 13])
def test_a_form_with_rules_goes_on_elsewhere(llm: LLM, where: int) -> None:
    params = SamplingParams(
        max_tokens=40, temperature=1.0, seed=2, grammar="start: /[a-z]{1,60}/", min_tokens=14,
        logit_bias={5: 4.0}, bad_words=["in"],
    )  # fmt: skip
    ids = llm.encode(TEXT)
    [whole] = llm.engine.complete([llm.engine.request(ids, params)])
    assert len(whole.token_ids) > 14
    request = llm.engine.request(ids, params, RequestTerms(output_ids=whole.token_ids[:where]))
    [resumed] = llm.engine.complete([request])
    assert (resumed.token_ids, resumed.text) == (whole.token_ids, whole.text)


def test_a_form_that_failed_is_no_answer_even_where_an_end_was_chosen(llm: LLM) -> None:
    request = llm.request(TEXT, grammar='start: "yes"')
    assert request.matcher is not None
    request.matcher._failure = "it broke"
    end_id = min(llm.tokenizer.end_ids)
    with pytest.raises(Exception, match="it broke"):
        request.accept(end_id)
    assert not request.done
