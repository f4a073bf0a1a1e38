"""benchmarks/vs_llama_cpp.py on mixtures of experts: their files, what ours holds, their goals."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from repository import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of `benchmarks/` by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def made(module: Any, name: str, folder: Path) -> Path:
    """A toy's file of random blocks."""
    shape = module("vs_models").SHAPES[name]
    path: Path = module("vs_blocks").made_of_blocks(shape, shape.usual_type, folder)
    return path


def test_what_is_cut_has_another_name(module: Any) -> None:
    shape = module("vs_models").SHAPES["qwen3-30b-a3b"]
    few = shape.cut(12)
    assert (few.name, few.num_layers) == ("qwen3-30b-a3b-12-layers", 12)
    assert shape.cut(None) == shape.cut(48) == shape.cut(99) == shape
    # Eight of 128 experts, of three matrices of 768 x 2048, in every layer that was left out.
    of_layer = (shape.num_weights_used - few.num_weights_used) / 36
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512
    assert of_layer == attention + 128 * 2048 + 8 * 3 * 768 * 2048 + 2 * 2048 + 2 * 128


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("toy-qwen3moe", ("Q4_K", "Q4_K", "Q6_K")),
        ("toy-gpt-oss", ("Q8_0", "MXFP4", "MXFP4")),
    ],
)
def test_tensors_have_the_types_that_a_quantiser_gives_them(
    module: Any, tmp_path: Path, name: str, types: tuple[str, ...]
) -> None:
    path = made(module, name, tmp_path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    matrices = ("attn_q", "ffn_gate_exps", "ffn_down_exps")
    found = [tensors[f"blk.1.{matrix}.weight"].tensor_type.name for matrix in matrices]
    assert tuple(found) == types
    assert tensors["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"
    gate = tensors["blk.1.ffn_gate_exps.weight"]
    assert gate.shape.tolist() == [256, 256, 8]
    values = gguf.quants.dequantize(gate.data, gate.tensor_type)
    # Scales of MXFP4 are powers of two.
    assert np.std(values) == pytest.approx(256**-0.5, rel=0.5)


def test_a_shape_has_a_type_of_its_own_where_none_is_asked_for(module: Any) -> None:
    options = module("vs_llama_cpp")._options
    peer = ["--peer", sys.executable]
    told = options([*peer, "--shape", "gpt-oss-20b", "--layers", "8"])
    assert (told.shape.name, told.types) == ("gpt-oss-20b-8-layers", ["MXFP4_MOE"])
    assert options([*peer, "--shape", "qwen3-30b-a3b"]).types == ["Q4_K_M"]
    assert options(peer).types == ["F16", "Q8_0", "Q4_0", "Q4_K_M"]


def test_experts_have_goals_of_their_own(module: Any) -> None:
    runs = [
        {"tokens_per_second": 12.0, "bandwidth_before": 1e9, "bandwidth_after": 1e9, "number": 0}
    ]
    tests = {test: {"ours": runs, "peer": runs} for test in ("tg32", "pp512")}
    row = {
        "type": "MXFP4_MOE", "has_experts": True, "tests": tests, "memory": {}, "divergence": {},
        "bytes_per_token": 1e6,
    }  # fmt: skip
    found = {one.what: one.limit for one in module("vs_report").targets(row)}
    assert found == {"tg32: x llama.cpp": 1.2, "pp512: x llama.cpp": 1.5}
    speeds = {"ours": {"tg128": [3.0], "pp512": [1.0]}, "peer": {"tg128": [2.0], "pp512": [2.0]}}
    goals = module("vs_gpu").goals({**row, "speeds": speeds})
    assert {goal.what: (goal.limit, goal.is_met) for goal in goals} == {
        "pp512: x llama.cpp": (1.0, False), "tg128: x llama.cpp": (1.2, True),
    }  # fmt: skip
