"""`hypo diff` of traces: the first point, its growth, and whom float64 agrees with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGUFValueType
from models.demo_variants import demo_with
from repository import DEMO

from hypocenter.base.errors import EXIT_GATE, EXIT_USAGE, UsageError
from hypocenter.cli import trace_report
from hypocenter.cli.trace_report import are_traces, examine, lines_of
from hypocenter.engine.float64_steps import Float64Steps, NotComputed, limit_of
from hypocenter.engine.llm import LLM
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.trace.comparing import compare
from hypocenter.trace.points import ModelTrace, Point, TracedAdapter
from hypocenter.trace.reading import read_trace

PROMPT = "def read_lines(path):\n    "


def _trace(
    path: Path, max_data_bytes: int = 64 << 20, model: Path = DEMO, **fields: Any
) -> ModelTrace:
    with LLM(model, context_length=64, prefix_cache=False, **fields) as llm:
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
    return _wrongly_rotated(folder / "base")


def _wrongly_rotated(path: Path, max_data_bytes: int = 64 << 20) -> ModelTrace:
    """As a program that rotates wrongly leaves it: its header knows of no other base."""
    trace = _trace(path, max_data_bytes, override_kv={"llama.rope.freq_base": 20000.0})
    return replace(trace, header=msgspec.structs.replace(trace.header, override_kv={}))


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


def test_float64_knows_divisors_of_the_rotation_and_windows(folder: Path) -> None:
    """As Llama 3.1's file has them, and Mistral's; with either left out the points are off."""
    divisors = np.linspace(1, 8, 32, dtype=np.float32)
    window = {"llama.attention.sliding_window": (5, GGUFValueType.UINT32)}
    path = demo_with(folder / "model.gguf", window, tensors={"rope_freqs.weight": divisors})
    trace = _trace(folder / "divided", model=path)
    with open_gguf(path) as file:
        arch, float64 = read_architecture(file), Float64Steps(file, trace)
        for step in trace.steps:
            for place in step.points:
                assert float64.error(step, *place) <= limit_of(place[0]) / 2, place
        layers = tuple(replace(shape, window=0) for shape in arch.layers)
        whole = Float64Steps(file, trace, arch=replace(arch, layers=layers))
        assert whole.error(trace.steps[0], "attention", 0) > 10 * limit_of("attention")
    with open_gguf(DEMO) as demo:
        header = msgspec.structs.replace(trace.header, model_bytes=DEMO.stat().st_size)
        plain = Float64Steps(demo, ModelTrace(header, trace.steps))
        assert plain.error(trace.steps[0], "q_rope", 0) > 10 * limit_of("q_rope")


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
    bare = _wrongly_rotated(folder / "bare", 0)
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


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"override_kv": {"llama.rope.freq_base": "20000.0"}}, "a run with --override-kv"),
        ({"adapters": (TracedAdapter("tuned", "00", 1.0),)}, "a run with an adapter"),
    ],
)
def test_a_run_that_was_changed_on_purpose_is_not_accused(
    sound: ModelTrace, other_base: ModelTrace, said: dict[str, Any], reason: str
) -> None:
    header = msgspec.structs.replace(other_base.header, **said)
    found = examine(sound, replace(other_base, header=header))
    assert found.first_wrong is None
    assert reason in found.not_judged
    assert found.diff.first is not None


def test_a_header_has_the_keys_that_were_given(sound: ModelTrace, folder: Path) -> None:
    assert (sound.header.override_kv, sound.header.adapters) == ({}, ())
    assert b'"override_kv":{"llama.rope.freq_base":"20000.0"}' in _first_line(folder / "base")


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


def _left_with(a: ModelTrace, b: ModelTrace, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The exit code of `hypo diff` of two traces; None where it just ends."""
    traces = iter((a, b))
    monkeypatch.setattr(trace_report, "read_trace", lambda path: next(traces))
    try:
        trace_report.diff_traces("a", "b", as_json=False)
    except SystemExit as left:
        return int(str(left.code))
    return None


def test_nothing_in_common_is_no_equality(
    sound: ModelTrace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *rest = sound.steps
    without_steps = replace(sound, steps=())
    without_points = replace(sound, steps=(replace(first, points={}),))
    cut = replace(without_steps, is_whole=False)
    for other in (without_steps, without_points, cut, replace(sound, steps=tuple(rest))):
        alone = replace(sound, steps=(first,))
        assert _left_with(alone, other, monkeypatch) == EXIT_USAGE
        said = capsys.readouterr().out
        assert "nothing can be compared" in said
        assert "no difference" not in said
    assert _left_with(without_steps, without_steps, monkeypatch) == EXIT_USAGE


def test_what_only_one_side_has_is_a_difference(
    sound: ModelTrace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _left_with(sound, sound, monkeypatch) is None
    assert "no difference" in capsys.readouterr().out
    first, *rest = sound.steps
    points = {place: point for place, point in first.points.items() if place != ("q", 3)}
    fewer = replace(sound, steps=(replace(first, points=points), *rest[:-1]))
    assert _left_with(sound, fewer, monkeypatch) == EXIT_GATE
    said = capsys.readouterr().out
    assert "q of layer 3 is only in A" in said
    assert "step 2 is only in A" in said
    assert "no difference" not in said


def _with_values(trace: ModelTrace, changes: dict[int, float], **figures: Any) -> ModelTrace:
    """The trace with some elements of v of layer 4 changed."""
    values = np.array(trace.steps[0].points["v", 4].values)
    values.flat[list(changes)] = list(changes.values())
    digest = f"{hash(values.tobytes()) % 2**64:016x}"
    return _with(trace, ("v", 4), values=values, digest=digest, **figures)


@pytest.mark.parametrize(
    ("of_a", "of_b", "counts"),
    [
        ({3: np.nan}, {4: np.nan}, {"num_nan": 1}),
        ({3: np.inf}, {3: -np.inf}, {"num_inf": 1}),
    ],
)
def test_nan_in_another_place_is_no_rounding(
    sound: ModelTrace, of_a: dict[int, float], of_b: dict[int, float], counts: dict[str, int]
) -> None:
    a, b = (_with_values(sound, changes, **counts) for changes in (of_a, of_b))
    beyond = compare(a, b).first_beyond
    assert beyond is not None
    assert (beyond.place, beyond.what) == (("v", 4), "NaN or infinities lie in other places")
    bare_a, bare_b = (_with(trace, ("v", 4), values=None) for trace in (a, b))
    beyond = compare(bare_a, bare_b).first_beyond
    assert beyond is not None
    assert "not known where NaN" in beyond.what
    nudged = _with_values(a, {9: a.steps[0].points["v", 4].high}, **counts)
    assert compare(a, nudged).first is not None
    assert compare(a, nudged).first.what == ""  # type: ignore[union-attr]
    assert compare(a, a).is_equal


def test_signs_of_zeros_are_other_bits(sound: ModelTrace) -> None:
    shape = sound.steps[0].points["v", 4].shape
    zeros = np.zeros(shape, np.float32)
    for values in ((zeros, -zeros), (None, None)):
        a, b = (
            _with(
                sound, ("v", 4), values=each, digest=digest * 16, low=0.0, high=0.0, rms=0.0,
                sketch=np.zeros(8, np.float32),
            )
            for each, digest in zip(values, "01", strict=True)
        )  # fmt: skip
        diff = compare(a, b)
        assert diff.first is not None
        assert (diff.first.is_of_bits, diff.first_beyond) == (True, None)
        assert diff.num_equal == diff.num_points - 1
        said = "\n".join(lines_of(trace_report.TraceFindings(diff, None, None, 0, ""), a, b))
        assert "only signs of zeros, or payloads of NaN" in said
        assert "no difference" not in said


def test_numbers_that_the_model_lacks_are_not_judged(sound: ModelTrace) -> None:
    first = sound.steps[0]
    point = first.points["attn_norm", 0]
    assert point.values is not None
    turned = replace(point, values=point.values[:, :-2], shape=(point.shape[0], 254))
    far = replace(first, token_ids=(10**6, *first.token_ids[1:]))
    late = replace(first, positions=(*first.positions[:-1], 2**30))
    narrow = replace(first, points={**first.points, ("attn_norm", 0): turned})
    with open_gguf(sound.header.model) as file:
        float64 = Float64Steps(file, sound)
        with pytest.raises(NotComputed, match="token 1000000, and the vocabulary"):
            float64.error(far, "embedding", None)
        with pytest.raises(NotComputed, match="1073741825 positions, and the trace has"):
            float64.error(late, "attention", 0)
        with pytest.raises(NotComputed, match="attn_norm of layer 0 has rows of 254"):
            float64.error(narrow, "q", 0)
