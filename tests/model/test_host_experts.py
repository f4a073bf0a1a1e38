"""Experts that the host's CPU computes while a simulated GPU has the rest of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.expert_model import write_experts
from models.resident import tensors_of
from models.tiny_gguf import write_tiny
from test_mixtures import logits, new_runner

from hypocenter import EngineConfig
from hypocenter.base.errors import BadSetting, ModelTooLarge
from hypocenter.base.tensor import DType
from hypocenter.device import devices
from hypocenter.device.backend import Room
from hypocenter.device.sim.sim import open_sim
from hypocenter.engine.runner import load_runner
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.placement import require_gpu_room
from hypocenter.model.tensors import footprint

SIM = "sim:h200"
IDS = [5, 77, 300]
SETTINGS: dict[str, Any] = {
    "device": SIM, "kv_dtype": "f32", "max_batch_tokens": 8, "context_length": 64,
    "kv_tokens": 64,
}  # fmt: skip


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the simulated GPU replay graphs, as real ones do."""
    monkeypatch.setattr(devices, "_backends", dict(devices._backends))
    devices.use_backend(open_sim(SIM, graphs=True))


@pytest.mark.parametrize(
    ("arch", "kind", "given"),
    [
        ("qwen3moe", DType.F32, {"n_cpu_moe": 1}),
        ("gpt-oss", DType.F32, {"cpu_moe": True}),
        ("qwen3moe", DType.Q8_0, {"cpu_moe": True}),
    ],
)
@pytest.mark.tier("sim")
@pytest.mark.usefixtures("captures")
def test_logits_are_those_of_a_cpu(
    arch: str, kind: DType, given: dict[str, Any], tmp_path: Path
) -> None:
    """A GPU rounds what it multiplies with codes to f16, and the CPU to codes."""
    path = write_experts(tmp_path / "experts.gguf", kind, arch=arch)
    wanted = logits(new_runner(path, **{**SETTINGS, "device": "cpu"}), IDS)
    runner = new_runner(path, **SETTINGS, **given)
    bound = 1e-5 if kind is DType.F32 else 2e-2
    for num_tokens in (3, 1, 1, 1):  # the plan of one token is captured, and replayed
        found = logits(runner, IDS[:num_tokens])
        assert np.abs(found - wanted[:num_tokens]).max() < bound * np.abs(wanted).max()
    alone, together = logits(runner, IDS[:2]), logits(runner, IDS[2:], IDS[:2])
    np.testing.assert_array_equal(together[1:], alone)


@pytest.mark.usefixtures("captures")
def test_the_host_works_between_graphs(tmp_path: Path) -> None:
    path = write_experts(tmp_path / "experts.gguf", DType.F32)
    wanted = logits(new_runner(path, **{**SETTINGS, "device": "cpu"}), IDS[:1])
    runner = new_runner(path, **SETTINGS, cpu_moe=True)
    for _ in range(3):
        found = logits(runner, IDS[:1])
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    (plan,) = (plan for plan in runner._plans.values() if plan.is_captured)
    assert plan._graph is not None
    kinds = [getattr(part, "kernel", "graph") for _, part in plan._graph.parts]
    assert kinds == ["graph", "host_mixture", "graph", "host_mixture", "graph"]
    runner.release()
    assert not plan.is_captured


def test_memory_is_counted_where_it_is(tmp_path: Path) -> None:
    path = write_experts(tmp_path / "experts.gguf", DType.Q8_0)
    runner = new_runner(path, **SETTINGS, n_cpu_moe=1)
    first, second = runner.weights.layers
    assert first.mixture is not None
    assert second.mixture is not None
    of_first = list(tensors_of((first.mixture, first.ffn_norm)))
    assert {tensor.device for tensor in of_first} == {"cpu"}
    assert {tensor.device for tensor in tensors_of(second)} == {"sim:h200"}
    held = {id(one.allocation): one.allocation.num_bytes for one in of_first}
    config = EngineConfig(**{**SETTINGS, "n_cpu_moe": 1})
    with open_gguf(path) as file:
        arch = read_architecture(file)
        on_host = footprint.host_weight_bytes(file, arch, config)
        assert on_host == sum(held.values())
        whole = footprint.needed_bytes(file, arch, EngineConfig(**SETTINGS), 64)["weights"]
        part = footprint.needed_bytes(file, arch, config, 64)["weights"]
        assert whole - part == on_host
        of_layer = sum(x.num_bytes for name, x in file.tensors.items() if "blk.0.ffn_" in name)
        of_file = sum(x.num_bytes for x in file.tensors.values())
        usual = EngineConfig(**SETTINGS, gpu_memory_fraction=1.0)
        needed = footprint.needed_bytes(file, arch, usual, 64)
        of_steps = sum(needed.values()) - needed["weights"]
        num_bytes = of_file + of_steps - of_layer // 2
        room = Room(num_bytes, num_bytes)
        with pytest.raises(ModelTooLarge):
            require_gpu_room("cuda", file, arch, usual, room)
        require_gpu_room("cuda", file, arch, replace(usual, n_cpu_moe=1), room)


def test_a_host_without_room_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_experts(tmp_path / "experts.gguf", DType.Q8_0)
    monkeypatch.setattr(footprint, "host_room", lambda: Room(1 << 16, 1 << 30))
    with pytest.raises(ModelTooLarge, match="experts"):
        new_runner(path, **SETTINGS, cpu_moe=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cpu"}, "n_cpu_moe is 1, but a CPU has all of the model; leave it out"),
        ({"tensor_parallel": 2}, "use one GPU"),
        ({"lora": ("a.gguf",)}, "leave out lora"),
        ({"launch_mode": "traced"}, "launches are not traced there; use off"),
        ({"n_cpu_moe": -1}, "n_cpu_moe is -1"),
        ({"cpu_moe": True}, "n_cpu_moe is 1, but cpu_moe is given as well"),
    ],
)
def test_what_does_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        EngineConfig(**{"device": "cuda", "n_cpu_moe": 1, **given})


def test_models_without_experts_by_themselves_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    with open_gguf(path) as file:
        with pytest.raises(BadSetting, match="cpu_moe is True, but a llama model has no experts"):
            load_runner(file, EngineConfig(device=SIM, cpu_moe=True))
        with pytest.raises(BadSetting, match="n_cpu_moe is 3, but a llama model has no experts"):
            load_runner(file, EngineConfig(device=SIM, n_cpu_moe=3))
