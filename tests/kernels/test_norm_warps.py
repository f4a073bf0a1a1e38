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
    facts = dict.fromkeys(("x", "out", "rounded", "row_scales"), rows) | {
        "width": width, "num_heads": 1, "fragments": None, "count": 0, "counts": None,
        "weight": None, "bias": None, "eps": 1e-6,
    }  # fmt: skip
    plan: Any = Plan(device)
    norm_gpu.add(plan, None, facts, 0, False)  # type: ignore[arg-type]
    norm_gpu.add_rounded(plan, None, facts)  # type: ignore[arg-type]
    layer_norm_gpu.add(plan, None, facts)  # type: ignore[arg-type]
    layer_norm_gpu.add_rounded(plan, None, facts)  # type: ignore[arg-type]
    assert plan.num_warps == [num_warps] * 4
