"""An allocation fails, nobody looks, and a kernel gets its null."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from faults.lab import Lab
from faults.truth import Truth
from faults.victim import Victim
from hypocenter.base.errors import OutOfMemory
from hypocenter.base.tensor import DType
from hypocenter.device import memory
from hypocenter.device.sim.sim import SimGpu
from hypocenter.doctor.causes import Cause
from hypocenter.record.recorder import current


def allocate_unchecked(original: Any, gpu: Any, num_bytes: int) -> int:
    try:
        return int(original(gpu, num_bytes))
    except OutOfMemory as error:
        current().record_failure(error)
        return 0


def too_large(weight: Any) -> Any:
    shape = (1 << 40,)
    room = memory.allocate_undefined(weight.name, "lab", DType.F32, shape, device=weight.device)
    return replace(room, shape=weight.shape, strides=weight.strides)


def plant(lab: Lab) -> None:
    lab.disarm()
    lab.wrap(SimGpu, "allocate", allocate_unchecked)
    lab.change_layer(1, ffn_norm=too_large)


VICTIM = Victim(
    name="late_out_of_memory",
    title="4 TiB are refused, and the null is passed to rms_norm",
    truth=Truth(causes=(Cause.LATE_OUT_OF_MEMORY,), kernels=("rms_norm",), arguments=("weight",)),
    symptom="crash",
    source="lm-eval#1689",
    plant=plant,
    twin=Lab.disarm,
)
