"""Sums of a norm are added in one order, whether its results are rounded at once or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from hypocenter.kernels.rowwise import layer_norm_gpu, norm_gpu


class Plan:
    """Takes launches down instead of making them."""

    def __init__(self, device: str) -> None:
        self.device, self.num_warps = device, list[int]()

    def add_gpu(self, *_: Any, num_warps: int = 4, **__: Any) -> None:
        self.num_warps.append(num_warps)


@pytest.mark.parametrize(
    ("device", "width", "num_warps"), [("cuda:0", 4096, 16), ("cuda:0", 128, 4), ("hip:0", 4096, 4)]
)
def test_a_norm_and_its_rounded_form_have_as_many_warps(
    device: str, width: int, num_warps: int
) -> None:
    rows = SimpleNamespace(shape=(3, width), strides=(width, 1))
    plan: Any = Plan(device)
    for ops in (norm_gpu, layer_norm_gpu):
        ops.launch(plan, rows, width, num_heads=1)
        ops.launch_rounded(plan, rows, width, rows, None)
    assert plan.num_warps == [num_warps] * 4
