"""Several tokens a step: the same tokens as one by one, whatever is tried, and nothing is left of
what was wrong."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.k_quants import demo_of_type
from models.tiny_gguf import WIDTH, write_tiny
from pretended.fake_runner import (
    POISON_ID,
    batches_of,
    expected_output,
    fake_engine,
    finish,
    hashed_logits,
    run,
)

from hypocenter import LLM
from hypocenter.base.errors import BadLogits
from hypocenter.device import devices
from hypocenter.device.sim.sim import open_sim
from hypocenter.doctor.case import Case
from hypocenter.doctor.rungs.engine.draws import draws
from hypocenter.doctor.rungs.engine.ownership import ownership
from hypocenter.doctor.rungs.engine.step_inputs import step_inputs
from hypocenter.doctor.rungs.engine.waiting import waiting
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.batch import Chunk
from hypocenter.engine.drafting import drafter
from hypocenter.engine.drafting.drafter import (
    _SHARE_LOST,
    CPU_COSTS,
    GPU_COSTS,
    Drafter,
    NgramDrafter,
    StepLoad,
)
from hypocenter.engine.drafting.ngrams import MAX_MATCH, MIN_MATCH, Ngrams
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.engine.sampler import _draw
from hypocenter.record import recorder, ring
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Reached, Stepped
from hypocenter.record.fault_record import FaultRecord
from hypocenter.settings.config import EngineConfig, SamplingParams

#: So much of the logits hangs on the last token alone that some drafts are right and some wrong.
HABIT = 4.0
LONG = 60
ALONE = StepLoad(1, 1)
SIM = "sim:h200"


def drafting(**sizes: Any) -> Engine:
    return fake_engine(draft_max=7, habit=HABIT, **sizes)


def expected(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return expected_output(prompt, params, 128, end=not params.ignore_eos, habit=HABIT)


def counts(requests: Sequence[Request]) -> tuple[int, int]:
    """Tokens that were tried for them, and those of these that were right."""
    timings = [request.timings() for request in requests]
    return sum(one.num_drafted_tokens for one in timings), sum(
        one.num_accepted_tokens for one in timings
    )


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens are tried as may be, however often they are wrong."""
    monkeypatch.setattr(Drafter, "_left", lambda self, num_output, gains=True: math.inf)
    monkeypatch.setattr(drafter, "best_number", lambda odds, most, price_of: (most, True))


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7},
    "filtered": {"temperature": 1.0, "top_k": 8, "top_p": 0.9},
    "penalised": {"frequency_penalty": 1.0, "presence_penalty": 1.0},
    "repeat": {"temperature": 0.6, "repeat_penalty": 1.1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("eager")
def test_answers_are_those_without_drafts(kind: str) -> None:
    """By several seeds, alone and together."""
    engine = drafting()
    together = []
    for seed in range(6):
        prompt = random.Random(seed).choices(range(1, 50), k=5) * 2
        params = SamplingParams(max_tokens=LONG, ignore_eos=True, seed=seed, **KINDS[kind])
        request = engine.request(prompt, params)
        if seed < 3:
            finish(engine, request)
        together.append(request)
    finish(engine, *together[3:])
    for request in together:
        assert request.output_ids == expected(request.prompt_ids, request.params)
    drafted, accepted = counts(together)
    assert 0 < accepted < drafted


def test_a_token_is_drawn_behind_drafts_as_behind_tokens() -> None:
    """Its position, and how often each token stands before it: drafts behind it do not count."""
    params = SamplingParams(temperature=0.5, seed=1, presence_penalty=0.5, max_tokens=20)
    drafts = [7, 7, 3, 9]

    def begun(output_ids: Sequence[int]) -> Chunk:
        request = drafting().request([3, 5], params, RequestTerms(output_ids=output_ids))
        request.num_computed = len(request.token_ids) - 1
        return Chunk.next_of(request, 1)

    tried = begun([5]).trying(drafts, [None] * 5)
    for number in range(5):
        draw, wanted = _draw(tried, number), _draw(begun([5, *drafts[:number]]), 0)
        assert (draw.position, draw.random_number) == (wanted.position, wanted.random_number)
        pairs = [
            dict(zip(one.context_ids.tolist(), one.output_counts.tolist(), strict=True))
            for one in (draw, wanted)
        ]
        assert pairs[0] == pairs[1]


@pytest.mark.usefixtures("eager")
def test_what_was_wrong_leaves_nothing_in_the_cache() -> None:
    """Blocks are given back, and others find none but those of the request's own tokens."""
    engine = drafting()
    num_wrong = 0
    for seed in range(4):
        prompt = [3, 1, 4, 1, 5] * 3
        params = SamplingParams(max_tokens=60, ignore_eos=True, seed=seed, temperature=0.8)
        request = engine.request(prompt, params)
        engine.submit(request)
        while not request.done:
            engine.step()
            engine.check_integrity()
            if not request.done:
                size = engine.cache.block_size
                assert len(engine.cache.blocks(request.id)) == -(-request.num_computed // size)
                assert engine.cache.num_tokens(request.id) == len(request.token_ids) - 1
        drafted, accepted = counts([request])
        num_wrong += drafted - accepted
        # What it left is what another one computes that is asked the same and drafts nothing.
        plain = SamplingParams(max_tokens=20, ignore_eos=True, seed=7, drafts=False)
        again = run(engine, request.token_ids, plain)
        assert again.num_cached > len(prompt)
        assert again.output_ids == expected(request.token_ids, plain)
    assert num_wrong > 20


@pytest.mark.usefixtures("eager")
def test_a_sampled_token_has_the_distribution_of_the_logits() -> None:
    """Chi-square of what is chosen behind a draft that was right, over several hundred seeds."""
    likely = int(np.argmax(hashed_logits([5], HABIT) - hashed_logits([5])))
    prompt = [1, 2, 5, likely, 7, 8, 1, 2, 5]
    engine = drafting()
    run(engine, prompt, SamplingParams(max_tokens=1, drafts=False))  # what is read is cached
    seen: Counter[int] = Counter()
    for seed in range(600):
        params = SamplingParams(max_tokens=3, ignore_eos=True, seed=seed, temperature=5.0)
        request = run(engine, prompt, params)
        if request.output_ids[0] == likely:
            assert counts([request])[1] > 0
            seen[request.output_ids[1]] += 1
    logits = hashed_logits([*prompt, likely], HABIT).astype(np.float64) / 5.0
    shares = np.exp(logits - logits.max())
    means = shares / shares.sum() * seen.total()
    common = [token for token in range(len(means)) if means[token] >= 5]
    statistic = sum((seen[token] - means[token]) ** 2 / means[token] for token in common)
    assert seen.total() > 100
    assert len(common) > 2
    assert statistic < len(common) + 4 * math.sqrt(2 * len(common))


@pytest.mark.usefixtures("eager")
def test_an_answer_ends_where_it_does_without_drafts() -> None:
    """By its end token, its length, its context; nothing behind that is tried."""
    engine = drafting(context_length=40)
    ended = Counter[str]()
    for seed in range(8):
        prompt = random.Random(seed).choices(range(1, 20), k=3) * 3
        params = SamplingParams(max_tokens=40, seed=seed, temperature=1.0)
        request = run(engine, prompt, params)
        wanted = expected_output(prompt, params, 40, habit=HABIT)
        assert request.output_ids == wanted, seed
        ended[request.finish_reason or ""] += 1
        assert all(int(batch.positions.max()) < 39 for batch in batches_of(engine))
    assert ended.keys() == {"stop", "length"}


@pytest.mark.usefixtures("eager")
def test_a_failure_behind_a_wrong_draft_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = drafting()
    prompt = [3, 1, 4, 1, 5] * 3
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=2, temperature=0.5)
    sample = engine._steps.sampler.sample
    num_poisoned = 0

    def poisoned(logits: Any, chunks: Any) -> Any:
        nonlocal num_poisoned
        outcomes, row = sample(logits, chunks)(), 0
        for chunk in chunks:
            right = [*chunk.drafts, None]
            wrong = next(n for n, draft in enumerate(right) if outcomes[row + n] != draft)
            for number in range(wrong + 1, chunk.num_drawn):
                outcomes[row + number] = BadLogits(0, 1, 61)
                num_poisoned += 1
            row += chunk.num_drawn
        return lambda: outcomes

    monkeypatch.setattr(engine._steps.sampler, "sample", poisoned)
    assert run(engine, prompt, params).output_ids == expected(prompt, params)
    assert num_poisoned > 0


def test_logits_that_are_none_end_the_request_alone() -> None:
    engine = drafting()
    bad, good = engine.request([POISON_ID, 3, 3], SamplingParams()), engine.request([3] * 4,
        SamplingParams(max_tokens=30, ignore_eos=True))  # fmt: skip
    finish(engine, bad, good)
    assert isinstance(bad.error, BadLogits)
    assert good.output_ids == expected([3] * 4, good.params)


@pytest.mark.parametrize("num_sent", [1, 17, 40])
@pytest.mark.usefixtures("eager")
def test_an_answer_that_was_begun_elsewhere_goes_on(num_sent: int) -> None:
    prompt, params = [7, 8, 9] * 3, SamplingParams(max_tokens=80, ignore_eos=True, seed=4)
    wanted = expected(prompt, params)
    request = run(drafting(), prompt, params, output_ids=wanted[:num_sent])
    assert request.output_ids == wanted


@pytest.mark.usefixtures("eager")
def test_a_text_that_becomes_long_is_computed_anew_at_the_same_token() -> None:
    engine = drafting(longrope_threshold=30)
    for seed in range(2):
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=seed, temperature=0.5)
        request = run(engine, [7, 8, 9] * 3, params)
        assert request.output_ids == expected([7, 8, 9] * 3, params)
    assert counts([request])[1]
    assert all(batch.is_long or int(batch.positions.max()) < 30 for batch in batches_of(engine))


@pytest.mark.usefixtures("eager")
def test_little_room_is_shared_without_drafts() -> None:
    """Requests are preempted as without; a draft takes no block that another has."""
    engine = drafting(num_blocks=14)
    prompts = [[n, n + 1, n + 2] * 3 for n in range(1, 13, 3)]
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=3, temperature=0.4)
    requests = [engine.request(prompt, params) for prompt in prompts]
    finish(engine, *requests)
    for request in requests:
        assert request.output_ids == expected(request.prompt_ids, params)
    assert max(request.num_preemptions for request in requests) > 0


@pytest.mark.usefixtures("eager")
def test_steps_are_launched_ahead_until_the_text_repeats_itself() -> None:
    engine = drafting(runs_ahead=True)
    for seed in range(3):
        prompt = random.Random(seed).sample(range(1, 50), 6)
        params = SamplingParams(max_tokens=LONG, ignore_eos=True, seed=seed, temperature=0.4)
        request = run(engine, prompt, params)
        assert request.output_ids == expected(prompt, params), seed
    batches = batches_of(engine)
    assert any(batch.ids_on_device for batch in batches)
    assert any(len(batch.token_ids) > 1 and len(batch.logit_rows) > 1 for batch in batches)


def test_a_request_can_be_without() -> None:
    engine = drafting()
    params = SamplingParams(max_tokens=30, ignore_eos=True, drafts=False)
    request = run(engine, [3] * 6, params)
    assert request.drafter is None
    assert all(len(batch.logit_rows) <= 1 for batch in batches_of(engine))
    assert request.output_ids == expected([3] * 6, params)


@pytest.mark.usefixtures("eager")
def test_steps_have_no_more_rows_than_tokens_are_chosen_from() -> None:
    """Eight requests choose at most eight tokens a step, beside what one of them may try."""
    engine = drafting(max_batch_tokens=64, num_blocks=400)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    finish(engine, *(engine.request([n, n + 1] * 5, params) for n in range(1, 9)))
    assert max(len(batch.logit_rows) for batch in batches_of(engine)) == 8


# -- what is tried ---------------------------------------------------------------------------------


def longest_match(ids: list[int]) -> int:
    """The most last tokens that stand somewhere before, up to MAX_MATCH."""
    most = 0
    for end in range(1, len(ids)):
        num = 0
        while num < min(end, MAX_MATCH) and ids[end - 1 - num] == ids[-1 - num]:
            num += 1
        most = max(most, num)
    return most


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_match_is_found(seed: int) -> None:
    chance = random.Random(seed)
    ids: list[int] = []
    ngrams = Ngrams()
    for _ in range(120):
        again = chance.randrange(len(ids)) if ids and chance.random() < 0.3 else None
        more = [chance.randrange(3)] if again is None else ids[again : again + 5]
        ids += more
        most, found = longest_match(ids), ngrams.find(ids)
        if found is None:
            assert most < MIN_MATCH
            continue
        start, num = found
        assert ids[start - num : start] == ids[-num:]
        # Of many places the newest ones are compared.
        assert num == most or len([n for n in range(len(ids)) if ids[n - 3 : n] == ids[-3:]]) > 16


def test_large_ids_are_told_apart() -> None:
    ngrams, last = Ngrams(), (1 << 21) - 1
    assert ngrams.find([last, 0, 1, 5, last - 1, 0, 1]) is None
    # Its places in the table are those of others, too: it is looked for, and not found.
    ngrams._is_met[:] = bytes([1]) * len(ngrams._is_met)
    assert ngrams.find([last, 0, 1, 5, last - 1, 0, 1, 6, 0, 0]) is None
    assert ngrams.find([last, 0, 1, 5, last - 1, 0, 1, 6, 0, 0, last, 0, 1]) == (3, 3)


def test_a_long_prompt_is_noted_at_once_as_one_by_one() -> None:
    ids = random.Random(1).choices(range(1 << 21), k=500)
    at_once, one_by_one = Ngrams(), Ngrams()
    at_once.find(ids)
    for end in range(1, len(ids) + 1):
        one_by_one.find(ids[:end])
    assert at_once._is_met == one_by_one._is_met
    assert at_once.find([*ids, *ids[100:103]]) == (103, 3)


@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS])
@pytest.mark.parametrize("num_answers", [1, 8, 32])
def test_wrong_drafts_cost_a_bounded_share(costs: Any, num_answers: int) -> None:
    """By the prices of the table: an answer whose every match misleads loses one part in a hundred,
    and less than one step."""
    one, load = NgramDrafter(7, costs), StepLoad(num_answers, num_answers)
    ids, lost = [1, 2, 3] * 4, 0.0
    for num_output in range(400):
        if one.is_awaited(ids, num_output, 7, load):
            lost += costs.apart * num_answers
        if drafts := one.propose(ids, num_output, 7, load):
            one.begin(len(drafts), load)
            lost += (costs.of(num_answers + len(drafts)) / costs.of(num_answers) - 1) * num_answers
            one.settle(len(drafts), 0)
        ids.append(ids[-3])  # the text goes on as if it repeated itself, but no draft is right
        assert lost <= costs.first_loss + _SHARE_LOST * num_output + 1e-9
    # On a GPU a row more of 32 begins another eight, and is not worth it.
    assert (one.num_drafted > 0) == (costs is CPU_COSTS or num_answers < 32)


@pytest.mark.parametrize("period", [5, 8, 13])
def test_misleading_beginnings_are_tried_twice(period: int) -> None:
    """Three tokens recur, and each time others follow. Even if a step that tries one token took
    twice what a step takes, 128 tokens would lose less than two in a hundred."""
    chance, one = random.Random(period), NgramDrafter(7, CPU_COSTS)
    ids = [1, 2, 3, *(chance.randrange(10, 100_000) for _ in range(125))]
    num_tries = num_rows = 0
    for num_output in range(1, 128):
        place = len(ids) % period
        ids.append(place + 1 if place < 3 else chance.randrange(10, 100_000))
        if drafts := one.propose(ids, num_output, 7, ALONE):
            one.begin(len(drafts), ALONE)
            one.settle(len(drafts), 0)
            num_tries, num_rows = num_tries + 1, num_rows + len(drafts)
    assert 1 <= num_tries <= 2
    assert num_rows / 128 < 0.02


def test_a_text_that_repeats_itself_is_gone_through_in_large_steps() -> None:
    one, ids = NgramDrafter(7, CPU_COSTS), [1, 2, 3, 4, 5] * 4
    sizes = []
    for _ in range(12):
        drafts = one.propose(ids, len(ids) - 20, 7, ALONE)
        assert drafts == [ids[len(ids) - 5 + n % 5] for n in range(len(drafts))]
        one.begin(len(drafts), ALONE)
        one.settle(len(drafts), len(drafts))
        ids = [n % 5 + 1 for n in range(len(ids) + len(drafts) + 1)]
        sizes.append(len(drafts))
    assert sizes[-1] == 7
    assert one.accepted_at[0] == 12


def test_full_steps_try_less() -> None:
    """The more requests share a step, the less a row that may be wrong is worth it."""
    sizes = []
    for num_answers in (1, 8, 64):
        one = NgramDrafter(7, CPU_COSTS)
        sizes.append(len(one.propose([1, 2, 3] * 20, 100, 7, StepLoad(num_answers, num_answers))))
    assert sizes[0] > sizes[-1]


# -- the models themselves -------------------------------------------------------------------------

PROMPT = "import os\nimport sys\nfrom pathlib"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 2},
    "sampled": {"temperature": 0.7, "seed": 11, "repeat_penalty": 1.05},
    "json": {"json_object": True},
    "rules": {"bad_words": ["self", "return x"], "min_tokens": 9, "stop": ["class"]},
}


def same_answers(
    path: Path | str | None, num_tokens: int = 120, **settings: Any
) -> tuple[int, int]:
    """Both have the same answers to the last bit of their logprobs; what was tried, and right."""
    drafted = accepted = 0
    source: dict[str, Any] = {} if path is None else {"path": str(path)}
    with (
        LLM(**source, context_length=256, **settings) as plain,
        LLM(**source, context_length=256, spec="ngram", **settings) as trying,
    ):
        for fields in SETTINGS.values():
            one = plain.generate(PROMPT, max_tokens=num_tokens, **fields)
            other = trying.generate(PROMPT, max_tokens=num_tokens, **fields)
            assert one.token_ids == other.token_ids, fields
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason), fields
            assert one.logprobs == other.logprobs, fields
            trying.engine.check_integrity()
            drafted += other.timings.num_drafted_tokens
            accepted += other.timings.num_accepted_tokens
    return drafted, accepted


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "Q4_K_M"])
@pytest.mark.tier("sim", fast=lambda case: case.kind == "Q8_0")
@pytest.mark.usefixtures("eager")
def test_a_cpu_says_the_same_to_the_bit(kind: str, tmp_path: Path) -> None:
    path = None if kind == "Q8_0" else demo_of_type(tmp_path / "demo.gguf", kind)
    drafted, accepted = same_answers(path, device="cpu", num_threads=1)
    assert drafted > accepted > 20


def alphabet(folder: Path) -> Path:
    """A model that most likely says after each token the one that follows it in the vocabulary."""
    each = np.eye(7, WIDTH, dtype=np.float32)
    tensors = {"token_embd.weight": 50 * each, "output.weight": 1.2 * np.roll(each, 1, axis=0)}
    return write_tiny(folder / "tiny.gguf", tokens=list("abcdefg"), tensors=tensors)


def of_alphabet(path: Path, device: str, spec: str, temperature: float) -> list[Request]:
    """Two requests that ran together."""
    recorder.close_recorder()
    if device == SIM:
        devices.use_backend(open_sim(SIM, graphs=True))
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=5)
    config = EngineConfig(device=device, context_length=64, max_batch_tokens=8, spec=spec)
    with LLM(path, config) as llm:
        requests = [llm.engine.request(ids, params) for ids in ([1, 2, 3], [4, 5, 6])]
        llm.engine.complete(requests)
        llm.engine.check_integrity()
    return requests


@pytest.mark.parametrize("temperature", [0.0, 0.15])
@pytest.mark.tier("sim")
@pytest.mark.usefixtures("eager")
def test_a_gpu_says_the_same(tmp_path: Path, temperature: float) -> None:
    """Steps that run ahead and steps that try tokens take turns, in graphs.

    At 0.15 the alphabet's next letter is drawn nine times of ten, so texts repeat themselves, and
    not always: at 0.3 it is six of ten, and hardly any three letters come again.
    """
    path = alphabet(tmp_path)
    plain = of_alphabet(path, SIM, "off", temperature)
    trying = of_alphabet(path, SIM, "ngram", temperature)
    for one, other in zip(plain, trying, strict=True):
        assert one.output_ids == other.output_ids
    drafted, accepted = counts(trying)
    assert accepted > 10
    assert (drafted > accepted) == (temperature > 0)


@pytest.mark.usefixtures("eager")
def test_the_doctor_finds_the_record_in_order(tmp_path: Path) -> None:
    requests = of_alphabet(alphabet(tmp_path), "cpu", "ngram", 0.3)
    drafted, accepted = counts(requests)
    assert 2 < accepted < drafted
    opened = recorder.current()
    assert isinstance(opened, recorder.Recorder)
    found = ring.read_run(opened.folder)
    steps = [event for event in found.events if isinstance(event, Stepped) and event.requests]
    assert any(request.num_drafts for event in steps for request in event.requests)
    case = Case(
        Bundle(
            kind="suspect", device="cpu", fault=FaultRecord(kind="none", message=""),
            plans=found.plans, tensors=found.tensors, events=found.events,
            progress=Reached(found.progress.submitted),
        )
    )  # fmt: skip
    for rung in (draws, step_inputs, ownership, waiting):
        assert [claim for claim in rung(case) if claim.root is not None] == [], rung
