"""Models with experts from file to logits: what is refused, what is held, CPU beside GPU, NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.expert_model import (
    EXPERT_WIDTH,
    NUM_EXPERTS,
    NUM_USED,
    WIDTH,
    write_experts,
    write_with_factors,
)
from models.resident import resident_bytes
from ops.kernel_launch import bits

from hypocenter import EngineConfig
from hypocenter.base.errors import BadModelFile, UnsupportedModel
from hypocenter.base.tensor import DType
from hypocenter.cli.verbs import bench, inspect
from hypocenter.device import copies
from hypocenter.engine.batch import Batch
from hypocenter.engine.runner import Runner, load_runner
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.tensors import footprint
from hypocenter.model.tensors import weights as weights_module
from hypocenter.model.tensors.tensor_reader import TensorReader, check_tensors

ROUTER = "blk.0.ffn_gate_inp.weight"
DOWN = "blk.1.ffn_down_exps.weight"


def refused(folder: Path, **changes: Any) -> BadModelFile:
    path = write_experts(folder / "refused.gguf", DType.F32, **changes)
    with open_gguf(path) as file, pytest.raises(BadModelFile) as caught:
        check_tensors(file, read_architecture(file))
    with open_gguf(path) as file, pytest.raises(type(caught.value)) as again:
        load_runner(file, EngineConfig(max_batch_tokens=4))
    assert str(again.value) == str(caught.value), "inspect says what run does"
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": {"expert_used_count": 9}}, "expert_used_count is 9, but must be from 1 to 8"),
        ({"metadata": {"expert_used_count": 0}}, "expert_used_count is 0, but must be from 1 to 8"),
        ({"metadata": {"expert_used_count": None}}, "qwen3moe.expert_used_count"),
        ({"metadata": {"expert_count": None}}, "qwen3moe.expert_count"),
        ({"metadata": {"expert_count": 0}}, "expert_count is 0"),
        ({"metadata": {"expert_count": 1 << 30}}, "expert_count is 1073741824"),
        ({"metadata": {"expert_count": 6}}, f"{ROUTER} shape is (8, 256)"),
        ({"shapes": {ROUTER: (8, 128)}}, f"{ROUTER} shape is (8, 128)"),
        ({"shapes": {DOWN: (7, WIDTH, 256)}}, f"{DOWN} shape is (7, 256, 256)"),
        ({"shapes": {DOWN: (WIDTH, 256)}}, f"{DOWN} shape is (256, 256)"),
        (
            {"metadata": {"expert_feed_forward_length": 128}},
            "blk.0.ffn_gate_exps.weight shape is (8, 256, 256)",
        ),
        ({"shapes": {"blk.0.exp_probs_b.bias": (8,)}}, "blk.0.exp_probs_b.bias"),
        ({"metadata": {"leading_dense_block_count": 3}}, "leading_dense_block_count is 3"),
        ({"metadata": {"leading_dense_block_count": 1}}, "blk.0.ffn_gate.weight"),
    ],
)
def test_experts_that_disagree_with_their_file_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in str(refused(tmp_path, **changes))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"blk.1.attn_sinks.weight": (5,)}, "blk.1.attn_sinks.weight shape is (5,)"),
        ({"blk.1.attn_sinks.weight": None}, "blk.1.attn_sinks.weight is missing"),
        (
            {"blk.0.ffn_gate_exps.bias": (NUM_EXPERTS, 128)},
            "blk.0.ffn_gate_exps.bias shape is (8, 128)",
        ),
        (
            {"blk.0.ffn_down_exps.bias": (NUM_EXPERTS - 1, WIDTH)},
            "blk.0.ffn_down_exps.bias shape is (7, 256)",
        ),
        ({"blk.0.ffn_up_exps.bias": None}, "blk.0.ffn_up_exps.bias is missing"),
        ({"blk.0.ffn_gate_inp.bias": None}, "blk.0.ffn_gate_inp.bias is missing"),
        ({"blk.0.ffn_norm.weight": (WIDTH,)}, "blk.0.ffn_norm.weight"),
    ],
)
def test_sinks_and_biases_that_disagree_are_refused(
    shapes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in str(refused(tmp_path, arch="gpt-oss", shapes=shapes))


def test_scores_that_we_do_not_know_are_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, metadata={"expert_gating_func": 3})
    assert isinstance(error, UnsupportedModel)
    assert error.field == "qwen3moe.expert_gating_func"


@pytest.mark.parametrize(
    ("num_groups", "num_groups_used", "message"),
    [
        (3, 1, "expert_group_count is 3, but must share 8 experts evenly, at least 1 to a group"),
        (4, 5, "expert_group_used_count is 5, but must be from 1 to 4"),
        (4, 0, "expert_group_used_count is 0, but must be from 1 to 4"),
        (8, 1, "expert_group_used_count is 1, but groups of 1 experts must have the 3 that"),
    ],
)
def test_groups_that_do_not_fit_the_experts_are_refused(
    num_groups: int, num_groups_used: int, message: str, tmp_path: Path
) -> None:
    keys = {"expert_group_count": num_groups, "expert_group_used_count": num_groups_used}
    assert message in str(refused(tmp_path, metadata=keys))


@pytest.mark.parametrize(("kind", "value", "place"), [(DType.MXFP4, 255, 0), (DType.NVFP4, 255, 3)])
@pytest.mark.parametrize(
    ("device", "part", "named"),
    [("cpu", "up", "gate_exps.weight + blk.1.ffn_up"), ("sim:h200", "down", "down")],
)
def test_a_scale_that_is_no_number_is_refused(
    device: str, part: str, named: str, kind: DType, value: int, place: int, tmp_path: Path
) -> None:
    """One byte among many, wherever it is."""
    path = write_experts(tmp_path / "experts.gguf", kind)
    with open_gguf(path) as file:
        at = file.tensors[f"blk.1.ffn_{part}_exps.weight"].offset
    block_bytes, per_row = kind.block_bytes, WIDTH // kind.block_elements
    data = bytearray(path.read_bytes())
    data[at + (300 * per_row + 2) * block_bytes + place] = value
    path.write_bytes(data)
    with pytest.raises(BadModelFile) as caught:
        new_runner(path, device=device)
    assert str(caught.value).startswith(
        f"{path}: blk.1.ffn_{named}_exps.weight: scale of block 2 of row 300 is {value}"
    )


_HALVES = ("ffn_gate_exps", "ffn_up_exps")
#: Gate and up as one tensor, in each layer.
_JOINT: dict[str, tuple[int, ...] | None] = {
    **{f"blk.{layer}.{name}.weight": None for layer in (0, 1) for name in _HALVES},
    **{
        f"blk.{layer}.ffn_gate_up_exps.weight": (NUM_EXPERTS, 2 * EXPERT_WIDTH, WIDTH)
        for layer in (0, 1)
    },
}


@pytest.mark.parametrize(
    ("names", "shapes"),
    [(("attn_q", *_HALVES, "ffn_down_exps"), {}), (("ffn_gate_up_exps",), _JOINT)],
    ids=["apart", "joint"],
)
@pytest.mark.parametrize("device", ["cpu", "sim:mi300x"])
@pytest.mark.tier("sim", fast=lambda case: case.device == "cpu")
def test_factors_beside_weights_of_nvfp4(
    device: str, names: tuple[str, ...], shapes: dict[str, Any], tmp_path: Path
) -> None:
    """Half of each weight with scales that are twice as large has the same bits."""
    shapes = shapes | {"blk.1.attn_q.input_scale": (1,)}
    plain = write_experts(tmp_path / "plain.gguf", DType.NVFP4, shapes=shapes)
    path = write_with_factors(tmp_path / "with.gguf", names, shapes)
    runner, other = (new_runner(one, device=device) for one in (plain, path))
    ids = [5, 77, 300, 12, 8]
    assert (bits(logits(runner, ids)) == bits(logits(other, ids))).all()


def test_numbers_of_a_weight_of_nvfp4_have_its_factor(tmp_path: Path) -> None:
    plain = write_experts(tmp_path / "plain.gguf", DType.NVFP4)
    path = write_with_factors(tmp_path / "with.gguf", ["attn_q", "ffn_up_exps"], {})
    for name in ("attn_q", "ffn_up_exps"):
        found = []
        for one in (plain, path):
            with open_gguf(one) as file:
                reader = TensorReader(file, read_architecture(file), None)
                shape = file.tensors[f"blk.1.{name}.weight"].shape
                found.append(reader.numbers(f"blk.1.{name}.weight", shape))
        np.testing.assert_array_equal(found[0], found[1])


def test_a_factor_that_is_no_number_is_refused(tmp_path: Path) -> None:
    beside = {"blk.1.ffn_down_exps.scale": (NUM_EXPERTS,)}
    path = write_experts(tmp_path / "experts.gguf", DType.NVFP4, shapes=beside)
    data = bytearray(path.read_bytes())
    with open_gguf(path) as file:
        at = file.tensors["blk.1.ffn_down_exps.scale"].offset + 8
    data[at : at + 4] = np.float32(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(BadModelFile, match=r"blk\.1\.ffn_down_exps\.scale\[2\] is inf"):
        new_runner(path)


def new_runner(path: Path, **settings: Any) -> Runner:
    with open_gguf(path) as file:
        return load_runner(file, EngineConfig(**{"max_batch_tokens": 16, **settings}))


def logits(runner: Runner, *sequences: list[int]) -> np.ndarray[Any, Any]:
    """All logits of several prompts in one step."""
    parts, size = [], runner.block_size
    tables = np.arange(len(sequences), dtype=np.int32)[:, None]
    for row, ids in enumerate(sequences):
        positions = np.arange(len(ids), dtype=np.int32)
        parts.append((ids, positions, row * size + positions, np.full_like(positions, row)))
    columns = [np.concatenate(x).astype(np.int32) for x in zip(*parts, strict=True)]
    wanted = np.arange(len(columns[0]), dtype=np.int32)
    batch = Batch(columns[0], columns[1], columns[2], columns[3], tables, wanted)
    made: np.ndarray[Any, Any] = copies.to_host(runner.run(batch))
    return made[: len(wanted), : runner.vocab_size].copy()


@pytest.mark.parametrize(
    ("kind", "arch"),
    [
        (DType.F32, "qwen3moe"), (DType.Q4_K, "qwen3moe"), (DType.MXFP4, "gpt-oss"),
        (DType.NVFP4, "qwen3moe"), (DType.IQ2_XS, "qwen3moe"),
    ],
)  # fmt: skip
@pytest.mark.tier("sim", fast=lambda case: case.kind in (DType.Q4_K, DType.MXFP4))
def test_needed_bytes_are_those_that_are_allocated(kind: DType, arch: str, tmp_path: Path) -> None:
    beside = {"blk.0.attn_q.scale": (1,)} if kind is DType.NVFP4 else {}
    path = write_experts(tmp_path / "experts.gguf", kind, arch=arch, shapes=beside)
    config = EngineConfig(
        context_length=64, kv_tokens=64, max_batch_tokens=70, max_batch_requests=3
    )
    with open_gguf(path) as file:
        model = read_architecture(file)
        needed = footprint.needed_bytes(file, model, config, 64)
        held = resident_bytes(load_runner(file, config))
    assert sum(needed.values()) == held + 64 * model.rope.dim // 2 * 3 * 8


@pytest.mark.tier("sim")
def test_gate_and_up_of_experts_may_lie_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_experts(tmp_path / "experts.gguf", DType.Q4_K)
    joined = new_runner(path)
    ids = [5, 77, 300, 12, 8]
    found = logits(joined, ids)
    mixture = joined.weights.layers[0].mixture
    assert mixture is not None
    assert mixture.experts.gate_up is not None
    assert mixture.experts.gate_up.shape == (NUM_EXPERTS, 2 * EXPERT_WIDTH, WIDTH)
    monkeypatch.setattr(weights_module, "may_join", lambda dtypes: False)
    apart = new_runner(path)
    assert (bits(logits(apart, ids)) == bits(found)).all()
    assert apart.weights.layers[0].mixture is not None
    assert apart.weights.layers[0].mixture.experts.gate_up is None


@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.tier("sim")
def test_a_gpu_gives_the_same_logits(num_tokens: int, tmp_path: Path) -> None:
    path = write_experts(tmp_path / "experts.gguf", DType.F32, num_layers=1)
    ids = [5, 77, 300, 12, 8, 400][:num_tokens]
    settings = {"kv_dtype": "f32", "max_batch_tokens": 8, "context_length": 64}
    expected = logits(new_runner(path, **settings), ids)
    found = logits(new_runner(path, device="sim:h200", **settings), ids)
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-5


def test_a_token_that_is_no_number_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    """Its router's scores are NaN; it still takes experts that exist, and its logits say so."""
    path = write_experts(tmp_path / "experts.gguf", DType.F32, num_layers=1, nan_row=300)
    runner = new_runner(path)
    alone = logits(runner, [5, 77])
    together = logits(runner, [300, 300, 300], [5, 77])
    assert np.isnan(together[:3]).all()
    assert (bits(together[3:]) == bits(alone)).all()


def test_a_token_reads_the_experts_that_it_takes(tmp_path: Path) -> None:
    path = write_experts(tmp_path / "experts.gguf", DType.Q8_0)
    with open_gguf(path) as file:
        model = bench.model_size(file)
        report = inspect.collect(file, None)
    stacks = 3 * 2 * NUM_EXPERTS * DType.Q8_0.num_bytes(EXPERT_WIDTH * WIDTH)
    assert model.num_bytes - model.bytes_per_token == stacks * (NUM_EXPERTS - NUM_USED) // 8
    experts = json.loads(json.dumps(report["architecture"]["experts"]))
    assert (experts["choice"]["num_experts"], experts["width"]) == (NUM_EXPERTS, EXPERT_WIDTH)
    assert report["problem"] is None
    assert "each token takes 3 of 8 experts" in inspect._text(report, [])
