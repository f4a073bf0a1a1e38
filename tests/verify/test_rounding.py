"""Tokens at which rounding alone moves logits further than two devices may be apart."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import DEMO, ROOT

from hypocenter import LLM
from hypocenter.base.dtypes import Array
from hypocenter.verify import logits_stage
from hypocenter.verify.rounding import distance_allowed, reach_of_rounding, undecided_of
from hypocenter.verify.steps import prompt

LENGTH = 40


def _reach(model: Path) -> tuple[Any, float]:
    with LLM(model, context_length=64, prefix_cache=False) as llm:
        runner = llm.engine.runner
        ids = [int(token) for token in prompt(runner.vocab_size, 96, 0)[:LENGTH]]

        def run() -> Array:
            return llm.logits(ids)

        before = run()
        found = reach_of_rounding(runner, run)
        assert (run() == before).all()  # the norms are what they were
        return found, distance_allowed(runner)


def test_rounding_moves_a_trained_model_less_than_is_allowed() -> None:
    reach, allowed = _reach(DEMO)
    assert reach.shape == (LENGTH,)
    assert 0 < reach.max() < allowed
    assert undecided_of(range(LENGTH), reach, allowed) is None


@pytest.mark.tier("sim")
def test_a_token_of_a_random_mixture_is_nearly_tied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 37 of this one has logits that are 0.53 apart on a CPU and an H200, though attention
    does on either what float64 makes of its own inputs."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    large_gguf = importlib.import_module("large_gguf")
    path = tmp_path / "experts.gguf"
    large_gguf.write(path, large_gguf.Shape("qwen3moe", 2, 512, 8, 4, 256, 4096, 16, 4), 2)
    reach, allowed = _reach(path)
    assert reach[37] > 0.5 > allowed
    assert (reach <= allowed).sum() > LENGTH // 2
    found = undecided_of(range(LENGTH), reach, allowed)
    assert found is not None
    assert f"{(reach > allowed).sum()} of {LENGTH} tokens" in found.what


def test_norms_are_put_back_where_a_run_dies() -> None:
    with LLM(DEMO, context_length=64, prefix_cache=False) as llm:
        before, calls = llm.logits([1, 2, 3]), iter([None])

        def run() -> Array:
            if next(calls, 0) is None:
                return before
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            reach_of_rounding(llm.engine.runner, run)
        assert np.array_equal(llm.logits([1, 2, 3]), before)


@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_logits_of_a_token_that_rounding_moves_are_not_held_against_a_cpu(
    moved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(DEMO, context_length=64, prefix_cache=False) as llm:
        runner = llm.engine.runner
        stage = logits_stage.LogitsStage(runner, runner)
        found = stage._run_chunks(3, 3)
        found[1] *= 2
        reach = np.array([0.0, moved, 0.0])
        monkeypatch.setattr(logits_stage, "reach_of_rounding", lambda runner, run: reach)
        stage._hold_against_cpu("at once", 3, found)
        assert [item.details["token"] for item in stage._findings] == ([] if moved else [1])
        assert [left.what for left in stage._left] == (
            ["1 of 3 tokens, the first of them 1"] if moved else []
        )
        found[1, 0] = np.nan
        stage._hold_against_cpu("at once", 3, found)
        assert stage._findings[-1].details["token"] == 1
