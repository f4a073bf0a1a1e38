"""The door for launches: modes are rebound, checks run when asked for and not otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from ops.kernel_launch import counts, rows_tensor, tensor

from hypocenter.base.errors import LaunchRejected, UsageError
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, memory
from hypocenter.device.cpu.kernel_forms import kernel_at_hand
from hypocenter.device.launch import Launch, prepare, run
from hypocenter.device.plan import MIN_PARALLEL_WORK, PlanBuilder
from hypocenter.kernels.attention import rope, rope_cpu
from hypocenter.kernels.rowwise import activation, activation_gpu, embedding


def _rope(positions: list[int]) -> tuple[Launch, Tensor]:
    plan, x = PlanBuilder(3), rows_tensor("x", np.ones((3, 64), np.float32))
    cos, sin = (tensor(name, np.zeros((8, 32), np.float32)) for name in ("cos", "sin"))
    rope.rotate(
        plan, x, tensor("positions", np.array(positions, np.int32)), (cos, sin), counts(3),
        num_heads=1, head_dim=64, style="neox",
    )  # fmt: skip
    return plan.launches[0], x


def test_off_runs_the_kernel_itself() -> None:
    launch, _ = _rope([0, 1, 2])
    assert launch.run._form is launch.function  # type: ignore[attr-defined]
    launch.set_mode("checked")
    launch.set_mode("off")
    assert launch.run._form is launch.function  # type: ignore[attr-defined]


def test_checked_names_the_entry_and_launches_nothing() -> None:
    launch, x = _rope([0, 8, 2])
    launch.set_mode("checked")
    with pytest.raises(LaunchRejected, match=r"rope: positions\[1\] = 8, but the table has 8"):
        run([launch])
    assert (copies.to_host(x) == 1).all()


def test_checked_lets_right_arguments_through() -> None:
    launch, x = _rope([0, 7, 2])
    launch.set_mode("checked")
    run([launch])
    assert (copies.to_host(x) == 0).all()


def test_a_tensor_freed_after_the_plan_was_made() -> None:
    launch, _ = _rope([0, 1, 2])
    launch.set_mode("checked")
    launch.tensors["cos"].allocation.freed_at = "engine.py:7"
    with pytest.raises(LaunchRejected, match=r"cos was freed at engine\.py:7"):
        run([launch])


def test_an_unknown_mode_is_refused() -> None:
    launch, _ = _rope([0, 1, 2])
    with pytest.raises(UsageError, match="launch mode is 'fast', but must be one of off, checked"):
        launch.set_mode("fast")


@pytest.mark.parametrize("num_rows", [1, MIN_PARALLEL_WORK])
def test_work_decides_on_threads(num_rows: int) -> None:
    plan = PlanBuilder(num_rows)
    x, out = (rows_tensor(name, np.zeros((2, 64), np.float32)) for name in ("x", "out"))
    embedding.gather(plan, x, tensor("rows", np.zeros(2, np.int32)), out, counts(0, 2))
    assert plan.launches[0].function.is_shared == (num_rows > 1)


def test_a_gpu_launch_beyond_the_gpus_limits_is_refused_when_the_plan_is_made() -> None:
    device = devices.open_device("sim:h200")
    plan = PlanBuilder(2, device)
    x, counts_ = (
        memory.allocate(name, "test", kind, shape, device=device)
        for name, kind, shape in (("x", DType.F32, (2, 64)), ("counts", DType.I32, (2,)))
    )
    facts = {"x": x, "counts": counts_, "count": 0, "factor": 1.0}
    for grid, num_warps, message in (
        ((2, 70000), 4, "70000"),
        ((2, 1), 64, "threads"),
        ((0, 1), 4, "0"),
    ):
        with pytest.raises(LaunchRejected, match=message):
            plan.add_gpu(
                activation_gpu.scale_kernel, x, counts_, 0, 1.0, 64, grid=grid,
                num_warps=num_warps, contract=activation.SCALE, facts=facts, BLOCK=64,
            )  # fmt: skip
    assert not plan.launches


def test_a_number_that_its_contract_was_not_checked_with_is_refused() -> None:
    """A contract looks at facts alone: what is passed beside them must be the same."""
    launch, _ = _rope([0, 1, 2])
    args = tuple(32 if arg == 64 else arg for arg in launch.given)
    assert args != launch.given
    with pytest.raises(
        LaunchRejected, match="head_dim is 32, but its contract was checked with 64"
    ):
        prepare(kernel_at_hand(rope_cpu.rope), args, launch.contract, launch.facts, parallel=False)
    prepare(
        kernel_at_hand(rope_cpu.rope), launch.given, launch.contract, launch.facts, parallel=False
    )
