"""A second model that drafts: the same tokens as without, whatever it writes, and its own cache in
order."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from models.k_quants import demo_of_type
from models.tiny_gguf import WIDTH, write_tiny
from pretended.fake_runner import (
    FakeRunner,
    batches_of,
    expected_output,
    fake_engine,
    finish,
    run,
)

from hypocenter import LLM
from hypocenter.base.errors import BadSetting
from hypocenter.device import devices
from hypocenter.device.backend import Room
from hypocenter.device.sim.sim import open_sim
from hypocenter.doctor.case import Case
from hypocenter.doctor.rungs.engine.draws import draws
from hypocenter.doctor.rungs.engine.ownership import ownership
from hypocenter.doctor.rungs.engine.step_inputs import step_inputs
from hypocenter.doctor.rungs.engine.waiting import waiting
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.batch import Chunk
from hypocenter.engine.drafting import drafter
from hypocenter.engine.drafting.ahead import DraftsAhead, WrittenRow
from hypocenter.engine.drafting.draft_model import DraftModel, _Draft
from hypocenter.engine.drafting.drafter import (
    CPU_COSTS,
    GPU_COSTS,
    Drafter,
    RowCosts,
    StepLoad,
)
from hypocenter.engine.drafting.model_drafter import _FIRST_LOSS, DraftRecord, ModelDrafter
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.engine.sampler import _draw
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.placement import draft_config, draft_needs, kv_room, weight_bytes
from hypocenter.record import recorder, ring
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Reached
from hypocenter.record.fault_record import FaultRecord
from hypocenter.settings.config import EngineConfig, SamplingParams

HABIT = 4.0
SIM = "sim:h200"
ALONE = StepLoad(1, 1)
#: A draft model that is right most of the time, and one that seldom is.
GOOD, BAD = {"noise": 0.3}, {"noise": 4.0}


def drafting(draft: Mapping[str, Any] = GOOD, **sizes: Any) -> Engine:
    return fake_engine(draft_max=5, habit=HABIT, draft=draft, **sizes)


def model_of(engine: Engine) -> DraftModel:
    assert engine.draft_model is not None
    return engine.draft_model


def expected(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return expected_output(prompt, params, 128, end=not params.ignore_eos, habit=HABIT)


def counts(requests: Sequence[Request]) -> tuple[int, int]:
    """Tokens that were tried for them, and those of these that were right."""
    timings = [request.timings() for request in requests]
    drafted = sum(one.num_drafted_tokens for one in timings)
    return drafted, sum(one.num_accepted_tokens for one in timings)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens are tried as may be, however often they are wrong."""
    monkeypatch.setattr(Drafter, "_left", lambda self, num_output, gains=True: math.inf)
    monkeypatch.setattr(drafter, "best_number", lambda odds, most, price_of: (most, True))
    monkeypatch.setattr(DraftRecord, "awaits_steps", False)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7},
    "filtered": {"temperature": 1.0, "top_k": 8, "top_p": 0.9},
    "penalised": {"frequency_penalty": 1.0, "presence_penalty": 1.0},
    "biased": {"temperature": 0.6, "repeat_penalty": 1.1},
}


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("eager")
def test_answers_are_those_without_a_draft_model(kind: str, runs_ahead: bool) -> None:
    """By several seeds, alone and together; on a device drafts are written one behind the other."""
    engine = drafting(runs_ahead=runs_ahead)
    together = []
    for seed in range(6):
        prompt = random.Random(seed).choices(range(1, 50), k=9)
        params = SamplingParams(max_tokens=40, ignore_eos=True, seed=seed, **KINDS[kind])
        request = engine.request(prompt, params)
        if seed < 2:
            finish(engine, request)
        together.append(request)
    finish(engine, *together[2:])
    for request in together:
        assert request.output_ids == expected(request.prompt_ids, request.params)
    drafted, accepted = counts(together)
    assert 0 < accepted < drafted
    batches = [batch for batch in model_batches(engine) if len(batch.logit_rows)]
    chained = [batch for batch in batches if batch.ids_on_device]
    assert bool(chained) == (runs_ahead and kind not in ("penalised", "biased"))
    assert max(len(batch.logit_rows) for batch in batches) == 4


def model_batches(engine: Engine) -> list[Any]:
    runner: Any = model_of(engine).runner
    assert isinstance(runner, FakeRunner)
    return runner.batches


@pytest.mark.parametrize("kind", ["greedy", "penalised"])
@pytest.mark.usefixtures("eager")
def test_the_host_reads_drafts_once_a_round(kind: str) -> None:
    """With the tokens of the step that tries them; one by one where it must see each."""
    engine = drafting(runs_ahead=True)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, **KINDS[kind])
    requests = [engine.request([n, n + 1], params) for n in (1, 11)]
    finish(engine, *requests)
    rounds = [batch for batch in batches_of(engine) if batch.put_drafts is not None]
    assert bool(rounds) == (kind == "greedy")
    assert cast(Any, model_of(engine).chain()).num_read == len(rounds)
    for batch in rounds:  # what the host does not know yet
        is_draft = batch.sequence_rows[1:] == batch.sequence_rows[:-1]
        assert is_draft.any()
        assert not batch.token_ids[1:][is_draft].any()


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised"])
@pytest.mark.usefixtures("eager")
def test_the_same_model_is_always_right(kind: str) -> None:
    """It draws at each place by the random number of the place, and counts what it has written."""
    engine = drafting({"noise": 0.0})
    params = SamplingParams(max_tokens=41, ignore_eos=True, seed=3, **KINDS[kind])
    request = run(engine, [3, 1, 4, 1, 5], params)
    assert request.output_ids == expected([3, 1, 4, 1, 5], params)
    drafted, accepted = counts([request])
    assert drafted == accepted
    num_steps = sum(1 for batch in batches_of(engine) if len(batch.logit_rows))
    assert num_steps <= 1 + -(-40 // 6)


@pytest.mark.usefixtures("eager")
def test_requests_that_want_unlike_numbers_are_written_for_together() -> None:
    """On a device each goes on behind its own token, when others have enough."""
    engine = drafting({"noise": 0.0}, runs_ahead=True, max_batch_requests=24, max_batch_tokens=64)
    requests = [
        engine.request([n, n + 1, n + 2], SamplingParams(max_tokens=most, ignore_eos=True))
        for n, most in ((1, 9), (11, 40), (21, 13), (31, 24))
    ]
    finish(engine, *requests)
    for request in requests:
        assert request.output_ids == expected(request.prompt_ids, request.params)
    drafted, accepted = counts(requests)
    assert drafted == accepted > 50
    rows = [len(batch.logit_rows) for batch in model_batches(engine) if batch.ids_on_device]
    assert {2, 3, 4} <= set(rows)


@pytest.mark.usefixtures("eager")
def test_little_room_is_shared_and_nothing_is_left() -> None:
    """Requests are preempted as without, and the draft model's cache is smaller than theirs."""
    engine = drafting({**GOOD, "num_blocks": 9}, num_blocks=14)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=3, temperature=0.4)
    requests = [engine.request([n, n + 1, n + 2] * 3, params) for n in range(1, 13, 3)]
    finish(engine, *requests)
    for request in requests:
        assert request.output_ids == expected(request.prompt_ids, params)
    assert max(request.num_preemptions for request in requests) > 0
    assert counts(requests)[1] > 0
    assert model_of(engine).cache.owners() == set()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.usefixtures("eager")
def test_what_was_written_and_refused_is_taken_back(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache never holds more than the text and what was written behind it last, also where it
    writes in some steps only. A long prompt is read in pieces, of which each is read once."""
    num_to_write, steps = ModelDrafter.num_to_write, itertools.count()

    def at_times(one: ModelDrafter, *given: Any) -> int:
        return 0 if next(steps) % every else num_to_write(one, *given)

    monkeypatch.setattr(ModelDrafter, "num_to_write", at_times)
    engine = drafting(BAD, max_batch_tokens=8)
    prompt = random.Random(1).choices(range(1, 50), k=40)
    params = SamplingParams(max_tokens=50, ignore_eos=True, seed=1, temperature=0.9)
    request = engine.request(prompt, params)
    engine.submit(request)
    cache, runner = model_of(engine).cache, cast(Any, model_of(engine).runner)
    while not request.done:
        engine.step()
        engine.check_integrity()
        assert cache.num_tokens(request.id) <= len(request.token_ids) + 5
        if (written := model_of(engine)._written.get(request.id)) is not None and not request.done:
            num_before, _ = written
            slots = cache.retrieve(request.id, 0, num_before).slots
            read = runner._cached[slots, 0].tolist()
            assert read == request.token_ids[:num_before]
    assert request.output_ids == expected(prompt, params)
    drafted, accepted = counts([request])
    assert drafted - accepted > 40 / every
    positions = [int(p) for batch in model_batches(engine) for p in batch.positions if p < 40]
    assert sorted(positions) == list(range(40))


def test_a_draft_is_drawn_behind_drafts_as_the_token_is() -> None:
    """Its position, and how often each token stands before it."""
    params = SamplingParams(temperature=0.5, seed=1, presence_penalty=0.5, max_tokens=20)
    engine = drafting()
    ids = [7, 7, 3]
    request = engine.request([3, 5], params, RequestTerms(output_ids=[5]))
    draw = model_of(engine)._draw(_Draft(request, 5, ids), len(ids))
    wanted = engine.request([3, 5], params, RequestTerms(output_ids=[5, *ids]))
    wanted.num_computed = len(wanted.token_ids) - 1
    other = _draw(Chunk.next_of(wanted, 1), 0)
    assert (draw.position, draw.random_number) == (other.position, other.random_number)
    counted = [
        dict(zip(one.context_ids.tolist(), one.output_counts.tolist(), strict=True))
        for one in (draw, other)
    ]
    assert counted[0] == counted[1]


@pytest.mark.usefixtures("eager")
def test_a_prompt_that_began_alike_is_not_read_again() -> None:
    engine = drafting()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = random.Random(2).choices(range(1, 50), k=30)
    run(engine, prompt, params)
    before = len(model_batches(engine))
    request = run(engine, [*prompt, 7], params)
    first = model_batches(engine)[before]
    assert request.output_ids == expected([*prompt, 7], params)
    assert int(first.positions.min()) == 28  # seven blocks of four


@pytest.mark.usefixtures("eager")
def test_forms_and_words_hold_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that may not come are not written, where single tokens are ruled."""
    engine = drafting({"noise": 0.0})
    params = SamplingParams(
        max_tokens=30, ignore_eos=True, seed=1, temperature=0.8,
        allowed_token_ids=tuple(range(5, 25)), logit_bias={7: 3.0},
    )  # fmt: skip
    plain = run(fake_engine(habit=HABIT), [3, 1, 4], params)
    request = run(engine, [3, 1, 4], params)
    assert request.output_ids == plain.output_ids
    drafted, accepted = counts([request])
    assert drafted == accepted > 20


@pytest.mark.parametrize("num_sent", [1, 17, 39])
@pytest.mark.usefixtures("eager")
def test_an_answer_that_was_begun_elsewhere_goes_on(num_sent: int) -> None:
    prompt, params = [7, 8, 9] * 3, SamplingParams(max_tokens=60, ignore_eos=True, seed=4)
    wanted = expected(prompt, params)
    request = run(drafting(), prompt, params, output_ids=wanted[:num_sent])
    assert request.output_ids == wanted
    assert counts([request])[1] > 0


@pytest.mark.usefixtures("eager")
def test_texts_longer_than_it_can_read_go_on_without() -> None:
    engine = drafting({**GOOD, "context_length": 30})
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    request = run(engine, [3, 1, 4, 1, 5], params)
    assert request.output_ids == expected([3, 1, 4, 1, 5], params)
    assert max(int(batch.positions.max()) for batch in model_batches(engine)) < 30
    assert max(len(batch.logit_rows) for batch in batches_of(engine)) > 1
    assert all(len(b.logit_rows) < 2 for b in batches_of(engine) if int(b.positions[0]) >= 30)


def test_what_costs_more_than_it_brings_reads_no_prompt() -> None:
    """A draft model as large as the model is not worth a step, nor that it reads along."""
    engine = drafting()
    engine.draft_model.record._guessed_cost = 1.0  # type: ignore[union-attr]
    prompt = random.Random(3).choices(range(1, 50), k=40)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    request = run(engine, prompt, params)
    assert request.output_ids == expected(prompt, params)
    assert (counts([request]), model_batches(engine)) == ((0, 0), [])


def test_a_prompt_without_an_answer_is_not_read() -> None:
    engine = drafting()
    finish(engine, engine.request([3] * 20, SamplingParams(max_tokens=1)))
    assert model_batches(engine) == []


def test_a_request_can_be_without() -> None:
    engine = drafting()
    params = SamplingParams(max_tokens=30, ignore_eos=True, drafts=False)
    request = run(engine, [3] * 6, params)
    assert request.output_ids == expected([3] * 6, params)
    assert model_batches(engine) == []


# -- the models themselves -------------------------------------------------------------------------

PROMPT = "import os\nimport sys\nfrom pathlib"
SETTINGS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"temperature": 0.7, "seed": 11, "repeat_penalty": 1.05},
    {"bad_words": ["self", "return x"], "min_tokens": 9, "temperature": 0.5, "seed": 2},
    {"json_object": True},
)


@pytest.mark.usefixtures("eager")
def test_a_cpu_says_the_same_to_the_bit(tmp_path: Path) -> None:
    """The bundled model in fewer bits drafts for itself, for each request alone and for all."""
    draft = str(demo_of_type(tmp_path / "draft.gguf", "Q4_K_M"))
    settings: dict[str, Any] = {"device": "cpu", "num_threads": 1, "context_length": 128}
    with LLM(**settings) as plain, LLM(draft_model=draft, **settings) as trying:
        params = [SamplingParams(max_tokens=40, **fields) for fields in SETTINGS]
        found = [
            [llm.generate(PROMPT, params[0]), *llm.generate([PROMPT] * len(params), params)]
            for llm in (plain, trying)
        ]
        trying.engine.check_integrity()
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.text, one.logprobs) == (other.text, other.logprobs)
    drafted = sum(other.timings.num_drafted_tokens for other in found[1])
    accepted = sum(other.timings.num_accepted_tokens for other in found[1])
    assert drafted > accepted > 60


#: What requests ask for that a device drafts for by itself, and the last one not.
ON_A_GPU: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.3, "seed": 5},
    {"temperature": 0.5, "seed": 6, "top_p": 0.95, "logprobs": 2},
    {"min_tokens": 9, "stop_token_ids": (3,), "ignore_eos": False},
    {"temperature": 0.4, "seed": 7, "allowed_token_ids": tuple(range(6))},
    {"frequency_penalty": 0.1},
)
GREEDY_ALONE = ON_A_GPU[:1] * 2


@pytest.mark.parametrize("together", [GREEDY_ALONE, ON_A_GPU], ids=["greedy", "each"])
@pytest.mark.tier("sim")
@pytest.mark.usefixtures("eager")
def test_a_gpu_says_the_same(tmp_path: Path, together: Sequence[dict[str, Any]]) -> None:
    """Drafts are written one behind the other on the device, in graphs, and go into the step that
    tries them there. The host reads them with its tokens."""
    found = []
    for certainty in (None, 0.9):
        recorder.close_recorder()
        devices.use_backend(open_sim(SIM, graphs=True))
        with simulated(tmp_path, certainty) as llm:
            llm.engine.capture()
            requests = [
                llm.engine.request(
                    [n, n + 1], SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | fields)
                )
                for n, fields in enumerate(together)
            ]
            llm.engine.complete(requests[:1])
            llm.engine.complete(requests[1:])
            llm.engine.check_integrity()
            if certainty is not None:
                plans = model_of(llm.engine).chain()._plans.values()
                assert any(plan.is_captured and "link" in plan.name for plan in plans)
        found.append(requests)
    for one, other in zip(*found, strict=True):
        assert one.output_ids == other.output_ids
        assert one.logprobs == other.logprobs
    drafted, accepted = counts(found[1])
    assert accepted > 5 * len(together)
    assert (drafted > accepted) == (together is ON_A_GPU)


def simulated(tmp_path: Path, certainty: float | None) -> LLM:
    """A model on a simulated GPU, and one that drafts for it, if it is that sure of itself."""
    path, draft = alphabet(tmp_path / "model.gguf", 1.2), None
    if certainty is not None:
        draft = str(alphabet(tmp_path / "draft.gguf", certainty))
    config = EngineConfig(
        device=SIM, context_length=64, max_batch_tokens=16, draft_model=draft, draft_max=4
    )
    return LLM(path, config)


def alphabet(path: Path, certainty: float) -> Path:
    """A model that most likely says after each token the one that follows it in the vocabulary."""
    each = np.eye(7, WIDTH, dtype=np.float32)
    tensors = {
        "token_embd.weight": 50 * each,
        "output.weight": certainty * np.roll(each, 1, axis=0),
    }
    return write_tiny(path, tokens=list("abcdefg"), tensors=tensors)


@pytest.mark.parametrize("device", ["cpu", SIM])
@pytest.mark.tier("sim", fast=lambda case: case.device == "cpu")
@pytest.mark.usefixtures("eager")
def test_the_doctor_finds_the_record_in_order(tmp_path: Path, device: str) -> None:
    """Steps of two models, of which one draws what the other is to try."""
    recorder.close_recorder()
    if device == SIM:
        devices.use_backend(open_sim(SIM, graphs=True))
    path, draft = alphabet(tmp_path / "model.gguf", 1.2), alphabet(tmp_path / "draft.gguf", 0.9)
    settings = EngineConfig(
        device=device, context_length=64, max_batch_tokens=16, draft_model=str(draft)
    )
    num_tokens = 30 if device == "cpu" else 12
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.3, seed=5)
    with LLM(path, settings) as llm:
        requests = [llm.engine.request(ids, params) for ids in ([1, 2, 3], [4, 5, 6])]
        llm.engine.complete(requests)
    drafted, accepted = counts(requests)
    assert 2 < accepted < drafted
    opened = recorder.current()
    assert isinstance(opened, recorder.Recorder)
    found = ring.read_run(opened.folder)
    case = Case(
        Bundle(
            kind="suspect", device="cpu", fault=FaultRecord(kind="none", message=""),
            plans=found.plans, tensors=found.tensors, events=found.events,
            progress=Reached(found.progress.submitted),
        )
    )  # fmt: skip
    for rung in (draws, step_inputs, ownership, waiting):
        assert [claim for claim in rung(case) if claim.root is not None] == [], rung


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("abcdefx", "token 6 is 'x' there, and 'g' in the model"),
        ("", "one of the two files has no vocabulary"),
    ],
)
def test_another_vocabulary_is_refused(tmp_path: Path, tokens: str, message: str) -> None:
    model = alphabet(tmp_path / "model.gguf", 1.2)
    draft = write_tiny(tmp_path / "draft.gguf", tokens=list(tokens))
    with pytest.raises(BadSetting, match="draft_model") as error:
        LLM(model, device="cpu", draft_model=str(draft))
    assert message in str(error.value)


def test_it_is_not_given_with_what_it_does_not_fit() -> None:
    with pytest.raises(BadSetting, match="one GPU"):
        EngineConfig(device="cuda", tensor_parallel=2, draft_model="x.gguf")
    with pytest.raises(BadSetting, match="spec"):
        EngineConfig(spec="ngram", draft_model="x.gguf")


def test_a_gpu_has_room_left_for_it(tmp_path: Path) -> None:
    """Its weights and buffers, and for each token of the cache one of its own."""
    path = alphabet(tmp_path / "tiny.gguf", 1.2)
    config = EngineConfig(device="cuda", context_length=64)
    with open_gguf(path) as file:
        arch = read_architecture(file)
        room = Room(1 << 30, 1 << 30)
        without = kv_room(file, arch, config, room)
        beside = replace(config, draft_model=str(path))
        needs = draft_needs(file, arch, beside)
        assert needs.fixed_bytes > weight_bytes(file)
        # Experts of the model that the host has are none of the draft model's.
        for on_host in ({"cpu_moe": True}, {"n_cpu_moe": 2}):
            small = draft_config(arch, replace(beside, **on_host), 64, 64)
            assert small.num_host_layers == 0
        with_one = kv_room(file, arch, beside, room)
    assert with_one == pytest.approx((without - needs.fixed_bytes) / 2, rel=1e-3)


@pytest.mark.usefixtures("eager")
def test_tokens_that_the_model_has_not_are_not_tried() -> None:
    """A draft model may have more tokens. Behind one of these nothing is tried; where a device has
    written it, token 0 stands for it."""
    engine = drafting()
    tried: list[int] = []
    model_of(engine)._num_ids = 30
    take_back = engine.scheduler.take_back

    def noted(chunk: Chunk, num_right: int) -> None:
        tried.extend(chunk.drafts)
        take_back(chunk, num_right)

    engine.scheduler.take_back = noted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.7, seed=1)
    request = run(engine, [3, 1, 4, 1, 5], params)
    assert request.output_ids == expected(request.prompt_ids, params)
    assert max(request.output_ids) >= 30
    assert len(tried) > 10
    assert max(tried) < 30
    written = {4: WrittenRow(1, 3)}
    by_device = np.array([[9, 5], [9, 30], [9, -1]], np.int32)
    ahead = DraftsAhead(written, lambda: by_device, lambda *_: None, max_rows=2, num_ids=30)
    ahead.read()
    assert ahead.ids_of(4) == [5, 0, 0]


# -- whether it is worth it ------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS])
@pytest.mark.parametrize("cost", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("num_writing", [1, 8])
def test_one_that_is_never_right_costs_a_bounded_share(
    costs: Any, cost: float, num_writing: int
) -> None:
    """By the prices of the tables: a hundredth of the answer, whatever its steps cost."""
    one = ModelDrafter(7, DraftRecord(costs, cost))
    load = StepLoad(num_writing, num_writing, num_writing)
    one.num_read, lost = 20, 0.0
    for num_output in range(1, 400):
        num = one.num_to_write(20 + num_output, num_output, 7, load)
        if num:
            lost += one._price_of(num, one._num_unread(20 + num_output, num_output), load)
            one.spend(num, 20 + num_output, num_output, load)
            one.settle(num, 0)
            one.num_read = 20 + num_output
        assert lost <= _FIRST_LOSS + 0.01 * num_output + 1e-9


def speed_up(costs: RowCosts, cost: float, quality: float, first: int = 0) -> float:
    """How much faster answers of 192 tokens are by the tables, with drafts of that quality: ten,
    from the `first` one on."""
    record = DraftRecord(costs, cost)
    total, num_tokens = 0.0, 0
    for seed in range(first + 10):
        chance, one, took = random.Random(seed), ModelDrafter(7, record), 0.0
        num_output, one.num_read = 1, 20
        while num_output < 192:
            num, num_right = one.num_to_write(20 + num_output, num_output, 7, ALONE), 0
            took += costs.of(1 + num)
            if num:
                one.spend(num, 20 + num_output, num_output, ALONE)
                num_unread = 20 + num_output - one.num_read
                took += costs.apart + cost * (costs.of(num_unread) + num - 1)
                while num_right < num and chance.random() < quality:
                    num_right += 1
                one.settle(num, num_right)
                one.num_read = 20 + num_output + min(num_right, num - 1)
            num_output += num_right + 1
        if seed >= first:
            total += took
            num_tokens += num_output - 1
    return num_tokens / total


@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS])
def test_by_the_tables_it_gains_or_loses_next_to_nothing(costs: RowCosts) -> None:
    for cost in (0.05, 0.1, 0.2, 0.4, 1.0):
        for quality in (0.9, 0.75, 0.5, 0.25, 0.0):
            assert speed_up(costs, cost, quality) > 0.98, (cost, quality)
    assert speed_up(costs, 0.05, 0.75, first=5) > (1.7 if costs is GPU_COSTS else 1.25)
    assert speed_up(costs, 0.1, 0.9, first=5) > (2.2 if costs is GPU_COSTS else 1.5)


def test_a_step_that_was_measured_counts_and_not_the_guess() -> None:
    record = DraftRecord(CPU_COSTS, 0.1)
    assert record.cost == 0.1
    for _ in range(5):
        record.note_own(1, 0.010)
        record.note_step(2, 0.020 * CPU_COSTS.of(2))
    assert record.cost == pytest.approx(0.5)
    record.note_own(1, 9.0)  # one that waited for something else
    assert record.cost == pytest.approx(0.5)


def test_on_a_device_a_round_counts_as_a_whole() -> None:
    """Beside steps without drafts, of which some are timed first."""
    record = DraftRecord(GPU_COSTS, 0.1, is_chained=True)
    one = ModelDrafter(7, record)
    one.num_read = 20
    for _ in range(5):
        assert record.awaits_steps
        assert one.num_to_write(21, 1, 7, ALONE) == 0
        record.note_step(1, 0.002, is_ahead=True)
    assert record.prices(is_chained=True) == pytest.approx((0.5, 0.1), rel=1e-6)
    assert one.num_to_write(21, 1, 7, ALONE) > 0
    apart, cost = 0.2, 0.05
    for work in (2.0, 4.0, 6.0) * 9:
        record.note_round(5, work, 0.002 * (GPU_COSTS.of(5) + apart + cost * work))
    record.note_round(5, 4.0, 9.0)  # one that waited for something else
    assert record.prices(is_chained=True) == pytest.approx((apart, cost), abs=0.05)
    # What passes the host costs what it did.
    assert record.prices(is_chained=False) == (0.5, 0.1)


def test_the_better_and_the_cheaper_it_is_the_more_is_written() -> None:
    def num_written(odds: float, cost: float, num_writing: int = 1) -> int:
        record = DraftRecord(GPU_COSTS, cost)
        record.odds = odds
        one = ModelDrafter(7, record)
        one._lost = -100.0
        one.num_read = 50
        load = StepLoad(num_writing, num_writing, num_writing)
        return one.num_to_write(51, 1, 7, load)

    assert num_written(0.9, 0.05) == 7
    assert 2 <= num_written(0.75, 0.13) <= 6
    assert num_written(0.2, 0.3) == 1
    assert num_written(0.75, 0.13, num_writing=32) < num_written(0.75, 0.13)


def test_what_one_request_learns_the_next_one_begins_with() -> None:
    record = DraftRecord(CPU_COSTS, 0.1)
    first = ModelDrafter(7, record)
    for _ in range(60):
        first.settle(1, 0)
    assert ModelDrafter(7, record)._odds < 0.25
