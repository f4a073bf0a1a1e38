"""Log probabilities: a float64 log-softmax of the raw logits, whoever else is in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.tiny_gguf import WIDTH, write_tiny
from pretended.fake_runner import POISON_ID, batches_of, expected_output, fake_engine, hashed_logits

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.base.errors import BadLogits, BadSetting
from hypocenter.base.results import Completion, TokenLogprob
from hypocenter.device import copies, devices
from hypocenter.device.sim.sim import open_sim
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.engine import Engine
from hypocenter.engine.logprobs import token_logprob
from hypocenter.engine.request import Request

PROMPT = "def read_lines(path):\n"
SIM = "sim:h200"
#: Sums of a vocabulary's terms in float64, in any order: a wrong row or token is far beyond it.
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1, max_batch_requests=4, max_batch_tokens=16) as llm:
        yield llm


def log_softmax(logits: Any) -> list[float]:
    """Plain sums of Python floats, highest taken off first."""
    values = [float(value) for value in logits]
    highest = max(values)
    total = math.fsum(math.exp(value - highest) for value in values)
    return [value - highest - math.log(total) for value in values]


def check(found: TokenLogprob, logits: Any, token_id: int, num_top: int) -> None:
    """That `found` tells of `token_id` what these logits say."""
    expected = log_softmax(logits)
    assert found.token_id == token_id
    assert found.logprob == pytest.approx(expected[token_id], abs=TOLERANCE)
    falling = sorted(range(len(expected)), key=lambda one: (-logits[one], one))[:num_top]
    assert [likely.token_id for likely in found.top] == falling
    for likely in found.top:
        assert likely.logprob == pytest.approx(expected[likely.token_id], abs=TOLERANCE)


def check_all(completion: Completion, num_top: int, logits_after: Any) -> None:
    """All logprobs of a completion; `logits_after` gives the logits after a context."""
    tokens = [*completion.prompt_token_ids, *completion.token_ids]
    num_prompt = len(completion.prompt_token_ids)
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    first, *others = completion.prompt_logprobs
    assert first is None
    entries = [*others, *completion.logprobs]
    assert (len(others), len(entries)) == (num_prompt - 1, len(tokens) - 1)
    for place, entry in enumerate(entries, 1):
        assert entry is not None
        check(entry, logits_after(tokens[:place]), tokens[place], num_top)


@pytest.mark.parametrize("num_top", [0, 1, 7, 20])
def test_logprobs_are_a_log_softmax(num_top: int) -> None:
    rng = np.random.default_rng(num_top)
    for scale in (0.01, 3.0, 300.0):
        logits = rng.normal(0, scale, 500).astype(np.float32)
        logits[7:9] = -np.inf
        for token_id in (0, 8, 499):
            check(token_logprob(logits, token_id, num_top, bytes), logits, token_id, num_top)


def test_of_equal_logits_the_lower_id_comes_first() -> None:
    logits = np.array([1, 3, 3, 2, 3, 3, -np.inf], np.float32)
    top = token_logprob(logits, 0, 3, bytes).top
    assert [likely.token_id for likely in top] == [1, 2, 4]
    assert len(token_logprob(logits, 0, 20, bytes).top) == len(logits)


@pytest.mark.parametrize(("bad", "num_bad"), [(np.nan, 2), (np.inf, 2), (-np.inf, 0)])
def test_without_a_distribution_there_are_none(bad: float, num_bad: int) -> None:
    logits = np.full(5, bad if num_bad == 0 else 1.0, np.float32)
    logits[1:3] = bad
    with pytest.raises(BadLogits) as caught:
        token_logprob(logits, 0, 2, bytes, row=3)
    assert (caught.value.row, caught.value.num_bad) == (3, num_bad)


PARAMS = [
    {"logprobs": 3, "prompt_logprobs": 3},
    {"logprobs": 0, "temperature": 0.9, "seed": 4},
    {"prompt_logprobs": 2, "temperature": 1.3, "seed": 8, "repeat_penalty": 1.3},
    {},
    {"logprobs": 20, "prompt_logprobs": 20, "presence_penalty": 0.5},
]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_in_any_company_each_has_its_own(runs_ahead: bool) -> None:
    """Prompts in chunks, requests that push each other out, some that ask and some that do not."""
    engine = fake_engine(
        num_blocks=14, block_size=4, max_batch_tokens=9, max_batch_requests=4, runs_ahead=runs_ahead
    )
    requests = []
    for number, fields in enumerate(PARAMS * 2):
        params = SamplingParams(max_tokens=12, ignore_eos=True, **fields)  # type: ignore[arg-type]
        requests.append(engine.request([number + 1] * (3 * number + 1), params))
    reading = engine.request(
        list(range(1, 30)), SamplingParams(max_tokens=0), RequestTerms(keeps_logits=True)
    )
    completions = engine.complete([*requests, reading])
    assert any(request.num_preemptions for request in requests)
    for request, completion in zip(requests, completions, strict=False):
        check_company(request, completion)
    alone = np.stack([hashed_logits(list(range(1, n + 1))) for n in range(1, 30)])
    assert np.array_equal(np.concatenate(reading.logits), alone)
    engine.check_integrity()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def check_company(request: Request, completion: Completion) -> None:
    params = request.params
    # The tokens are those that nobody asked about.
    assert request.output_ids == expected_output(request.prompt_ids, params, 128, end=False)
    if params.logprobs is None:
        assert completion.logprobs is None
    if params.prompt_logprobs is None:
        assert completion.prompt_logprobs is None
    if params.logprobs is not None and params.prompt_logprobs is not None:
        check_all(completion, params.logprobs, hashed_logits)
    for place, entry in enumerate(completion.logprobs or ()):
        context = [*request.prompt_ids, *request.output_ids[:place]]
        check(entry, hashed_logits(context), request.output_ids[place], params.logprobs or 0)


def test_nothing_is_copied_for_those_who_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    to_host_later = copies.to_host_later

    def counted(tensor: Any) -> Any:
        copied.append(tensor.shape[0])
        return to_host_later(tensor)

    monkeypatch.setattr(copies, "to_host_later", counted)
    engine = fake_engine()
    five = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.complete([engine.request([1, 2], five), engine.request([3] * 4, five)])
    assert copied == []
    asking = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1)
    engine.complete([engine.request([1, 2], five), engine.request([3] * 4, asking)])
    assert copied == [1] * 5


def test_without_a_token_the_prompt_is_read_for_its_logprobs() -> None:
    engine = fake_engine(max_batch_tokens=4, context_length=10)
    for prompt in ([5], [5, 6, 7], list(range(1, 10)), list(range(1, 11))):
        params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=1)
        completion = engine.complete([engine.request(prompt, params)])[0]
        assert (completion.token_ids, completion.finish_reason) == ((), "length")
        check_all(completion, 1, hashed_logits)
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_bad_logits_of_a_prompt_end_its_request_alone() -> None:
    engine = fake_engine()
    params = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    bad, good = engine.request([POISON_ID, 2, 4], params), engine.request([3, 1], params)
    for request in (bad, good):
        engine.submit(request)
    while engine.step():
        engine.check_integrity()
    assert isinstance(bad.error, BadLogits)
    check_all_of(engine, good)


def check_all_of(engine: Engine, request: Request) -> None:
    assert request.error is None
    assert request.output_ids == expected_output(request.prompt_ids, request.params, 128, end=False)
    assert len(request.prompt_logprobs) == len(request.prompt_ids) - 1
    assert batches_of(engine)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, True, 1.0])
def test_a_number_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(BadSetting, match=rf"^{field} is "):
        SamplingParams(**{field: value})


def test_of_a_model_they_are_those_of_its_logits(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.5, seed=5, ignore_eos=True)
    silent = llm.generate(PROMPT, params)
    asked = llm.generate(PROMPT, params, logprobs=5, prompt_logprobs=5)
    assert (silent.token_ids, silent.logprobs, silent.prompt_logprobs) == (
        asked.token_ids, None, None,
    )  # fmt: skip
    logits = llm.logits([*asked.prompt_token_ids, *asked.token_ids])
    check_all(asked, 5, lambda context: logits[len(context) - 1])
    assert asked.logprobs is not None
    assert b"".join(entry.piece for entry in asked.logprobs).decode() == asked.text
    assert {entry.token_id for entry in asked.logprobs} - {
        e.top[0].token_id for e in asked.logprobs
    }


def test_pieces_of_a_stream_have_those_of_their_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=5, temperature=1.5, ignore_eos=True, logprobs=2)
    whole = llm.generate(PROMPT, params)
    assert whole.logprobs is not None
    # A stop string that does not come true holds a token back.
    pieces = list(llm.stream(PROMPT, params, stop=whole.logprobs[3].piece.decode() + "never"))
    assert any(len(piece.token_ids) > 1 for piece in pieces)
    for piece in pieces:
        assert piece.logprobs is not None
        assert tuple(entry.token_id for entry in piece.logprobs) == piece.token_ids
    assert tuple(entry for piece in pieces for entry in piece.logprobs or ()) == whole.logprobs
    assert all(piece.logprobs is None for piece in llm.stream(PROMPT, max_tokens=2))


def test_pieces_of_half_a_character_join_to_the_text(llm: LLM) -> None:
    text = "# naïve — 漢字 🦀\n"
    (completion,) = [llm.generate(text, max_tokens=0, prompt_logprobs=0)]
    pieces = [entry.piece for entry in completion.prompt_logprobs or () if entry is not None]
    assert b"".join(pieces).decode() == text
    assert any(not is_whole(piece) for piece in pieces)


def is_whole(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_special_tokens_and_rows_beyond_the_vocabulary_show_nothing(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer.eos_id is not None
    assert tokenizer.piece(tokenizer.eos_id) == b"<|end_of_text|>"
    assert tokenizer.shown_piece(tokenizer.eos_id) == b""
    assert tokenizer.shown_piece(tokenizer.vocab_size) == b""
    (import_id,) = tokenizer.encode("import", add_special=False)
    assert tokenizer.shown_piece(import_id) == b"import"


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.tier("sim")
def test_on_a_gpu_rows_of_those_who_ask_reach_the_host(tmp_path: Path, runs_ahead: bool) -> None:
    each = np.eye(7, WIDTH, dtype=np.float32)
    tensors = {"token_embd.weight": 50 * each, "output.weight": 3 * np.roll(each, 1, axis=0)}
    path = write_tiny(tmp_path / "tiny.gguf", tokens=list("abcdefg"), tensors=tensors)
    devices.use_backend(open_sim(SIM, graphs=True))
    plain = SamplingParams(max_tokens=3, ignore_eos=True, temperature=2.0, seed=3)
    asking = SamplingParams(
        max_tokens=3, ignore_eos=True, temperature=2.0, seed=3, logprobs=2, prompt_logprobs=2
    )
    with LLM(path, EngineConfig(device=SIM, context_length=64, max_batch_tokens=8)) as llm:
        llm.engine.runner.runs_ahead = runs_ahead
        prompts = [[1, 2, 3], [4, 5], [6]]
        silent = llm.generate(prompts, plain)
        asked = llm.generate(prompts, [asking, plain, asking])
        assert [one.token_ids for one in asked] == [one.token_ids for one in silent]
        assert asked[1].logprobs is None
        for one in (asked[0], asked[2]):
            logits = llm.logits([*one.prompt_token_ids, *one.token_ids])
            check_all(one, 2, lambda context, logits=logits: logits[len(context) - 1])
        llm.engine.check_integrity()
