"""What is compiled before a model is ready is all that its requests ever need."""

from __future__ import annotations

import io
import itertools
import math
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("triton")
from pretended.counting_gpu import CountingGpu
from repository import DEMO

from hypocenter import LLM
from hypocenter.base.tensor import DType
from hypocenter.device import devices
from hypocenter.device.forms import form_of
from hypocenter.engine.drafting.drafter import Drafter
from hypocenter.engine.ranks import messages, program
from hypocenter.engine.ranks.messages import Capture
from hypocenter.engine.ranks.ranks import Ranks
from hypocenter.engine.request import Request
from hypocenter.engine.runner import Runner, _powers
from hypocenter.model.offline.specimens import architecture_of
from hypocenter.model.tensors.specimen_weights import undefined_weights
from hypocenter.settings.config import EngineConfig, SamplingParams
from hypocenter.wire.frames import as_frame

#: What requests ask for beside their prompts.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    {"repeat_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 3},
    {"prompt_logprobs": 2},
    {"logit_bias": {5: 1.0}, "temperature": 0.5},
    {"allowed_token_ids": (0, 4, 9)},
    {"json_schema": {"type": "integer"}},
)


@pytest.fixture
def gpu() -> Iterator[CountingGpu]:
    made = CountingGpu()
    devices.use_backend(made)
    yield made
    devices._backends.pop(made.name)


def traffic(llm: LLM, seed: int, num_requests: int = 48) -> list[Request]:
    """Requests of random lengths, each of a random kind; several answers to some prompts."""
    chance = random.Random(seed)
    found: list[Request] = []
    while len(found) < num_requests:
        length = chance.choice((1, 2, 3, 7, 16, 33, 100, 200, 480))
        prompt = [chance.randrange(3, llm.vocab_size) for _ in range(length)]
        fields = {"max_tokens": chance.choice((1, 3, 9)), **chance.choice(KINDS)}
        if "json_schema" not in fields:
            fields["ignore_eos"] = True
        num = chance.choice((1, 1, 1, 3))
        found += llm.sample_requests(prompt, num, SamplingParams(**fields))
    return found


def run_all(llm: LLM, requests: list[Request]) -> None:
    """To their ends; a GPU that computes nothing holds to no form, which ends a request alone."""
    for request in requests:
        llm.engine.submit(request)
    while not all(request.done for request in requests):
        llm.engine.step()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.tier("sim", fast=lambda case: case.seed == 0)
def test_random_requests_need_nothing_that_was_not_compiled(gpu: CountingGpu, seed: int) -> None:
    with LLM(device=gpu.name, max_batch_requests=8, context_length=512, kv_tokens=2048) as llm:
        runner = llm.engine.runner
        assert gpu.named
        assert not gpu.met
        run_all(llm, traffic(llm, seed))
        ran = llm.route().kernels
        assert (runner.num_compiled_since, gpu.met) == (0, {})
    wanted = {"sample_masked_keys", "sample_bias", "sample_penalise", "sample_level", "attention"}
    assert wanted <= set(ran)


def test_steps_of_a_token_each_are_graphs_before_the_first_request(gpu: CountingGpu) -> None:
    with LLM(device=gpu.name, max_batch_requests=8, context_length=512) as llm:
        llm.engine.runner.capture()
        # Of 1, 2, 4 and 8 requests, and with prompts up to 2048 tokens.
        assert gpu.num_graphs == 12
        assert llm.engine.runner.route().num_graphs == 0  # none has run
        run_all(llm, traffic(llm, 2))
        assert llm.engine.runner.route().num_graphs >= 8


def test_steps_that_try_tokens_are_ready_as_well(gpu: CountingGpu) -> None:
    """Alone and together; up to eight rows of one request are graphs before the first one comes."""
    settings = EngineConfig(
        device=gpu.name, max_batch_requests=8, context_length=512, kv_tokens=2048, spec="ngram"
    )
    with LLM(config=settings) as llm:
        runner = llm.engine.runner
        runner.capture()
        assert gpu.num_graphs == 15
        # What computes nothing says the same token again and again.
        alone = llm.sample_requests([7] * 9, 1, SamplingParams(max_tokens=60, ignore_eos=True))
        run_all(llm, alone)
        assert alone[0].timings().num_drafted_tokens > 0
        together = llm.sample_requests([7] * 9, 3, SamplingParams(max_tokens=60, ignore_eos=True))
        run_all(llm, together + traffic(llm, 1))
        assert any(request.timings().num_drafted_tokens for request in together)
        assert (runner.num_compiled_since, gpu.met) == (0, {})


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.tier("sim", fast=lambda case: case.runs_ahead)
def test_a_draft_model_is_ready_as_well(
    gpu: CountingGpu, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are graphs before the first request, also those that read two tokens of each, and
    those of a chain."""
    gpu.runs_ahead = runs_ahead
    monkeypatch.setattr(Drafter, "_left", lambda self, num_output, gains=True: math.inf)
    settings = EngineConfig(
        device=gpu.name, max_batch_requests=8, context_length=512, kv_tokens=2048,
        draft_model=str(DEMO),
    )  # fmt: skip
    with LLM(config=settings) as llm:
        runner, model = llm.engine.runner, llm.engine.draft_model
        assert model is not None
        llm.engine.capture()
        num_graphs = gpu.num_graphs
        assert num_graphs >= 15 + 12
        alone = llm.sample_requests([7] * 9, 1, SamplingParams(max_tokens=60, ignore_eos=True))
        run_all(llm, alone)
        assert alone[0].timings().num_drafted_tokens > 0
        assert set(model.runner._keys_of_answers()) <= model.runner._plans.keys()
        if runs_ahead:
            assert model.chain()._plans[1, (None, False), True].is_captured
        together = llm.sample_requests([7] * 9, 3, SamplingParams(max_tokens=60, ignore_eos=True))
        run_all(llm, together + traffic(llm, 1))
        assert any(request.timings().num_drafted_tokens for request in together)
        assert (runner.num_compiled_since, gpu.met) == (0, {})


def test_ranks_are_told_to_capture_before_the_first_step_is(gpu: CountingGpu) -> None:
    """Each step has collectives: who captures alone would wait for the others."""
    told: list[int] = []

    class Others:
        def capture(self) -> None:
            told.append(gpu.num_graphs)

    with LLM(device=gpu.name, max_batch_requests=8, context_length=512) as llm:
        llm.engine.runner.ranks = cast(Any, Others())
        llm.engine.runner.capture()
        llm.engine.runner.ranks = None
    assert (told, gpu.num_graphs) == ([0], 12)


def test_a_rank_captures_when_it_is_told(gpu: CountingGpu) -> None:
    class Follower:
        config = EngineConfig(device=gpu.name)
        calls: list[str] = []  # noqa: RUF012

        def capture(self) -> None:
            self.calls.append("capture")

    frames = io.BytesIO(as_frame(Capture()) * 2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program._follow(cast(Any, Follower()), cast(Any, frames), ours)
    assert Follower.calls == ["capture"] * 2


def test_what_a_rank_compiles_after_it_was_ready_is_counted_by_the_first() -> None:
    class Follower:
        config = EngineConfig(device="sim:h200")
        num_compiled_since = 0

        def run(self, batch: object) -> None:
            self.num_compiled_since += 2 * (len(ran) == 1)
            ran.append(batch)

        def wait(self) -> None:
            pass

    ran: list[object] = []
    arrays = dict.fromkeys(messages._ARRAYS, b"") | {"block_tables": bytes(4)}
    step = messages.Step(arrays, 1, (), ids_on_device=False, is_long=False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program._follow(cast(Any, Follower()), cast(Any, io.BytesIO(as_frame(step) * 3)), theirs)
        program._say(theirs, "it ends")
        theirs.close()
        first = Ranks.__new__(Ranks)
        first._problems, first._num_compiled = {}, {2: 5}
        first._heard = {1: threading.Event()}
        with ours.makefile("rb") as reader:
            first._listen(1, cast(Any, reader))
    assert len(ran) == 3
    assert first._heard[1].is_set()
    assert first._problems == {1: "it ends"}
    assert first.num_compiled_since == 5 + 2


def test_what_ranks_compiled_is_part_of_the_runners_count(gpu: CountingGpu) -> None:
    with LLM(device=gpu.name, max_batch_requests=4, context_length=512) as llm:
        runner = llm.engine.runner
        assert runner.num_compiled_since == 0
        runner.ranks = cast(Any, SimpleNamespace(num_compiled_since=3))
        assert runner.num_compiled_since == 3
        runner.ranks = None


def test_forms_that_an_index_has_loaded_are_not_planned_again(
    gpu: CountingGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.has_all_forms = True
    with LLM(device=gpu.name, max_batch_requests=8, context_length=512) as llm:
        few = len(gpu.named)
        assert llm.engine.runner.num_forms == few
    # One that turns out to lack a form is not believed.
    gpu.named.clear()
    del gpu.has_all_forms
    monkeypatch.setattr(CountingGpu, "has_all_forms", property(lambda gpu: not gpu.named))
    with LLM(device=gpu.name, max_batch_requests=8, context_length=512):
        assert len(gpu.named) > 2 * few
    monkeypatch.undo()
    gpu.named.clear()
    with LLM(device=gpu.name, max_batch_requests=8, context_length=512):
        assert len(gpu.named) > 2 * few


def test_a_form_that_was_not_listed_is_counted(gpu: CountingGpu) -> None:
    with LLM(device=gpu.name, max_batch_requests=4, context_length=512) as llm:
        runner = llm.engine.runner
        gpu.named.clear()
        runner._num_compiled = gpu.num_compiled
        run_all(llm, traffic(llm, 3, 8))
        assert runner.num_compiled_since == len(gpu.met) > 5


FAMILIES = ("llama", "gemma2", "gpt-oss", "qwen35", "deepseek2", "falcon-h1", "qwen3moe")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.tier("sim", fast=lambda case: case.family == "gemma2")
def test_a_few_layers_are_launched_in_all_forms_of_the_model(gpu: CountingGpu, family: str) -> None:
    arch = architecture_of(family)
    if arch.recurrence is None:
        shape = arch.layers[0]
        layers = [shape, shape, replace(shape, window=64), shape, shape, shape]
        arch = replace(arch, layers=tuple(layers))
    shape = arch.layers[0]
    arch = replace(arch, rope=replace(arch.rope, dim=shape.head_dim - shape.rank))
    config = EngineConfig(device=gpu.name, max_batch_requests=8, kv_tokens=4096)
    runner = Runner(arch, undefined_weights(arch, DType.Q4_K, gpu.name), config, 4096)
    runner.compile()
    assert runner.num_compiled_since == 0
    sizes = list(_powers(runner.max_batch_tokens))
    steps = itertools.product(sizes, (0, *sizes), (True, False))
    for key in {runner._key(*step) for step in steps if step[1] <= step[0]}:
        for launch in runner._new_plan(*key).every_launch:
            if launch.jit is not None:
                form = form_of(launch.jit, launch.args, launch.options)
                assert form in gpu.named, (key, launch.kernel)
