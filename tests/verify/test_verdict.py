"""`hypo verify` looks for the place of its page first, and its verdict never hangs on that page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from models.encoder_gguf import make_encoder
from repository import DEMO

from hypocenter.base.errors import EXIT_ERROR, EXIT_GATE, EXIT_USAGE, BadSetting
from hypocenter.cli.app import main
from hypocenter.cli.outcomes import outcome_lines
from hypocenter.cli.verbs import verify as verb
from hypocenter.device import devices
from hypocenter.device.sim.sim import open_sim
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.placement import context_length_of
from hypocenter.settings.config import EngineConfig
from hypocenter.verify.clock import StageClock
from hypocenter.verify.outcome import Mistake, Stage, StageVerdict, Uncovered, Verification
from hypocenter.verify.own.runtime import OwnReport
from hypocenter.verify.verify import SHARES, Effort, _compile, stage_seconds
from hypocenter.verify.verify import verify as verify_model

OWN = "import triton\n"


def leaves(words: list[object]) -> Any:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return left.value.code


def outcome(verdict: StageVerdict) -> Verification:
    findings = (Mistake("a sum is off"),) if verdict is StageVerdict.WRONG else ()
    stage = Stage("kernels", "is it right?", verdict, "forms", 1, 1, 1, findings=findings)
    return Verification("m.gguf", "cpu", "a CPU", "quick", 20.0, (stage,), 1.0)


@pytest.mark.parametrize("of", ["model", "file"])
def test_a_page_that_is_there_is_refused_before_any_work(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    for name in ("verify_model", "verify_file"):
        monkeypatch.setattr(verb, name, work)
    own = tmp_path / "own.py"
    own.write_text(OWN)
    page = tmp_path / "page.html"
    page.write_text("another's")
    code = leaves(["verify", DEMO if of == "model" else own, "--html", page])
    said = capfd.readouterr().err
    assert (code, said) == (
        EXIT_USAGE,
        f"hypo: --html {page} is there already; name another file\n",
    )
    assert page.read_text() == "another's"


@pytest.mark.parametrize(
    ("verdict", "code"), [(StageVerdict.WRONG, EXIT_GATE), (StageVerdict.RIGHT, EXIT_ERROR)]
)
def test_a_page_that_cannot_be_written_leaves_the_verdict(
    verdict: StageVerdict,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page.html"

    def work(*_: object, **__: object) -> Verification:
        page.mkdir()  # made by another while this one worked
        return outcome(verdict)

    monkeypatch.setattr(verb, "verify_model", work)
    assert leaves(["verify", DEMO, "--html", page, "--quiet"]) == code
    out, err = capfd.readouterr()
    assert f"VERDICT   {verdict}," in out
    assert str(page) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("verdict", "code"), [(StageVerdict.WRONG, EXIT_GATE), (StageVerdict.RIGHT, EXIT_ERROR)]
)
def test_tests_that_cannot_be_written_leave_the_verdict(
    verdict: StageVerdict,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    own, there = tmp_path / "own.py", tmp_path / "test_sums_fails.py"
    own.write_text(OWN)
    there.write_text("another's")
    found = outcome(verdict), OwnReport(smallest={"sums": {"n": 3}})
    monkeypatch.setattr(verb, "verify_file", lambda *given: found)
    assert leaves(["verify", own, "--tests", tmp_path]) == code
    out, err = capfd.readouterr()
    assert f"VERDICT   {verdict}," in out
    assert str(there) in err
    assert there.read_text() == "another's"


@pytest.mark.parametrize(
    ("verdict", "code"), [(StageVerdict.WRONG, EXIT_GATE), (StageVerdict.RIGHT, EXIT_ERROR)]
)
def test_a_page_that_cannot_be_written_takes_no_tests(
    verdict: StageVerdict,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of two tests the first is written and told, and the second one is there already."""
    own, page = tmp_path / "own.py", tmp_path / "page.html"
    own.write_text(OWN)
    first, second = (tmp_path / f"test_{name}_fails.py" for name in ("sums", "rows"))
    second.write_text("another's")
    found = outcome(verdict), OwnReport(smallest={"sums": {"n": 3}, "rows": {"n": 4}})

    def work(*_: object, **__: object) -> object:
        page.write_text("another's")
        return found

    monkeypatch.setattr(verb, "verify_file", work)
    assert leaves(["verify", own, "--tests", tmp_path, "--html", page]) == code
    said = capfd.readouterr().err
    assert f"wrote {first}; run it with pytest" in said
    assert first.is_file()
    assert f"{second}: File exists; the test was not written" in said
    assert said.count(str(page)) == 1


@pytest.mark.parametrize("command", ["verify", "audit"])
def test_a_draft_model_is_refused_by_its_option(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is not opened: no such file is there."""
    given = [command, DEMO, "--device", "cpu", "-md", tmp_path / "none.gguf"]
    assert leaves(list(given)) == EXIT_USAGE
    assert "--model-draft/-md is " in capfd.readouterr().err


@pytest.mark.parametrize("command", ["verify", "audit"])
def test_a_model_that_sees_through_a_window_has_the_context_that_it_takes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its file says 64, and half of its window to each side are 49."""
    path = make_encoder("gemma-embedding", tmp_path).path
    lengths: list[int] = []

    def stages(given: Any, *_: object) -> Any:
        lengths.append(given.context_length)
        return iter(outcome(StageVerdict.RIGHT).stages)

    def of_verify(_: object, ready: Any, *__: object) -> Any:
        return list(stages(ready.runner))

    monkeypatch.delenv("HYPO_RECORD", raising=False)
    monkeypatch.setattr("hypocenter.verify.verify._stages", of_verify)
    monkeypatch.setattr("hypocenter.audit.audit._stages", lambda llm, *_: stages(llm.engine.runner))
    assert leaves([command, path, "--device", "cpu", "--quiet"]) == 0
    assert "VERDICT   right" in capfd.readouterr().out
    assert lengths == [49]
    with open_gguf(path) as file:
        arch = read_architecture(file)
    with pytest.raises(BadSetting) as refused:
        context_length_of(arch, EngineConfig(context_length=64))
    assert str(refused.value) == (
        "context_length is 64, but the model takes texts of at most 49 tokens, half of its window "
        "to each side; take at most that"
    )


@pytest.mark.parametrize("fast", ["", "gather"])
def test_what_is_not_compiled_in_time_is_told(monkeypatch: pytest.MonkeyPatch, fast: str) -> None:
    """On a simulated GPU with a slow compiler, which has one kernel when its time is over."""

    def compile_slowly(
        launches: Sequence[Any], progress: object = None, is_over: Any = lambda: False
    ) -> bool:
        while not is_over():
            time.sleep(0.01)
        return all(launch.kernel == fast for launch in launches)

    sim = open_sim("sim:h200")
    monkeypatch.setattr(sim, "compiles", True)
    monkeypatch.setattr(sim, "compile", compile_slowly)
    devices.use_backend(sim)
    monkeypatch.setattr("hypocenter.verify.verify.stage_seconds", lambda *_: 60.0)
    config = EngineConfig(
        device="sim:h200", context_length=32, kv_tokens=64, max_batch_tokens=32, kv_dtype="f16"
    )
    began = time.perf_counter()
    found = verify_model(str(DEMO), config, Effort("none", 0.2))
    assert found.seconds <= time.perf_counter() - began
    assert found.preparing_seconds <= found.seconds
    assert found.budget_seconds == 0.2
    kernels, *others, memory = found.stages
    assert memory.name == "memory"
    why = "kernels were not compiled in time; the next run has them sooner"
    for stage in others:
        assert (stage.verdict, [item.why for item in stage.uncovered]) == ("not run", [why])
    assert [stage.name for stage in others] == ["sampling", "repeats", "logits", "ahead"]
    assert why in {item.why for item in kernels.uncovered}
    assert bool(kernels.num_covered) == bool(fast)
    assert any(x.what.startswith("gather,") for x in kernels.uncovered) == (not fast)
    last = list(outcome_lines(found, verb._WORDS))[-1]
    named = "sampling, repeats, logits, ahead, memory"
    assert f"not run: {named if fast else 'kernels, ' + named}" in last


class SlowCompiler:
    """Stands for a runner that compiles until its time is over."""

    ended = 0.0

    def compile(self, progress: object, is_over: Callable[[], bool]) -> bool:
        while not is_over():
            time.sleep(0.002)
        self.ended = time.perf_counter()
        return False


def test_compiling_has_more_time_than_all_that_is_looked_at() -> None:
    on_device: Any = SlowCompiler()
    on_cpu: Any = SlowCompiler()
    began = time.perf_counter()
    ready = _compile(on_device, on_cpu, 0.1, None)
    assert (ready.is_whole, ready.has_cpu) == (False, False)
    assert 0.1 <= on_cpu.ended - began < 0.3 <= on_device.ended - began


def test_the_verdict_says_which_stages_did_not_run_and_each_reason_once() -> None:
    """As on an emulated GPU in 20 s: what had no time must not hide behind a short word."""
    over, part = "the time was over", "1 of 4 cases; the time was over"
    left = [("a", part), ("b", over), ("c", part), ("d", over)]
    stages = (
        Stage(
            "kernels", "?", StageVerdict.RIGHT, "forms", 18, 18, 18,
            uncovered=tuple(Uncovered(*item) for item in left),
        ),
        Stage("logits", "?", StageVerdict.RIGHT, "ways", 1, 5, 5),
        Stage("sampling", "?", StageVerdict.NOT_RUN, uncovered=(Uncovered("greedy", over),) * 2),
        Stage("memory", "?", StageVerdict.NOT_RUN, uncovered=(Uncovered("free", "ask for it"),)),
    )  # fmt: skip
    found = Verification("m.gguf", "emu:x", "an X", "quick", 20.0, stages, 21.0)
    lines = list(outcome_lines(found, verb._WORDS))
    assert lines[-1] == (
        "VERDICT   right, by 2 of 4 stages (not run: sampling, memory; in part: logits), in 21 s"
    )
    assert [line for line in lines if line.startswith("NOT SEEN")] == [
        f"NOT SEEN  kernels: a and 1 more: {part}",
        f"NOT SEEN  kernels: b and 1 more: {over}",
    ]
    assert f"sampling  not run  {over}" in lines


def test_a_stage_begins_nothing_that_would_take_longer() -> None:
    """As a step on an emulated GPU, which nothing ends."""
    times = iter([0.0, 0.0, 3.0, 3.1, 6.0, 6.5, 7.0, 9.0])
    is_over = StageClock(10.0, lambda: next(times), first_takes=0.1)
    # What it did took 0, 3 and 0.1 s; then 2.9 s with 4 left, 0.5 s, 0.5 s with 3 left, and 2 s.
    assert [is_over() for _ in range(7)] == [False, False, False, False, False, False, True]
    late = iter([0.0, 2.0, 10.5])
    is_over = StageClock(10.0, lambda: next(late))
    assert [is_over() for _ in range(2)] == [False, True], "launches are unlike one another"
    for first_takes, is_too_long in ((3.0, False), (4.1, True)):
        known = iter([0.0, 0.0, 0.0, 0.0])
        is_over = StageClock(4.0, partial(next, known), first_takes=first_takes)
        assert [is_over() for _ in range(3)] == 3 * [is_too_long]


@pytest.mark.parametrize("with_memory", [False, True])
def test_each_stage_has_a_share_of_what_is_left(with_memory: bool) -> None:
    wanted = [name for name in SHARES if name != "memory" or with_memory]
    left, taken = 20.0, []
    for name in wanted:
        taken.append(stage_seconds(name, wanted, left))
        left -= taken[-1]
    assert min(taken) >= 20 * min(SHARES.values())
    assert sum(taken) == pytest.approx(20)
    # One that takes more than its share takes of all behind it alike.
    short = [stage_seconds(name, wanted, 3.0) for name in wanted[1:2]]
    assert 0 < short[0] < taken[1]
    assert stage_seconds("ahead", wanted, -5.0) == 0
