"""A call fails, nobody looks, and an innocent launch is blamed for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.base.errors import DeviceFault
from hypocenter.device import copies
from hypocenter.device.sim.sim import SimGpu
from hypocenter.doctor.causes import Cause

PENDING: list[DeviceFault] = []


def refused_copy(llm: Any) -> None:
    """As a failed cudaHostRegister: the error stays with the runtime until somebody asks."""
    weight = llm.engine.runner.weights.output_norm
    far = replace(weight, allocation=replace(weight.allocation, address=1 << 50))
    try:
        copies.to_device(far, np.ones(weight.shape, np.float32))
    except DeviceFault as error:
        PENDING.append(error)


def poll(original: Any, gpu: Any, *given: Any, **keywords: Any) -> None:
    original(gpu, *given, **keywords)
    if PENDING:
        error = PENDING.pop()
        raise DeviceFault(
            gpu.name,
            "launch of lookup_float_kernel",
            error.reason,
            is_asynchronous=False,
            kernel="lookup_float_kernel",
        )


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.after_load(refused_copy)
    lab.wrap(SimGpu, "copy_in", poll)


VICTIM = Victim(
    name="pending_error",
    title="the error of a refused copy is reported by the first step",
    truth=Truth(causes=(Cause.PENDING_ERROR,), kernels=("",)),
    symptom="error",
    source="vllm#51080",
    plant=plant,
    twin=Lab.disarm,
)
