"""Several tokens a step where layers carry a state: the state behind a wrong draft is never gone on
from, and the tokens are those without."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models.families import make_family
from models.gguf_edit import Tensors, rewritten
from models.state_heads import NUM_LETTERS, as_alphabet, end_with_attention
from pretended.fake_runner import batches_of, expected_output, fake_engine, finish, run

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.base.tensor import Tensor
from hypocenter.device import devices
from hypocenter.device.sim.sim import open_sim
from hypocenter.doctor.case import Case
from hypocenter.doctor.rungs.engine.draws import draws
from hypocenter.doctor.rungs.engine.kept_blocks import kept_blocks
from hypocenter.doctor.rungs.engine.ownership import ownership
from hypocenter.doctor.rungs.engine.states import states
from hypocenter.doctor.rungs.engine.step_inputs import step_inputs
from hypocenter.engine.batch import Batch, Chunk
from hypocenter.engine.drafting import drafter
from hypocenter.engine.drafting.drafter import Drafter, NgramDrafter, StepLoad
from hypocenter.engine.drafting.model_drafter import DraftRecord
from hypocenter.engine.drafting.tried import with_drafts
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.record import recorder, ring
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Reached, Stepped
from hypocenter.record.fault_record import FaultRecord

SIM = "sim:h200"
#: So much of the logits hangs on the last token alone that some drafts are right and some wrong.
HABIT = 4.0


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens are tried as may be, however often they are wrong."""
    monkeypatch.setattr(Drafter, "_left", lambda self, num_output, gains=True: math.inf)
    monkeypatch.setattr(drafter, "best_number", lambda odds, most, price_of: (most, True))
    monkeypatch.setattr(DraftRecord, "awaits_steps", False)


def drafting(num_checkpoints: int = 6, draft_max: int = 7, **sizes: Any) -> Engine:
    sizes |= {"num_checkpoints": num_checkpoints, "draft_max": draft_max}
    return fake_engine(habit=HABIT, **sizes)


def expected(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return expected_output(prompt, params, 128, end=not params.ignore_eos, habit=HABIT)


def counts(requests: Sequence[Request]) -> tuple[int, int]:
    """Tokens that were tried for them, and those of these that were right."""
    timings = [request.timings() for request in requests]
    return sum(one.num_drafted_tokens for one in timings), sum(
        one.num_accepted_tokens for one in timings
    )


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7}, {"frequency_penalty": 1.0}])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.usefixtures("eager")
def test_answers_are_those_without_drafts(fields: dict[str, Any], runs_ahead: bool) -> None:
    """Alone and together; the runner compares each state with the tokens it must stand for."""
    engine = drafting(runs_ahead=runs_ahead)
    requests = []
    for seed in range(6):
        prompt = random.Random(seed).choices(range(1, 50), k=5) * 2
        params = SamplingParams(max_tokens=60, ignore_eos=True, seed=seed, **fields)
        requests.append(engine.request(prompt, params))
        if seed < 3:
            finish(engine, requests[-1])
    finish(engine, *requests[3:])
    for request in requests:
        assert request.output_ids == expected(request.prompt_ids, request.params)
    drafted, accepted = counts(requests)
    assert 0 < accepted < drafted


@pytest.mark.usefixtures("eager")
def test_all_drafts_right_leave_nothing_to_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tokens behind a wrong draft run again, those that were right: no row more."""
    engine = drafting(draft_max=2)
    taken: list[tuple[int, int]] = []
    take_back = engine.scheduler.take_back

    def noted(chunk: Any, num_right: int) -> None:
        taken.append((len(chunk.drafts), num_right))
        take_back(chunk, num_right)

    monkeypatch.setattr(engine.scheduler, "take_back", noted)
    prompt = [3, 1, 4, 1, 5] * 3
    params = SamplingParams(max_tokens=90, ignore_eos=True, seed=2, temperature=0.6)
    request = run(engine, prompt, params)
    num_rows = sum(len(batch.token_ids) for batch in batches_of(engine))
    again = sum(right for num, right in taken if right < num)
    assert again > 0
    assert any(num == right > 0 for num, right in taken)
    wrong = sum(num - right for num, right in taken)
    # All tokens but the last have run once, those behind a wrong draft twice.
    assert num_rows == len(request.token_ids) - 1 + wrong + again


@pytest.mark.usefixtures("eager")
def test_a_step_leaves_a_state_for_others_or_one_before_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is one place where a step leaves a state apart."""
    engine = drafting()
    seen: set[tuple[bool, bool]] = set()

    def note(chunks: list[Chunk], *args: Any) -> list[Chunk]:
        tried = with_drafts(chunks, *args)
        pairs = zip(chunks, tried, strict=True)
        seen.update((bool(chunk.checkpoint_at), bool(one.drafts)) for chunk, one in pairs)
        return tried

    monkeypatch.setattr("hypocenter.engine.scheduler.with_drafts", note)
    run(engine, [3, 1, 4, 1, 5] * 3, SamplingParams(max_tokens=90, ignore_eos=True))
    assert seen == {(False, False), (False, True), (True, False)}


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_checkpoints", [1, 5])
@pytest.mark.usefixtures("eager")
def test_many_requests(
    runs_ahead: bool, num_checkpoints: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beginnings that others left, full caches, requests that end: nothing changes a token."""
    rng = random.Random(num_checkpoints)
    engine = drafting(
        num_checkpoints, num_blocks=24, max_batch_requests=4, max_batch_tokens=13,
        runs_ahead=runs_ahead,
    )  # fmt: skip
    run_batch, blocks = engine.runner.run, engine.cache._blocks

    def checked(batch: Batch) -> Tensor:
        assert all(blocks[slot // 4].digest is None for slot in batch.slots), "others may read it"
        return run_batch(batch)

    monkeypatch.setattr(engine.runner, "run", checked)
    requests: list[Request] = []
    for _ in range(40):
        prompt = rng.choices(range(1, 9), k=4) * rng.randrange(1, 5)
        if requests and rng.random() < 0.4:
            prompt = list(rng.choice(requests).token_ids)[:60]
        params = SamplingParams(max_tokens=rng.randrange(1, 60), seed=1, ignore_eos=True)
        requests.append(engine.request(prompt, params))
        engine.submit(requests[-1])
        for _ in range(rng.randrange(6)):
            engine.step()
            engine.check_integrity()
        if rng.random() < 0.2:
            engine.cancel(rng.choice(requests))
    finish(engine)
    for request in requests:
        assert request.error is None
        wanted = expected(request.prompt_ids, request.params)
        assert request.output_ids == wanted[: len(request.output_ids)]
        assert len(request.output_ids) == len(wanted) or request.finish_reason == "cancelled"
    drafted, accepted = counts(requests)
    assert 0 < accepted < drafted
    assert any(request.num_preemptions for request in requests)
    assert num_checkpoints == 1 or sum(request.num_cached for request in requests) > 0


FAMILIES = {
    "qwen35": "delta rule", "qwen3next": "delta rule, experts", "lfm2": "convolution",
    "mamba2": "states alone", "falcon-h1": "both in a layer", "granitehybrid-moe": "experts",
}  # fmt: skip
ASKED: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.7, "seed": 2, "presence_penalty": 0.5},
    {"logprobs": 3}, {"regex": "[a-z0-9]{30}"},
)  # fmt: skip


def answers(path: Path, **how: Any) -> list[Request]:
    """Requests of each kind, alone and together, of prompts that begin alike."""
    sizes: dict[str, Any] = {"context_length": 96, "max_batch_tokens": 16, "max_batch_requests": 3}
    found = []
    with LLM(path, EngineConfig(device="cpu", block_size=16, num_threads=1, **sizes, **how)) as llm:
        for number, fields in enumerate(ASKED):
            params = SamplingParams(max_tokens=24, ignore_eos="regex" not in fields, **fields)
            prompts = [[number + 5, *[9, 10, 11, 12] * 6], [7, 8] * 9]
            requests = [llm.engine.request(ids, params) for ids in prompts]
            llm.engine.complete(requests)
            requests.append(llm.engine.request(requests[0].token_ids[:40], params))
            llm.engine.complete(requests[2:])
            llm.engine.check_integrity()
            found += requests
    return found


def foretell(
    monkeypatch: pytest.MonkeyPatch, texts: Sequence[Sequence[int]], wrong: int = 5
) -> None:
    """Drafts are what these texts go on with, but for one token in `wrong`."""

    def propose(
        self: NgramDrafter, token_ids: Sequence[int], num_output: int, most: int, load: StepLoad
    ) -> list[int]:
        num = len(token_ids)
        text = next((text for text in texts if list(text[:num]) == list(token_ids)), ())
        most = min(most, 1 + num % 4)
        drafts = enumerate(text[num : num + most], num)
        return [token_id ^ (place % wrong == 0) for place, token_id in drafts]

    monkeypatch.setattr(NgramDrafter, "propose", propose)


def compare(plain: list[Request], trying: list[Request]) -> None:
    for one, other in zip(plain, trying, strict=True):
        assert one.output_ids == other.output_ids
        assert one.logprobs == other.logprobs
    drafted, accepted = counts(trying)
    assert drafted - accepted > 20
    assert accepted > 100
    assert all(request.num_cached for request in trying[2::3])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.tier("sim", fast=lambda case: case.family == "lfm2")
def test_a_cpu_says_the_same_to_the_bit(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_family(family, tmp_path).path
    plain = answers(path)
    foretell(monkeypatch, [request.token_ids for request in plain])
    compare(plain, answers(path, spec="ngram"))


@pytest.mark.parametrize("family", ["qwen3next", "qwen35", "qwen35moe"])
@pytest.mark.tier("sim", fast=lambda case: case.family == "qwen35")
@pytest.mark.usefixtures("eager")
def test_a_head_drafts_for_layers_with_states(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_with_attention(monkeypatch, family)
    path = as_alphabet(make_family(family, tmp_path), tmp_path, has_head=True)
    compare(answers(path), answers(path, spec="mtp", draft_max=4))


@pytest.mark.tier("sim")
@pytest.mark.usefixtures("eager")
def test_a_draft_model_drafts_for_layers_with_states(tmp_path: Path) -> None:
    """It has none itself; every fourth letter it says another one."""
    path = as_alphabet(make_family("qwen35", tmp_path), tmp_path, has_head=False)
    small = as_alphabet(make_family("qwen3", tmp_path), tmp_path, has_head=False)

    def change(tensors: Tensors) -> Tensors:
        output = tensors["output.weight"].copy()
        output[1:NUM_LETTERS:4] = 0
        return tensors | {"output.weight": output}

    small = rewritten(small, tmp_path / "small.gguf", change)
    compare(answers(path), answers(path, draft_model=str(small), draft_max=4))


def test_the_doctor_finds_the_record_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of its two slots a request goes on from stands in it."""
    path, text = make_family("lfm2", tmp_path).path, [7, 8] * 9
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with LLM(path, device="cpu", context_length=96) as llm:
        request = llm.engine.request(text, params)
        llm.engine.complete([request])
    recorder.close_recorder()
    foretell(monkeypatch, [request.token_ids])
    with LLM(path, device="cpu", context_length=96, spec="ngram") as llm:
        llm.engine.complete([llm.engine.request(text, params)])
    opened = recorder.current()
    assert isinstance(opened, recorder.Recorder)
    found = ring.read_run(opened.folder)
    steps = [event for event in found.events if isinstance(event, Stepped) and event.requests]
    assert len({event.requests[0].state_slot for event in steps}) == 2
    case = Case(
        Bundle(
            kind="suspect", device="cpu", fault=FaultRecord(kind="none", message=""),
            plans=found.plans, tensors=found.tensors, events=found.events,
            progress=Reached(found.progress.submitted),
        )
    )  # fmt: skip
    for rung in (states, draws, step_inputs, ownership, kept_blocks):
        assert [claim for claim in rung(case) if claim.root is not None] == [], rung
    assert states(case)


def on_a_gpu(path: Path, **how: Any) -> Request:
    devices.use_backend(open_sim(SIM, graphs=True))
    sizes: dict[str, Any] = {"context_length": 32, "max_batch_tokens": 8, "max_batch_requests": 1}
    with LLM(path, EngineConfig(device=SIM, **sizes, **how)) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        request = llm.engine.request([4, 5, 6], params)
        llm.engine.complete([request])
    return request


@pytest.mark.parametrize("family", ["qwen35", "mamba2", "lfm2-tied"])
@pytest.mark.tier("sim")
@pytest.mark.usefixtures("eager")
def test_a_gpu_says_the_same(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head of the file, and with drafts of the host that are right twice of three times."""
    if is_mtp := family == "qwen35":
        end_with_attention(monkeypatch, family)
    made = make_family(family, tmp_path)
    path = as_alphabet(made, tmp_path, has_head=True) if is_mtp else made.path
    plain = on_a_gpu(path)
    foretell(monkeypatch, [plain.token_ids], wrong=3)
    trying = on_a_gpu(path, spec="mtp" if is_mtp else "ngram", draft_max=3)
    assert trying.output_ids == plain.output_ids
    drafted, accepted = counts([trying])
    assert 1 < accepted < drafted
