"""Arguments of ops by their names: what binds, and what is refused when a plan is made."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import counts, rows_tensor, vector_tensor

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import DType
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Scalar, live_counts
from hypocenter.device import devices
from hypocenter.device.cpu.lang import cpu_kernel, prange
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.rowwise import norm

SIM = "sim:h200"
CONTRACT = Contract(
    "shift",
    Arg("x", (DType.F32,), "num_rows, width", "both"),
    Arg("bias", (DType.F32,), "width", optional=True),
    live_counts("num_rows", 0),
    Scalar("factor"),
)


@cpu_kernel
def shift(x: Any, bias: Any, counts: Any, factor: float, doubles: bool) -> None:
    for row in prange(counts[0]):
        x[row, 0] = factor


def _op(**changes: Any) -> Op:
    given: dict[str, Any] = {"contract": CONTRACT, "cpu": shift}
    return Op(**(given | changes))


def _arguments(**changes: Any) -> dict[str, Any]:
    x = rows_tensor("x", np.ones((2, 64), np.float32))
    given = {"x": x, "bias": None, "counts": counts(2), "factor": 0.1, "doubles": True}
    return {name: value for name, value in (given | changes).items() if value is not Ellipsis}


def test_a_cpu_kernel_takes_its_arguments_by_their_names_whatever_their_order() -> None:
    plan = PlanBuilder(2)
    arguments = _arguments()
    plan.add(_op(), **dict(reversed(arguments.items())))
    (launch,) = plan.launches
    x, bias, count, factor, doubles = launch.given
    assert x is arguments["x"]
    assert count is arguments["counts"]
    assert doubles is True
    assert isinstance(factor, np.float32)
    assert factor == np.float32(0.1)
    assert bias.shape == (0,)
    assert bias.dtype == np.float32
    assert list(launch.facts) == ["factor", "counts", "bias", "x"]  # what the contract names
    assert launch.facts["bias"] is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"factor": ...}, "its contract names 'factor', but it was given x, bias, counts, doubles"),
        ({"doubles": ...}, "nothing was given for 'doubles', only x, bias, counts, factor"),
        ({"treble": 1}, "nothing takes the argument 'treble', only bias, counts, doubles, factor"),
        ({"doubles": None}, "'doubles' is None, which its contract does not allow"),
    ],
)
def test_a_name_that_does_not_fit_is_refused_in_one_line(
    changes: dict[str, Any], said: str
) -> None:
    plan = PlanBuilder(2)
    with pytest.raises(LaunchRejected) as refused:
        plan.add(_op(), **_arguments(**changes))
    assert str(refused.value).startswith(f"shift: {said}")
    assert "\n" not in str(refused.value)
    assert plan.launches == []


def test_a_renamed_parameter_of_a_kernel_is_refused_when_the_plan_is_made() -> None:
    @cpu_kernel
    def renamed(x: Any, offset: Any, counts: Any, factor: float, doubles: bool) -> None:
        for row in prange(counts[0]):
            x[row, 0] = factor

    with pytest.raises(
        LaunchRejected, match=r"shift: nothing was given for 'offset', only x, bias"
    ):
        PlanBuilder(2).add(_op(cpu=renamed), **_arguments())


def test_a_tensor_that_no_contract_has_seen_reaches_no_kernel() -> None:
    stray = vector_tensor("stray", np.zeros(3, np.float32))
    with pytest.raises(LaunchRejected, match="'doubles' is a tensor that its contract does not"):
        PlanBuilder(2).add(_op(), **_arguments(doubles=stray))


def test_a_function_of_work_asks_for_arguments_by_their_names() -> None:
    plan = PlanBuilder(1 << 14)
    plan.add(_op(work_per_row=lambda x: x.shape[1]), **_arguments())
    assert plan.launches[0].function.is_shared  # many threads
    with pytest.raises(LaunchRejected, match="shift: nothing was given for 'width', only x"):
        plan.add(_op(work_per_row=lambda width: 2 * width), **_arguments())


def test_an_op_without_a_kernel_for_the_device_is_refused() -> None:
    with pytest.raises(LaunchRejected, match="shift: there is no kernel of it for cpu"):
        PlanBuilder(2).add(_op(cpu=None), **_arguments())


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("triton")
    name = devices.open_device(SIM)
    monkeypatch.setattr(kernel_launch, "device", name)
    return name


def _norm_arguments() -> dict[str, Any]:
    x = rows_tensor("x", np.ones((2, 128), np.float32))
    weight = vector_tensor("weight", np.ones(64, np.float32))
    return {
        "x": x, "weight": weight, "counts": counts(2), "count": 0, "width": 64, "eps": 1e-6,
        "out": x, "num_heads": 2, "accumulate": False,
    }  # fmt: skip


def _norm(plan: PlanBuilder) -> None:
    plan.add(norm.RMS_NORM, **_norm_arguments())


def test_a_gpu_kernel_takes_pointers_strides_and_constants_by_their_names(sim: str) -> None:
    plan = PlanBuilder(2, sim)
    _norm(plan)
    (launch,) = plan.launches
    given = dict(zip(launch.jit.arg_names, launch.given, strict=False))
    assert given["weight_ptr"] is launch.facts["weight"]
    assert given["out_ptr"].name == "x"
    assert (given["x_stride"], given["count"], given["width"]) == (128, 0, 64)
    assert launch.options["ACCUMULATE"] is False
    assert launch.options["grid"] == (2, 2)
    assert "norm_gpu.py:" in launch.site  # where the launch is told its grid


@pytest.mark.parametrize(
    ("old", "new"),
    [("weight_ptr", "factors_ptr"), ("BLOCK", "COLUMNS"), ("x_stride", "x_pitch"), ("eps", "room")],
)
def test_a_renamed_parameter_of_a_gpu_kernel_is_refused_when_the_plan_is_made(
    sim: str, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    from hypocenter.kernels.rowwise import norm_gpu

    kernel = norm_gpu.rms_norm_kernel
    names = [new if name == old else name for name in kernel.arg_names]
    monkeypatch.setattr(kernel, "arg_names", names)
    said = f"rms_norm: nothing was given for {new!r}, only x, weight, counts, count, width, eps, "
    with pytest.raises(LaunchRejected, match=said):
        _norm(PlanBuilder(2, sim))


def test_what_neither_a_gpu_kernel_nor_its_compiler_takes_is_refused(
    sim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hypocenter.kernels.rowwise import norm_gpu

    def launch(plan: Any, x: Any) -> None:
        plan.add_gpu(norm_gpu.rms_norm_kernel, grid=(1,), BLOCK=64, BLOCKS=64)

    monkeypatch.setattr(norm_gpu, "launch", launch)
    with pytest.raises(
        LaunchRejected, match=r"rms_norm: nothing takes 'BLOCKS'; its kernel takes x_ptr"
    ):
        _norm(PlanBuilder(2, sim))
    monkeypatch.setattr(norm_gpu, "launch", lambda plan, x: None)
    with pytest.raises(LaunchRejected, match="rms_norm: nothing takes the argument 'accumulate'"):
        _norm(PlanBuilder(2, sim))


def _num_calls(function: Callable[[], object]) -> int:
    """Calls of Python functions, `function` itself among them."""
    num_calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize(("device", "most"), [("cpu", 40), (SIM, 150)])
def test_names_are_looked_up_once_and_not_at_each_plan(sim: str, device: str, most: int) -> None:
    # A plan of a deep model binds hundreds of ops while its first request waits. Seconds would
    # depend on the machine, calls do not.
    plan = PlanBuilder(2, device)
    op, arguments = (_op(), _arguments()) if device == "cpu" else (norm.RMS_NORM, _norm_arguments())
    bind = functools.partial(plan.add, op, **arguments)
    bind()
    assert _num_calls(bind) <= most
