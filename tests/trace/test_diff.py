"""`hypo diff` of traces: the first point, its growth, and whom float64 agrees with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypocenter.base.errors import UsageError
from hypocenter.cli.trace_report import are_traces, examine, lines_of
from hypocenter.engine.float64_steps import Float64Steps, NotComputed, limit_of
from hypocenter.engine.llm import LLM
from hypocenter.model.gguf.file import open_gguf
from hypocenter.trace.points import ModelTrace, Point
from hypocenter.trace.reading import read_trace

PROMPT = "def read_lines(path):\n    "


def _trace(path: Path, max_data_bytes: int = 64 << 20, **fields: Any) -> ModelTrace:
    with LLM(context_length=64, prefix_cache=False, **fields) as llm:
        trace = llm.trace(path, max_data_bytes=max_data_bytes)
        llm.generate(PROMPT, max_tokens=3, temperature=0.0)
        trace.close()
    return read_trace(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def sound(folder: Path) -> ModelTrace:
    return _trace(folder / "sound")


@pytest.fixture(scope="module")
def other_base(folder: Path) -> ModelTrace:
    return _trace(folder / "base", override_kv={"llama.rope.freq_base": 20000.0})


def _with(trace: ModelTrace, place: tuple[str, int | None], **changes: Any) -> ModelTrace:
    """The trace with one point of its first step changed."""
    first, *rest = trace.steps
    points = dict(first.points)
    points[place] = replace(points[place], **changes)
    return ModelTrace(trace.header, (replace(first, points=points), *rest))


def test_every_point_is_as_float64_has_it(sound: ModelTrace) -> None:
    with open_gguf(sound.header.model) as file:
        float64 = Float64Steps(file, sound)
        for step in sound.steps:
            for place in step.points:
                assert float64.error(step, *place) <= limit_of(place[0]) / 2, place


def test_equal_traces_have_no_difference(sound: ModelTrace) -> None:
    found = examine(sound, sound)
    assert (found.diff.first, found.first_wrong) == (None, None)
    assert found.diff.num_equal == found.diff.num_points == 3 * 69
    assert "no difference" in lines_of(found, sound, sound)


def test_a_wrong_base_is_at_the_first_rotation(sound: ModelTrace, other_base: ModelTrace) -> None:
    found = examine(sound, other_base)
    assert found.diff.first is not None
    assert found.diff.first.place == ("q_rope", 0)
    wrong = found.first_wrong
    assert wrong is not None
    assert (wrong.name, wrong.layer, wrong.wrong) == ("q_rope", 0, "B")
    growth = [each for each in found.diff.growth if each.name == "layer_out"]
    assert [each.layer for each in growth] == [*range(6)]
    assert all(each.relative > 1e-4 for each in growth)
    assert "agrees with A and not with B" in "\n".join(lines_of(found, sound, other_base))


def test_the_other_way_round_a_is_wrong(sound: ModelTrace, other_base: ModelTrace) -> None:
    wrong = examine(other_base, sound).first_wrong
    assert wrong is not None
    assert wrong.wrong == "A"


def test_without_elements_it_says_what_it_needs(folder: Path, sound: ModelTrace) -> None:
    bare = _trace(folder / "bare", 0, override_kv={"llama.rope.freq_base": 20000.0})
    found = examine(sound, bare)
    assert found.diff.first is not None
    assert (found.diff.first.place, found.diff.first.is_estimate) == (("q_rope", 0), True)
    assert 0.01 < found.diff.first.relative < 0.1
    assert found.first_wrong is None
    assert "--trace-data" in found.not_judged


def test_a_nan_is_told(sound: ModelTrace) -> None:
    point: Point = sound.steps[0].points["v", 4]
    assert point.values is not None
    values = point.values.copy()
    values[2, 7] = np.nan
    bad = _with(sound, ("v", 4), values=values, num_nan=1, digest="0" * 16)
    found = examine(sound, bad)
    assert found.diff.first is not None
    assert found.diff.first.what == "A has 0 NaN and 0 infinities, B 1 NaN and 0 infinities"
    assert found.first_wrong is not None
    assert (found.first_wrong.name, found.first_wrong.layer) == ("v", 4)
    assert found.first_wrong.wrong == "B"


def test_other_tokens_are_not_compared(sound: ModelTrace) -> None:
    first, *rest = sound.steps
    moved = ModelTrace(sound.header, (replace(first, positions=(*first.positions[1:], 9)), *rest))
    found = examine(sound, moved)
    assert found.diff.unlike == "step 0 has other positions"
    assert found.diff.num_points == 0


def test_float64_is_not_asked_about_another_model(sound: ModelTrace) -> None:
    import msgspec

    header = msgspec.structs.replace(sound.header, model_bytes=1)
    with (
        open_gguf(sound.header.model) as file,
        pytest.raises(NotComputed, match="is not the model"),
    ):
        Float64Steps(file, ModelTrace(header, sound.steps))


def test_a_trace_and_something_else_are_refused(folder: Path, sound: ModelTrace) -> None:
    assert are_traces(str(folder / "sound"), str(folder / "sound"))
    with pytest.raises(UsageError, match="is no trace"):
        are_traces(str(folder / "sound"), str(folder))
    assert not are_traces(str(folder), str(folder))
