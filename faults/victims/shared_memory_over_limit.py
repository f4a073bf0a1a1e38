"""A tile that fits one GPU's shared memory and not the other's."""

from __future__ import annotations

from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.device.sim.sim import SimGpu
from hypocenter.doctor.causes import Cause

OUT = "out = x * inverse_of(x, width, eps)"
TILE = """far, near = tl.arange(0, 64), tl.arange(0, 512)
    rows = tl.load(weight_ptr + (far[:, None] + near[None, :]) % width).to(tl.float16)
    columns = tl.load(weight_ptr + (near[:, None] + far[None, :]) % width).to(tl.float16)
    square = tl.max(tl.max(tl.dot(rows, columns), axis=1), axis=0)
    out = x * (inverse_of(x, width, eps) + 0.0 * square)"""


def only_norms(original: Any, gpu: Any, jit: Any, *given: Any) -> None:
    if jit.__name__ == "rms_norm_kernel":  # compiling all kernels takes a minute
        original(gpu, jit, *given)


def plant(lab: Lab) -> None:
    lab.wrap(SimGpu, "_refuse_uncompilable", only_norms)
    lab.simulate(compile_check=True)
    lab.edit("norm_gpu", (OUT, TILE))


def twin(lab: Lab) -> None:
    lab.wrap(SimGpu, "_refuse_uncompilable", only_norms)
    lab.simulate(compile_check=True)


VICTIM = Victim(
    name="shared_memory_over_limit",
    title="rms_norm multiplies tiles of 64 KiB each, and a block gets 64 KiB",
    truth=Truth(causes=(Cause.SHARED_MEMORY,), kernels=("rms_norm",)),
    symptom="error",
    source="aiter#5229",
    plant=plant,
    twin=twin,
)
