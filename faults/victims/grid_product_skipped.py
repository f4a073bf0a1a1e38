"""A grid whose product wraps to 0 in 32 bits: Triton launches nothing and says nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.device import launch as door
from hypocenter.device.sim.sim import SimGpu
from hypocenter.doctor.causes import Cause


def as_triton(original: Callable[..., Any], gpu: SimGpu, jit: Any) -> Callable[..., None]:
    """Triton's launcher multiplies the grid in a C int and leaves when that is not positive."""
    launch = original(gpu, jit)

    def launch_unchecked(*args: Any, grid: tuple[int, ...], **keywords: Any) -> None:
        if (math.prod(grid) + (1 << 31)) % (1 << 32) > 1 << 31:
            launch(*args, grid=grid, **keywords)

    return launch_unchecked


def lift_limit(lab: Lab) -> None:
    lab.disarm()
    lab.patch(door, "check_launch", lambda *given: None)
    lab.wrap(SimGpu, "launcher", as_triton)


def plant(lab: Lab) -> None:
    lift_limit(lab)
    lab.edit(
        "rope_write_gpu",
        (
            "grid=(q.shape[0], num_heads + num_kv_heads)",
            "grid=(q.shape[0] << 15, num_heads << 2, 1 << 15)",
        ),
    )


VICTIM = Victim(
    name="grid_product_skipped",
    title="rope_write asks for a multiple of 2**32 programs, which Triton takes for none",
    truth=Truth(causes=(Cause.GRID_PRODUCT,), kernels=("rope_write",), arguments=("grid",)),
    symptom="differs",
    source="triton#3299",
    plant=plant,
    twin=lift_limit,
)
