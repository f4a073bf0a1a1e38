"""A plan that runs again becomes a graph: same results, fewer words, and memory that stays."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import counts, rows_tensor, tensor
from pretended.fake_runner import FakeTokenizer
from pretended.fake_torch import FakeJit, FakeTorch
from repository import DEMO

from hypocenter.base.errors import UsageError
from hypocenter.base.results import Completion, Route, Timings
from hypocenter.base.tensor import DType, Tensor
from hypocenter.cli.answer import closing_line
from hypocenter.device import copies, devices, limits, memory
from hypocenter.device.gpu.torch_gpu import TorchGpu
from hypocenter.device.launch import BoundArguments, Launch, TritonCall
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.device.sim.sim import SimGpu, open_sim
from hypocenter.engine.engine import Engine
from hypocenter.engine.runner import load_runner
from hypocenter.kernels.attention import rope
from hypocenter.kernels.sampling.draw import TokenChoice
from hypocenter.kernels.sampling.sampling import sample
from hypocenter.kernels.sampling.sampling_plan import DeviceSampler
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.config import EngineConfig, SamplingParams

SIM = "sim:rx7900xtx"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimGpu:
    monkeypatch.setattr(devices, "_backends", dict(devices._backends))
    monkeypatch.setattr(kernel_launch, "device", SIM)
    made = open_sim(SIM, graphs=True)
    devices.use_backend(made)
    return made


def _plan(device: str = SIM) -> tuple[Plan, Tensor, Tensor]:
    """A plan that turns x by the angles at `positions`, which is all that a step changes."""
    builder, x = PlanBuilder(1, device), rows_tensor("x", np.ones((1, 64), np.float32))
    cos, sin = np.full((8, 32), 0.0, np.float32), np.arange(8 * 32, dtype=np.float32) / 32
    positions = tensor("positions", np.array([1], np.int32))
    table = tensor("cos", cos), tensor("sin", sin.reshape(8, 32))
    rope.rotate(builder, x, positions, table, counts(1), num_heads=1, head_dim=64, style="neox")
    return Plan(builder, x), x, positions


def _turned(plan: Plan, x: Tensor, positions: Tensor, position: int) -> np.ndarray:
    copies.to_device(x, np.ones((1, 64), np.float32))
    copies.to_device(positions, np.array([position], np.int32))
    plan.run()
    return copies.to_host(x)


def test_the_second_run_captures_and_each_replay_reads_its_inputs_anew(gpu: SimGpu) -> None:
    plan, x, positions = _plan()
    seen = []
    for position in (1, 2, 7, 3):
        seen.append(plan.is_captured)
        found = _turned(plan, x, positions, position)
        half = np.arange(32, dtype=np.float32) / 32 + position
        assert (found == np.concatenate([-half, half])).all()
    assert seen == [False, False, True, True]


def test_what_a_graph_uses_is_not_freed_and_is_named(gpu: SimGpu) -> None:
    plan, x, positions = _plan()
    for _ in range(2):
        _turned(plan, x, positions, 1)
    says = rf"{SIM}: free of positions \(test\) \(512 bytes at 0x.*, which is used by 1 captured"
    with pytest.raises(UsageError, match=says):
        memory.free(positions)
    assert _turned(plan, x, positions, 2)[0, 0] == -2  # it is still there
    plan.release()
    assert not plan.is_captured
    memory.free(positions)


def test_another_mode_gives_the_graph_up(gpu: SimGpu) -> None:
    plan, x, positions = _plan()
    for mode in ("checked", "guarded"):
        plan.set_mode("off")
        for _ in range(2):
            _turned(plan, x, positions, 1)
        assert plan.is_captured
        plan.set_mode(mode)
        seen = []
        for _ in range(4):
            seen.append(plan.is_captured)
            assert _turned(plan, x, positions, 4)[0, 0] == -4
        assert seen == [False, False, mode == "guarded", mode == "guarded"]


@pytest.mark.parametrize("options", [{}, {"graphs": True, "blocking": True}])
def test_a_sim_captures_only_when_asked_to_and_not_with_a_wait_after_each_launch(
    gpu: SimGpu, options: dict[str, bool]
) -> None:
    devices.use_backend(open_sim(SIM, **options))
    plan, x, positions = _plan()
    for _ in range(3):
        _turned(plan, x, positions, 1)
    assert not plan.is_captured


@pytest.mark.parametrize("call", ["allocate", "copy_in", "copy_out", "synchronise", "free"])
def test_a_step_that_does_more_than_launch_is_not_captured(gpu: SimGpu, call: str) -> None:
    plan, x, _ = _plan()
    calls: dict[str, Any] = {
        "allocate": lambda: gpu.allocate(4),
        "copy_in": lambda: gpu.copy_in(x.address, np.zeros(4, np.uint8)),
        "copy_out": lambda: gpu.copy_out(x.address, 4),
        "synchronise": gpu.synchronise,
        "free": lambda: gpu.free(x.address),
    }
    runs: list[Any] = []

    def step() -> None:
        plan.launches[0].run()
        if runs:
            calls[call]()
        runs.append(True)

    with pytest.raises(UsageError, match=f"{call} while a graph is captured"):
        gpu.capture(step)
    with pytest.raises(UsageError, match="nothing was launched while a graph"):
        gpu.capture(lambda: None)
    gpu.capture(plan.run)()  # and the device still works


def test_a_plan_that_somebody_captures_does_not_capture_itself(gpu: SimGpu) -> None:
    plan, x, positions = _plan()
    graph = gpu.capture(plan.run)
    assert graph.num_launches == 1
    assert not plan.is_captured
    copies.to_device(x, np.ones((1, 64), np.float32))
    copies.to_device(positions, np.array([5], np.int32))
    graph()
    assert copies.to_host(x)[0, 0] == -5


def test_a_graph_keeps_the_addresses_of_then(gpu: SimGpu) -> None:
    """What the lab plants: memory that is freed in spite of all, and has a new owner."""
    plan, x, positions = _plan()
    for _ in range(2):
        _turned(plan, x, positions, 1)
    gpu.synchronise()
    gpu.allocator.free(x.address - gpu._memory.base)  # past the door that would refuse it
    other = tensor("other", np.ones((1, 64), np.float32))
    assert other.address == x.address
    plan.run()
    assert copies.to_host(other)[0, 0] == -1


def test_the_log_tells_each_launch_and_then_each_replay(
    gpu: SimGpu, caplog: pytest.LogCaptureFixture
) -> None:
    plan, x, positions = _plan()
    with caplog.at_level(logging.DEBUG, "hypocenter.sim"):
        for _ in range(4):
            _turned(plan, x, positions, 1)
    line = "Launch: kernel=rope_kernel, grid=(1,1,1), block=(128,1,1)"
    assert caplog.messages == [line, line, *["Graph: replay of 1 launches"] * 2]


@pytest.mark.tier("sim")
def test_a_sampler_that_outgrows_its_buffers_gives_its_graphs_up_first(gpu: SimGpu) -> None:
    sampler = DeviceSampler(SIM, 4097, 1)
    logits = memory.allocate("logits", "test", DType.F32, (1, 4097), device=SIM)
    params = SamplingParams(temperature=1.0, top_k=2, repeat_penalty=1.5)
    kept: list[Any] = []  # as somebody who looks at a plan may
    for num_ids in (9, 9, 9, 300, 300):
        ids = np.arange(num_ids, dtype=np.int32)
        sample(logits, [TokenChoice(params, 9, ids, np.ones(num_ids, np.int32))], sampler)
        kept += sampler._plans.values()
    assert sampler.num_graphs == 1
    with pytest.raises(UsageError, match=r"free of context_ids \(sampler\)"):
        memory.free(sampler._context["context_ids"])
    sampler.free()
    memory.free(logits)


def _generated(model: Path, device: str) -> tuple[list[list[int]], Any, Engine]:
    config = EngineConfig(device=device, context_length=64, max_batch_tokens=8, num_threads=1)
    with open_gguf(model) as file:
        engine = Engine(load_runner(file, config), cast(Any, FakeTokenizer()))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    requests = [engine.request(prompt, params) for prompt in ([1, 2, 3], [4, 5])]
    engine.complete(requests)
    return [list(request.output_ids) for request in requests], engine.route(), engine


def test_an_engine_on_graphs_generates_the_same_and_says_so(gpu: SimGpu, tmp_path: Path) -> None:
    # Here, for a machine with a GPU may lack the package that writes models.
    from models.tiny_gguf import VOCAB_SIZE, WIDTH, write_tiny

    tables = {
        f"{name}.weight": np.random.default_rng(seed).normal(0, 1, (VOCAB_SIZE, WIDTH))
        for name, seed in (("output", 7), ("token_embd", 57))
    }
    model = write_tiny(tmp_path / "tiny.gguf", tensors=tables)
    expected, route, _ = _generated(model, "cpu")
    assert route.num_graphs == 0
    found, route, engine = _generated(model, SIM)
    assert found == expected
    assert len({*found[0]}) > 2  # or else equality says little
    assert route.num_graphs == 2  # a decode step, and the choice of its tokens
    inputs, pages = engine.runner._inputs, engine.runner._decoder.pages
    weight = engine.runner.weights.layers[0].down
    for held, name in (
        (inputs.positions, "inputs (step)"),
        (pages.keys[0], "k_cache.0 (kv_cache)"),
        (weight, "blk.0.ffn_down.weight (model)"),
    ):
        with pytest.raises(UsageError) as caught:
            memory.free(held)
        assert f"free of {name} (" in str(caught.value)


def test_the_closing_line_of_a_run_counts_graphs() -> None:
    def line(num_graphs: int) -> str:
        route = Route("cuda", "cuda", "Q8_0", "I8", "f16", 1, (), num_graphs)
        done = Completion("", (), (), "length", 0, Timings(1, 1.0, 2, 1.0), route)
        return closing_line(done)

    assert [line(n).rpartition("; ")[2] for n in (0, 1, 2)] == [
        "length", "1 graph captured", "2 graphs captured",
    ]  # fmt: skip


# Through torch, imitated and real.


def test_a_capture_in_debug_counts_and_tells_each_launch_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_backends", dict(devices._backends))
    fake = FakeTorch()
    device = TorchGpu("cuda", fake, 0, limits.named_gpu("h200"), environ={})
    devices.use_backend(device)
    x, y = (memory.allocate(n, "test", DType.F32, (1,), device="cuda") for n in ("x", "y"))
    copies.to_device(y, np.ones(1, np.float32))
    jit = FakeJit(fake.cuda, lambda x, y: x.add_(y))
    builder = PlanBuilder(1, "cuda")
    with caplog.at_level(logging.DEBUG, "hypocenter.gpu"):
        launcher = device.launcher(jit)
        builder.launches.append(
            Launch(
                "add",
                launcher,
                BoundArguments((x, y), (x.data, y.data), (4, 4)),
                cast(Any, None),
                {},
                triton=TritonCall(options={"grid": (1,)}),
            )
        )
        plan = Plan(builder, x)
        for _ in range(4):
            plan.run()
    assert plan.is_captured
    assert copies.to_host(x)[0] == 4
    line = "Launch: kernel=add_kernel, grid=(1,1,1), block=(256,1,1), shared=4096 bytes"
    assert caplog.messages == [
        line, line, "Graph: launches=1, buffers=2", *["Graph: replay of 1 launches"] * 2,
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"cuda: free of y \(test\) \(4 bytes at .* by 1 captured"):
        memory.free(y)
    plan.release()
    memory.free(y)


def _vendor() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return "hip" if torch.version.hip else "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(_vendor() is None, reason="no GPU here; scripts/gpu runs this on one")
def test_on_a_gpu_a_plan_is_captured_replayed_and_held(monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.open_device(cast(str, _vendor()))
    monkeypatch.setattr(kernel_launch, "device", device)
    plan, x, positions = _plan(device)
    for position in (1, 2, 7, 3):
        found = _turned(plan, x, positions, position)
        assert (found[0, 0], found[0, 32]) == (-position, position)
    assert plan.is_captured
    with pytest.raises(UsageError, match=r"free of positions \(test\) .* by 1 captured graph"):
        memory.free(positions)
    plan.set_mode("guarded")
    for position in (4, 5, 6):
        assert _turned(plan, x, positions, position)[0, 0] == -position
    assert plan.is_captured
    plan.set_mode("off")
    memory.free(positions)


@pytest.mark.gpu
@pytest.mark.skipif(_vendor() is None, reason="no GPU here; scripts/gpu runs this on one")
def test_on_a_gpu_an_engine_generates_the_same_with_and_without_graphs() -> None:
    vendor = cast(str, _vendor())
    device = devices.open_device(vendor)
    found, route, _ = _generated(DEMO, vendor)
    assert route.num_graphs == 2
    cast(Any, devices.backend_of(device)).blocking = "a test"
    try:
        without, route, _ = _generated(DEMO, vendor)
    finally:
        cast(Any, devices.backend_of(device)).blocking = None
    assert route.num_graphs == 0
    assert found == without
