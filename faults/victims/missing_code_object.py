"""The kernels were built for another architecture."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.device.gpu.errors import launch_failure
from hypocenter.device.sim.sim import SimGpu
from hypocenter.doctor.causes import Cause

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
    truth=Truth(causes=(Cause.NO_CODE_OBJECT,), kernels=("lookup_float",)),
    symptom="error",
    source="vllm#53906",
    plant=plant,
)
