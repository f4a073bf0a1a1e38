"""Several weights in one GPU launch, in the forms for NVIDIA's GPUs: the bits of each alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ops import kernel_launch
from ops.kernel_launch import bits, counts, random_rows, rows_tensor, vector_tensor, weight_tensor

from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices
from hypocenter.device.op import BoundPlan
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.kernels.linear import linear_gpu
from hypocenter.kernels.linear.linear import linear_several
from hypocenter.kernels.linear.operands import Operands, Product

SIM = "sim:h200"
OUTPUTS = (70, 16, 130, 5)


class _AsCuda:
    """A plan on a simulated GPU that is launched as NVIDIA's real ones are."""

    device = "cuda"

    def __init__(self, plan: BoundPlan) -> None:
        self._plan = plan

    def add_gpu(self, *args: Any, **keywords: Any) -> None:
        self._plan.add_gpu(*args, **keywords)


def _as_on_cuda(launch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(launch)
    def launched(plan: BoundPlan, **arguments: Any) -> None:
        launch(_AsCuda(plan), **arguments)

    return launched


@pytest.fixture(autouse=True)
def sim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "device", devices.open_device(SIM))


def _products(
    dtype: DType, num_rows: int, biases: tuple[bool, ...], *, together: bool = True
) -> tuple[list[np.ndarray[Any, Any]], list[tuple[int, int]]]:
    """The results, and of each launch how many weights it took and its outputs per program."""
    rng, num_columns = np.random.default_rng(1), 512
    builder = PlanBuilder(num_rows, SIM)
    x = rows_tensor("x", rng.standard_normal((num_rows, num_columns)).astype(np.float32))
    products = []
    for index, (num_outputs, has_bias) in enumerate(zip(OUTPUTS, biases, strict=True)):
        raw = random_rows(dtype, num_outputs, num_columns, index)
        values = rng.standard_normal(num_outputs).astype(np.float32)
        products.append(
            Product(
                weight_tensor(dtype, raw, num_columns),
                rows_tensor(f"out{index}", np.zeros((num_rows, num_outputs), np.float32)),
                vector_tensor(f"bias{index}", values) if has_bias else None,
            )
        )
    operands = Operands.allocate([dtype], num_rows, num_columns, device=SIM).first(num_rows)
    for some in [products] if together else [[one] for one in products]:
        linear_several(builder, x, some, counts(num_rows), operands)
    Plan(builder, x).run()
    forms = [
        (one.options["NUM_WEIGHTS"], one.options.get("OUTPUTS", 16))
        for one in builder.launches
        if one.kernel.startswith("linear")
    ]
    sizes = zip(products, OUTPUTS, strict=True)
    return [copies.to_host(one.out)[:, :size] for one, size in sizes], forms


@pytest.mark.parametrize("biases", [(False,) * 4, (True, False, True, False)])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_K, DType.Q6_K, DType.F16, DType.BF16])
@pytest.mark.tier(
    "sim",
    fast=lambda case: (
        not case.dtype.is_quantised
        or (case.dtype is DType.Q4_K and case.num_rows == 3 and any(case.biases))
    ),
)
def test_launches_of_several_weights_give_the_bits_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, num_rows: int, biases: tuple[bool, ...]
) -> None:
    alone, forms = _products(dtype, num_rows, biases, together=False)
    assert {num_weights for num_weights, _ in forms} == {1}
    takes_several = linear_gpu.takes_several
    for name in ("launch_codes", "launch_floats", "launch_rounded"):
        monkeypatch.setattr(linear_gpu, name, _as_on_cuda(getattr(linear_gpu, name)))
    monkeypatch.setattr(
        linear_gpu, "takes_several", lambda rows, kind, _: takes_several(rows, kind, "cuda")
    )
    found, forms = _products(dtype, num_rows, biases)
    shares = num_rows == 1 or dtype.is_quantised
    expected = [3, 1] if not any(biases) else [2, 2]
    assert [num_weights for num_weights, _ in forms] == (expected if shares else [1] * 4)
    for got, wanted in zip(found, alone, strict=True):
        assert (bits(got) == bits(wanted)).all()
