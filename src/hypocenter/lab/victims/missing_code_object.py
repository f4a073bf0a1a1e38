"""The kernels were built for another architecture."""

from __future__ import annotations

from typing import Any

from hypocenter.device.gpu.errors import launch_failure
from hypocenter.device.sim.sim import SimGpu
from hypocenter.doctor.causes import Cause
from hypocenter.lab.lab import Lab
from hypocenter.lab.victim import Victim

# What HIP's module loader says, as Triton passes it on.
WORDS = "Triton Error [HIP]: Code: 209, Messsage: no kernel image is available for execution"


def not_built(original: Any, gpu: Any, jit: Any) -> Any:
    def launch(*args: Any, grid: Any, **given: Any) -> None:
        name, error = jit.__name__.removesuffix("_kernel"), RuntimeError(WORDS)
        shape, product = f"(grid={grid})", gpu.limits.product
        raise launch_failure("hip", product, error, name, shape, is_maker=True) or error

    return launch


def plant(lab: Lab) -> None:
    lab.wrap(SimGpu, "launcher", not_built)


VICTIM = Victim(
    name="missing_code_object",
    title="the GPU has no code for its architecture",
    cause=Cause.NO_CODE_OBJECT,
    symptom="error",
    kernel="lookup_float",
    source="vllm#53906",
    plant=plant,
)
