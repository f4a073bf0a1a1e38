"""A trace tells what steps hold, changes none of them, and a damaged one is refused."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hypocenter.base.errors import UsageError
from hypocenter.cli.verbs import run as cli_run
from hypocenter.device.cpu.measuring import TILE, figures_of
from hypocenter.device.digests import BLOCK
from hypocenter.engine.llm import LLM
from hypocenter.trace.points import (
    AFTER_LAYERS,
    BEFORE_LAYERS,
    OF_LAYERS,
    ModelTrace,
    Selection,
)
from hypocenter.trace.reading import is_trace, read_trace

PROMPT = "def read_lines(path):\n    "


def _traced(
    path: Path, selection: Selection | None = None, **fields: Any
) -> tuple[ModelTrace, Any]:
    """The trace of a short answer of the bundled model, and the answer's tokens with the logits of
    the prompt."""
    with LLM(context_length=64, prefix_cache=False, **fields) as llm:
        trace = llm.trace(path, selection, max_data_bytes=64 << 20)
        answer = llm.generate(PROMPT, max_tokens=3, temperature=0.0)
        logits = llm.logits(PROMPT)
        trace.close()
    return read_trace(path), (answer.token_ids, logits)


def test_every_point_is_there_and_no_bit_changes(tmp_path: Path) -> None:
    trace, (token_ids, logits) = _traced(tmp_path / "trace")
    with LLM(context_length=64, prefix_cache=False) as llm:
        assert token_ids == llm.generate(PROMPT, max_tokens=3, temperature=0.0).token_ids
        np.testing.assert_array_equal(logits, llm.logits(PROMPT))
    layers = [(name, layer) for layer in range(6) for name in OF_LAYERS]
    ends = [*((name, None) for name in BEFORE_LAYERS)], [*((name, None) for name in AFTER_LAYERS)]
    for step in trace.steps:
        assert list(step.points) == [*ends[0], *layers, *ends[1]]
    *_, last = trace.steps
    values = last.points["logits", None].values
    assert values is not None
    np.testing.assert_array_equal(values, logits)


def test_points_belong_together(tmp_path: Path) -> None:
    """What one point holds follows from the one before it."""
    step = _traced(tmp_path / "trace")[0].steps[0]

    def values(name: str, layer: int | None) -> Any:
        found = step.points[name, layer].values
        assert found is not None
        return found.astype(np.float64)

    x, normed = values("embedding", None), values("attn_norm", 0)
    without_weight = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)
    some = np.abs(x).min(0) > 1e-4
    weight = normed[:, some] / without_weight[:, some]
    assert some.sum() > 100
    np.testing.assert_allclose(weight, np.broadcast_to(weight[:1], weight.shape), rtol=1e-4)
    # The first position is not turned, and sees its own values alone.
    np.testing.assert_array_equal(values("q", 2)[0], values("q_rope", 2)[0])
    own = values("v_cache", 2)[0].reshape(2, 1, 64).repeat(2, axis=1).reshape(-1)
    np.testing.assert_allclose(values("attention", 2)[0], own, rtol=1e-6)
    np.testing.assert_allclose(values("k_cache", 1)[0], values("k", 1)[0], rtol=1e-3, atol=1e-6)


def test_only_what_was_asked_for(tmp_path: Path) -> None:
    selection = Selection(frozenset({"q", "logits"}), layers=(1, 3), steps=(1,))
    trace, _ = _traced(tmp_path / "trace", selection)
    [step] = trace.steps
    assert step.step == 1
    assert list(step.points) == [("q", 1), ("q", 3), ("logits", None)]


def _assert_figures_are_of_their_elements(trace: ModelTrace) -> None:
    """What the device made of a point is what the host makes of its copy: the digest to the bit."""
    for step in trace.steps:
        for place, point in step.points.items():
            assert point.values is not None, place
            wanted = figures_of(point.values[None])
            assert point.digest == wanted.digests, place
            assert (point.low, point.high) == (wanted.low[0], wanted.high[0]), place
            sums = (point.mean, point.rms, *point.sketch)
            of_host = (wanted.mean[0], wanted.rms[0], *wanted.sketches[0])
            np.testing.assert_allclose(sums, of_host, rtol=0, atol=1e-6 * point.rms)


def test_figures_are_of_what_the_tensors_held(tmp_path: Path) -> None:
    """Elements are copied at once, and figures may be made a few launches later."""
    _assert_figures_are_of_their_elements(_traced(tmp_path / "trace")[0])


@pytest.mark.tier("sim")
def test_figures_of_a_gpu_are_of_what_the_tensors_held(tmp_path: Path) -> None:
    trace = _traced(tmp_path / "trace", device="sim:mi300x")[0]
    _assert_figures_are_of_their_elements(trace)


def test_a_model_runs_on_when_its_trace_is_closed(tmp_path: Path) -> None:
    with LLM(context_length=64, prefix_cache=False) as llm:
        trace = llm.trace(tmp_path / "trace")
        answer = llm.generate(PROMPT, max_tokens=2, temperature=0.0)
        trace.close()
        again = llm.generate(PROMPT, max_tokens=2, temperature=0.0)
    assert again.token_ids == answer.token_ids
    assert len(read_trace(tmp_path / "trace").steps) == 2


def test_figures_without_elements_are_the_same(tmp_path: Path) -> None:
    with LLM(context_length=64, prefix_cache=False) as llm:
        trace = llm.trace(tmp_path / "bare")
        llm.generate(PROMPT, max_tokens=3, temperature=0.0)
        trace.close()
    bare, whole = read_trace(tmp_path / "bare"), _traced(tmp_path / "whole")[0]
    for one, other in zip(bare.steps, whole.steps, strict=False):
        assert [p.digest for p in one.points.values()] == [p.digest for p in other.points.values()]
        assert all(point.values is None for point in one.points.values())


@pytest.mark.tier("sim")
def test_a_gpu_has_the_same_points(tmp_path: Path) -> None:
    ours, _ = _traced(tmp_path / "cpu")
    theirs, _ = _traced(tmp_path / "gpu", device="sim:h200")
    for one, other in zip(ours.steps, theirs.steps, strict=True):
        assert list(one.points) == list(other.points)
        for place, point in one.points.items():
            off = np.abs(point.sketch - other.points[place].sketch).max()
            assert off < 0.2 * point.rms, place


def test_figures_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, BLOCK + 77)).astype(np.float32)
    values[1, 5], values[1, BLOCK + 3], values[1, 9] = np.nan, np.inf, -np.inf
    values[2] = np.nan
    found = figures_of(values[:, None])
    for row, numbers in enumerate(values[:2].astype(np.float64)):
        finite = numbers[np.isfinite(numbers)]
        told = found.low[row], found.high[row], found.mean[row], found.rms[row]
        wanted = finite.min(), finite.max(), finite.mean(), np.sqrt((finite**2).mean())
        np.testing.assert_allclose(told, wanted, rtol=1e-6, atol=1e-7)
    assert (found.num_nan, found.num_inf) == ([0, 1, BLOCK + 77], [0, 2, 0])
    assert (found.low[2], found.rms[2]) == (0, 0)


@pytest.mark.parametrize("size", [1e-30, 1e-13, 1e18, 3e37])
def test_figures_of_what_f32_cannot_square(size: float) -> None:
    values = np.random.default_rng(2).uniform(-size, size, (2, 3 * TILE)).astype(np.float32)
    found = figures_of(values[:, None])
    for row, numbers in enumerate(values.astype(np.float64)):
        rms = np.sqrt((numbers**2).mean())
        np.testing.assert_allclose(found.rms[row], rms, rtol=1e-6)
        np.testing.assert_allclose(found.mean[row] / rms, numbers.mean() / rms, atol=1e-6)
        assert (found.low[row], found.high[row]) == (numbers.min(), numbers.max())


def test_a_digest_sees_a_bit_and_a_place() -> None:
    values = np.arange(2 * BLOCK, dtype=np.float32).reshape(1, 2, BLOCK)
    first = figures_of(values).digests
    swapped = values[:, ::-1]
    nudged = values.copy()
    nudged[0, 0, 70] = np.nextafter(nudged[0, 0, 70], np.float32(np.inf))
    assert len({first, figures_of(swapped).digests, figures_of(nudged).digests}) == 3


def test_a_sketch_tells_how_far_two_are_apart() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((1, 3, BLOCK)).astype(np.float32)
    moved = values + 1e-3 * rng.standard_normal(values.shape).astype(np.float32)
    apart = figures_of(values).sketches - figures_of(moved).sketches
    assert 3e-4 < np.sqrt((apart.astype(np.float64) ** 2).mean()) < 3e-3


def _cut(lines: list[Any]) -> None:
    lines[1]["groups"][0]["low"].pop()


def _other_point(lines: list[Any]) -> None:
    lines[1]["groups"][0]["names"][0] = "querys"


def _far_layer(lines: list[Any]) -> None:
    group = next(each for each in lines[1]["groups"] if "q" in each["names"])
    group["layers"][group["names"].index("q")] = 6


def _newer(lines: list[Any]) -> None:
    lines[0]["version"] = 4


def _again(lines: list[Any]) -> None:
    lines.append(lines[1])


def _more_data(lines: list[Any]) -> None:
    lines[1]["groups"][0]["shape"][0] += 1


def _many_axes(lines: list[Any]) -> None:
    lines[1]["groups"][0] |= {"shape": [1] * 70, "data": None}


def _other_rows(lines: list[Any]) -> None:
    group = next(each for each in lines[1]["groups"] if "attn_norm" in each["names"])
    group["shape"] = group["shape"][::-1]


def _nan_sketches(lines: list[Any]) -> None:
    group = lines[1]["groups"][0]
    raw = b"\xff\xff\xff\x7f" * 8 * len(group["names"])
    group["sketches"] = base64.b64encode(raw).decode()


def _set(name: str, value: int) -> Callable[[list[Any]], None]:
    def change(lines: list[Any]) -> None:
        lines[1][name][0] = value

    return change


def _no_tokens(lines: list[Any]) -> None:
    lines[1] |= {key: [] for key in ("token_ids", "positions", "sequences", "logit_rows")}


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_many_axes, "has a shape of 70 axes"),
        (_other_rows, "embedding has the shape .256, 7., and there are 7 rows"),
        (_nan_sketches, "a sketch of .* is not finite"),
        (_set("logit_rows", 99), "99 in logit_rows, which must be from 0"),
        (_set("logit_rows", -1), "-1 in logit_rows"),
        (_set("token_ids", -3), "-3 in token_ids"),
        (_set("positions", 10**30), "1000000000000000000000000000000 in positions"),
        (_no_tokens, "it has no tokens"),
        (_cut, "line 2 is damaged: lists of embedding.* differ in length"),
        (_other_point, "there is no point 'querys'"),
        (_far_layer, "q is of layer 6, and there are 6"),
        (_newer, "this program reads version 3"),
        (_again, "line 6 has step 0 out of order"),
        (_more_data, "bytes of elements for"),
    ],
)
def test_a_damaged_trace_is_refused(
    tmp_path: Path, whole: list[bytes], break_it: Callable[[list[Any]], None], message: str
) -> None:
    lines = [msgspec.json.decode(line) for line in whole]
    break_it(lines)
    path = tmp_path / "damaged"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    with pytest.raises(UsageError, match=message):
        read_trace(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The lines of a trace."""
    path = tmp_path_factory.mktemp("whole") / "trace"
    _traced(path)
    assert is_trace(path)
    return path.read_bytes().splitlines()


def test_a_trace_whose_writer_died_is_read_as_far_as_it_goes(
    tmp_path: Path, whole: list[bytes]
) -> None:
    path = tmp_path / "cut"
    path.write_bytes(b"\n".join(whole)[:-10])
    trace = read_trace(path)
    assert not trace.is_whole
    assert len(trace.steps) == len(whole) - 2


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("mine")
    with LLM(context_length=64) as llm, pytest.raises(UsageError, match="is there already"):
        llm.trace(path)
    assert path.read_text() == "mine"


def test_a_pipe_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)  # so that no reader waits
    os.write(held, b"x\n")
    with pytest.raises(UsageError, match="pipe is no regular file"):
        read_trace(path)
    os.close(held)


def test_layers_and_steps_that_are_not_there_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(context_length=64) as llm:
        with pytest.raises(UsageError, match="there is no layer 99 to trace: 6 layers"):
            llm.trace(tmp_path / "far", Selection(layers=(1, 99)))
        assert not (tmp_path / "far").exists()
        trace = llm.trace(tmp_path / "late", Selection(frozenset({"logits"}), steps=(0, 7)))
        llm.generate(PROMPT, max_tokens=2, temperature=0.0)
        trace.close()
    assert (trace.missing_steps, trace.num_written) == ([7], 1)
    cli_run._tell_of_missing(trace)
    said = capsys.readouterr().err
    assert said.endswith("not in the trace: 7\n")
    assert said.count("\n") == 1
