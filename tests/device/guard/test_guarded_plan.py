"""A plan in guarded mode: bit-identical when right; named, and survived, when wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import bits, counts, rows_tensor, tensor
from specimens import guard_kernels
from specimens.project_kernels import first_specimens, kernels

from hypocenter.base.errors import AccessRefused, OutOfMemory, UsageError
from hypocenter.base.tensor import Tensor
from hypocenter.cli.answer import _explain
from hypocenter.device import copies, devices, memory
from hypocenter.device.guard.guard import guard
from hypocenter.device.guard.launches import GuardedLaunches
from hypocenter.device.launch import prepare_gpu
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.device.sim.sim import open_sim
from hypocenter.kernels.attention import rope
from hypocenter.record.guard_faults import AccessFault


@pytest.fixture(autouse=True)
def sim(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kernel_launch, "device", devices.open_device("sim:h200"))
    return "sim:h200"


def _plan(positions: list[int], x: np.ndarray) -> tuple[Plan, Tensor]:
    builder = PlanBuilder(3, "sim:h200")
    turned = rows_tensor("x", x)
    cos, sin = (tensor(name, np.full((8, 32), 0.5, np.float32)) for name in ("cos", "sin"))
    rope.rotate(
        builder, turned, tensor("positions", np.array(positions, np.int32)), (cos, sin),
        counts(3), num_heads=2, head_dim=64, style="neox",
    )  # fmt: skip
    return Plan(builder, turned), turned


def test_right_arguments_give_the_same_bits() -> None:
    x = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)
    (plain, expected), (guarded, got) = _plan([0, 7, 3], x), _plan([0, 7, 3], x)
    plain.run()
    guarded.set_mode("guarded")
    guarded.run()
    assert (bits(copies.to_host(got)) == bits(copies.to_host(expected))).all()


def test_a_position_beyond_the_table_is_named_and_the_device_survives() -> None:
    x = np.ones((3, 128), np.float32)
    plan, _ = _plan([0, 8, 3], x)
    plan.set_mode("guarded")
    with pytest.raises(AccessRefused) as caught:
        plan.run()
    fault = caught.value.faults[0]
    assert isinstance(fault, AccessFault)
    assert fault.program is not None
    assert (fault.kernel, fault.parameter) == ("rope_kernel", "cos_ptr")
    assert fault.byte_offset // 4 // 32 == 8
    assert fault.program[0] == 1
    assert fault.site.calls[0].file.endswith("rope_gpu.py")
    assert "tl.load(cos_ptr + position * half + pair" in fault.site.expression
    plan.set_mode("off")
    right, out = _plan([0, 1, 2], x)
    right.set_mode("guarded")
    right.run()
    assert np.isfinite(copies.to_host(out)).all()


class NothingDemanded:
    """A contract that every launch keeps."""

    def check(self, **arguments: Any) -> dict[str, Any]:
        return {}

    def needs_int64(self, **arguments: Any) -> bool:
        return False

    def check_values(self, read: Callable[[Tensor], Any], **arguments: Any) -> None: ...


@pytest.mark.parametrize(
    ("width", "byte"), [(5, None), (6, 20), (8, 20)], ids=["right", "one more", "whole row"]
)
def test_what_lies_between_the_rows_of_a_view_is_not_its_own(width: int, byte: int | None) -> None:
    """Rows of 5 elements, each 8 from the one before."""
    held = np.arange(32, dtype=np.float32).reshape(4, 8)
    wholes = tensor("x", held), tensor("y", np.zeros_like(held))
    views = [
        Tensor(w.name, w.owner, w.dtype, (4, 5), (8, 1), 0, w.allocation, w.data) for w in wholes
    ]
    options = {"grid": (4,), "num_warps": 1, "BLOCK": 8}
    args = (*views, 8, width)
    launch = prepare_gpu(
        guard_kernels.rows_kernel, args, options, NothingDemanded(), {}, "sim:h200"
    )
    guarded = GuardedLaunches("sim:h200", [launch])
    guarded.begin()
    launch.run()
    if byte is None:
        guarded.settle()
        assert (copies.to_host(wholes[1])[:, :5] == held[:, :5]).all()
    else:
        with pytest.raises(AccessRefused) as caught:
            guarded.settle()
        faults = [fault for fault in caught.value.faults if isinstance(fault, AccessFault)]
        assert sorted(fault.parameter for fault in faults) == ["x_ptr", "y_ptr"]
        assert all(fault.byte_offset % 32 in range(byte, 32, 4) for fault in faults)
    assert (copies.to_host(wholes[1])[:, 5:] == 0).all()


def test_what_it_refused_is_explained_with_the_index_at_fault(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As `hypo run --launch-mode guarded` does before it ends."""
    plan, _ = _plan([0, 8, 3], np.ones((3, 128), np.float32))
    plan.set_mode("guarded")
    with pytest.raises(AccessRefused) as caught:
        plan.run()
    capfd.readouterr()
    _explain(caught.value)
    told = capfd.readouterr().err
    assert "launch 1 of the step's 1" in told
    assert "cos_ptr is cos of" in told
    assert "replay of program (1, " in told
    assert "element 256 (byte 1024), past the last of shape (8, 32)" in told
    assert "position=8" in told


def _two_turns(second: int) -> tuple[Plan, Tensor]:
    """Two launches; the positions of the first lie in its table, that of the other may not."""
    builder = PlanBuilder(1, kernel_launch.device)
    x = rows_tensor("x", np.ones((1, 128), np.float32))
    cos, sin = (tensor(name, np.full((8, 32), 0.5, np.float32)) for name in ("cos", "sin"))
    positions = [tensor("positions", np.array([at], np.int32)) for at in (3, second)]
    for one in positions:
        rope.rotate(builder, x, one, (cos, sin), counts(1), num_heads=2, head_dim=64, style="neox")
    return Plan(builder, x), positions[1]


@pytest.mark.parametrize("graphs", [False, True])
def test_each_run_tells_its_own_faults_by_launch(graphs: bool) -> None:
    devices.use_backend(open_sim("sim:h200", graphs=graphs))
    plan, position = _two_turns(9)
    plan.set_mode("guarded")
    for run, at in enumerate((9, 9, 2, 9, 2, 2, 8)):
        copies.to_device(position, np.array([at], np.int32))
        assert plan.is_captured == (graphs and run >= 2)
        if at < 8:
            plan.run()
            continue
        with pytest.raises(AccessRefused) as caught:
            plan.run()
        faults = [fault for fault in caught.value.faults if isinstance(fault, AccessFault)]
        assert {fault.launch for fault in faults} == {1}
        assert {fault.parameter for fault in faults} == {"cos_ptr", "sin_ptr"}
        assert {fault.byte_offset // 128 for fault in faults} == {at}


def test_what_an_interrupted_run_left_is_not_told_of_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan, position = _two_turns(9)
    plan.set_mode("guarded")
    last = plan.launches[1]
    run = last.run

    def interrupted() -> None:
        run()
        raise KeyboardInterrupt

    last.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        plan.run()
    last.run = run
    copies.to_device(position, np.array([1], np.int32))
    with caplog.at_level(logging.WARNING):
        plan.run()
    assert "a run that did not end had a fault: rope_kernel: load" in caplog.text


def test_a_mode_that_cannot_be_had_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = _two_turns(9)
    plan.set_mode("guarded")

    def full(*args: object, **keywords: object) -> None:
        raise OutOfMemory("sim:h200", 8, 0, 0)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "allocate", full)
        with pytest.raises(OutOfMemory):
            plan.set_mode("guarded")
    with pytest.raises(AccessRefused):
        plan.run()
    with pytest.raises(UsageError, match="guarded is a mode of plans; set it on the plan"):
        plan.launches[0].set_mode("guarded")


def test_slots_are_given_back_with_the_mode() -> None:
    devices.use_backend(sim := open_sim("sim:h200", graphs=True))
    plan, _ = _two_turns(2)
    before = sim.allocator.used_bytes
    for _ in range(3):
        plan.set_mode("guarded")
        assert sim.allocator.used_bytes > before
        for _ in range(3):
            plan.run()
        plan.set_mode("off")
        assert sim.allocator.used_bytes == before


def test_a_cpu_kernel_has_no_guarded_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "device", "cpu")
    builder = PlanBuilder(1)
    x = rows_tensor("x", np.ones((1, 64), np.float32))
    cos, sin = (tensor(name, np.zeros((8, 32), np.float32)) for name in ("cos", "sin"))
    rope.rotate(
        builder, x, tensor("positions", np.zeros(1, np.int32)), (cos, sin), counts(1),
        num_heads=1, head_dim=64, style="neox",
    )  # fmt: skip
    plan = Plan(builder, x)
    with pytest.raises(UsageError, match="rope runs on the CPU"):
        plan.set_mode("guarded")
    plan.run()  # as before


@pytest.mark.parametrize("name", sorted(kernels()))
def test_every_kernel_is_guardable(name: str) -> None:
    specimen = first_specimens()[name]
    pointers = [p for p, kind in specimen.signature.items() if kind.startswith("*")]
    guarded = guard(specimen.jit, pointers)
    assert {p for site in guarded.sites for p in site.parameters} == set(pointers)
