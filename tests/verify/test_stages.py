"""Each stage of a verification finds what is planted, and says what it did not look at."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from repository import DEMO

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.engine.runner import Runner, load_runner
from hypocenter.kernels.attention import rope
from hypocenter.kernels.sampling.sampling import sample_later
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.config import EngineConfig
from hypocenter.verify import ahead_stage, logits_stage, repeats_stage
from hypocenter.verify.ahead_stage import AheadStage
from hypocenter.verify.drawing import Drawer
from hypocenter.verify.form import distinct_units
from hypocenter.verify.logits_stage import LogitsStage
from hypocenter.verify.machine import multiprocessors
from hypocenter.verify.machine.load import on_core
from hypocenter.verify.machine.memory_stage import MemoryStage
from hypocenter.verify.machine.multiprocessors import differing, usual
from hypocenter.verify.machine.words import WordLooker, patterns
from hypocenter.verify.outcome import Mistake, PlantedError, StageVerdict, verdict_of
from hypocenter.verify.repeats_stage import RepeatsStage
from hypocenter.verify.sampling_stage import SamplingStage
from hypocenter.verify.steps import PromptSteps

SMALL: dict[str, Any] = {
    "context_length": 64,
    "kv_tokens": 256,
    "max_batch_tokens": 32,
    "max_batch_requests": 2,
}


def no_end() -> bool:
    return False


def load(device: str) -> Runner:
    with open_gguf(DEMO) as file:
        return load_runner(file, EngineConfig(device=device, **SMALL))


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load("cpu")


def test_what_a_stage_may_say_of_itself() -> None:
    seen, unseen, none = PlantedError("x", 1, 1), PlantedError("x", 2, 1), PlantedError("x", 0, 0)
    wrong = [Mistake("x")]
    assert verdict_of([], seen, 1) is StageVerdict.RIGHT
    assert verdict_of([], unseen, 1) is verdict_of(wrong, unseen, 1) is StageVerdict.BLIND
    assert verdict_of([], none, 1) is StageVerdict.BLIND
    assert verdict_of(wrong, seen, 1) is verdict_of(wrong, none, 1) is StageVerdict.WRONG
    assert verdict_of([], seen, 0) is StageVerdict.NOT_RUN


def test_ways_of_running_a_prompt_are_held_against_each_other(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = LogitsStage(runner, None).run(no_end)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.num_covered == found.num_all
    assert found.canary is not None
    assert (found.canary.num_planted, found.canary.num_seen) == (1, 1)
    assert any("CPU itself" in item.why for item in found.uncovered)

    def other_seed(self: LogitsStage) -> Any:
        rows = right(self)
        rows.view(np.uint32)[3, 5] ^= 1
        return rows

    right = LogitsStage._run_together
    monkeypatch.setattr(logits_stage.LogitsStage, "_run_together", other_seed)
    wrong = LogitsStage(runner, None).run(no_end)
    assert wrong.verdict is StageVerdict.WRONG
    assert wrong.findings[0].details["token"] == 3
    assert wrong.findings[0].details["logit"] == 5


def test_logits_of_a_wrong_rope_base_are_not_those_of_the_cpu(runner: Runner) -> None:
    """The device is a second engine on the CPU, whose tables have another base."""
    other = load("cpu")
    assert LogitsStage(other, runner).run(no_end).verdict is StageVerdict.RIGHT
    cos, sin = other.weights.ropes.whole
    for tensor, table in zip((cos, sin), rope.tables(cos.shape[0], 64, 5000.0), strict=True):
        copies.to_device(tensor, table)
    found = LogitsStage(other, runner).run(no_end)
    assert found.verdict is StageVerdict.WRONG


def test_what_differs_when_it_runs_again_is_named(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = distinct_units(runner.plans_of_all_forms())[:3]
    found = RepeatsStage(runner, units).run(no_end)
    assert found.verdict is StageVerdict.RIGHT, found.findings
    assert found.num_covered == 3
    assert found.details["forms_on_each_core"] == 3

    read, number = Drawer.read, [0]

    def once_wrong(self: Any, unit: Any) -> Any:
        values = read(self, unit)
        number[0] += 1
        if number[0] == 4 and "out" in values:  # a draw reads, too
            values["out"].view(np.uint32)[0, 2] ^= 1
        return values

    monkeypatch.setattr(Drawer, "read", once_wrong)
    wrong = RepeatsStage(runner, units[:1]).run(no_end)
    assert wrong.verdict is StageVerdict.WRONG
    assert wrong.findings[0].details["place"] == [0, 2]


def test_a_core_that_computes_otherwise_is_named(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = distinct_units(runner.plans_of_all_forms())[:1]
    at: list[int] = []
    read, bind = Drawer.read, on_core
    cores = [0, 1, 2]
    monkeypatch.setattr(repeats_stage, "cores_of_process", lambda: cores)

    def bound(core: int) -> Any:
        at[:] = [core]
        return bind(next(iter(os.sched_getaffinity(0))))

    def wrong_on_one(self: Any, unit: Any) -> Any:
        values = read(self, unit)
        if at == [1]:
            values["out"].view(np.uint32)[0, 0] ^= 1
        return values

    monkeypatch.setattr("hypocenter.verify.repeats_stage.on_core", bound)
    monkeypatch.setattr(Drawer, "read", wrong_on_one)
    found = RepeatsStage(runner, units).run(no_end)
    assert [item.details for item in found.findings] == [{"core": 1}]


def test_a_token_that_the_reference_does_not_choose_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SamplingStage("cpu", 300, 2).run(no_end).verdict is StageVerdict.RIGHT

    def two_on(rows: Tensor, draws: Any, sampler: Any) -> Any:
        if draws[0].params.temperature != 1 or draws[0].bias_ids.size:
            return sample_later(rows, draws, sampler)
        return sample_later(
            rows, [replace(draw, position=draw.position + 2) for draw in draws], sampler
        )

    monkeypatch.setattr("hypocenter.verify.sampling_stage.sample_later", two_on)
    found = SamplingStage("cpu", 300, 2).run(no_end)
    assert found.verdict is StageVerdict.WRONG
    assert {item.where for item in found.findings} == {"by temperature"}


def test_a_kind_of_draws_ends_between_its_rows_when_the_time_is_over() -> None:
    found = SamplingStage("cpu", 300, 3).run(over_after(2))
    assert (found.num_covered, found.num_checks) == (1, 4)
    found = SamplingStage("cpu", 300, 3).run(over_after(1))
    assert (found.num_covered, found.num_checks) == (1, 1)
    assert found.uncovered[0].what == "greedy, 3 rows"


def test_a_form_of_each_op_comes_before_the_second_form_of_any(runner: Runner) -> None:
    """So that little time shows something of every kernel."""
    kernels = [unit.kernels for unit in distinct_units(runner.plans_of_all_forms())]
    num_kinds = len(set(kernels))
    assert num_kinds < len(kernels)
    assert len(set(kernels[:num_kinds])) == num_kinds


def test_the_cpu_has_nothing_ahead(runner: Runner) -> None:
    found = AheadStage(runner).run(no_end)
    assert found.verdict is StageVerdict.NOT_RUN
    assert "on the CPU" in found.uncovered[0].why


def over_after(num_asked: int) -> Callable[[], bool]:
    """The time is over when it has been asked for so often."""
    asked = itertools.count(1)
    return lambda: next(asked) > num_asked


@pytest.mark.parametrize(("num_asked", "num_steps"), [(0, 0), (2, 0), (4, 3)])
def test_steps_ahead_keep_to_their_time(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, num_asked: int, num_steps: int
) -> None:
    monkeypatch.setattr(ahead_stage, "_why_not", lambda runner: None)
    found = AheadStage(runner).run(over_after(num_asked))
    assert found.verdict is (StageVerdict.RIGHT if num_steps else StageVerdict.NOT_RUN)
    assert (found.num_checks, found.uncovered[0].why) == (num_steps, "the time was over")
    if num_steps:
        assert found.uncovered[0].what == "steps 4 to 48 of a round"


def test_a_repeated_step_keeps_to_its_time_and_is_short_on_no_gpu(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    plain = PromptSteps.run

    def run(self: PromptSteps, spans: Any) -> Any:
        lengths.append(spans[0][2])
        return plain(self, spans)

    monkeypatch.setattr(PromptSteps, "run", run)
    stage = RepeatsStage(runner, [])
    stage._device = "emu:mi300x"
    stage._repeat_steps(over_after(1))
    assert lengths == [6]
    assert [item.what for item in stage._uncovered] == ["a whole step"]


@pytest.fixture(params=["cpu", "sim:h200"])
def words(request: pytest.FixtureRequest) -> tuple[WordLooker, Tensor]:
    device = devices.open_device(request.param)
    piece = memory.allocate("piece", "test", DType.I32, (1000,), device=device)
    return WordLooker(device, on_device=device != "cpu"), piece


def test_a_word_that_holds_another_bit_is_found(words: tuple[WordLooker, Tensor]) -> None:
    looker, piece = words
    for pattern in patterns():
        looker.write(piece, 5000, pattern)
        assert looker.look(piece, 5000, pattern) is None, pattern.name
        np.testing.assert_array_equal(copies.to_host(piece), pattern.words(5000, 1000))
        wrong = copies.to_host(memory.rows(piece, 700, 701)) ^ np.int32(1 << 30)
        copies.to_device(memory.rows(piece, 700, 701), wrong)
        assert looker.look(piece, 5000, pattern) == (1, 700), pattern.name


def test_memory_that_joins_two_lines_of_addresses_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hypocenter.verify.machine.memory_stage._HOST_BYTES", 1 << 16)
    assert MemoryStage("cpu").run(no_end).verdict is StageVerdict.RIGHT
    write = WordLooker.write

    def joined(self: WordLooker, piece: Tensor, start: int, pattern: Any) -> None:
        write(self, piece, start, pattern)
        piece.data[1 << 10 : 2 << 10] = piece.data[: 1 << 10]

    monkeypatch.setattr(WordLooker, "write", joined)
    found = MemoryStage("cpu").run(no_end)
    assert found.verdict is StageVerdict.WRONG
    assert found.findings[0].details["offset"] == 4 << 10
    assert found.findings[0].details["bits"] == f"{1 << 10:#010x}"


def test_programs_whose_bits_differ_are_told_from_the_others() -> None:
    out = np.tile(np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), (6, 1, 1))
    out[2, 1, 1] = np.nextafter(out[2, 1, 1], np.float32(9))
    assert list(np.flatnonzero(differing(out, usual(out)))) == [2]


def test_each_program_of_the_probe_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated GPU, whose programs do not say where they ran."""
    monkeypatch.setattr(multiprocessors, "PROGRAMS", 3)
    monkeypatch.setattr(multiprocessors, "ROUNDS", 2)
    monkeypatch.setattr(multiprocessors, "MAX_LAUNCHES", 1)
    probe = multiprocessors.Probe(devices.open_device("sim:h200"))
    details, findings, was_seen = probe.run(no_end)
    assert (details["programs"], findings, was_seen) == (3, [], True)
